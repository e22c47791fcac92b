"""Models of real families on a mesh against the same models in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases_of_attention import mesh_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import polyhead as ph
from polyhead import parallel
from polyhead.config import (
    ALiBiConfig,
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LatentAttentionConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    QKNormConfig,
    RelativeBiasConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.parallel.experts import Absent

E, W, T, B = 32, 47, 21, 2
RMS, LAYER = NormConfig(), NormConfig("layernorm", bias=True)
ROPE = RopeConfig()


def _decoder(
    attention: Any, network: Any, norm: NormConfig = RMS, **more: Any
) -> TransformerConfig:
    """Two layers; a pair of attentions is one for each."""
    pair = attention if isinstance(attention, tuple) else (attention, attention)
    placement = more.pop("norm_placement", "pre")
    layers = tuple(LayerConfig(each, network, norm, placement) for each in pair)
    return TransformerConfig("decoder", W, E, 64, layers, final_norm=norm, **more)


def _heads(H: int, G: int, **more: Any) -> AttentionConfig:
    return AttentionConfig(H, G, 8, **more)


def _gpt2() -> TransformerConfig:
    attention = _heads(4, 4, qkv_bias=True, out_bias=True)
    network = FeedForwardConfig(48, "gelu_tanh", gated=False, bias=True)
    return _decoder(attention, network, LAYER, embedding=EmbeddingConfig("learned"))


def _gpt_oss() -> TransformerConfig:
    full = _heads(4, 2, rope=ROPE, sinks=True, qkv_bias=True, out_bias=True)
    expert = FeedForwardConfig(16, "silu", bias=True)
    network = MixtureConfig(expert, 4, 2, router_bias=True)
    return _decoder((replace(full, window=7), full), network, head="untied")


def _gemma2() -> TransformerConfig:
    full = _heads(4, 2, rope=ROPE, softcap=20.0, scale=0.3)
    network = FeedForwardConfig(48, "gelu_tanh")
    return _decoder(
        (replace(full, window=6), full), network, norm_placement="sandwich", logit_softcap=10.0,
        embedding=EmbeddingConfig(scale=5.7),
    )  # fmt: skip


def _t5() -> TransformerConfig:
    attention = _heads(4, 4, scale=1.0)
    layer = LayerConfig(attention, FeedForwardConfig(48, "relu", gated=False), RMS)
    decoder = replace(layer, cross_attention=attention)
    return TransformerConfig(
        "encoder-decoder", W, E, 64, (decoder,) * 2, (layer,) * 2,
        relative_bias=RelativeBiasConfig(8, 20), logit_scale=E**-0.5,
        encoder=ph.config.EncoderConfig(relative_bias=RelativeBiasConfig(8, 20)),
    )  # fmt: skip


def _mixtral() -> TransformerConfig:
    network = MixtureConfig(FeedForwardConfig(16, "silu"), 8, 2, normalize=True)
    return _decoder(_heads(4, 2, rope=ROPE), network, head="untied")


def _deepseek(kv_lora_rank: int = 12, q_lora_rank: int | None = 10) -> TransformerConfig:
    """With the sizes given first, expanding latents takes fewer operations than absorbing."""
    latent = LatentAttentionConfig(
        num_heads=4, kv_lora_rank=kv_lora_rank, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=6, q_lora_rank=q_lora_rank, rope=ROPE, norm=RMS,
    )  # fmt: skip
    expert = FeedForwardConfig(16, "silu")
    mixture = MixtureConfig(
        expert, 4, 2, scoring="sigmoid", choice_bias=True, shared=FeedForwardConfig(16, "silu")
    )
    dense = LayerConfig(latent, FeedForwardConfig(48, "silu"), RMS)
    layers = (dense, replace(dense, feed_forward=mixture))
    return TransformerConfig("decoder", W, E, 64, layers, final_norm=RMS, head="untied")


SILU = FeedForwardConfig(48, "silu")
FAMILIES: dict[str, Callable[[], TransformerConfig]] = {
    "GPT-2": _gpt2,
    "Llama": lambda: _decoder(_heads(4, 2, rope=ROPE), SILU),
    "Qwen 3": lambda: _decoder(_heads(4, 2, rope=ROPE, qk_norm=QKNormConfig()), SILU),
    "Falcon": lambda: _decoder(
        _heads(4, 1, rope=ROPE), FeedForwardConfig(48, "gelu", gated=False), LAYER
    ),
    "Gemma 2": _gemma2,
    "gpt-oss": _gpt_oss,
    "Bloom": lambda: _decoder(
        _heads(4, 4, alibi=ALiBiConfig(), qkv_bias=True, out_bias=True),
        FeedForwardConfig(48, "gelu_tanh", gated=False, bias=True),
        LAYER,
    ),
    "T5": _t5,
    "DeepSeek": _deepseek,
    "DeepSeek, small latent": lambda: _deepseek(kv_lora_rank=4, q_lora_rank=None),
    "Mixtral": _mixtral,
}

MESHES: dict[str, tuple[tuple[str, ...], tuple[int, ...] | None]] = {
    "data": (("data",), None),
    "shard": (("shard",), None),
    "tensor": (("tensor",), None),
    "context": (("context",), None),
    "expert": (("expert",), None),
    "tensor + context": (("context", "tensor"), (2, -1)),
    "expert + tensor": (("expert", "tensor"), (2, -1)),
    "expert + context": (("expert", "context"), (2, -1)),
    "shard + expert": (("shard", "expert"), (2, -1)),
    "data + expert": (("data", "expert"), (2, -1)),
    "shard + tensor": (("shard", "tensor"), (2, -1)),
    "shard + context": (("shard", "context"), (2, -1)),
    "data + shard": (("data", "shard"), (2, -1)),
    "data + shard + tensor": (("data", "shard", "tensor"), (2, 2, -1)),
}


def made(family: str, dtype: torch.dtype) -> ph.Transformer:
    """A model with weights that are alike in all processes."""
    torch.manual_seed(7)
    model = ph.Transformer(FAMILIES[family]()).to(dtype)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25, generator=generator)
        for buffer in model.buffers():
            buffer.normal_(0.0, 0.25, generator=generator)
    return model


def batch(family: str, rows: int = B) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Ids, labels, and what an encoder reads."""
    generator = torch.Generator().manual_seed(9)
    ids = torch.randint(W, (rows, T + 1), generator=generator)
    more = {}
    if FAMILIES[family]().kind == "encoder-decoder":
        more["encoder_ids"] = torch.randint(W, (rows, 17), generator=generator)
    return ids[:, :-1], ids[:, 1:], more


