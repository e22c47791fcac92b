"""Planned activations against what a prefill allocates, as torch's memory profiler sees it.

With native code and without: a plan is for either, and one of the two allocates all of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import pytest
import torch
from plan_facts import TINY
from torch import nn

from allocations import measured
from polyhead import native
from polyhead.config import (
    AltUpConfig,
    BlockMeansConfig,
    CompressedAttentionConfig,
    ConvolutionalAttentionConfig,
    CoPEAttentionConfig,
    CyclesConfig,
    DepthAveragedMixtureConfig,
    EngramConfig,
    GatedSelectiveAttentionConfig,
    LowRankConnectionsConfig,
    MeanIndexerConfig,
    MultiTokenAttentionConfig,
    NormalizerAttentionConfig,
    PerLayerEmbeddingConfig,
    PerLayerInputConfig,
    QueryTemperatureConfig,
    ScaledResidualConfig,
    TalkingHeadsAttentionConfig,
    TransformerConfig,
    WeighedSharedConfig,
)
from polyhead.layers import (
    AttentionConfig,
    CrossLayerAttentionConfig,
    DenseAndExpertsConfig,
    DifferentialAttentionConfig,
    DistanceProfilesAttentionConfig,
    DynamicMaskConfig,
    ExclusiveAttentionConfig,
    ExpertHeadsAttentionConfig,
    Experts,
    FactorizedAttentionConfig,
    FeedForwardConfig,
    ForgettingAttentionConfig,
    GatedAttentionConfig,
    GatedDeltaNetConfig,
    GatedLatentAttentionConfig,
    GroupedAttentionConfig,
    GroupedTiedAttentionConfig,
    HybridHeadsConfig,
    HyperConnectionsConfig,
    IdentityMixtureConfig,
    IndexerConfig,
    KimiDeltaAttentionConfig,
    LatentAttentionConfig,
    LayerConfig,
    LightningAttentionConfig,
    Mamba2Config,
    MambaConfig,
    MixedConnectionsConfig,
    MixtureConfig,
    NativeSparseAttentionConfig,
    NormConfig,
    NormGateConfig,
    OffByOneAttentionConfig,
    QKNormConfig,
    ReversibleConfig,
    RgLruConfig,
    RopeConfig,
    ScalableSoftmaxAttentionConfig,
    SelectiveAttentionConfig,
    SharedBlockConfig,
    ShortConvolutionConfig,
    SparseLatentAttentionConfig,
    SubNormAttentionConfig,
    TensorProductAttentionConfig,
    ValueResidualAttentionConfig,
)
from polyhead.models import Transformer
from polyhead.planning import plan

SHORT, LONG = 512, 1536
KIB, MIB = 1 << 10, 1 << 20


def heads(H: int = 8, G: int = 2, D: int = 32, **options: Any) -> AttentionConfig:
    return AttentionConfig(H, G, D, **{"rope": RopeConfig(), **options})


GATED, NARROW = FeedForwardConfig(1024), FeedForwardConfig(64)
LATENT = LatentAttentionConfig(32, 96, 64, 16, 64)
SPARSE = SparseLatentAttentionConfig(
    32, 96, 64, 16, 64, q_lora_rank=96, indexer=IndexerConfig(16, 32, 128)
)
MOBA = SelectiveAttentionConfig(16, 4, 64, rope=RopeConfig(), selector=BlockMeansConfig(64, 4))
NSA = NativeSparseAttentionConfig(16, 4, 64, rope=RopeConfig(), top_k=6)
COMPRESSED = CompressedAttentionConfig(
    16, 64, 96, 16, 128, 4, 64, rope=RopeConfig(), block_size=4, overlap=True,
    indexer=IndexerConfig(16, 32, 64, rotates="last"),
)  # fmt: skip
SCRATCH = 272 * KIB
"""What oneDNN's products in bfloat16 rearrange, and a few numbers per token: norms, experts."""
TILES_OF_WEIGHTS = torch.cpu._is_amx_tile_supported()
"""Whether oneDNN and torch's attention rearrange whole matrices in bfloat16, for matrix tiles."""
NATIVE = 0.5
"""Share of a plan that is allocated at least where it is not reached."""
TILES = 6 * MIB
"""Float32 copies of a tile's keys, values and scores, in the kernel that works in tiles."""
TILES_OF_CONTENT = 18 * MIB
"""The same with a bias by content in float64: its numbers, and the columns that they are in."""
WHOLE_ROWS = 24 * MIB
"""Scores and weights of some queries on all keys, and what lies between them, in float32."""
CHUNKS = 16 * MIB
"""What the recurrence in chunks holds beside a plan, where there is no native code."""


