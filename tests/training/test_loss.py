"""The loss: torch's cross-entropy of all logits, without holding them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.models import Transformer
from polyhead.training import loss

V, B, T = 61, 3, 40

ATTENTION = AttentionConfig(4, 2, 8, rope=RopeConfig())
LAYER = LayerConfig(ATTENTION, FeedForwardConfig(48))
DECODER = TransformerConfig("decoder", V, 16, 64, (LAYER,) * 2)
BOTH = replace(
    DECODER,
    kind="encoder-decoder",
    layers=(replace(LAYER, cross_attention=replace(ATTENTION, rope=None)),) * 2,
    encoder_layers=(LAYER,),
)
CONFIGS = {
    "tied": DECODER,
    "own head with a bias": replace(DECODER, head="untied", head_bias=True),
    "scaled": replace(DECODER, logit_scale=0.5),
    "softcap": replace(DECODER, logit_softcap=2.0, head_bias=True),
    "encoder-decoder": BOTH,
}


def _model(config: TransformerConfig) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5).add_(0.01 * torch.randn_like(parameter))
    return model


def _batch(config: TransformerConfig) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(V, (B, T), generator=generator)
    labels = ids.masked_fill(torch.rand(B, T, generator=generator) < 0.3, -100)
    source = torch.randint(V, (B, 9), generator=generator)
    return ids, labels, {"encoder_ids": source} if config.kind == "encoder-decoder" else {}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_all_logits(
    name: str, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A few tokens at a time, where the chunks are polyhead's own.
    monkeypatch.setattr("polyhead.training.losses._CHUNK_BYTES", 4 * V * 7)
    config = CONFIGS[name]
    model, (ids, labels, call) = _model(config), _batch(config)
    logits = model(ids, **call)
    wanted_labels = labels
    if config.kind == "decoder":
        logits, wanted_labels = logits[:, :-1], labels[:, 1:]
    wanted = F.cross_entropy(
        logits.flatten(0, 1), wanted_labels.flatten(), label_smoothing=smoothing
    )
    names = [name for name, parameter in model.named_parameters()]
    expected = torch.autograd.grad(wanted, list(model.parameters()), allow_unused=True)
    found = loss(model, ids, labels, label_smoothing=smoothing, **call)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    gradients = torch.autograd.grad(3 * found, list(model.parameters()), allow_unused=True)
    for parameter, got, right in zip(names, gradients, expected, strict=True):
        assert (got is None) == (right is None), parameter
        if right is not None:
            scale = right.abs().max().clamp_min(1e-6)
            assert (got - 3 * right).abs().max() < 1e-5 * 3 * scale, parameter
    total = loss(model, ids, labels, label_smoothing=smoothing, reduction="sum", **call)
    count = int((wanted_labels != -100).sum())
    torch.testing.assert_close(total / count, found, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["tied", "own head with a bias"])
def test_autocast_rounds_logits_and_sums_in_float32(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyhead.training.losses._CHUNK_BYTES", 4 * V * 7)
    model, (ids, labels, _) = _model(CONFIGS[name]), _batch(CONFIGS[name])
    parameters = list(model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        found = loss(model, ids, labels)
        logits = model(ids)[:, :-1].flatten(0, 1)
        wanted = F.cross_entropy(logits.float(), labels[:, 1:].flatten())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
    expected = torch.autograd.grad(wanted, parameters)
    for got, right in zip(torch.autograd.grad(found, parameters), expected, strict=True):
        assert got.dtype == torch.float32
        assert (got - right).norm() < 0.03 * right.norm()


def test_of_no_labels_the_loss_is_0_and_so_are_its_gradients() -> None:
    model, (ids, labels, _) = _model(DECODER), _batch(DECODER)
    found = loss(model, ids, torch.full_like(labels, -100))
    found.backward()
    assert found == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("config", "smoothing"), [(DECODER, 0.0), (DECODER, 0.1), (CONFIGS["softcap"], 0.0)]
)
def test_the_logits_of_all_tokens_are_never_held(
    config: TransformerConfig, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary, tokens = 20_000, 256
    config = replace(config, vocab_size=vocabulary, max_positions=tokens)
    model = Transformer(config)
    monkeypatch.setattr("polyhead.training.losses._CHUNK_BYTES", 4 << 20)
    ids = torch.randint(vocabulary, (1, tokens))
    with torch.profiler.profile(profile_memory=True) as seen:
        loss(model, ids, ids, label_smoothing=smoothing).backward()
    largest = max(event.self_cpu_memory_usage for event in seen.events())
    assert largest < tokens * vocabulary * 4, "one allocation holds all logits"


def test_what_does_not_fit_is_said() -> None:
    model, (ids, labels, _) = _model(DECODER), _batch(DECODER)
    with pytest.raises(ValueError, match=r"shape of ids, \[3, 40\]: got \[3, 39\]"):
        loss(model, ids, labels[:, 1:])
    with pytest.raises(ValueError, match="tokens from 0 to 60: got 61"):
        loss(model, ids, labels.masked_fill(labels == labels[0, 5], 61))
    with pytest.raises(ValueError, match="label_smoothing must be"):
        loss(model, ids, labels, label_smoothing=1.5)
    with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum': got 'none'"):
        loss(model, ids, labels, reduction="none")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ValueError, match="no head"):
        loss(Transformer(replace(DECODER, head=None)), ids, labels)


def test_layers_that_are_computed_again_give_the_same_gradients_from_less_memory() -> None:
    model = _model(replace(BOTH, layers=BOTH.layers * 3)).train()
    ids, labels, call = _batch(BOTH)
    held = []
    gradients = []
    for again in (False, True):
        model.recompute = again
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, kept=kept: (kept.append(x.numel()), x)[1], lambda x: x
        ):
            found = loss(model, ids, labels, **call)
        held.append(sum(kept))
        gradients.append(torch.autograd.grad(found, list(model.parameters()), allow_unused=True))
    assert held[1] < held[0] / 4
    for once, twice in zip(*gradients, strict=True):
        assert (once is None and twice is None) or torch.equal(once, twice)
