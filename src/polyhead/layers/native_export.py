"""Parts of layers as native code reads them: projections, norms, networks, mixtures of experts.

An allowlist of exact classes and of fields of configurations. Anything else raises
``NotExportableError``: the modules compute it.

Shape letters: E embed size, F hidden size, X experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from polyhead.config import (
    ALiBiConfig,
    AttentionConfig,
    BlockBoundsConfig,
    Data,
    FeedForwardConfig,
    LatentAttentionConfig,
    MixtureConfig,
    NormConfig,
    QKNormConfig,
    QueryTemperatureConfig,
    RopeConfig,
    SelectiveAttentionConfig,
)
from polyhead.layers.exact import ExactType, SupportedFields, guarded_attributes
from polyhead.layers.experts import Experts, native_routing
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.linear import weight_of
from polyhead.layers.linear_gradients import PLAIN_LINEAR
from polyhead.layers.norms import HeadNorm, LayerNorm, RMSNorm
from polyhead.layers.quantized import QUANTIZED_LINEAR
from polyhead.native import NormWeight, arguments, is_plain
from polyhead.native.arguments import ACTIVATIONS, Weight

_FEED_FORWARD, _EXPERTS, _LIST = (
    ExactType(FeedForward),
    ExactType(Experts),
    ExactType(nn.ModuleList),
)
_NOTHING = ExactType(nn.Identity)
_RMS_NORM, _LAYER_NORM, _HEAD_NORM = ExactType(RMSNorm), ExactType(LayerNorm), ExactType(HeadNorm)

Parts = dict[str, nn.Module | None]


def ANY(names: str) -> dict[str, None]:
    """Fields that may have any value."""
    return dict.fromkeys(names.split())


KNOWN_NORM = {NormConfig: ANY("type eps bias weight_offset weight")}
KNOWN = SupportedFields(
    KNOWN_NORM
    | {
        AttentionConfig: ANY(
            "num_heads num_kv_heads head_dim v_head_dim qkv_bias k_bias out_bias rope qk_norm "
            "window softcap scale dropout alibi sinks qkv_clip chunk query_temperature"
        ),
        SelectiveAttentionConfig: ANY(
            "num_heads num_kv_heads head_dim v_head_dim qkv_bias k_bias out_bias rope qk_norm "
            "softcap scale dropout qkv_clip selector"
        ),
        BlockBoundsConfig: ANY("size top_k max_queries") | {"shared": (True,)},
        ALiBiConfig: ANY("max_bias scale rounded"),
        QueryTemperatureConfig: ANY("scale every offset"),
        LatentAttentionConfig: ANY(
            "num_heads kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim q_lora_rank bias "
            "norm q_bias rope scale dropout"
        ),
        QKNormConfig: ANY("norm place per_head"),
        FeedForwardConfig: ANY("hidden_dim gated bias down_bias dropout clamp up_offset")
        | {"activation": ACTIVATIONS},
        # One token of a sequence finds room in any capacity.
        MixtureConfig: ANY(
            "expert num_experts experts_per_token shared scoring choice_bias normalize scale "
            "groups groups_per_token group_score shared_gate router_bias jitter weighs capacity"
        ),
        RopeConfig: ANY(
            "theta type dim factor original_max_positions low_freq_factor high_freq_factor "
            "beta_fast beta_slow attention_factor mscale mscale_all_dim truncate short_factor "
            "long_factor frequencies rotated sections interleaved_sections"
        ),
    }
)


class NotExportableError(Exception):
    """What native code does not do, or a parameter that does not lie in memory as it reads it.

    Args:
        why: A phrase about ``module``.
        module: What cannot be read; None: the layer.
    """

    def __init__(self, why: str, module: nn.Module | None = None) -> None:
        super().__init__(why)
        self.why, self.module = why, module


def check_unhooked(kinds: Sequence[ExactType[Any]], module: nn.Module | None) -> None:
    """Raises unless ``module`` is exactly of one of these classes, and no hook sees its calls."""
    if not any(kind.is_exact_and_unhooked(module) for kind in kinds):
        same = [kind for kind in kinds if kind.is_class(module)] or kinds
        raise NotExportableError(same[0].why_not(module), module)


def known_fields(module: nn.Module, config: Data) -> None:
    """Raises unless native code knows every field of a configuration."""
    if not KNOWN.accepts(config):
        raise NotExportableError(f"native code does not compute {config}", module)


def network(parts: Parts, x: Tensor) -> dict[str, Any]:
    """The fields of ``LayerWeights`` for a feed-forward network or a mixture, with its norms."""
    module = parts["feed_forward"]
    found: dict[str, Any] = around("feed_forward", parts, x)
    if isinstance(module, Experts):
        return found | {"experts": _mixture(module, x)}
    return found | {"network": _plain(module, x)}


def _plain(module: nn.Module | None, x: Tensor) -> arguments.Network:
    check_unhooked([_FEED_FORWARD], module)
    assert isinstance(module, FeedForward)
    known_fields(module, module.config)
    form = module.form(x)
    if form is None:
        raise NotExportableError(f"native code does not compute {module.activation}", module)
    if module.training and module.dropout:
        raise NotExportableError("it is training, with dropout", module)
    inner, hidden, E = module._modules, module.hidden_dim, x.shape[2]
    gate = inner["gate_proj"]
    return arguments.Network(
        None if gate is None else linear(gate, E, hidden, x),
        linear(inner["up_proj"], E, hidden, x),
        linear(inner["down_proj"], hidden, E, x),
        *form,
    )


def _mixture(module: Experts, x: Tensor) -> arguments.Experts:
    check_unhooked([_EXPERTS], module)
    inner, config = module._modules, module.config
    known_fields(module, config)
    routing, experts, shared = native_routing(module, x), inner["experts"], inner.get("shared")
    if routing is None:
        raise NotExportableError("its router cannot be read", module)
    check_unhooked([_LIST], experts)
    assert isinstance(experts, nn.ModuleList)
    if len(experts) != config.num_experts or module.calls_all:
        raise NotExportableError("it calls other experts than those chosen", module)
    return arguments.Experts(
        routing,
        tuple(_plain(expert, x) for expert in experts),
        tuple(guarded_attributes(expert.modules()) for expert in experts),
        None if shared is None else _plain(shared, x),
        config.weighs == "input",
    )


def modules_of(part: nn.Module, *, visited: bool) -> Iterator[nn.Module]:
    """Modules of a part that every token goes through.

    Args:
        part: A part of a layer.
        visited: Without experts, which are looked at where a token visits them.
    """
    if not visited or type(part) is not Experts:
        yield from part.modules()
        return
    yield part
    for name, child in part.named_children():
        yield from (child,) if name == "experts" else child.modules()


def around(part: str, parts: Parts, x: Tensor) -> dict[str, NormWeight | None]:
    """The norms before and behind a part."""
    found = ((name, parts[name]) for name in (f"{part}_norm", f"{part}_out_norm"))
    return {name: None if it is None else norm(it, x.shape[2], x) for name, it in found}


def linear(module: nn.Module | None, inputs: int, outputs: int, x: Tensor) -> Weight:
    found = weight_of(module, x, inputs)
    if found is None:
        check_unhooked((PLAIN_LINEAR, QUANTIZED_LINEAR), module)
        raise NotExportableError(_said(f"[{outputs}, {inputs}]", x), module)
    bias = found.bias
    if len(found.weight) != outputs or (bias is not None and bias.shape != (outputs,)):
        raise NotExportableError(_said(f"[{outputs}, {inputs}]", x), module)
    return found


def _said(shape: str, x: Tensor) -> str:
    return f"its weights are not {shape} in {x.dtype} in memory without gaps"


def norm(module: nn.Module | None, features: int, x: Tensor) -> NormWeight:
    if _RMS_NORM.is_exact_and_unhooked(module):
        known_fields(module, module.config)
        only: Tensor | None = module._parameters["weight"]
        if only is not None or module.dim != features:
            only = read(only, (features,), x, module)
        return NormWeight(only, module.eps, module.weight_offset)
    check_unhooked([_LAYER_NORM, _RMS_NORM], module)
    assert isinstance(module, LayerNorm)
    if module.normalized_shape != (features,):
        raise NotExportableError(f"it does not normalize {features} features", module)
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    return NormWeight(
        weight if weight is None else read(weight, (features,), x, module),
        module.eps,
        module.weight_offset,
        bias if bias is None else read(bias, (features,), x, module),
        centred=True,
    )


def norm_of_heads(
    module: nn.Module | None, heads: int, features: int, x: Tensor, *, whole: bool
) -> NormWeight:
    """The norm of queries or keys: of all heads at once, or of each, with its own weight or not."""
    if whole:
        return norm(module, heads * features, x)
    if not _HEAD_NORM.is_exact_and_unhooked(module) or not KNOWN.accepts(module.config):
        return norm(module, features, x)
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    config, shape = module.config, (heads, features)
    return NormWeight(
        weight if weight is None else read(weight, shape, x, module),
        config.eps,
        config.weight_offset,
        bias if bias is None else read(bias, shape, x, module),
        centred=config.type == "layernorm",
    )


def latent_norm(module: nn.Module | None, features: int, x: Tensor) -> NormWeight | None:
    return None if _NOTHING.is_exact_and_unhooked(module) else norm(module, features, x)


def read(
    weight: Tensor | None, shape: tuple[int, ...], x: Tensor, module: nn.Module | None = None
) -> Tensor:
    if weight is None or weight.shape != shape or not is_plain(weight, x):
        raise NotExportableError(_said(str([*shape]), x), module)
    return weight
