"""A cache that is saved and loaded goes on as if nothing had happened, or says why it cannot."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from test_state_machine import KINDS, tokens

import polyhead as ph
from polyhead.caches import (
    DenseCache,
    LatentCache,
    ModelCache,
    PagedCache,
    QuantizedCache,
    Ring,
    RingCache,
    StoredCache,
)
from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    EncoderConfig,
    FeedForwardConfig,
    LayerConfig,
    TransformerConfig,
)
from polyhead.errors import CheckpointError


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("own_positions", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_loaded_cache_goes_on_bit_for_bit(kind, own_positions, ragged, tmp_path):
    layout, storage = KINDS[kind]
    cache, loaded = StoredCache(layout, storage), StoredCache(layout, storage)
    real = torch.ones(2, 29).bool()
    if ragged:
        real[1, 3:9] = False
    positions = None
    for seed, count in enumerate((17, 12)):
        q, k, v = tokens(seed, 2, count, storage)
        if ragged or own_positions:
            positions = cache.next_positions(real[:, :count])
            positions = positions + 100 * own_positions * (positions >= 0)
        cache.append(k, v, positions)
    cache.save(tmp_path / "cache.safetensors")
    loaded.load(tmp_path / "cache.safetensors")
    assert loaded.lengths == cache.lengths
    assert loaded.max_rollback == cache.max_rollback
    assert torch.equal(loaded.positions, cache.positions)
    for seed in (7, 8):
        q, k, v = tokens(seed, 2, 5, storage)
        if ragged or own_positions:
            positions = cache.next_positions(torch.ones(2, 5).bool()) + 100 * own_positions
        outs = [
            ph.attention(q, each.append(k, v, positions), mask=ph.Causal(), q_positions=positions)
            for each in (cache, loaded)
        ]
        assert torch.equal(*outs)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_caches_of_every_length_are_restored_and_no_other_length_is(kind):
    layout, storage = KINDS[kind]
    cache = StoredCache(layout, storage)
    _, *new = tokens(0, 2, 24, storage)
    for length in range(1, 25):
        cache.append(*(x[:, :, length - 1 : length] for x in new))
        restored = StoredCache(layout, storage)
        held, facts = cache.state()
        restored.restore(held, facts, torch.device("cpu"))
        assert restored.lengths == cache.lengths
        assert all(map(torch.equal, restored.source().gather(), cache.source().gather()))
        name = next(iter(facts["stores"]))
        wrong = [{"lengths": [length, length + by]} for by in (1, -1)]
        if not isinstance(layout, Ring):  # which forgets its first tokens
            begun = facts["stores"][name] | {"firsts": [0, 1]}
            wrong.append({"stores": facts["stores"] | {name: begun}})
        for change in wrong:
            with pytest.raises(ValueError, match=r"must end at|begins at|do not reach|units"):
                restored.restore(held, facts | change, torch.device("cpu"))
        assert restored.lengths == cache.lengths


def test_an_encoders_output_has_the_width_of_the_models_encoder(tmp_path):
    layer = LayerConfig(AttentionConfig(1, 1, 8), FeedForwardConfig(8))
    crossed = replace(layer, cross_attention=layer.attention)
    for own, width in ((None, 8), (6, 6)):
        config = TransformerConfig(
            "encoder-decoder", 9, 8, 9, (crossed,), encoder_layers=(layer,),
            encoder=EncoderConfig(EmbeddingConfig() if own else None, embed_dim=own),
        )  # fmt: skip
        cache = ModelCache([filled(DenseCache())], [DenseCache()], config.to_json())
        for given in (width, width + 1):
            cache.context = torch.randn(1, 3, given)
            cache.save(tmp_path / "file")
            if given == width:
                cache.load(tmp_path / "file")
            else:
                with pytest.raises(CheckpointError, match=rf"context must be \[1, S, {width}\]"):
                    cache.load(tmp_path / "file")


def test_an_empty_cache_can_be_saved_and_loaded(tmp_path):
    DenseCache().save(tmp_path / "file")
    cache = DenseCache()
    cache.load(tmp_path / "file")
    assert cache.length == cache.bytes == 0


FILLED = torch.randn(1, 1, 40, 8, generator=torch.Generator().manual_seed(0))


def filled(cache):
    with torch.no_grad():
        cache.append(FILLED, FILLED[..., :6] if isinstance(cache, LatentCache) else FILLED)
    return cache


@pytest.mark.parametrize(
    ("saved", "here", "words"),
    [
        (RingCache(8), RingCache(9), "layout.window is 8 in the file, 9 here"),
        (RingCache(8), DenseCache(), "layout.kind is 'Ring' in the file, 'Dense' here"),
        (PagedCache(4), PagedCache(8), "layout.page_size is 4 in the file, 8 here"),
        (
            LatentCache(6, 2),
            LatentCache(5, 3),
            "storage.kv_lora_rank is 6 in the file, 5 here",
        ),
        (QuantizedCache(8), QuantizedCache(4), "storage.k_bits is 8 in the file, 4 here"),
    ],
)
def test_a_cache_of_another_kind_is_refused_by_name(saved, here, words, tmp_path):
    filled(saved).save(tmp_path / "file")
    with pytest.raises(CheckpointError) as error:
        here.load(tmp_path / "file")
    assert words in str(error.value)
    assert here.length == 0


@torch.no_grad()
def test_a_cache_of_another_shape_is_refused_by_name(tmp_path):
    filled(DenseCache()).save(tmp_path / "file")
    other = DenseCache()
    other.append(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))
    with pytest.raises(CheckpointError, match="num_kv_heads is 1 in the file, 2 here"):
        other.load(tmp_path / "file")
    assert other.length == 3


def test_files_that_are_no_caches_are_refused(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(CheckpointError, match="no such file"):
        DenseCache().load(path)
    filled(DenseCache()).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        DenseCache().load(path)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match="not a file of caches: it has no polyhead"):
        DenseCache().load(path)
    filled(RingCache(64)).save(path)
    ModelCache([DenseCache(), DenseCache()]).save(tmp_path / "two")
    with pytest.raises(CheckpointError, match="holds 2 caches, one per layer: expected 1"):
        DenseCache().load(tmp_path / "two")


def test_tensors_that_do_not_fit_their_header_are_refused_and_nothing_changes(tmp_path):
    path = tmp_path / "file"
    filled(DenseCache()).save(path)
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    for tensors in (
        {"0.tokens.k": FILLED},
        {"0.tokens.k": FILLED, "0.tokens.v": FILLED[..., :5].contiguous()},
        {"0.tokens.k": FILLED[:, :, :30].contiguous(), "0.tokens.v": FILLED.clone()},
        {"0.tokens.k": FILLED.double(), "0.tokens.v": FILLED.clone()},
    ):
        save_file(tensors, path, metadata=header)
        cache = filled(DenseCache())
        with pytest.raises(CheckpointError, match="its tensors do not fit its header"):
            cache.load(path)
        assert torch.equal(cache.source().gather()[0], FILLED)


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "file"
    filled(DenseCache()).save(path)
    before = path.read_bytes()

    def broken(tensors, name, metadata):
        with open(name, "wb") as file:
            file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("polyhead._utils.atomic_write.save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        filled(DenseCache()).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_cache_of_another_model_is_refused_by_name(tmp_path):
    def of(heads):
        owner = json.dumps({"layers": [{"attention": {"num_kv_heads": heads}}]})
        return ModelCache([filled(DenseCache())], owner=owner)

    of(2).save(tmp_path / "file")
    with pytest.raises(
        CheckpointError,
        match=r"of another model: config.layers\[0\].attention.num_kv_heads is 2 in the file, 4",
    ):
        of(4).load(tmp_path / "file")
    with pytest.raises(CheckpointError, match="holds a model's caches"):
        DenseCache().load(tmp_path / "file")
    deeper = ModelCache([filled(DenseCache())], owner=json.dumps({"layers": [{}, {}]}))
    with pytest.raises(CheckpointError, match=r"config\.layers has 1 entries in the file, 2 here"):
        deeper.load(tmp_path / "file")
    same = of(2)
    same.reset()
    same.load(tmp_path / "file")
    assert same.length == 40


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda it: it.pop("owner"), "its header must have an owner and a list of caches"),
        (lambda it: it.pop("caches"), "its header must have an owner and a list of caches"),
        (lambda it: it.update(version=3), "version must be 2: got 3"),
        (lambda it: it.update(caches=[3]), "its header must say of every cache what it is"),
        (lambda it: it["caches"].append(3), "its header must say of every cache what it is"),
        (lambda it: it["caches"][0].pop("lengths"), "its header has no 'lengths'"),
        (lambda it: it["caches"][0].update(lengths=[1 << 62]), "lengths must be a whole number"),
        (lambda it: it["caches"][0].update(lengths=[10**30]), "lengths must be a whole number"),
        (lambda it: it["caches"][0].update(lengths=[40, 40]), "must be a list of 1 numbers"),
        (lambda it: it["caches"][0].update(num_kv_heads=2), "tokens.k must be"),
        (lambda it: it["caches"][0].update(stores={"x": 1}), "stores must be tokens"),
    ],
)
def test_headers_that_lie_are_refused(change, words, tmp_path):
    path = tmp_path / "file"
    filled(DenseCache()).save(path)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["polyhead.cache"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(header)
    save_file(tensors, path, {"polyhead.cache": json.dumps(header)})
    with pytest.raises(CheckpointError, match=words):
        DenseCache().load(path)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"context": torch.zeros(2, 3, 8)}, r"context must be \[1, S, any\]: got \[2, 3, 8\]"),
        ({"context": torch.zeros(3)}, r"context must be \[1, S, any\]: got \[3\]"),
        ({"context": torch.zeros(1, 3, 8).long()}, "context must be floating point: got"),
        ({"context": torch.zeros(1, 3, 8).to(torch.float8_e4m3fn)}, "context must be floating"),
        ({"": torch.zeros(1)}, "no tensor may be called ''"),
        ({"1.tokens.k": torch.zeros(1)}, "no tensor may be called '1.tokens.k'"),
    ],
)
def test_an_encoders_output_that_does_not_fit_is_refused(extra, words, tmp_path):
    path = tmp_path / "file"
    ModelCache([filled(DenseCache())]).save(path)
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors | extra, path, header)
    cache = ModelCache([DenseCache()])
    with pytest.raises(CheckpointError, match=words):
        cache.load(path)
    assert cache.length == 0
    assert cache.context is None
