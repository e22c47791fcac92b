"""A decoding step of every family is native calls, with the bits of its modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Case, all_cases
from torch import Tensor

import polyhead as ph
from families_page import _read
from polyhead import native
from polyhead.layers import transformer_layer
from polyhead.layers.decode_plan import LayerArgs, step, steps
from polyhead.layers.native_layer import NETWORK, last_part
from polyhead.layers.transformer_layer import TransformerLayer
from polyhead.models import stack

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
CASES = all_cases()
UNLIKE: dict[str, tuple[Any, ...]] = {
    "cohere": ({"use_qk_norm": True},),
    "falcon": ({"alibi": True}, {"new_decoder_architecture": True}),
    "stablelm": ({"qk_layernorm": True}, {"use_parallel_residual": True}),
}
"""Options with which a family's layers are of another kind."""
AS_MODULES = {
    "cohere2_moe": "a mixture parallel to attention",
    "gemma4_unified_text": "a factor of each layer, normalized values, keys of other layers",
    "longcat_flash": "a factor of the latents, and a network that joins behind the next layer",
    "kolibri1": "the bias of the choice of experts is added to logits",
    "mimo_v2_flash": "a factor of the values",
    "mistral4": "queries of latents that grow by position",
    "gemma4_text": "vectors of single layers, normalized values, keys of other layers",
    "hrm_text": "several residual streams",
    "reformer": "two residual streams",
    "gemma3n_text": "several residual streams",
}
"""Families of heads whose layers native code does not compute to their end, and why."""
OPTIONS_AS_MODULES = {
    "full_attn_alpha_factor": "a factor of the residual path",
    "mlp_alpha_factor": "a factor of the residual path",
    "layers_block_type": "a layer without a network",
}
"""Options with which it computes none of a family's layers, and why."""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_step_is_one_call(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    for chosen in ((), *((option,) for option in UNLIKE.get(case.model_type, ()))):
        check(monkeypatch, case, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_step_is_one_call_whatever_the_option(
    monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    for option in (option for axis in case.axes for option in axis if option):
        check(monkeypatch, case, (option,))


def check(monkeypatch: pytest.MonkeyPatch, case: Case, chosen: tuple[Any, ...]) -> None:
    config = _read(case, *chosen)
    if config.kind == "encoder" or config.task is not None:
        return
    if any(layer.attention.one_pass for layer in config.layers):
        return  # no steps
    native_layers = [layer.attention.kind in ("heads", "latent") for layer in config.layers]
    wanted = [NETWORK if each else 0 for each in native_layers]
    if case.model_type in AS_MODULES or any(
        each[name] is not None for each in chosen for name in OPTIONS_AS_MODULES.keys() & each
    ):
        wanted = [last_part(layer) for layer in config.layers]
        # An option may take away what native code does not compute.
        assert NETWORK not in wanted or (chosen and case.model_type in AS_MODULES)
        native_layers = [False] * len(wanted)
    torch.manual_seed(0)
    model = ph.Transformer(config).eval()
    ends: list[int] = []
    runs: list[int] = []

    def counted(layer: TransformerLayer, x: Tensor, given: LayerArgs) -> Any:
        found = step(layer, x, given)
        ends.append(0 if found is None else found[1])
        return found

    def counted_together(*arguments: Any, **named: Any) -> tuple[Tensor, int, int]:
        x, whole, part = steps(*arguments, **named)
        ends.extend([NETWORK] * whole + [part] * (part > 0))
        runs.append(whole)
        return x, whole, part

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        ids = case.ids()
        given = {"encoder_ids": case.source()} if config.kind == "encoder-decoder" else {}
        cache = model.new_cache()
        model(ids[:, :9], cache=cache, **given)
        other = cache.fork()
        for at in range(9, 12):
            token = ids[:, at : at + 1]
            ends.clear()
            runs.clear()
            with monkeypatch.context() as patch:
                patch.setattr(transformer_layer, "step", counted)
                patch.setattr(stack, "steps", counted_together)
                found = model(token, cache=cache)
            # The first may make room, or complete a group of a ring's tokens.
            assert ends == wanted, (chosen, at)
            with monkeypatch.context() as patch:
                patch.setattr(transformer_layer, "step", lambda *arguments: None)
                patch.setattr(stack, "steps", lambda parts, x, *_, **__: (x, 0, 0))
                assert torch.equal(found, model(token, cache=other)), (chosen, at)
        if all(native_layers):
            assert runs == [len(config.layers)], chosen  # of the last token: all layers together
