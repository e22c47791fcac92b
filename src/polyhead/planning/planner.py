"""``plan``: the cost of a model before it is built.

    time of a decode step ≥ max(bytes read / bandwidth, operations / rate)

Everything but that bound is counted, not estimated: parameters, visible pairs and cache bytes are
those of this package's layers, masks and caches, and activations are the most that its layers hold
at a time.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polyhead._utils.checks import check_int
from polyhead._utils.notebook import lines, panel
from polyhead.caches.choice import Kind, check_evicting
from polyhead.caches.eviction import Evicting
from polyhead.caches.sizes import Quantized
from polyhead.config import AttentionConfig, HeadLayout, TransformerConfig
from polyhead.errors import ConfigError, ContextLengthError
from polyhead.planning.activations import activation_elements
from polyhead.planning.figures import DecodeBound, Figures, LayerCachePlan
from polyhead.planning.flops import Flops
from polyhead.planning.flops import flops as count_flops
from polyhead.planning.layouts import layouts
from polyhead.planning.memory import CACHE_TYPES, LayerCache, caches, fit
from polyhead.planning.mesh import checked_mesh, mesh_plan
from polyhead.planning.presets import subject
from polyhead.planning.tables import text
from polyhead.planning.units import quantity
from polyhead.planning.weight_bits import FILE, WEIGHT_BITS, weight_bits
from polyhead.planning.weights import check_ranks, counts, parameter_groups


@dataclass(frozen=True)
class Plan(Figures):
    """The cost of a model; print it, or read its fields, which are those of ``Figures``."""

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain dicts, lists, numbers, strings and None, sums included."""
        data = dataclasses.asdict(self) | {"config": self.config.to_dict()}
        data["parameters"]["total"] = self.parameters.total
        data["rank_bytes"] = self.rank_bytes
        for name, each in (("prefill", self.prefill), ("decode", self.decode)):
            if each is not None:
                data[name] |= {"model": each.model, "hardware": each.hardware}
        return data

    def __repr__(self) -> str:
        return (
            f"Plan({self.name!r}, tokens={self.tokens}, batch_size={self.batch_size}, "
            f"dtype={self.dtype!r}, "
            f"parameters={self.parameters.total}, cache_bytes={self.cache_bytes})"
        )

    def __str__(self) -> str:
        return text(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: the tables."""
        return panel(repr(self), lines(str(self)))


def plan(
    config: Any,
    *,
    tokens: int | None = None,
    batch_size: int = 1,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    page_size: int | None = None,
    tensor_parallel: int = 1,
    memory: float | str | None = None,
    bandwidth: float | str | None = None,
    flops: float | str | None = None,
    mesh: Mapping[str, int] | None = None,
    link: float | str | None = None,
    evicting: Evicting | None = None,
) -> Plan:
    """Computes parameters, operations, cache bytes and what fits, without building the model.

    Args:
        config: A preset's name (``"llama-3-8b"``), a path to a Hugging Face config.json or its
            directory, the file's object, a ``TransformerConfig``, or what ``load`` returned.
        tokens: Context length of each sequence, of an encoder-decoder on both sides; default:
            max_positions.
        batch_size: Number of sequences.
        dtype: Dtype of weights: float32, bfloat16, float16, float8, int8 or int4 (scales are not
            counted); ``"file"``: as ``load`` holds the codes of a config.json with
            quantization_config, or as a loaded model (of a GGUF file, say) holds its weights, with
            their scales, and float32 activations.
        kv_dtype: Dtype of the cache: float32, bfloat16, float16, int8 or int4 (the latter two as
            ``QuantizedCache`` keeps them, scales included); default: ``dtype`` where a cache can
            have it, bfloat16 otherwise.
        page_size: Tokens per page of the cache, whose layers then keep every token, as those of
            ``new_cache(kind="paged")`` do; default: not paged, a window is a ring.
        tensor_parallel: Ranks. Query and kv heads, hidden features and the vocabulary are shared;
            norms and the latents of MLA are on every rank, and a kv head on several where there
            are more ranks than kv heads.
        memory: Memory of one rank, in bytes or as ``"24GiB"``: what fits is worked out.
        bandwidth: Bandwidth of one rank's memory, in bytes per second or as ``"3.35TB/s"``.
        flops: Compute rate of one rank, in operations per second or as ``"989TFLOP/s"``.
        mesh: Sizes of the dimensions data, shard, context and tensor of ``polyhead.parallel``, such
            as ``{"tensor": 8, "context": 4}``: what one rank holds and sends is ``Plan.mesh``.
        link: Bytes per second that a rank sends to the next, or as ``"50GB/s"``: with ``flops``,
            from how many tokens transfers hide behind attention.
        evicting: Layers without a window evict keys, as those of ``new_cache(evicting=...)`` do:
            ``H2O(budget)``, ``SnapKV(budget)`` or ``StreamingLLM(budget)``. The bytes are those
            behind a prompt of ``tokens``, and results differ from those of the model.

    Raises:
        ConfigError: A field of the configuration, or an argument, is missing or impossible; or not
            even the weights fit in ``memory``.
        ContextLengthError: More tokens than max_position_embeddings.
        ModelNotFoundError: No preset and no path of that name.
    """
    found = subject(config)
    model = found.config
    tokens = model.max_positions if tokens is None else tokens
    sizes, ranks = _ranks(mesh, tensor_parallel)
    for name, value in (("tokens", tokens), ("batch_size", batch_size), ("tensor_parallel", ranks)):
        check_int(name, value, least=1, error=ConfigError)
    if page_size is not None:
        check_int("page_size", page_size, least=1, error=ConfigError)
    kv_dtype = _cache_dtype(kv_dtype, dtype)
    bits = weight_bits(dtype, found.scheme, found.held, ranks if sizes is None else 0)
    check_ranks(model, ranks)
    _check_context(model, tokens)

    weights = parameter_groups(model)
    parameters = counts(weights)
    rank_weights = _bytes(p.on_rank(ranks) * n * bits(p) for p, n in weights.items())
    if evicting is not None:
        _check_evicting(model, evicting, kv_dtype, page_size, ranks, mesh)
    layers = caches(model, kv_dtype, page_size, ranks, evicting)
    step, bound, touched, read = None, None, 0, 0
    if model.kind != "encoder":
        decoder = model if evicting is None else _seeing(model, evicting.budget + 1)
        step = _flops(decoder, queries=1, cached=tokens - 1, batch_size=batch_size)
        touched = _bytes(p.touched(ranks, batch_size) * n * bits(p) for p, n in weights.items())
        read = sum(n * each.read_bytes(tokens, batch_size) for each, n in Counter(layers).items())
        bound = _bound(touched + read, step.model / ranks, bandwidth, flops, batch_size)
    room = None
    if memory is not None:
        held = int(quantity("memory", memory, unit="B"))
        room = fit(layers, memory=held, weights=rank_weights, tokens=tokens, batch_size=batch_size)
    return Plan(
        name=found.name,
        config=model,
        tokens=tokens,
        batch_size=batch_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=page_size,
        tensor_parallel=ranks,
        parameters=parameters,
        active_parameters=sum(piece.active * n for piece, n in weights.items()),
        weight_bytes=_bytes(p.count * n * bits(p) for p, n in weights.items()),
        rank_weight_bytes=rank_weights,
        cache_token_bytes=sum(each.token_bytes for each in layers),
        cache_bytes=sum(n * each.bytes(tokens, batch_size) for each, n in Counter(layers).items()),
        cache_layers=_by_layer(model, layers, tokens, batch_size),
        prefill=_flops(model, queries=tokens, cached=0, batch_size=batch_size),
        activation_bytes=_activation_bytes(model, tokens, batch_size, dtype, ranks),
        decode=step,
        decode_weight_bytes=touched,
        decode_cache_bytes=read,
        bound=bound,
        fit=room,
        layouts=layouts(
            model, tokens=tokens, batch_size=batch_size, kv_dtype=kv_dtype, page_size=page_size
        ),
        savings=found.savings,
        notes=found.notes if evicting is None else (*found.notes, _lossy(evicting, tokens)),
        evicting=None if evicting is None else str(evicting),
        mesh=None
        if sizes is None
        else mesh_plan(
            model,
            sizes,
            tokens=tokens,
            batch_size=batch_size,
            weight_bits=WEIGHT_BITS[dtype],
            kv_dtype=kv_dtype,
            page_size=page_size,
            link=None if link is None else quantity("link", link, unit="B/s"),
            flops=None if flops is None else quantity("flops", flops, unit="FLOP/s"),
        ),
    )


def _check_evicting(
    model: TransformerConfig,
    evicting: Evicting,
    kv_dtype: str,
    page_size: int | None,
    ranks: int,
    mesh: Mapping[str, int] | None,
) -> None:
    kind: Kind = "auto" if page_size is None else "paged"
    bits = CACHE_TYPES[kv_dtype]
    quantized = Quantized(bits, bits) if isinstance(bits, int) else None
    check_evicting(model, evicting, kind=kind, quantized=quantized)
    if ranks > 1 or mesh is not None:
        raise ConfigError(
            f"evicting={evicting} is for one process: got tensor_parallel={ranks}, mesh={mesh}"
        )


def _seeing(model: TransformerConfig, keys: int) -> TransformerConfig:
    """A model whose layers without a window see so many keys at most."""
    layers = tuple(
        dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, window=keys))
        if isinstance(layer.attention, AttentionConfig) and layer.attention.visible_window is None
        else layer
        for layer in model.layers
    )
    return dataclasses.replace(model, layers=layers)


def _lossy(evicting: Evicting, tokens: int) -> str:
    kept = min(tokens, evicting.budget)
    weights = ", and computing its weights is not counted" if evicting.by_weight else ""
    return (
        f"evicting keeps {kept:,} of {tokens:,} tokens and loses the others: results differ; other "
        f"head layouts are shown without it{weights}"
    )


def _ranks(
    mesh: Mapping[str, int] | None, tensor_parallel: int
) -> tuple[dict[str, int] | None, int]:
    """The sizes of a mesh if there is one, and the ranks of tensor parallelism."""
    if mesh is None:
        return None, tensor_parallel
    if tensor_parallel != 1:
        raise ConfigError("tensor_parallel and mesh are mutually exclusive: give the mesh's tensor")
    sizes = checked_mesh(mesh)
    return sizes, sizes.get("tensor", 1)


def _cache_dtype(kv_dtype: str | None, dtype: str) -> str:
    """The cache's dtype: as asked for, or that of the weights where a cache can have it."""
    if dtype not in (*WEIGHT_BITS, FILE):
        raise ConfigError(f"dtype must be one of {', '.join((*WEIGHT_BITS, FILE))}: got {dtype!r}")
    if kv_dtype is None and dtype == FILE:
        return "float32"
    if kv_dtype is None:
        return dtype if dtype in ("float32", "bfloat16", "float16") else "bfloat16"
    if kv_dtype not in CACHE_TYPES:
        raise ConfigError(f"kv_dtype must be one of {', '.join(CACHE_TYPES)}: got {kv_dtype!r}")
    return kv_dtype


def _flops(model: TransformerConfig, *, queries: int, cached: int, batch_size: int) -> Flops:
    return count_flops(
        model, queries=queries, cached=cached, batch_size=batch_size, context=cached + queries
    )


def _activation_bytes(
    model: TransformerConfig, tokens: int, batch_size: int, dtype: str, ranks: int
) -> int:
    """Weights of fewer bits are multiplied with activations of 16."""
    half = dtype not in ("float32", FILE)
    elements = activation_elements(
        model, tokens=tokens, batch_size=batch_size, ranks=ranks, half=half
    )
    return elements * (2 if half else 4)


def _bytes(bits: Iterable[float]) -> int:
    return -(-round(sum(bits)) // 8)


def _bound(
    bytes_read: int,
    operations: float,
    bandwidth: float | str | None,
    flops: float | str | None,
    batch_size: int,
) -> DecodeBound | None:
    """The time of a step on one rank; None where neither a bandwidth nor a rate was given."""
    memory = compute = None
    if bandwidth is not None:
        memory = bytes_read / quantity("bandwidth", bandwidth, unit="B/s")
    if flops is not None:
        compute = operations / quantity("flops", flops, unit="FLOP/s")
    seconds = max(memory or 0.0, compute or 0.0)
    if seconds == 0.0:
        return None
    return DecodeBound(
        memory_seconds=memory,
        compute_seconds=compute,
        seconds=seconds,
        bound="memory" if seconds == memory else "compute",
        tokens_per_second=batch_size / seconds,
    )


def _by_layer(
    model: TransformerConfig, layers: tuple[LayerCache, ...], tokens: int, batch_size: int
) -> tuple[LayerCachePlan, ...]:
    shapes: list[tuple[int, HeadLayout, bool]] = []
    if model.kind != "encoder":
        shapes = [(i, layer.attention, False) for i, layer in enumerate(model.layers)]
        shapes += [
            (i, layer.crossing, True)
            for i, layer in enumerate(model.layers)
            if layer.crossing is not None
        ]
    groups: dict[tuple[LayerCache, str, bool], list[int]] = {}
    for (i, shape, cross), cache in zip(shapes, layers, strict=True):
        groups.setdefault((cache, _described(shape), cross), []).append(i)
    return tuple(
        LayerCachePlan(
            layers=tuple(numbers),
            attention=words,
            num_kv_heads=cache.num_kv_heads,
            token_bytes=cache.token_bytes,
            bytes=cache.bytes(tokens, batch_size),
            cross=cross,
        )
        for (cache, words, cross), numbers in groups.items()
    )


def _described(shape: HeadLayout) -> str:
    window = shape.visible_window
    return shape.layout if window is None else f"{shape.layout}, window {window:,}"


def _check_context(model: TransformerConfig, tokens: int) -> None:
    limit = model.max_positions
    if tokens > limit:
        raise ContextLengthError(
            f"tokens must be at most max_position_embeddings={limit:,}, the most that the model "
            f"reads: got {tokens:,}"
        )