def equal_all(
    families: list[str], meshes: list[str], dtype: str, options: dict[str, Any] | None = None
) -> None:
    for family in families:
        for mesh in meshes:
            try:
                equal(family, mesh, dtype, **(options or {}))
            except Exception as error:
                raise AssertionError(f"{family} on {mesh}, {dtype}: {error}") from error


def equal(
    family: str, mesh_name: str, dtype_name: str, *, exchange: str = "ring",
    order: str = "zigzag", **options: Any,
) -> None:  # fmt: skip
    """Loss, logits and every gradient."""
    dtype = getattr(torch, dtype_name)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    mesh = mesh_named(mesh_name)
    mine, copies = _rows(mesh)
    one = made(family, dtype)
    ids, labels, more = batch(family, max(B, copies))
    wanted = one(ids, **more)
    loss = F.cross_entropy(wanted.flatten(0, 1), labels.flatten())
    loss.backward()
    model = parallel.parallelize(
        made(family, dtype), mesh, exchange=exchange, order=order, **options
    )

    def cut(x: Tensor) -> Tensor:
        return parallel.shard(x[mine], mesh, order=order)

    found = model(cut(ids), **{name: cut(x) for name, x in more.items()})
    ours = parallel.cross_entropy(found, cut(labels), mesh)
    ours.backward()
    assert abs(ours.item() - loss.item()) <= bound * 10, f"loss {ours.item()} for {loss.item()}"
    if options.get("loss_parallel"):
        assert isinstance(found, DTensor)
        assert found.to_local().shape[-1] < W
        found = found.full_tensor()
    whole = parallel.gather(found, mesh, order=order)
    _compare("logits", whole, wanted[mine].detach(), bound)
    compare_gradients(model, one, bound)