class Case(NamedTuple):
    """A layer, where all that is planned is allocated, and the least share of it that is.

    Without native code some are computed in tiles, which long prompts alone make small beside them.
    """

    layer: LayerConfig
    reached: Literal["native", "torch"] = "torch"
    share: float = 1.0
    tokens: int = SHORT
    tiles: int = 0
    second: LayerConfig | None = None
    vectors: PerLayerEmbeddingConfig | None = None
    kind: Literal["decoder", "encoder"] = "decoder"
    head: Literal["tied", "untied"] = "tied"
    tiled: bool = False  # native code does not know its scores


LAYERS = {
    "gated network": Case(LayerConfig(heads(), GATED)),
    "plain network": Case(LayerConfig(heads(), FeedForwardConfig(1024, gated=False))),
    "sandwich": Case(LayerConfig(heads(), GATED, norm_placement="sandwich")),
    # What comes in is normed nowhere, and so one copy less is alive.
    "norms after": Case(LayerConfig(heads(), GATED, norm_placement="post"), share=10 / 11),
    "wide heads": Case(LayerConfig(heads(16, 16, 64), NARROW), "torch"),
    "normed heads": Case(LayerConfig(heads(16, 16, 64, qk_norm=QKNormConfig()), NARROW), "torch"),
    "heads normed last": Case(
        LayerConfig(heads(16, 16, 64, qk_norm=QKNormConfig(place="after_rope")), NARROW), "torch"
    ),
    "normed, not rotated": Case(
        LayerConfig(heads(4, 4, 256, v_head_dim=32, rope=None, qk_norm=QKNormConfig()), NARROW),
        "torch",
        tokens=LONG,
    ),
    "normed values": Case(
        LayerConfig(heads(16, 16, 64, rope=None, v_norm=NormConfig(weight=False)), NARROW),
        share=0.8,
    ),
    "no rotation": Case(LayerConfig(heads(16, 16, 64, rope=None), NARROW), "native"),
    "window": Case(LayerConfig(heads(32, 32, 64, window=33), NARROW), "torch", tokens=LONG),
    "latent": Case(LayerConfig(LATENT, NARROW), tokens=LONG, tiles=TILES),
    "latent queries": Case(
        LayerConfig(replace(LATENT, q_lora_rank=96), NARROW), tokens=LONG, tiles=TILES
    ),
    "absorbed latent": Case(LayerConfig(replace(LATENT, kv_lora_rank=48), NARROW), tokens=LONG),
    "latent heads": Case(
        LayerConfig(replace(LATENT, kv_lora_rank=192, latent_heads=2), NARROW),
        share=0.9,
        tokens=LONG,
        tiles=TILES,
    ),
    "absorbed latent heads": Case(
        LayerConfig(replace(LATENT, latent_heads=2), NARROW), share=0.9, tokens=LONG
    ),
    "gated heads": Case(LayerConfig(GatedAttentionConfig(16, 16, 64, rope=RopeConfig()), NARROW)),
    "scalable softmax": Case(
        LayerConfig(ScalableSoftmaxAttentionConfig(16, 16, 64, rope=RopeConfig()), NARROW)
    ),
    "scalable softmax, not rotated": Case(
        LayerConfig(ScalableSoftmaxAttentionConfig(16, 16, 64, v_head_dim=8), NARROW),
        tokens=LONG,
        tiles=TILES,
    ),
    "softmax off by one": Case(
        LayerConfig(OffByOneAttentionConfig(16, 16, 64, rope=RopeConfig()), NARROW),
        tiles=TILES,
    ),
    "heads with a norm": Case(
        LayerConfig(SubNormAttentionConfig(16, 16, 64, rope=RopeConfig()), NARROW), share=0.9
    ),
    "gated latent": Case(
        LayerConfig(GatedLatentAttentionConfig(16, 64, 32, 32, 64), NARROW),
        tokens=LONG,
        tiles=TILES,
    ),
    "grouped heads": Case(
        LayerConfig(GroupedAttentionConfig(16, 16, 64, q_groups=4, o_groups=2), NARROW), share=0.6
    ),
    "heads of experts": Case(
        LayerConfig(ExpertHeadsAttentionConfig(16, 8, 64, num_experts=4), NARROW), share=0.5
    ),
    "convolved queries and keys": Case(
        LayerConfig(
            ConvolutionalAttentionConfig(16, 4, 64, rope=RopeConfig(), qk_norm=QKNormConfig()),
            NARROW,
        ),
        share=0.6,
    ),
    "differences": Case(
        LayerConfig(DifferentialAttentionConfig(16, 16, 64, rope=RopeConfig()), NARROW)
    ),
    # Of these a plan counts the most of several stages, each a little more than it takes.
    "chosen blocks": Case(LayerConfig(MOBA, NARROW), share=0.5, tokens=LONG, tiles=TILES),
    "three branches": Case(LayerConfig(NSA, NARROW), share=0.5, tokens=LONG, tiles=TILES),
    "compressed blocks": Case(LayerConfig(COMPRESSED, NARROW), share=0.8, tiles=TILES),
    "a window of one key": Case(
        LayerConfig(replace(COMPRESSED, block_size=None, overlap=False, indexer=None), NARROW),
        share=0.8,
        tiles=TILES,
    ),
    "chosen latents": Case(LayerConfig(SPARSE, NARROW), share=0.6, tokens=LONG, tiles=TILES),
    "gated DeltaNet": Case(
        LayerConfig(GatedDeltaNetConfig(8, 4, 32, 32), NARROW), share=0.6, tiles=CHUNKS
    ),
    "Kimi delta": Case(
        LayerConfig(KimiDeltaAttentionConfig(8, 8, 32, 32), NARROW), share=0.6, tiles=CHUNKS
    ),
    "Mamba-2": Case(LayerConfig(Mamba2Config(16, 2, 32, 32), NARROW), share=0.6, tiles=CHUNKS),
    "Mamba-2 alone": Case(
        LayerConfig(Mamba2Config(16, 2, 32, 32, in_scales=(0.5,) * 5), None),
        share=0.6,
        tiles=CHUNKS,
    ),
    "Mamba alone": Case(LayerConfig(MambaConfig(512, 16, 16), None), share=0.9, tiles=CHUNKS),
    "Lightning": Case(
        LayerConfig(LightningAttentionConfig(16, 32), NARROW), share=0.6, tiles=CHUNKS
    ),
    "RG-LRU": Case(LayerConfig(RgLruConfig(8, width=512), NARROW), share=0.6, tiles=CHUNKS),
    "shared block": Case(
        LayerConfig(
            SharedBlockConfig(
                8,
                8,
                64,
                rope=RopeConfig(),
                mixer=Mamba2Config(16, 2, 32, 32),
                network=GATED,
                adapter_rank=8,
                head_adapters=True,
            ),
            None,
            attention_norm=False,
        ),
        share=0.5,
        tiles=CHUNKS,
    ),
    "hybrid heads": Case(
        LayerConfig(
            HybridHeadsConfig(
                8,
                2,
                32,
                rope=RopeConfig(),
                mamba=Mamba2Config(16, 2, 32, 32),
                attention_scales=(0.5, 2.0),
                mamba_scales=(0.5, 2.0),
            ),
            NARROW,
        ),
        share=0.6,
        tiles=CHUNKS,
    ),
    "heads alone": Case(LayerConfig(heads(16, 16, 64), None), "torch"),
    "convolution": Case(
        LayerConfig(ShortConvolutionConfig(width=512, conv_kernel=4), NARROW), share=0.6
    ),
    "convolved parts": Case(
        LayerConfig(
            ShortConvolutionConfig(width=64, conv_kernel=4), FeedForwardConfig(8), out_convolution=4
        ),
        share=0.6,
    ),
    "profiles of distances": Case(
        LayerConfig(
            DistanceProfilesAttentionConfig(
                8, 8, 32, qk_norm=QKNormConfig(), profiles=4, extent=128
            ),
            NARROW,
            out_convolution=4,
            feed_forward_scale=True,
        ),
        share=0.6,
        tokens=LONG,
        tiles=TILES,
        tiled=True,
    ),
    "profiles with temperatures, wide values": Case(
        LayerConfig(
            DistanceProfilesAttentionConfig(
                8,
                8,
                16,
                v_head_dim=256,
                profiles=4,
                extent=64,
                query_temperature=QueryTemperatureConfig(0.1, 64, steps=False),
            ),
            NARROW,
        ),
        share=0.5,
        tokens=LONG,
        tiles=TILES,
        tiled=True,
    ),
    "keys of another layer": Case(
        LayerConfig(heads(8, 8, 64, hands_on_keys=True), NARROW),
        share=0.6,
        second=LayerConfig(CrossLayerAttentionConfig(8, 8, 64, rope=RopeConfig()), NARROW),
    ),
    "values of the first layer": Case(
        LayerConfig(ValueResidualAttentionConfig(16, 16, 64), NARROW),
        share=0.7,
        second=LayerConfig(ValueResidualAttentionConfig(16, 16, 64, values_of=0), NARROW),
    ),
    "sums of outer products": Case(
        LayerConfig(TensorProductAttentionConfig(16, 64, rope=RopeConfig()), NARROW), share=0.7
    ),
    "sums of outer products, many for queries": Case(
        LayerConfig(TensorProductAttentionConfig(4, 64, 24, 2, 2, rope=RopeConfig()), NARROW),
        share=0.7,
    ),
    "softpick": Case(
        LayerConfig(NormalizerAttentionConfig(16, 16, 64, normalizer="softpick"), NARROW),
        tokens=LONG,
        tiles=WHOLE_ROWS,
        tiled=True,
    ),
    "contextual positions": Case(
        LayerConfig(CoPEAttentionConfig(16, 16, 16, num_positions=256), NARROW),
        share=0.7,
        tokens=LONG,
        tiles=2 * WHOLE_ROWS,
        tiled=True,
    ),
    "talking heads": Case(
        LayerConfig(TalkingHeadsAttentionConfig(16, 16, 64), NARROW),
        tokens=LONG,
        tiles=WHOLE_ROWS,
        tiled=True,
    ),
    "weights of several tokens": Case(
        LayerConfig(MultiTokenAttentionConfig(16, 16, 64), NARROW),
        share=0.7,
        tokens=LONG,
        tiles=WHOLE_ROWS,
        tiled=True,
    ),
    "queries of low rank": Case(
        LayerConfig(FactorizedAttentionConfig(16, 1, 64, q_rank=256, rope=RopeConfig()), NARROW),
        share=0.7,
    ),
    "queries of a normed rank": Case(
        LayerConfig(
            FactorizedAttentionConfig(8, 1, 64, q_rank=512, q_rank_norm=NormConfig()), NARROW
        ),
        share=0.7,
    ),
    "tied keys and values": Case(
        LayerConfig(GroupedTiedAttentionConfig(16, 4, 64, rope=RopeConfig()), NARROW), share=0.7
    ),
    "tied keys and values of each head": Case(
        LayerConfig(GroupedTiedAttentionConfig(16, 16, 64), NARROW), share=0.7
    ),
    "forget gates": Case(
        LayerConfig(ForgettingAttentionConfig(32, 32, 8), NARROW),
        share=0.5,
        tokens=LONG,
        tiles=TILES_OF_CONTENT,
        tiled=True,
    ),
    "vectors of layers": Case(
        LayerConfig(heads(8, 2, 16), NARROW, per_layer_input=PerLayerInputConfig(256)),
        share=0.6,
        vectors=PerLayerEmbeddingConfig(500, 256),
    ),
    "several streams": Case(
        LayerConfig(
            heads(),
            NARROW,
            norm_placement="sandwich",
            per_layer_input=PerLayerInputConfig(16),
            laurel_rank=16,
            streams=AltUpConfig(),
        ),
        share=0.6,
        vectors=PerLayerEmbeddingConfig(500, 16),
    ),
    "exclusive heads": Case(
        LayerConfig(
            ExclusiveAttentionConfig(
                16,
                2,
                64,
                rope=RopeConfig(),
                qk_norm=QKNormConfig(),
                mix_norm=NormConfig(),
                value_vocab_size=500,
            ),
            NARROW,
            attention_norm=False,
        ),
        share=0.7,
        kind="encoder",
    ),
    "a shortcut": Case(
        LayerConfig(heads(), GATED, shortcut=IdentityMixtureConfig(FeedForwardConfig(16), 4, 2)),
        second=LayerConfig(heads(), GATED, joins_shortcut=True),
    ),
    "a scaled residual": Case(
        LayerConfig(heads(), NARROW, streams=ScaledResidualConfig()), share=0.5
    ),
    "depth-averaged routers": Case(
        LayerConfig(heads(), DepthAveragedMixtureConfig(NARROW, 4, 2, router_dim=512)),
        share=0.6,
        second=LayerConfig(
            heads(), DepthAveragedMixtureConfig(NARROW, 4, 2, router_dim=512, reads_state=True)
        ),
    ),
    "cycles": Case(
        LayerConfig(heads(), NARROW, streams=CyclesConfig(starts=True, ends=True)), share=0.6
    ),
    "hyper-connections": Case(
        LayerConfig(heads(), NARROW, streams=HyperConnectionsConfig()), share=0.4
    ),
    "mixed connections": Case(
        LayerConfig(heads(), NARROW, streams=MixedConnectionsConfig()), share=0.4
    ),
    "low-rank connections": Case(
        LayerConfig(heads(), NARROW, streams=LowRankConnectionsConfig(rank=32)), share=0.4
    ),
    "an engram": Case(
        LayerConfig(
            EngramConfig(
                streams=4, width=256, vocab_size=500, end_token_id=0, dim=64, table_rows=50
            ),
            None,
            streams=LowRankConnectionsConfig(rank=32),
        ),
        share=0.4,
    ),
    "chosen blocks of a mean, gated": Case(
        LayerConfig(
            GatedSelectiveAttentionConfig(
                16, 2, 64, rope=RopeConfig(), selector=MeanIndexerConfig(4, 32, 16, 64)
            ),
            NARROW,
        ),
        share=0.6,
        tokens=LONG,
        tiles=TILES,
    ),
    "chosen latents, gated": Case(
        LayerConfig(replace(SPARSE, gated=True, sinks=True), NARROW),
        share=0.6,
        tokens=LONG,
        tiles=TILES,
    ),
    "chosen pools": Case(
        LayerConfig(
            replace(
                SPARSE,
                qk_nope_head_dim=80,
                qk_rope_head_dim=0,
                rope=None,
                indexer=IndexerConfig(16, 32, 128, pool=4),
            ),
            NARROW,
        ),
        share=0.6,
        tokens=LONG,
        tiles=TILES,
    ),
    "chosen latents with gates of queries": Case(
        LayerConfig(replace(SPARSE, query_gate=True), NARROW), share=0.6, tokens=LONG, tiles=TILES
    ),
    "gates of norms": Case(LayerConfig(heads(), NARROW, norm_gate=NormGateConfig(16)), share=0.6),
    "keys that values choose": Case(
        LayerConfig(
            DynamicMaskConfig(16, 4, 64, rope=RopeConfig(), qk_norm=QKNormConfig(), top_k=128),
            NARROW,
            residual_weights=True,
        ),
        share=0.6,
        tokens=LONG,
        tiles=TILES,
    ),
    "reversible layers": Case(
        LayerConfig(heads(), NARROW, streams=ReversibleConfig()), share=0.4, head="untied"
    ),
    "a sparse network": Case(
        LayerConfig(heads(), FeedForwardConfig(1024, sparsity=0.9)), share=0.6
    ),
    "mixture": Case(LayerConfig(heads(), MixtureConfig(GATED, 4, 2))),
    "weighed shared experts": Case(
        LayerConfig(
            heads(),
            WeighedSharedConfig(GATED, 4, 2, scoring="sigmoid", normalize=True, num_shared=2),
        )
    ),
    "shared expert": Case(LayerConfig(heads(), MixtureConfig(NARROW, 4, 2, shared=GATED))),
    "experts beside a network": Case(
        LayerConfig(heads(), DenseAndExpertsConfig(GATED, MixtureConfig(GATED, 4, 2)))
    ),
}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """oneDNN's scratch memory is that of each thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def calls() -> Iterator[Any]:
    """Of each layer the code that allocates all that is planned; the other one at test-all.

    There in bfloat16 too: the same tensors at half the size, which torch multiplies at a tenth of
    its speed where the processor cannot.
    """
    for name, case in LAYERS.items():
        for code in ("native", "torch"):
            for dtype in ("float32", "bfloat16"):
                often = (code, dtype) == (case.reached, "float32") and name != "latent queries"
                yield pytest.param(name, code, dtype, marks=() if often else pytest.mark.slow)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("name", "code", "dtype"), list(calls()))
def test_planned_activations_are_those_that_are_allocated(
    name: str, code: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if code == "torch":
        module = importlib.import_module("polyhead.native.selection")
        monkeypatch.setattr(module, "_chosen", lambda: None)
    elif native.code() is None:
        pytest.skip(f"no native code here: {native.unavailable()}")
    case = LAYERS[name]
    layers = (case.layer, case.second or case.layer)
    config = TransformerConfig(
        case.kind, 500, 256, 4096, layers, per_layer_embedding=case.vectors, head=case.head
    )
    torch.manual_seed(0)
    model = Transformer(config).eval().to(getattr(torch, dtype))
    for module in model.modules():
        if isinstance(module, Experts):  # the worst: all tokens visit the same two
            torch.nn.init.zeros_(module.router.weight)
    ids = torch.randint(0, 500, (2, case.tokens // 2))
    with torch.no_grad():
        model(ids[:1, :1], last=1)  # tests the native code
        model(ids[:1], last=1)  # makes rotary tables
        allocated, _ = measured(lambda: model(ids, last=1))
    planned = plan(config, tokens=case.tokens // 2, batch_size=2, dtype=dtype).activation_bytes
    scratch = SCRATCH + (case.tiles if code == "torch" or case.tiled else 0)
    if dtype == "bfloat16" and TILES_OF_WEIGHTS:
        weights = [each.weight.nbytes for each in model.modules() if isinstance(each, nn.Linear)]
        scratch += max(weights) * (2 if code == "torch" else 1)
    assert allocated <= planned + scratch
    # Native code has room of its own for the hidden features of some rows, and takes no more.
    assert allocated >= (case.share if case.reached == code else NATIVE) * planned


def test_activations_grow_with_tokens_and_are_shared_by_ranks() -> None:
    one, four = (plan(TINY, tokens=tokens).activation_bytes for tokens in (64, 256))
    assert four == 4 * one
    E, F = 32, 48
    assert one == 64 * 2 * max(2 * F + 3 * E, 8 * E)
    wide = TINY | {"intermediate_size": 4800}
    whole, half = (
        plan(wide, tokens=64, tensor_parallel=n, dtype="float32").activation_bytes for n in (1, 2)
    )
    assert (whole, half) == (64 * 4 * (2 * 4800 + 3 * E), 64 * 4 * (2 * 2400 + 3 * E))
    assert "prompt in one piece, at most" in str(plan(TINY, tokens=64))


def test_logits_of_the_last_tokens_are_counted_where_they_are_most() -> None:
    made = plan(TINY | {"vocab_size": 100_000}, tokens=2, batch_size=3, dtype="float32")
    assert made.activation_bytes == 3 * 4 * (2 * 2 * 32 + 100_000)


def test_the_widest_attention_of_a_layer_is_counted_whichever_it_is() -> None:
    small, wide = AttentionConfig(2, 2, 8), AttentionConfig(32, 32, 32)
    made = {}
    for own, across in ((small, None), (small, small), (small, wide), (wide, small)):
        layer = LayerConfig(own, FeedForwardConfig(8), cross_attention=across)
        config = TransformerConfig(
            "decoder" if across is None else "encoder-decoder", 50, 64, 512, (layer,),
            encoder_layers=() if across is None else (LayerConfig(small, FeedForwardConfig(8)),),
        )  # fmt: skip
        made[own, across] = plan(config, tokens=100, dtype="float32").activation_bytes
    # One more residual is alive behind the layer's own attention.
    assert made[small, wide] == made[wide, small] + 4 * 100 * 64
    assert made[small, wide] > 3 * made[small, small]
    layer = LayerConfig(small, FeedForwardConfig(8), cross_attention=small)
    reader = LayerConfig(wide, FeedForwardConfig(8))
    config = TransformerConfig("encoder-decoder", 50, 64, 512, (layer,), encoder_layers=(reader,))
    assert plan(config, tokens=100, dtype="float32").activation_bytes == made[wide, small]
