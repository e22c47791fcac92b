"""The modules a Transformer is made of.

Read in this order: ``attention``, ``positions``, ``norms``, ``feed_forward``,
``transformer_layer``, ``linear``; then ``latent_attention`` and ``experts``. What they are built
from is in ``polyhead.config``.
"""

from polyhead.config import (
    AttentionConfig,
    BlockSumsAttentionConfig,
    BottleneckAttentionConfig,
    CompressedAttentionConfig,
    ConvolutionalAttentionConfig,
    ConvolvedHeadsConfig,
    CoPEAttentionConfig,
    CrossLayerAttentionConfig,
    CyclesConfig,
    DenseAndExpertsConfig,
    DepthAveragedMixtureConfig,
    DifferentialAttentionConfig,
    DisentangledAttentionConfig,
    DistanceProfilesAttentionConfig,
    DynamicMaskConfig,
    EngramConfig,
    ExclusiveAttentionConfig,
    ExpertHeadsAttentionConfig,
    FactorizedAttentionConfig,
    FeedForwardConfig,
    ForgettingAttentionConfig,
    FunnelAttentionConfig,
    GatedAttentionConfig,
    GatedDeltaNetConfig,
    GatedLatentAttentionConfig,
    GatedSelectiveAttentionConfig,
    GlobalBlocksAttentionConfig,
    GlobalPrefixAttentionConfig,
    GlobalWindowAttentionConfig,
    GroupedAttentionConfig,
    GroupedFeedForwardConfig,
    GroupedTiedAttentionConfig,
    HybridHeadsConfig,
    HyperConnectionsConfig,
    IdentityMixtureConfig,
    IndexerConfig,
    KimiDeltaAttentionConfig,
    LatentAttentionConfig,
    LayerConfig,
    LightningAttentionConfig,
    LowRankConnectionsConfig,
    LshAttentionConfig,
    Mamba2Config,
    MambaConfig,
    MergedAttentionConfig,
    MixedConnectionsConfig,
    MixtureConfig,
    MultiTokenAttentionConfig,
    NativeSparseAttentionConfig,
    NormalizerAttentionConfig,
    NormConfig,
    NormGateConfig,
    OffByOneAttentionConfig,
    QKNormConfig,
    RelativeAttentionConfig,
    ReversibleConfig,
    RgLruConfig,
    RopeConfig,
    ScalableSoftmaxAttentionConfig,
    ScaledResidualConfig,
    SelectiveAttentionConfig,
    SharedBlockConfig,
    ShortConvolutionConfig,
    SparseLatentAttentionConfig,
    SubNormAttentionConfig,
    SubNormFeedForwardConfig,
    TalkingHeadsAttentionConfig,
    TensorProductAttentionConfig,
    TokenMixtureConfig,
    ValueResidualAttentionConfig,
    WeighedSharedConfig,
)
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.block_sums_attention import BlockSumsAttention
from polyhead.layers.bottleneck_attention import BottleneckAttention
from polyhead.layers.compressed_attention import CompressedAttention
from polyhead.layers.contextual_positions_attention import CoPEAttention
from polyhead.layers.convolutional_attention import ConvolutionalAttention
from polyhead.layers.convolved_heads_attention import ConvolvedHeads
from polyhead.layers.cross_layer_attention import CrossLayerAttention
from polyhead.layers.cycles import Cycles
from polyhead.layers.dense_and_experts import DenseAndExperts
from polyhead.layers.depth_averaged_experts import DepthAveragedExperts
from polyhead.layers.differential_attention import DifferentialAttention
from polyhead.layers.disentangled_attention import DisentangledAttention
from polyhead.layers.distance_profiles_attention import DistanceProfilesAttention
from polyhead.layers.dynamic_mask_attention import DynamicMaskAttention
from polyhead.layers.engram import Engram
from polyhead.layers.exclusive_attention import ExclusiveAttention
from polyhead.layers.expert_heads_attention import ExpertHeadsAttention
from polyhead.layers.experts import Experts
from polyhead.layers.factorized_attention import FactorizedAttention
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.forgetting_attention import ForgettingAttention
from polyhead.layers.funnel_attention import FunnelAttention
from polyhead.layers.gated_attention import GatedAttention
from polyhead.layers.gated_delta_net import GatedDeltaNet
from polyhead.layers.gated_latent_attention import GatedLatentAttention
from polyhead.layers.gated_selective_attention import GatedSelectiveAttention
from polyhead.layers.global_blocks_attention import GlobalBlocksAttention
from polyhead.layers.global_prefix_attention import GlobalPrefixAttention
from polyhead.layers.global_window_attention import GlobalWindowAttention
from polyhead.layers.grouped import GroupedAttention, GroupedFeedForward
from polyhead.layers.grouped_tied_attention import GroupedTiedAttention
from polyhead.layers.hybrid_heads import HybridHeads
from polyhead.layers.hyper_connections import HyperConnections, MixedConnections
from polyhead.layers.identity_experts import IdentityExperts
from polyhead.layers.kimi_delta_attention import KimiDeltaAttention
from polyhead.layers.latent_attention import MultiHeadLatentAttention
from polyhead.layers.lightning_attention import LightningAttention
from polyhead.layers.low_rank_connections import LowRankConnections
from polyhead.layers.lsh_attention import LshAttention
from polyhead.layers.mamba import Mamba
from polyhead.layers.mamba2 import Mamba2
from polyhead.layers.merged_attention import MergedAttention
from polyhead.layers.multi_token_attention import MultiTokenAttention
from polyhead.layers.native_sparse_attention import NativeSparseAttention
from polyhead.layers.normalizer_attention import NormalizerAttention
from polyhead.layers.norms import LayerNorm, RMSNorm, build_norm
from polyhead.layers.off_by_one_attention import OffByOneAttention
from polyhead.layers.positions import LearnedPositions, RoPE, SinusoidalPositions
from polyhead.layers.record import AttentionHook, AttentionRecord, HookHandle
from polyhead.layers.relative_attention import RelativeAttention
from polyhead.layers.reversible import Reversible
from polyhead.layers.rg_lru import RgLru
from polyhead.layers.scalable_softmax_attention import ScalableSoftmaxAttention
from polyhead.layers.scaled_residual import ScaledResidual
from polyhead.layers.selective_attention import SelectiveAttention
from polyhead.layers.shared_block import SharedBlock
from polyhead.layers.short_convolution import ShortConvolution
from polyhead.layers.sparse_latent_attention import LightningIndexer, SparseLatentAttention
from polyhead.layers.sub_norm import SubNormAttention, SubNormFeedForward
from polyhead.layers.talking_heads_attention import TalkingHeadsAttention
from polyhead.layers.tensor_product_attention import TensorProductAttention
from polyhead.layers.token_experts import TokenExperts
from polyhead.layers.transformer_layer import TransformerLayer
from polyhead.layers.value_residual_attention import ValueResidualAttention
from polyhead.layers.weighed_shared_experts import WeighedSharedExperts

