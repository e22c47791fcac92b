"""What a plan consists of, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from polyhead.config import TransformerConfig
from polyhead.models.counts import ParameterCounts
from polyhead.planning.flops import Flops
from polyhead.planning.layouts import LayoutRow, Saving
from polyhead.planning.memory import Fit
from polyhead.planning.mesh import MeshPlan


@dataclass(frozen=True)
class LayerCachePlan:
    """One layer's cache on one rank.

    Attributes:
        layers: Numbers of the layers that have this cache, from 0.
        attention: ``"GQA-8"``, and the window where there is one.
        kv_heads: On this rank.
        token_bytes: Bytes of one more token in one layer, while no window is full.
        bytes: Bytes of one layer, allocated for the plan's tokens and batch.
        cross: Whether it is that of a cross-attention.
    """

    layers: tuple[int, ...]
    attention: str
    kv_heads: int
    token_bytes: float
    bytes: int
    cross: bool


@dataclass(frozen=True)
class DecodeBound:
    """The least time of one decode step on one rank.

    Attributes:
        memory_seconds: Bytes read at the bandwidth, or None where none was given.
        compute_seconds: Operations at the rate, or None.
        seconds: The greater one.
        bound: Which one that is.
        tokens_per_second: Rate of all sequences of the batch.
    """

    memory_seconds: float | None
    compute_seconds: float | None
    seconds: float
    bound: Literal["memory", "compute"]
    tokens_per_second: float


@dataclass(frozen=True)
class Figures:
    """What a model costs.

    Attributes:
        name: Name of the model, for people.
        config: Configuration of the model.
        tokens: Context, of each sequence.
        batch: Sequences.
        dtype: Dtype of weights.
        kv_dtype: Dtype of the cache.
        page: Tokens of a page, or None.
        tensor_parallel: Ranks that share heads and hidden features.
        parameters: By part.
        active_parameters: That one token meets, embedding and head included.
        weight_bytes: Bytes of all weights once.
        rank_weight_bytes: On one rank, copies included.
        cache_token_bytes: Bytes of one more token on one rank, all layers, while no window is full.
        cache_bytes: On one rank, all layers: what the caches allocate.
        cache_layers: The same by layer.
        prefill: Operations of a prompt of ``tokens`` (of the forward pass, of an encoder).
        activation_bytes: Bytes of a prompt in one piece on one rank, at most; see ``activations``.
        decode: Operations of a step that makes token number ``tokens``; None for an encoder.
        decode_weight_bytes: Bytes of weights that such a step reads on one rank.
        decode_cache_bytes: Bytes of cache that it reads on one rank.
        bound: The time that such a step takes at least, where a bandwidth or rate was given.
        fit: What fits, where a memory was given.
        layouts: MHA, GQA, MQA and MLA at this width.
        savings: This cache beside others.
        notes: What was assumed or deserves a warning.
        mesh: What one rank of a mesh holds and sends, where a mesh was given.
    """

    name: str
    config: TransformerConfig
    tokens: int
    batch: int
    dtype: str
    kv_dtype: str
    page: int | None
    tensor_parallel: int
    parameters: ParameterCounts
    active_parameters: int
    weight_bytes: int
    rank_weight_bytes: int
    cache_token_bytes: float
    cache_bytes: int
    cache_layers: tuple[LayerCachePlan, ...]
    prefill: Flops
    activation_bytes: int
    decode: Flops | None
    decode_weight_bytes: int
    decode_cache_bytes: int
    bound: DecodeBound | None
    fit: Fit | None
    layouts: tuple[LayoutRow, ...]
    savings: tuple[Saving, ...]
    notes: tuple[str, ...]
    mesh: MeshPlan | None = None

    @property
    def rank_bytes(self) -> int:
        """Weights and cache of one rank."""
        return self.rank_weight_bytes + self.cache_bytes
