"""Configurations: pure data that says everything a model's arithmetic depends on.

They do not depend on layers, caches or files; those are built from configurations."""

from polyhead.config.adapter import AdapterConfig
from polyhead.config.attention import (
    ALiBiConfig,
    AttentionConfig,
    QKNormConfig,
    QueryTemperatureConfig,
    RelativeBiasConfig,
)
from polyhead.config.block_sums import BlockSumsAttentionConfig
from polyhead.config.bottleneck import BottleneckAttentionConfig
from polyhead.config.compressed import CompressedAttentionConfig
from polyhead.config.contextual_positions import CoPEAttentionConfig
from polyhead.config.convolution import ConvolutionConfig
from polyhead.config.convolutional_attention import ConvolutionalAttentionConfig
from polyhead.config.convolved_heads import ConvolvedHeadsConfig
from polyhead.config.cross_layer import CrossLayerAttentionConfig
from polyhead.config.cycles import CyclesConfig
from polyhead.config.data import Data
from polyhead.config.dense_and_experts import DenseAndExpertsConfig
from polyhead.config.depth_averaged_mixture import DepthAveragedMixtureConfig
from polyhead.config.differential_attention import DifferentialAttentionConfig, first_lambda
from polyhead.config.disentangled import DisentangledAttentionConfig, RelativeEmbeddingConfig
from polyhead.config.distance_profiles import DistanceProfilesAttentionConfig
from polyhead.config.dynamic_mask import DynamicMaskConfig
from polyhead.config.embedding import (
    AudioConfig,
    AxialConfig,
    EmbeddingConfig,
    EmbeddingProjectionConfig,
    FirstRowConfig,
    Frontend,
    PatchConfig,
    SinusoidConfig,
    SoftPromptConfig,
    TokenDropoutConfig,
)
from polyhead.config.engram import EngramConfig
from polyhead.config.exclusive_attention import ExclusiveAttentionConfig
from polyhead.config.expert_heads import ExpertHeadsAttentionConfig
from polyhead.config.factorized import FactorizedAttentionConfig
from polyhead.config.feed_forward import FeedForwardConfig
from polyhead.config.forgetting import ForgettingAttentionConfig
from polyhead.config.funnel import FunnelAttentionConfig, FunnelConfig
from polyhead.config.gated_attention import GatedAttentionConfig
from polyhead.config.gated_delta_net import GatedDeltaNetConfig, KimiDeltaAttentionConfig
from polyhead.config.gated_latent import GatedLatentAttentionConfig
from polyhead.config.gated_selective import GatedSelectiveAttentionConfig
from polyhead.config.global_blocks import GlobalBlocksAttentionConfig
from polyhead.config.global_prefix import GlobalPrefixAttentionConfig
from polyhead.config.global_window import GlobalWindowAttentionConfig
from polyhead.config.grouped import GroupedAttentionConfig, GroupedFeedForwardConfig
from polyhead.config.grouped_tied import GroupedTiedAttentionConfig
from polyhead.config.head import HeadTransformConfig, TaskHeadConfig
from polyhead.config.hybrid_heads import HybridHeadsConfig
from polyhead.config.hyper_connections import HyperConnectionsConfig, MixedConnectionsConfig
from polyhead.config.identity_mixture import IdentityMixtureConfig
from polyhead.config.initial import InitialConfig
from polyhead.config.latent import LatentAttentionConfig
from polyhead.config.layer import LayerConfig
from polyhead.config.layout import AttentionSpan, CallCost, HeadLayout, Network
from polyhead.config.lightning_attention import LightningAttentionConfig
from polyhead.config.low_rank_connections import LowRankConnectionsConfig
from polyhead.config.lsh import LshAttentionConfig
from polyhead.config.mamba import MambaConfig
from polyhead.config.mamba2 import Mamba2Config
from polyhead.config.memories import (
    Memory,
    OfLayer,
    PerToken,
    Pooled,
    Recent,
    State,
    Tail,
    TokenIds,
)
from polyhead.config.merged_attention import MergedAttentionConfig
from polyhead.config.mixture import MixtureConfig
from polyhead.config.multi_token import MultiTokenAttentionConfig
from polyhead.config.native_sparse import NativeSparseAttentionConfig
from polyhead.config.norm import NormConfig
from polyhead.config.norm_gate import NormGateConfig
from polyhead.config.normalizer_attention import NormalizerAttentionConfig
from polyhead.config.off_by_one import OffByOneAttentionConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.per_layer import PerLayerEmbeddingConfig, PerLayerInputConfig
from polyhead.config.relative_attention import RelativeAttentionConfig
from polyhead.config.reversible import ReversibleConfig
from polyhead.config.rg_lru import RgLruConfig
from polyhead.config.rope import RopeConfig, RopeType
from polyhead.config.scalable_softmax import ScalableSoftmaxAttentionConfig
from polyhead.config.scaled_residual import ScaledResidualConfig
from polyhead.config.selective_attention import SelectiveAttentionConfig
from polyhead.config.selectors import (
    BlockBoundsConfig,
    BlockIndexerConfig,
    BlockMeansConfig,
    MeanIndexerConfig,
    SelectorConfig,
)
from polyhead.config.shared_block import SharedBlockConfig
from polyhead.config.short_convolution import ShortConvolutionConfig
from polyhead.config.sparse_latent import IndexerConfig, SparseLatentAttentionConfig
from polyhead.config.streams import AltUpConfig, StreamsConfig
from polyhead.config.sub_norm import SubNormAttentionConfig, SubNormFeedForwardConfig
from polyhead.config.talking_heads import TalkingHeadsAttentionConfig
from polyhead.config.tensor_product import TensorProductAttentionConfig
from polyhead.config.token_mixture import TokenMixtureConfig
from polyhead.config.transformer import EncoderConfig, TransformerConfig
from polyhead.config.value_residual import ValueResidualAttentionConfig
from polyhead.config.weighed_shared import WeighedSharedConfig