__all__ = [
    "AttentionConfig",
    "AttentionHook",
    "AttentionRecord",
    "BlockSumsAttention",
    "BlockSumsAttentionConfig",
    "BottleneckAttention",
    "BottleneckAttentionConfig",
    "CoPEAttention",
    "CoPEAttentionConfig",
    "CompressedAttention",
    "CompressedAttentionConfig",
    "ConvolutionalAttention",
    "ConvolutionalAttentionConfig",
    "ConvolvedHeads",
    "ConvolvedHeadsConfig",
    "CrossLayerAttention",
    "CrossLayerAttentionConfig",
    "Cycles",
    "CyclesConfig",
    "DenseAndExperts",
    "DenseAndExpertsConfig",
    "DepthAveragedExperts",
    "DepthAveragedMixtureConfig",
    "DifferentialAttention",
    "DifferentialAttentionConfig",
    "DisentangledAttention",
    "DisentangledAttentionConfig",
    "DistanceProfilesAttention",
    "DistanceProfilesAttentionConfig",
    "DynamicMaskAttention",
    "DynamicMaskConfig",
    "Engram",
    "EngramConfig",
    "ExclusiveAttention",
    "ExclusiveAttentionConfig",
    "ExpertHeadsAttention",
    "ExpertHeadsAttentionConfig",
    "Experts",
    "FactorizedAttention",
    "FactorizedAttentionConfig",
    "FeedForward",
    "FeedForwardConfig",
    "ForgettingAttention",
    "ForgettingAttentionConfig",
    "FunnelAttention",
    "FunnelAttentionConfig",
    "GatedAttention",
    "GatedAttentionConfig",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "GatedLatentAttention",
    "GatedLatentAttentionConfig",
    "GatedSelectiveAttention",
    "GatedSelectiveAttentionConfig",
    "GlobalBlocksAttention",
    "GlobalBlocksAttentionConfig",
    "GlobalPrefixAttention",
    "GlobalPrefixAttentionConfig",
    "GlobalWindowAttention",
    "GlobalWindowAttentionConfig",
    "GroupedAttention",
    "GroupedAttentionConfig",
    "GroupedFeedForward",
    "GroupedFeedForwardConfig",
    "GroupedTiedAttention",
    "GroupedTiedAttentionConfig",
    "HookHandle",
    "HybridHeads",
    "HybridHeadsConfig",
    "HyperConnections",
    "HyperConnectionsConfig",
    "IdentityExperts",
    "IdentityMixtureConfig",
    "IndexerConfig",
    "KimiDeltaAttention",
    "KimiDeltaAttentionConfig",
    "LatentAttentionConfig",
    "LayerConfig",
    "LayerNorm",
    "LearnedPositions",
    "LightningAttention",
    "LightningAttentionConfig",
    "LightningIndexer",
    "LowRankConnections",
    "LowRankConnectionsConfig",
    "LshAttention",
    "LshAttentionConfig",
    "Mamba",
    "Mamba2",
    "Mamba2Config",
    "MambaConfig",
    "MergedAttention",
    "MergedAttentionConfig",
    "MixedConnections",
    "MixedConnectionsConfig",
    "MixtureConfig",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "MultiTokenAttention",
    "MultiTokenAttentionConfig",
    "NativeSparseAttention",
    "NativeSparseAttentionConfig",
    "NormConfig",
    "NormGateConfig",
    "NormalizerAttention",
    "NormalizerAttentionConfig",
    "OffByOneAttention",
    "OffByOneAttentionConfig",
    "QKNormConfig",
    "RMSNorm",
    "RelativeAttention",
    "RelativeAttentionConfig",
    "Reversible",
    "ReversibleConfig",
    "RgLru",
    "RgLruConfig",
    "RoPE",
    "RopeConfig",
    "ScalableSoftmaxAttention",
    "ScalableSoftmaxAttentionConfig",
    "ScaledResidual",
    "ScaledResidualConfig",
    "SelectiveAttention",
    "SelectiveAttentionConfig",
    "SharedBlock",
    "SharedBlockConfig",
    "ShortConvolution",
    "ShortConvolutionConfig",
    "SinusoidalPositions",
    "SparseLatentAttention",
    "SparseLatentAttentionConfig",
    "SubNormAttention",
    "SubNormAttentionConfig",
    "SubNormFeedForward",
    "SubNormFeedForwardConfig",
    "TalkingHeadsAttention",
    "TalkingHeadsAttentionConfig",
    "TensorProductAttention",
    "TensorProductAttentionConfig",
    "TokenExperts",
    "TokenMixtureConfig",
    "TransformerLayer",
    "ValueResidualAttention",
    "ValueResidualAttentionConfig",
    "WeighedSharedConfig",
    "WeighedSharedExperts",
    "build_norm",
]
