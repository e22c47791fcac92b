"""No result depends on torch's default dtype or device, which belong to the user's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny import decoder, encoder, write_decoder
from torch import Tensor

import polyhead as ph
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    QueryTemperatureConfig,
    RelativeBiasConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.layers import attention_parts
from polyhead.models import Transformer

PROMPT = "The cat sat"


@pytest.fixture(params=["bfloat16", "float64", "meta"])
def default(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """What sets the default; it is set back when the test ends."""

    def set_it() -> None:
        attention_parts.temperatures.cache_clear()
        if request.param == "meta":  # what is made there by mistake cannot be read
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(getattr(torch, request.param))

    yield set_it
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    attention_parts.temperatures.cache_clear()


def mixture() -> Transformer:
    """RMS norms, T5's bias, temperatures, experts, a window and rotary positions that stretch."""
    torch.manual_seed(0)
    rope = RopeConfig(type="dynamic", factor=2.0, original_max_positions=4)
    warm = QueryTemperatureConfig(scale=0.1, every=4)
    near = AttentionConfig(4, 2, 8, rope=rope, window=5, query_temperature=warm, sinks=True)
    network = MixtureConfig(FeedForwardConfig(16), 4, 2)
    layers = (
        LayerConfig(near, network, NormConfig("rmsnorm")),
        LayerConfig(AttentionConfig(4, 4, 8), FeedForwardConfig(16), NormConfig("rmsnorm")),
    )
    config = TransformerConfig(
        "decoder", 40, 32, 64, layers, relative_bias=RelativeBiasConfig(8, 16)
    )
    return Transformer(config).eval()


def ids() -> Tensor:
    return torch.arange(18, dtype=torch.int64, device="cpu").view(2, 9)


def everything(model: Transformer) -> list[Tensor]:
    """Logits, gradients, and steps through every kind of cache."""
    logits = model(ids())
    found = [logits, *torch.autograd.grad(logits.square().sum(), [*model.parameters()])]
    with torch.no_grad():
        for kind in ("dense", "paged", "auto"):
            cache = model.new_cache(kind=kind)
            found += [model(part, cache=cache) for part in ids().split([5, 1, 1, 2], dim=1)]
        with ph.probe(model) as seen:
            model(ids())
    return [*found, *(view.lse for view in seen)]


def calls() -> list[Tensor]:
    """The function itself: masks, biases, dropout, every kernel of a CPU."""
    torch.manual_seed(0)
    like = {"dtype": torch.float32, "device": "cpu"}
    q, k, v = (torch.randn(2, 4, 9, 8, **like).requires_grad_() for _ in range(3))
    found = []
    for kernel in ("auto", "tiled", "reference"):
        for given in (
            {"mask": ph.Causal() & ph.Window(3), "softcap": 5.0},
            {"mask": ph.KeyLengths([3, 9]), "bias": ph.ALiBi(4)},
            {"mask": ph.Documents([4, 5]), "bias": ph.ALiBi([0.1, 0.2, 0.3, 0.4])},
            {"dropout_p": 0.3},
        ):
            out, lse = ph.attention(q, k, v, return_lse=True, kernel=kernel, **given)
            found += [out, lse, *torch.autograd.grad(out.square().sum(), (q, k, v))]
    return found


def same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a.dtype, a.device) == (b.dtype, b.device)
        assert torch.equal(a, b)


def test_calls_and_models_compute_the_same_bits(default: Callable[[], None]) -> None:
    model, bidirectional = mixture(), encoder()

    def results() -> list[Tensor]:
        with torch.no_grad():
            hidden = bidirectional(ids())
        return [*calls(), *everything(model), hidden]

    wanted = results()
    default()
    same(results(), wanted)


def test_a_loaded_model_writes_the_same_texts(default: Callable[[], None], tmp_path: Path) -> None:
    folder, plan = write_decoder(tmp_path / "model"), str(ph.plan("llama-3-8b", tokens=512))

    def results() -> list[str]:
        model = ph.load(folder)
        drawn = model.generate(PROMPT, max_new_tokens=8, temperature=1.0, seed=5).text
        beams = model.generate(PROMPT, max_new_tokens=8, num_beams=3).text
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        batch = model.generate([PROMPT, "A"], max_new_tokens=4)
        return [drawn, beams, *(each.text for each in batch)]

    wanted = results()
    default()
    assert results() == wanted
    assert str(ph.plan("llama-3-8b", tokens=512)) == plan


def test_new_models_have_the_default_dtype(default: Callable[[], None]) -> None:
    default()
    built = decoder()
    like = torch.empty(0)
    assert {(p.dtype, p.device) for p in built.parameters()} == {(like.dtype, like.device)}
