"""Quantized GGUF files used as they are: no copies, and the results of the unpacked weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from gguf_tiny import write_gguf
from hf_tiny import DECODERS, Tiny
from torch import Tensor

import polyhead as ph
from polyhead import native
from polyhead.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from polyhead.checkpoints.formats.gguf_file import GGUFFile
from polyhead.layers.quantized import QuantizedEmbedding, QuantizedLinear, QuantizedMatrix
from polyhead.models import Transformer
from polyhead.models.int8_activations import round_activations

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
Kind = gguf.GGMLQuantizationType
SIZES = {"hidden_size": 96, "intermediate_size": 160}


def decoded(model: Transformer, ids: Tensor) -> Tensor:
    """Logits of the tokens behind the third, one by one."""
    cache = model.new_cache()
    model(ids[:, :3], cache=cache)
    steps = [model(ids[:, i : i + 1], cache=cache) for i in range(3, ids.shape[1])]
    return torch.cat(steps, dim=1)


def _alike(model: Transformer, other: Transformer, ids: Tensor) -> bool:
    """Whether weights in blocks and unpacked ones give the same bits, multiplied in one order.

    By default prompts are multiplied by whichever code is faster on this processor.
    """
    with ph.batch_invariant():
        return torch.equal(model(ids), other(ids))


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"tie_word_embeddings": True}, Kind.Q8_0),
        ({"tie_word_embeddings": False, "attention_bias": True}, Kind.Q4_1),
    ],
)
def test_a_quantised_file_stays_as_it_is(
    options: dict[str, bool], kind: Kind, tmp_path: Path
) -> None:
    tiny = Tiny("Llama", {**SIZES, **options})
    path = write_gguf(tmp_path / "tiny.gguf", tiny.build(), kind=kind)
    kept, unpacked = load_checkpoint(path, None), load_checkpoint(path)
    model, ids = kept.model, tiny.ids()
    parts = [part for part in model.modules() if isinstance(part, QuantizedMatrix)]
    assert len(parts) == 3 * 7 + 1 + (not options["tie_word_embeddings"])
    assert isinstance(model.embedding.tokens, QuantizedEmbedding)
    assert {part.kind.name for part in parts} == {kind.name}
    assert model.parameter_counts() == unpacked.model.parameter_counts()
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert _alike(model, unpacked.model, ids)
    assert torch.equal(decoded(model, ids), decoded(unpacked.model, ids))
    # In the mapped file: as far from each other as there.
    file, layer = GGUFFile(path), model.layers[1]
    assert isinstance(layer, ph.TransformerLayer)
    o, down = layer.attention.o_proj, layer.feed_forward.down_proj
    assert isinstance(o, QuantizedLinear)
    assert isinstance(down, QuantizedLinear)
    assert down.blocks.data_ptr() - o.blocks.data_ptr() == (
        file.tensors["blk.1.ffn_down.weight"].start - file.tensors["blk.1.attn_output.weight"].start
    )
    down.blocks.zero_()  # a copy of the page: the file stays
    assert GGUFFile(path).tensor("blk.1.ffn_down.weight").count_nonzero() > 0


@torch.no_grad()
def test_weights_that_are_no_blocks_are_float32(tmp_path: Path) -> None:
    tiny = DECODERS["llama, GQA"]
    path = write_gguf(tmp_path / "half.gguf", tiny.build(), kind=Kind.F16)
    model = load_checkpoint(path, None).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not any(isinstance(part, QuantizedMatrix) for part in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


@torch.no_grad()
def test_types_that_native_code_does_not_read_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Tiny("Llama", SIZES)
    path = write_gguf(tmp_path / "tiny.gguf", tiny.build(), kind=Kind.Q5_1)
    wanted = load_checkpoint(path, None).model
    monkeypatch.setattr("polyhead.checkpoints.formats.gguf.readable", lambda code, kind: False)
    model = load_checkpoint(path, None).model
    assert not any(isinstance(part, QuantizedMatrix) for part in model.modules())
    assert _alike(model, wanted, tiny.ids())


@torch.no_grad()
def test_what_is_saved_is_unpacked(tmp_path: Path) -> None:
    tiny = Tiny("Llama", SIZES)
    kept = load_checkpoint(write_gguf(tmp_path / "a.gguf", tiny.build(), kind=Kind.Q8_0), None)
    checkpoint = Checkpoint(kept.config, kept.model, None, "here", family=kept.family)
    with pytest.warns(UserWarning, match="in blocks of a few bits are saved unpacked"):
        save_checkpoint(checkpoint, tmp_path / "b")
    again = load_checkpoint(tmp_path / "b").model
    assert _alike(again, kept.model, tiny.ids())


@torch.no_grad()
def test_what_is_pruned_is_unpacked(tmp_path: Path) -> None:
    tiny = Tiny("Llama", SIZES)
    path = write_gguf(tmp_path / "tiny.gguf", tiny.build(), kind=Kind.Q8_0)
    heads = {0: [0, 1, 2]}
    kept, unpacked = (
        ph.prune(load_checkpoint(path, each).model, heads) for each in (None, torch.float32)
    )
    assert not any(isinstance(part, QuantizedMatrix) for part in kept.modules())
    assert torch.equal(kept(tiny.ids()), unpacked(tiny.ids()))


@pytest.mark.model
@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_real_files_decode_with_the_bits_of_float32(name: str, hamlet: str) -> None:
    """200 greedy tokens; a prompt within 2e-4."""
    kept = ph.load(name, expect=ph.LanguageModel)
    unpacked = ph.load(name, dtype="float32", expect=ph.LanguageModel)
    ids = torch.tensor([kept.tokenizer.encode(hamlet)[:64]])
    assert (kept(ids) - unpacked(ids)).abs().max() < 2e-4
    caches = kept.new_cache(), unpacked.new_cache()
    models = [*zip((kept, unpacked), caches, strict=True)]
    rows = [model(ids, cache=cache, last=1) for model, cache in models]
    for _ in range(200):
        token = rows[1].argmax(-1)
        assert torch.equal(rows[0].argmax(-1), token)
        rows = [model(token, cache=cache) for model, cache in models]
        assert (rows[0] - rows[1]).abs().max() < 2e-4


@torch.no_grad()
def test_a_file_whose_activations_are_rounded(tmp_path: Path) -> None:
    tiny = Tiny("Llama", {**SIZES, "tie_word_embeddings": True})
    path = write_gguf(tmp_path / "tiny.gguf", tiny.build(), kind=Kind.Q8_0)
    model, ids = load_checkpoint(path, None).model, tiny.ids()
    exact = decoded(model, ids)
    round_activations(model)
    rounded = decoded(model, ids)
    assert 0 < (rounded - exact).norm() < 0.05 * exact.norm()
    beside = torch.cat([decoded(model, row[None]) for row in ids])
    assert (beside - rounded).norm() < 0.02 * exact.norm()
    with pytest.raises(ph.UnsupportedError, match="needs weights in blocks, and this model has"):
        ph.load(path, "float32", activations="int8")
