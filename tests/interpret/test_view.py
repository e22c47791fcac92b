"""Tiles, maps and statistics of chosen heads are cut out of the same exact weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import polyhead as ph
from polyhead.config import AttentionConfig, FeedForwardConfig, LayerConfig, TransformerConfig
from polyhead.errors import CheckpointError, InputError
from polyhead.interpret.files import KEY
from polyhead.interpret.probe import Probe, probe
from polyhead.interpret.statistics import OF_ROWS

HEADS, KV_HEADS, TOKENS, LAYERS = 6, 2, 40, 2


@pytest.fixture(scope="module")
def model() -> ph.Transformer:
    torch.manual_seed(0)
    attention = AttentionConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=8)
    layer = LayerConfig(attention, FeedForwardConfig(hidden_dim=16))
    config = TransformerConfig(
        kind="decoder", vocab_size=11, embed_dim=16, max_positions=64, layers=(layer,) * LAYERS
    )
    model = ph.Transformer(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.5)
    return model


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 11, (2, TOKENS), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def seen(model: ph.Transformer, ids: Tensor) -> Probe:
    with probe(model) as seen, torch.no_grad():
        model(ids)
    return seen


def test_tile_is_cut_out_of_the_rows(seen: Probe) -> None:
    whole = seen[1].rows()
    tile = seen[1].tile(4, slice(7, 31), slice(3, -2))
    torch.testing.assert_close(tile, whole[:, 4, 7:31, 3:-2])
    assert seen[1].tile(0, slice(5, 5), slice(None)).shape == (2, 0, TOKENS)
    with pytest.raises(InputError, match="k_range must be a contiguous slice"):
        seen[1].tile(0, slice(0, 4), slice(0, 8, 2))


@pytest.mark.parametrize("pixels", [1, 7, 16, 40, 99])
def test_map_holds_the_largest_or_mean_weight_of_each_cell(seen: Probe, pixels: int) -> None:
    rows = seen[0].rows([3])[:, 0]
    cell = -(-TOKENS // pixels)
    edges = range(0, TOKENS, cell)
    for reduce, of in (("max", Tensor.amax), ("mean", Tensor.mean)):
        cells = [[of(rows[:, i : i + cell, j : j + cell], (1, 2)) for j in edges] for i in edges]
        wanted = torch.stack([torch.stack(row, dim=-1) for row in cells], dim=1)
        torch.testing.assert_close(seen[0].map(3, pixels, reduce), wanted)
        part = seen[0].map(3, 5, reduce, q_range=slice(10, 30), k_range=slice(4, 19))
        cells = [
            [of(rows[:, i : min(i + 4, 30), j : min(j + 4, 19)], (1, 2)) for j in range(4, 19, 4)]
            for i in range(10, 30, 4)
        ]
        wanted_part = torch.stack([torch.stack(row, dim=-1) for row in cells], dim=1)
        torch.testing.assert_close(part, wanted_part)
        assert wanted.shape[1] <= pixels


@pytest.mark.parametrize("pixels", [1, 3, 40])
def test_map_joins_tiles_smaller_than_a_cell(
    seen: Probe, monkeypatch: pytest.MonkeyPatch, pixels: int
) -> None:
    """As in texts of 100,000 tokens, of which a cell is hundreds."""
    wanted = seen[0].map(3, pixels)
    monkeypatch.setattr("polyhead.interpret.view.tile_size", lambda call: (6, 5))
    torch.testing.assert_close(seen[0].map(3, pixels), wanted)


def test_chosen_heads_keep_their_numbers_and_their_own_keys_only(
    model: ph.Transformer, ids: Tensor, seen: Probe
) -> None:
    with probe(model, heads={0: [4, 1], 1: [5]}) as some, torch.no_grad():
        model(ids)
    assert some[0].heads == (4, 1)
    assert some[1].k.shape[1] == 1
    torch.testing.assert_close(some[0].rows([1]), seen[0].rows([1]))
    torch.testing.assert_close(some[1].entropy, seen[1].entropy[:, [5]])
    torch.testing.assert_close(some[0].received, seen[0].received[:, [4, 1]])
    with pytest.raises(InputError, match=r"one of \[4, 1\]: got 0"):
        some[0].rows([0])
    with pytest.raises(InputError, match="from 0 to 5: got 6"), probe(model, heads=[6]):
        model(ids)


def test_statistics_measured_while_running_are_all_that_is_kept(
    model: ph.Transformer, ids: Tensor, seen: Probe
) -> None:
    plain = model(ids)
    names = ("entropy", "top_weights", "top_keys", "received", "induction")
    with probe(model, statistics=names, top_k=3) as measured:
        assert torch.equal(model(ids), plain)
    for view in measured:
        torch.testing.assert_close(view.entropy, seen[int(view.layer)].entropy)
        torch.testing.assert_close(view.induction, seen[int(view.layer)].induction)
        assert view.top_keys.shape == (2, HEADS, TOKENS, 3)
        numbers = 2 * HEADS * TOKENS * (1 + 1 + 1 + 1 + 3)
        assert view.nbytes == 4 * numbers + 8 * 2 * HEADS * TOKENS * 3
        with pytest.raises(InputError, match="without statistics="):
            view.rows()
        with pytest.raises(InputError, match="without statistics="):
            view.max_weight  # noqa: B018


def test_statistics_through_a_cache_equal_those_of_one_pass(
    model: ph.Transformer, ids: Tensor, seen: Probe
) -> None:
    cache = model.new_cache()
    with torch.no_grad(), probe(model, ids=ids) as chunked:
        model(ids[:, :31], cache=cache)
        model(ids[:, 31:], cache=cache)
    names = (*OF_ROWS, "duplicate", "induction")
    whole = seen[1].measure(names)
    for name, values in chunked[1].measure(names).items():
        torch.testing.assert_close(values, whole[name][:, :, 31:], atol=1e-5, rtol=1e-5)


def test_statistics_that_lack_something_say_what(model: ph.Transformer, ids: Tensor) -> None:
    cache = model.new_cache()
    with probe(model) as seen, torch.no_grad():
        model(ids[:, :8], cache=cache)
        model(ids[:, 8:], cache=cache)
    with pytest.raises(InputError, match=r"duplicate needs the tokens.*ids="):
        seen[0].duplicate  # noqa: B018
    with pytest.raises(InputError, match="document_mass needs documents"):
        seen[0].document_mass  # noqa: B018
    with pytest.raises(InputError, match=r"statistics are entropy.*got 'entropie'"):
        seen[0].measure(["entropie"])
    assert "induction" not in seen[0].summary().means


def test_mass_of_documents_adds_up(model: ph.Transformer, ids: Tensor) -> None:
    with probe(model, documents=[10, 30]) as seen, torch.no_grad():
        model(ids)
    mass = seen[0].document_mass
    torch.testing.assert_close(mass[..., 0], seen[0].rows()[..., :10].sum(-1))
    torch.testing.assert_close(mass.sum(-1), torch.ones(2, HEADS, TOKENS))


@pytest.mark.parametrize("statistics", [None, ("entropy", "top_keys")])
def test_probe_is_the_same_after_saving_and_loading(
    model: ph.Transformer, ids: Tensor, tmp_path: Path, statistics: tuple[str, ...] | None
) -> None:
    mask = ph.KeyLengths([TOKENS, 30]) & ~ph.Prefix(2) & ph.Keep(torch.rand(TOKENS, TOKENS) < 0.9)
    with probe(model, heads=[5, 2], statistics=statistics) as seen, torch.no_grad():
        model(ids, mask=mask & ph.Documents([10, 30]) | ph.Window(3))
    seen.save(tmp_path / "seen.safetensors")
    loaded = Probe.load(tmp_path / "seen.safetensors")
    assert loaded.modules == seen.modules
    assert loaded.nbytes == seen.nbytes
    for view, again in zip(seen, loaded, strict=True):
        assert (again.layer, again.heads, again.kv_heads) == (view.layer, (5, 2), (1, 0))
        for name in statistics or ("entropy", "induction", "document_mass"):
            assert torch.equal(getattr(again, name), getattr(view, name))
        if statistics is None:
            assert torch.equal(again.rows([2]), view.rows([2]))


def test_damaged_and_foreign_files_are_refused(seen: Probe, tmp_path: Path) -> None:
    path = tmp_path / "seen.safetensors"
    seen.save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        Probe.load(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match=r"not the file of a probe"):
        Probe.load(path)


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (("lse",), {"tensor": "x"}, "must be of shape"),
        (("heads",), [0], "heads must be 6 numbers, one per query head: got"),
        (("kv_heads",), [1 << 62] * 6, "kv_heads must be a whole number from 0 to"),
        (("_q_tokens", "of", 0), 1 << 62, "length must be a whole number from 0 to"),
        (("_q_tokens", "of", 0), 7, "_q_tokens must be 40 Tokens"),
        (("_call", "of", 6), [5] * 6, "kv_heads must be a whole number from 0 to"),
        (("_call", "of", 0), {"tensor": "x"}, "must be of shape"),
        (("_call", "of", 0), None, "q of KeptCall cannot be None"),
        (("_call", "of", 3, "of", 0), "x", "scale of Specification cannot be 'x'"),
        (("_call", "of", 3, "kind"), "Nonsense", "there is no part of kind 'Nonsense'"),
        (("_measured",), {"dict": {"entropie": 1}}, "there is no statistic 'entropie'"),
        (("more",), 1, "a view must have heads, top_k"),
    ],
)
def test_a_saved_probe_that_lies_is_refused(
    seen: Probe, tmp_path: Path, where: tuple[str | int, ...], value: object, words: str
) -> None:
    path = tmp_path / "seen.safetensors"
    seen.save(path)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()[KEY])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors["x"] = torch.zeros(1)
    at = next(iter(header["content"]["dict"]["views"]["dict"].values()))["dict"]
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    named = set(re.findall(r'"tensor": "(\w+)"', json.dumps(header)))
    kept = {name: tensor for name, tensor in tensors.items() if name in named}
    save_file(kept, path, {KEY: json.dumps(header)})
    with pytest.raises(CheckpointError, match=re.escape(words)):
        Probe.load(path)