__all__ = [
    "ALiBiConfig",
    "AdapterConfig",
    "AltUpConfig",
    "AttentionConfig",
    "AttentionSpan",
    "AudioConfig",
    "AxialConfig",
    "BlockBoundsConfig",
    "BlockIndexerConfig",
    "BlockMeansConfig",
    "BlockSumsAttentionConfig",
    "BottleneckAttentionConfig",
    "CallCost",
    "CoPEAttentionConfig",
    "CompressedAttentionConfig",
    "ConvolutionConfig",
    "ConvolutionalAttentionConfig",
    "ConvolvedHeadsConfig",
    "CrossLayerAttentionConfig",
    "CyclesConfig",
    "Data",
    "DenseAndExpertsConfig",
    "DepthAveragedMixtureConfig",
    "DifferentialAttentionConfig",
    "DisentangledAttentionConfig",
    "DistanceProfilesAttentionConfig",
    "DynamicMaskConfig",
    "EmbeddingConfig",
    "EmbeddingProjectionConfig",
    "EncoderConfig",
    "EngramConfig",
    "ExclusiveAttentionConfig",
    "ExpertHeadsAttentionConfig",
    "FactorizedAttentionConfig",
    "FeedForwardConfig",
    "FirstRowConfig",
    "ForgettingAttentionConfig",
    "Frontend",
    "FunnelAttentionConfig",
    "FunnelConfig",
    "GatedAttentionConfig",
    "GatedDeltaNetConfig",
    "GatedLatentAttentionConfig",
    "GatedSelectiveAttentionConfig",
    "GlobalBlocksAttentionConfig",
    "GlobalPrefixAttentionConfig",
    "GlobalWindowAttentionConfig",
    "GroupedAttentionConfig",
    "GroupedFeedForwardConfig",
    "GroupedTiedAttentionConfig",
    "HeadLayout",
    "HeadTransformConfig",
    "HybridHeadsConfig",
    "HyperConnectionsConfig",
    "IdentityMixtureConfig",
    "IndexerConfig",
    "InitialConfig",
    "KimiDeltaAttentionConfig",
    "LatentAttentionConfig",
    "LayerConfig",
    "LightningAttentionConfig",
    "LowRankConnectionsConfig",
    "LshAttentionConfig",
    "Mamba2Config",
    "MambaConfig",
    "MeanIndexerConfig",
    "Memory",
    "MergedAttentionConfig",
    "MixedConnectionsConfig",
    "MixtureConfig",
    "MultiTokenAttentionConfig",
    "NativeSparseAttentionConfig",
    "Network",
    "NormConfig",
    "NormGateConfig",
    "NormalizerAttentionConfig",
    "OfLayer",
    "OffByOneAttentionConfig",
    "ParameterGroup",
    "PatchConfig",
    "PerLayerEmbeddingConfig",
    "PerLayerInputConfig",
    "PerToken",
    "Pooled",
    "QKNormConfig",
    "QueryTemperatureConfig",
    "Recent",
    "RelativeAttentionConfig",
    "RelativeBiasConfig",
    "RelativeEmbeddingConfig",
    "ReversibleConfig",
    "RgLruConfig",
    "RopeConfig",
    "RopeType",
    "ScalableSoftmaxAttentionConfig",
    "ScaledResidualConfig",
    "SelectiveAttentionConfig",
    "SelectorConfig",
    "SharedBlockConfig",
    "ShortConvolutionConfig",
    "SinusoidConfig",
    "SoftPromptConfig",
    "SparseLatentAttentionConfig",
    "State",
    "StreamsConfig",
    "SubNormAttentionConfig",
    "SubNormFeedForwardConfig",
    "Tail",
    "TalkingHeadsAttentionConfig",
    "TaskHeadConfig",
    "TensorProductAttentionConfig",
    "TokenDropoutConfig",
    "TokenIds",
    "TokenMixtureConfig",
    "TransformerConfig",
    "ValueResidualAttentionConfig",
    "WeighedSharedConfig",
    "first_lambda",
]
