"""Ablating, patching and pruning heads; and which heads matter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import byte_tokenizer, decoder
from torch import Tensor, nn

import polyhead as ph
from polyhead.checkpoints import Checkpoint, save_checkpoint
from polyhead.config import ALiBiConfig, QKNormConfig
from polyhead.errors import ConfigError, InputError, UnsupportedError
from polyhead.interpret.ablation import leave_one_out, logit_difference, patch_heads
from polyhead.interpret.pruning import head_importance

HEADS = {0: [1], 1: [0, 3]}


@pytest.fixture(scope="module")
def model() -> ph.Transformer:
    return decoder()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))


def _columns_zeroed(heads: dict[int, list[int]]) -> ph.Transformer:
    model = decoder()
    for layer, numbers in heads.items():
        for head in numbers:
            nn.init.zeros_(model.layers[layer].attention.o_proj.weight[:, 8 * head : 8 * head + 8])
    return model


@torch.no_grad()
def test_ablating_is_zeroing_the_columns_of_the_projection(
    model: ph.Transformer, ids: Tensor
) -> None:
    plain = model(ids)
    with ph.ablate(model, HEADS):
        ablated = model(ids)
    torch.testing.assert_close(ablated, _columns_zeroed(HEADS)(ids), atol=1e-5, rtol=1e-5)
    assert (ablated - plain).abs().max() > 0.1
    assert torch.equal(model(ids), plain)


@torch.no_grad()
def test_ablation_holds_while_decoding_and_beside_a_probe(
    model: ph.Transformer, ids: Tensor
) -> None:
    with ph.ablate(model, HEADS), ph.probe(model) as seen:
        whole, cache = model(ids), model.new_cache()
        steps = [model(ids[:, i : i + 1], cache=cache) for i in range(ids.shape[1])]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-4, rtol=1e-4)
    assert len(seen) == 2


@torch.no_grad()
def test_mean_ablation_puts_the_mean_over_the_reference(model: ph.Transformer, ids: Tensor) -> None:
    records: list[Tensor] = []
    attention = model.layers[1].attention
    with attention.register_attention_hook(lambda record: records.append(record.out)):
        model(ids)
    (out,) = records
    mean = out[:, 2].mean(dim=(0, 1))

    def edit(out: Tensor) -> Tensor:
        out = out.clone()
        out[:, 2] = mean
        return out

    with attention.register_head_edit(edit):
        wanted = model(ids[:1])
    with ph.ablate(model, {1: [2]}, mode="mean", reference=ids):
        torch.testing.assert_close(model(ids[:1]), wanted)


@torch.no_grad()
def test_resampling_draws_outputs_of_the_reference_by_a_seed(
    model: ph.Transformer, ids: Tensor
) -> None:
    def run(seed: int) -> Tensor:
        with ph.ablate(model, {0: [3]}, mode="resample", reference=ids, seed=seed):
            return model(ids)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    one = ids[:1, :1]  # a reference of one token leaves nothing to draw
    with ph.ablate(model, {0: [3]}, mode="resample", reference=one):
        drawn = model(ids)
    with ph.ablate(model, {0: [3]}, mode="mean", reference=one):
        torch.testing.assert_close(model(ids), drawn)


@torch.no_grad()
def test_patching_every_head_of_the_source_in_one_layer_is_one_head_at_a_time(
    model: ph.Transformer, ids: Tensor
) -> None:
    source, target = ids[:1], ids[1:]
    metric = logit_difference(65, 66)
    found = patch_heads(model, source, target, metric)
    outputs: list[Tensor] = []
    attention = model.layers[1].attention
    with attention.register_attention_hook(lambda record: outputs.append(record.out)):
        model(source)

    def edit(out: Tensor) -> Tensor:
        out = out.clone()
        out[:, 2] = outputs[0][:, 2]
        return out

    with attention.register_head_edit(edit):
        wanted = metric(model(target))[0]
    torch.testing.assert_close(found[1][2], wanted, atol=1e-4, rtol=1e-4)
    (late,) = patch_heads(model, source, target, metric, layers=[1])
    torch.testing.assert_close(late, found[1])
    same = patch_heads(model, target, target, metric)
    torch.testing.assert_close(
        torch.stack(same), metric(model(target)).expand(2, 4), atol=1e-4, rtol=1e-4
    )


@torch.no_grad()
def test_leave_one_out_is_ablation_head_by_head(model: ph.Transformer, ids: Tensor) -> None:
    metric = logit_difference(65, 66)
    found = leave_one_out(model, ids[:1], metric)
    with ph.ablate(model, {0: [2]}):
        torch.testing.assert_close(found[0][2], metric(model(ids[:1]))[0], atol=1e-4, rtol=1e-4)


def test_gradient_importance_is_the_slope_of_the_loss(model: ph.Transformer, ids: Tensor) -> None:
    model = decoder().double()
    importance = head_importance(model, ids)
    step = 1e-5

    def losses(gate: float) -> Tensor:
        def edit(out: Tensor) -> Tensor:
            out = out.clone()
            out[:, 1] *= gate
            return out

        with model.layers[0].attention.register_head_edit(edit), torch.no_grad():
            logits = model(ids)[:, :-1].transpose(1, 2)
            return nn.functional.cross_entropy(logits, ids[:, 1:], reduction="none").mean(1)

    slope = (losses(1 + step) - losses(1 - step)) / (2 * step)
    torch.testing.assert_close(importance[0][1].double(), slope.abs().mean(), atol=1e-6, rtol=1e-4)
    assert model.layers[0].attention.q_proj.weight.grad is None


def test_leave_one_out_importance_is_the_rise_of_the_loss(
    model: ph.Transformer, ids: Tensor
) -> None:
    importance = head_importance(model, ids, "leave-one-out")

    @torch.no_grad()
    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    whole = loss()
    with ph.ablate(model, {1: [2]}):
        torch.testing.assert_close(importance[1][2], loss() - whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("heads", [{0: [0, 1]}, {1: [1, 2]}, {0: [0, 3], 1: [2, 3]}, {}])
@torch.no_grad()
def test_pruned_model_equals_the_ablated_one_and_is_smaller(
    model: ph.Transformer, ids: Tensor, heads: dict[int, list[int]]
) -> None:
    pruned = ph.prune(model, heads)
    with ph.ablate(model, heads):
        torch.testing.assert_close(pruned(ids), model(ids), atol=1e-4, rtol=1e-4)
    if heads:
        counts = [sum(p.numel() for p in part.parameters()) for part in (pruned, model)]
        assert counts[0] < counts[1]
    for layer, dropped in heads.items():
        assert pruned.layers[layer].attention.num_heads == 4 - len(dropped)


def of_attention(model: ph.Transformer, **changes: object) -> ph.Transformer:
    """A new model whose attentions differ from those of another in some fields."""
    layers = tuple(
        replace(layer, attention=replace(layer.attention, **changes))
        for layer in model.config.layers
    )
    return ph.Transformer(replace(model.config, layers=layers)).eval()


@pytest.mark.parametrize("heads", [{0: [0, 1]}, {1: [1, 2]}], ids=str)
@torch.no_grad()
def test_pruned_heads_take_their_sinks_with_them(
    model: ph.Transformer, ids: Tensor, heads: dict[int, list[int]]
) -> None:
    model = of_attention(model, sinks=True)
    for layer in model.layers:
        layer.attention.sinks.copy_(torch.tensor([3.0, -2.0, 1.0, 0.5]))
    with ph.ablate(model, heads):
        torch.testing.assert_close(ph.prune(model, heads)(ids), model(ids), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_pruned_model_saves_and_loads(ids: Tensor, tmp_path: Path) -> None:
    model = ph.LanguageModel(decoder(), byte_tokenizer(), "tiny").eval()
    even = ph.prune(model, {0: [1, 2], 1: [0, 3]})
    uneven = ph.prune(model, {0: [0, 1]})
    for pruned, form in ((even, "hugging-face"), (even, "polyhead"), (uneven, "polyhead")):
        checkpoint = Checkpoint(pruned.config, pruned.transformer, pruned.tokenizer, "tiny")
        save_checkpoint(checkpoint, tmp_path / "pruned", form=form)
        again = ph.load(str(tmp_path / "pruned"))
        assert again.config == pruned.config
        assert torch.equal(again(ids), pruned(ids))
    with pytest.raises(ConfigError, match="cannot be written for Hugging Face"):
        save_checkpoint(checkpoint, tmp_path / "other")


def test_what_would_break_a_model_is_refused(model: ph.Transformer, ids: Tensor) -> None:
    with pytest.raises(InputError, match=r"kv head 0 keeps 1, kv head 1 keeps 2.*whole groups"):
        ph.prune(model, {0: [1]})
    with pytest.raises(InputError, match="layer 0 must keep a head"):
        ph.prune(model, {0: range(4)})
    with pytest.raises(InputError, match="heads of layer 1 are 0 to 3: got 4"):
        ph.prune(model, {1: [4]})
    with (
        pytest.raises(InputError, match="mode='mean' needs reference="),
        ph.ablate(model, HEADS, mode="mean"),
    ):
        pass
    with pytest.raises(InputError, match="mode must be"), ph.ablate(model, HEADS, mode="one"):
        pass
    with pytest.raises(InputError, match="the same T"):
        patch_heads(model, ids[:1], ids[1:, :5], logit_difference(0, 1))
    with pytest.raises(InputError, match="at least two tokens"):
        head_importance(model, ids[:, :1])
    with pytest.raises(UnsupportedError, match="normalizes all heads together"):
        ph.prune(of_attention(model, qk_norm=QKNormConfig(place="full_width")), {0: [0, 1]})
    with pytest.raises(UnsupportedError, match="slopes follow from the number of heads"):
        ph.prune(of_attention(model, alibi=ALiBiConfig(), rope=None), {0: [0, 1]})
