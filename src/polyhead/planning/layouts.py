"""What other head layouts would cost at the same width, side by side.

MHA remembers 2 · H · D numbers per token and layer, GQA 2 · G · D, MQA 2 · D (Shazeer 2019; Ainslie
et al. 2023), MLA one latent of R + P (DeepSeek-V2, 2024). FlashAttention changes none of these
numbers: it is another way to compute the same attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from polyhead.config import HeadLayout, LatentAttentionConfig, TransformerConfig
from polyhead.planning.flops import attention_flops
from polyhead.planning.memory import layer_cache, total_bytes

EXAMPLES = {
    "MHA": "BERT, GPT-2, GPT-3",
    "GQA": "LLaMA-2-70B, LLaMA-3, Mistral, Qwen2",
    "MQA": "PaLM, Falcon-7B",
    "MLA": "DeepSeek-V2, V3, R1",
}


@dataclass(frozen=True)
class LayoutRow:
    """One head layout in all layers of a model.

    Attributes:
        name: ``"MHA"``, ``"GQA-8"``, ``"MQA"``, ``"MLA"``.
        current: Whether the model has it.
        query_heads: H of the first layer.
        num_kv_heads: G of the first layer; None for a latent.
        elements: Numbers remembered per token in the first layer.
        token_bytes: Bytes of one token in all layers, while no window is full.
        cache_bytes: At the plan's tokens and batch, on all ranks together without copies.
        ratio: ``cache_bytes`` divided by those of MHA.
        parameters: Parameters of attention, all layers.
        decode_flops: Scores and weighted values of one decode step, all layers.
        examples: Models that have it.
    """

    name: str
    current: bool
    query_heads: int
    num_kv_heads: int | None
    elements: int
    token_bytes: float
    cache_bytes: int
    ratio: float
    parameters: int
    decode_flops: int
    examples: str


def layouts(
    model: TransformerConfig, *, tokens: int, batch_size: int, kv_dtype: str, page_size: int | None
) -> tuple[LayoutRow, ...]:
    """MHA, GQA, MQA and MLA in place of the self-attention of every layer of a decoder.

    None where a layer keeps no keys and values of each token: there is nothing to put in place.
    """
    if model.kind == "encoder":
        return ()
    memories = [layer.attention.memories for layer in model.layers]
    if not all(any(memory.keys_and_values for memory in kept) for kept in memories):
        return ()
    first = model.layers[0].attention
    groups = _groups(first)
    variants: list[tuple[str, Callable[[HeadLayout], HeadLayout]]] = [
        ("MHA", lambda shape: shape.with_num_kv_heads(shape.num_heads))
    ]
    if groups is not None:
        variants.append((f"GQA-{groups}", lambda shape: shape.with_num_kv_heads(groups)))
    variants += [("MQA", lambda shape: shape.with_num_kv_heads(1)), ("MLA", as_latent)]
    rows: list[LayoutRow] = []
    for name, change in variants:
        made = {own: change(own) for own in {layer.attention for layer in model.layers}}
        shapes = [made[layer.attention] for layer in model.layers]
        kinds = Counter(shapes)
        beside = [layer.out_memories(model.embed_dim) for layer in model.layers]
        memory = Counter(
            layer_cache(shape, kv_dtype, page_size, beside=kept)
            for shape, kept in zip(shapes, beside, strict=True)
        )
        held = total_bytes(memory, tokens, batch_size)
        rows.append(
            LayoutRow(
                name=name,
                current=shapes[0].layout == first.layout,
                query_heads=shapes[0].num_heads,
                num_kv_heads=_kv_heads(shapes[0]),
                elements=round(shapes[0].token_elements),
                token_bytes=sum(each.token_bytes * times for each, times in memory.items()),
                cache_bytes=held,
                ratio=held / rows[0].cache_bytes if rows else 1.0,
                parameters=sum(
                    times * sum(piece.count for piece in shape.parameter_groups(model.embed_dim))
                    for shape, times in kinds.items()
                ),
                decode_flops=sum(
                    times * attention_flops(shape, 1, tokens - 1, batch_size)
                    for shape, times in kinds.items()
                ),
                examples=EXAMPLES[name.split("-")[0]],
            )
        )
    return tuple(rows)


def as_latent(shape: HeadLayout) -> HeadLayout:
    """DeepSeek's proportions at the same heads: R = 4 · D, P = D / 2, no window."""
    if isinstance(shape, LatentAttentionConfig):
        return replace(shape, latent_heads=1)
    if shape.kv.latent:
        return shape
    D = shape.with_num_kv_heads(shape.num_heads).kv.key_dim
    return LatentAttentionConfig(
        num_heads=shape.num_heads,
        kv_lora_rank=4 * D,
        qk_nope_head_dim=D,
        qk_rope_head_dim=max(2, D // 4 * 2),
        v_head_dim=shape.value_dim,
    )


@dataclass(frozen=True)
class Saving:
    """How much smaller a cache is than another, and what was compared."""

    fraction: float
    baseline: str

    def __str__(self) -> str:
        return f"{self.fraction:.1%} less cache per token than {self.baseline}"


def cache_saving(
    model: TransformerConfig,
    baseline: TransformerConfig,
    *,
    bits: float = 16,
    baseline_bits: float = 16,
) -> float:
    """1 − (bits per token of ``model``'s cache) / (bits per token of ``baseline``'s), all layers.

    Like for like where both have as many bits per number; 0 where neither cache grows with tokens.
    """
    ours, theirs = (
        sum(layer.attention.token_elements for layer in each.layers) for each in (model, baseline)
    )
    if not theirs and not ours:
        return 0.0
    return 1 - ours * bits / (theirs * baseline_bits)


def with_mha(model: TransformerConfig) -> TransformerConfig:
    """The same model with keys and values for every head."""
    return replace(
        model,
        layers=tuple(
            replace(layer, attention=layer.attention.with_num_kv_heads(layer.attention.num_heads))
            for layer in model.layers
        ),
    )


def _groups(shape: HeadLayout) -> int | None:
    """The model's own number of groups where it has some, or 8, or the nearest divisor."""
    H, G = shape.num_heads, shape.kv.num_kv_heads
    if 1 < G < H:
        return G
    divisors = [g for g in range(2, min(H, 1024)) if H % g == 0]
    return min(divisors, key=lambda g: (abs(g - 8), g)) if divisors else None


def _kv_heads(shape: HeadLayout) -> int | None:
    held = shape.kv
    return None if held.latent else held.num_kv_heads