def of_eight_heads(family: str) -> None:
    """On ``tensor`` alone, with twice the heads."""
    config = FAMILIES[family]()
    layers = tuple(
        replace(layer, attention=replace(layer.attention, num_heads=8)) for layer in config.layers
    )
    with mock.patch.dict(FAMILIES, {family: lambda: replace(config, layers=layers)}):
        equal(family, "tensor", "float64")


def of_one_token(family: str) -> None:
    """On ``tensor`` with a vocabulary of one token, of which all ranks but the first have none."""
    config = replace(FAMILIES[family](), vocab_size=1)
    with mock.patch.dict(FAMILIES, {family: lambda: config}), mock.patch.dict(globals(), W=1):
        equal(family, "tensor", "float64")


def of_a_longer_encoder(family: str) -> None:
    """Tokens of an encoder that has positions which the decoder has not."""
    config = FAMILIES[family]()
    more = replace(config, max_positions=T, encoder=replace(config.encoder, max_positions=2 * T))

    usual = batch

    def longer(family: str, rows: int = B) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        ids, labels, _ = usual(family, rows)
        return ids, labels, {"encoder_ids": torch.cat([ids, labels], dim=1)}

    changed = mock.patch.dict(globals(), batch=longer)
    with mock.patch.dict(FAMILIES, {family: lambda: more}), changed:
        equal(family, "context", "float64")


def compare_gradients(model: nn.Module, one: nn.Module, bound: float) -> None:
    theirs = dict(one.named_parameters())
    seen, parts = set(), mixture_parts(model)
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        expected = theirs[name].grad
        if grad is None and expected is None:
            continue
        if expected is None:  # of an expert that no token visits
            expected = torch.zeros_like(theirs[name])
        assert grad is not None, f"{name} has no gradient"
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        _compare(f"the gradient of {name}", grad, expected, bound)
        seen.add(name)
    assert seen >= {n for n, p in theirs.items() if p.grad is not None and parts(n)}


def mixture_parts(model: nn.Module) -> Callable[[str], bool]:
    """Whether a parameter of the whole model is one of this rank's."""
    absent = [n + "." for n, m in model.named_modules() if isinstance(m, Absent)]
    return lambda name: not any(name.startswith(prefix) for prefix in absent)


def _compare(what: str, ours: Tensor, theirs: Tensor, bound: float) -> None:
    scale = max(1.0, theirs.abs().max().item())
    assert ours.shape == theirs.shape, f"{what}: {list(ours.shape)} for {list(theirs.shape)}"
    apart = (ours - theirs).abs().max().item()
    assert apart <= bound * scale, f"{what} differs by {apart:.1e} of {scale:.1e}"


def mesh_named(name: str) -> Any:
    """One of ``MESHES``, over all processes."""
    names, sizes = MESHES[name]
    if sizes is not None:
        rest = dist.get_world_size()
        for size in sizes[:-1]:
            rest //= size
        sizes = (*sizes[:-1], rest)
    return mesh_of(*names, sizes=sizes)


def _rows(mesh: Any) -> tuple[slice, int]:
    """The batch rows of this rank, and how many ranks share them: data, shard and expert."""
    count, number = 1, 0
    for name in ("data", "shard", "expert"):
        if name in mesh.mesh_dim_names:
            size = mesh[name].size()
            count, number = count * size, number * size + mesh.get_local_rank(name)
    each = max(B, count) // count
    return slice(number * each, number * each + each), count
