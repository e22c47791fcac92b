"""Patching, attribution patching, path patching and knockout are what their definitions say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from traced_models import made, texts

import polyhead as ph
from polyhead.errors import InputError, UnsupportedError
from polyhead.interpret.ablation import logit_difference, patch_heads
from polyhead.interpret.effects import Effects
from polyhead.interpret.patching import attribution, knockout, patch, patch_path

SOURCE, TARGET = (texts("llama", seed=seed, batch=1)["ids"] for seed in (0, 1))
METRIC = logit_difference(3, 7)


@pytest.fixture(scope="module")
def model() -> ph.Transformer:
    return made("llama")


def with_edit(model: ph.Transformer, name: str, change: Callable[[Tensor], Tensor]) -> float:
    with torch.no_grad(), ph.trace(model, TARGET) as t:
        t[name].edit(change)
    return float(METRIC(t.output))


def value_of(model: ph.Transformer, name: str, ids: Tensor) -> Tensor:
    with torch.no_grad(), ph.trace(model, ids) as t:
        saved = t[name].save()
    return saved.value


@torch.no_grad()
def test_patching_everything_gives_the_other_run_bit_for_bit(model: ph.Transformer) -> None:
    wanted = METRIC(model(SOURCE))
    for at, kind in (("resid_pre", "llama"), ("resid_post", "gemma"), ("resid_mid", "experts")):
        other = made(kind)
        patched = patch(other, SOURCE, TARGET, METRIC, at, each=["layer"])
        if at != "resid_mid":  # all that follows is the source's
            assert torch.equal(patched.values, METRIC(other(SOURCE)).expand(2)), kind
    everything = patch(model, SOURCE, TARGET, METRIC, each=[])
    assert torch.equal(everything.values, wanted[0])
    nothing = patch(model, TARGET, TARGET, METRIC, each=["layer"])
    assert torch.equal(nothing.values, METRIC(model(TARGET)).expand(2))


@pytest.mark.parametrize(
    ("at", "each"),
    [
        ("resid_pre", ("layer", "position")),
        ("mlp.out", ("layer", "position")),
        ("attention.heads", ("layer", "head")),
        ("attention.q", ("layer", "head", "position")),
        ("attention.weights", ("head",)),
        ("mlp.hidden", ("position",)),
    ],
)
def test_each_number_is_one_run_with_one_edit(
    model: ph.Transformer, at: str, each: tuple[str, ...]
) -> None:
    found = patch(model, SOURCE, TARGET, METRIC, at, each, layers=[1])
    assert tuple(found.axes) == each
    value = value_of(model, f"layers.1.{at}", SOURCE)
    wanted = Effects(torch.zeros_like(found.values), found.axes)
    for labels in found.top(10**6):
        chosen = dict(zip(each, labels[:-1], strict=True))

        def change(x: Tensor, chosen: dict[str, int] = chosen) -> Tensor:
            x = x.clone()
            index = [slice(None)] * x.ndim
            for name, axis in (("head", 1), ("position", x.ndim - 2)):
                if name in chosen:
                    index[axis] = slice(chosen[name], chosen[name] + 1)
            x[tuple(index)] = value[tuple(index)]
            return x

        index = tuple(list(found.axes[name]).index(chosen[name]) for name in each)
        wanted.values[index] = with_edit(model, f"layers.1.{at}", change)
    torch.testing.assert_close(found.values, wanted.values, atol=1e-4, rtol=1e-4)
    assert found.values.std() > 1e-3


@torch.no_grad()
def test_patching_heads_is_what_patch_heads_does(model: ph.Transformer) -> None:
    one = patch(model, SOURCE, TARGET, METRIC, "attention.heads", ["layer", "head"])
    other = torch.stack(patch_heads(model, SOURCE, TARGET, METRIC))
    torch.testing.assert_close(one.values, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("at", ["resid_mid", "mlp.hidden", "attention.heads", "attention.weights"])
def test_attribution_is_the_slope_from_the_target_to_the_source(at: str) -> None:
    model = made("sinks").double()
    found = attribution(model, SOURCE, TARGET, METRIC, at)
    source, target = (value_of(model, f"layers.1.{at}", ids) for ids in (SOURCE, TARGET))
    step = 1e-5 * (source - target)

    def slope(position: int) -> float:
        def moved(sign: int) -> float:
            def change(x: Tensor) -> Tensor:
                x = x.clone()
                x[..., position, :] += sign * step[..., position, :]
                return x

            return with_edit(model, f"layers.1.{at}", change)

        return (moved(1) - moved(-1)) / 2e-5

    wanted = torch.tensor([slope(i) for i in range(9)], dtype=torch.float64)
    torch.testing.assert_close(found.values[1], wanted, atol=1e-6, rtol=1e-5)
    in_all = attribution(model, SOURCE, TARGET, METRIC, at, each=["layer"])
    torch.testing.assert_close(in_all.values, found.values.sum(dim=1))
    assert found.values.abs().max() > 1e-3


@torch.no_grad()
def test_a_path_from_the_embedding_to_the_end_is_what_the_embedding_adds(
    model: ph.Transformer,
) -> None:
    embedded = [value_of(model, "layers.0.resid_pre", ids) for ids in (SOURCE, TARGET)]
    last = value_of(model, "layers.1.resid_post", TARGET)
    stream = last - embedded[1] + embedded[0]
    wanted = METRIC(model.logits(model.final_norm(stream)))
    found = patch_path(model, SOURCE, TARGET, METRIC, ["layers.0.resid_pre"], ["final"])
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    head = ("layers.1.attention.heads", 2)
    same = patch_path(model, TARGET, TARGET, METRIC, [head], ["layers.1.mlp.input", "final"])
    torch.testing.assert_close(same, METRIC(model(TARGET)), atol=1e-6, rtol=1e-6)
    whole = patch_path(model, SOURCE, TARGET, METRIC, [head], ["layers.1.resid_mid"])
    patched = patch(model, SOURCE, TARGET, METRIC, "attention.heads", ["head"], layers=[1])
    torch.testing.assert_close(whole, patched.values[2:3], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_path_to_the_queries_of_one_head_leaves_the_others(model: ph.Transformer) -> None:
    sender, receiver = ("layers.0.attention.heads", 1), ("layers.1.attention.q", 3)
    found = patch_path(model, SOURCE, TARGET, METRIC, [sender], [receiver])
    heads = value_of(model, "layers.0.attention.heads", SOURCE)
    with ph.trace(model, TARGET) as t:
        network = t.layers[0].mlp.out.save()

    def one_head(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 1] = heads[:, 1]
        return x

    with ph.trace(model, TARGET) as t:
        t.layers[0].attention.heads.edit(one_head)
        t.layers[0].mlp.out.set(network.value)
        queries = t.layers[1].attention.q.save()

    def one_query(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 3] = queries.value[:, 3]
        return x

    wanted = with_edit(model, "layers.1.attention.q", one_query)
    torch.testing.assert_close(float(found), wanted, atol=1e-5, rtol=1e-5)
    assert abs(wanted - float(METRIC(model(TARGET)))) > 1e-4


@torch.no_grad()
def test_knockout_is_a_mask_and_leaves_weights_of_zero(model: ph.Transformer) -> None:
    hidden = torch.zeros(9, 9, dtype=torch.bool)
    hidden[6:8, [1, 3]] = True
    wanted = model(TARGET, mask=ph.Drop(hidden))
    with knockout(model, queries=[6, 7], keys=[1, 3]), ph.probe(model) as seen:
        found = model(TARGET)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    rows = seen[1].rows()
    assert not rows[:, :, 6:8, [1, 3]].any()
    torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows[..., 0]))
    with knockout(model, queries=[6], keys=[1], layers=[1], heads=[2]), ph.probe(model) as seen:
        found = model(TARGET)
        cache = model.new_cache()
        steps = [model(TARGET[:, i : i + 1], cache=cache) for i in range(9)]
    torch.testing.assert_close(torch.cat(steps, dim=1), found, atol=2e-5, rtol=2e-5)
    assert torch.equal(model(TARGET)[:, :6], found[:, :6])
    assert not torch.allclose(model(TARGET)[:, 6:], found[:, 6:])
    with knockout(model, [6], [1], layers=[1], heads=[2]), ph.probe(model) as seen:
        model(TARGET)
    zero = (seen[1].rows() == 0) & torch.ones(9, 9, dtype=torch.bool).tril()
    assert zero.nonzero().tolist() == [[0, 2, 6, 1]]
    with pytest.raises(UnsupportedError, match="layer 0 is a Mamba2"):
        knockout(made("states"), [1], [0], layers=[0]).__enter__()


def test_wrong_calls_are_named(model: ph.Transformer) -> None:
    with pytest.raises(InputError, match=r"both be \[1, T\]"):
        patch(model, SOURCE, TARGET[:, :4], METRIC)
    with pytest.raises(
        InputError, match="each must be of layer, position for this activation: got 'head'"
    ):
        patch(model, SOURCE, TARGET, METRIC, each=["head"])
    with pytest.raises(InputError, match="no layer has 'resid_middle': names are layers"):
        attribution(model, SOURCE, TARGET, METRIC, "resid_middle")


def test_effects_become_a_frame_with_a_row_for_each_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    effects = Effects(torch.tensor([[1.0, -3.0], [2.0, 0.0]]), {"layer": (4, 5), "head": (0, 1)})
    assert effects.top(2) == [(4, 1, -3.0), (5, 0, 2.0)]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UnsupportedError, match="pip install pandas"):
        effects.to_pandas()
    monkeypatch.setitem(
        sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows, columns: (rows, columns))
    )
    rows, columns = effects.to_pandas()
    assert columns == ["layer", "head", "value"]
    assert rows == [(4, 0, 1.0), (4, 1, -3.0), (5, 0, 2.0), (5, 1, 0.0)]
