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
        layers: Indices of the layers that have this cache.
        attention: ``"GQA-8"``, and the window where there is one.
        num_kv_heads: Key/value heads on this rank.
        token_bytes: Bytes of one more token in one layer, while no window is full.
        bytes: Allocated bytes of one layer, for the plan's tokens and batch.
        cross: Whether it belongs to cross-attention.
    """

    layers: tuple[int, ...]
    attention: str
    num_kv_heads: int
    token_bytes: float
    bytes: int
    cross: bool


@dataclass(frozen=True)
class DecodeBound:
    """The least time of one decode step on one rank.

    Attributes:
        memory_seconds: Bytes read ÷ bandwidth; None without a bandwidth.
        compute_seconds: Operations ÷ compute rate; None without a rate.
        seconds: The larger of the two.
        bound: Which of the two that is.
        tokens_per_second: Rate over all sequences of the batch.
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
        name: Display name of the model.
        config: Configuration of the model.
        tokens: Context length of each sequence.
        batch_size: Number of sequences.
        dtype: Dtype of the weights.
        kv_dtype: Dtype of the cache.
        page_size: Tokens per page of the cache, or None.
        tensor_parallel: Ranks that share heads and hidden features.
        parameters: Number of parameters by part of the model.
        active_parameters: Parameters active per token, embedding and head included.
        weight_bytes: Bytes of all weights.
        rank_weight_bytes: Bytes of the weights of one rank, replicas included.
        cache_token_bytes: Bytes of one more token on one rank, all layers, while no window is full.
        cache_bytes: Bytes of all caches that one rank allocates.
        cache_layers: The same by layer.
        prefill: FLOPs of a prompt of ``tokens``; of an encoder, of the forward pass.
        activation_bytes: Peak activation bytes of a prompt in one piece on one rank; see
            ``activations``.
        decode: FLOPs of the decode step of token number ``tokens``; None for an encoder.
        decode_weight_bytes: Bytes of weights that the step reads on one rank.
        decode_cache_bytes: Bytes of cache that the step reads on one rank.
        bound: Least time of the step, if a bandwidth or rate was given.
        fit: What fits in memory, if a memory was given.
        layouts: MHA, GQA, MQA and MLA at this width.
        savings: This cache beside others.
        notes: Assumptions and warnings.
        mesh: What one rank of the mesh holds and sends, if a mesh was given.
        evicting: Which keys the cache evicts, in words, or None: it keeps what queries see.
    """

    name: str
    config: TransformerConfig
    tokens: int
    batch_size: int
    dtype: str
    kv_dtype: str
    page_size: int | None
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
    evicting: str | None = None

    @property
    def rank_bytes(self) -> int:
        """Weights and cache of one rank."""
        return self.rank_weight_bytes + self.cache_bytes
