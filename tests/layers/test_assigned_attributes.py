"""Public attributes that are assigned take effect on every path, or cannot be assigned."""

from dataclasses import replace

import pytest
import torch

import polyhead as ph
from polyhead.config import (
    FeedForwardConfig,
    IndexerConfig,
    LatentAttentionConfig,
    MixtureConfig,
    NormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.layers import (
    AttentionConfig,
    DifferentialAttention,
    DifferentialAttentionConfig,
    Experts,
    FeedForward,
    GatedAttention,
    GatedAttentionConfig,
    LayerConfig,
    LayerNorm,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    QKNormConfig,
    RMSNorm,
    RoPE,
    SinusoidalPositions,
    SparseLatentAttention,
    TransformerLayer,
)
from polyhead.layers.norms import HeadNorm
from polyhead.native import code

E, H, D = 32, 4, 8
ROPE = RopeConfig()
HEADS = AttentionConfig(num_heads=H, num_kv_heads=2, head_dim=D, rope=ROPE)
NETWORK = FeedForwardConfig(48, clamp=0.3, up_offset=0.5)
LATENT = LatentAttentionConfig(
    num_heads=H, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
)
SIZES = {"embed_dim": 64, "num_heads": 2, "v_head_dim": 16}
OF_HEADS = SIZES | {"kdim": 64, "vdim": 64, "num_kv_heads": 4, "head_dim": 16}
LIVE = {"scale": 0.9, "dropout": 0.5}

# Per module: how it is built, what cannot be assigned, and what the next call takes.
CASES = {
    "heads": (
        lambda: MultiHeadAttention.from_config(E, replace(HEADS, qk_norm=QKNormConfig())),
        OF_HEADS | {"config": replace(HEADS, window=2), "qk_norm_place": "after_rope"},
        LIVE | {"softcap": 0.7, "rope": RoPE(theta=50.0)},
    ),
    "heads without norms": (
        lambda: MultiHeadAttention.from_config(E, replace(HEADS, softcap=0.2, window=3)),
        {"config": replace(HEADS, softcap=3.0), "qk_norm_place": "before_rope"},
        LIVE | {"softcap": None, "rope": None},
    ),
    "gated heads": (
        lambda: GatedAttention(E, H, rope=ROPE),
        {"config": GatedAttentionConfig(num_heads=2, num_kv_heads=2, head_dim=16)},
        LIVE,
    ),
    "differential heads": (
        lambda: DifferentialAttention(E, H, rope=ROPE),
        {"config": DifferentialAttentionConfig(H, H, D, lambda_init=0.1)},
        {"scale": 0.9},
    ),
    "latent heads": (
        lambda: MultiHeadLatentAttention.from_config(E, LATENT),
        SIZES | {"config": replace(LATENT, num_heads=2)},
        LIVE | {"preferred": "expanded", "rope": RoPE(theta=50.0)},
    ),
    "sparse latent heads": (
        lambda: SparseLatentAttention(
            E,
            H,
            q_lora_rank=16,
            kv_lora_rank=8,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
            indexer=IndexerConfig(16, 8, 6),
        ),
        SIZES | {"config": LATENT},
        LIVE | {"top_k": 3},
    ),
    "network": (
        lambda: FeedForward.from_config(E, NETWORK),
        {"config": replace(NETWORK, clamp=None), "gated": False, "hidden_dim": 24},
        {"activation": "gelu", "dropout": 0.5},
    ),
    "network without gate": (
        lambda: FeedForward(E, 48, "relu", gated=False),
        {"config": NETWORK, "gated": True},
        {"activation": "relu2"},
    ),
    "mixture": (
        lambda: Experts(E, MixtureConfig(NETWORK, 4, 2)),
        {"config": MixtureConfig(NETWORK, 4, 1)},
        {"calls_all": True},
    ),
    "rms norm": (
        lambda: RMSNorm(E),
        {"config": NormConfig("rmsnorm", 0.1), "dim": 16},
        {"eps": 0.5, "weight_offset": 1.0},
    ),
    "rms norm without weight": (lambda: RMSNorm(E, weight=False), {}, {"eps": 0.5}),
    "layer norm": (lambda: LayerNorm(E), {}, {"eps": 0.5, "weight_offset": 1.0}),
    "layer norm without weight": (lambda: LayerNorm(E, weight=False), {}, {"eps": 0.5}),
    "head norm": (lambda: HeadNorm(4, E, NormConfig("rmsnorm")), {"config": NormConfig()}, {}),
    "layer": (
        lambda: TransformerLayer.from_config(E, LayerConfig(HEADS, NETWORK)),
        {"config": LayerConfig(HEADS, NETWORK, residual_scale=0.5)},
        {},
    ),
    "sinusoids": (lambda: SinusoidalPositions(E), {"config": None, "embed_dim": 16}, {}),
}
ASSIGNED = [
    pytest.param(build, name, value, fixed, id=f"{name} of {case}")
    for case, (build, fixed_ones, live) in CASES.items()
    for fixed, values in ((True, fixed_ones), (False, live))
    for name, value in values.items()
]


def _both(module, x):
    """Without gradients, where native code computes what it can, and with them."""
    options = (
        {"mask": ph.Causal()} if hasattr(module, "attention") or hasattr(module, "rope") else {}
    )
    with torch.no_grad():
        alone = module(x, **options)
    return alone, module(x, **options).detach()


@pytest.mark.parametrize(("build", "name", "value", "fixed"), ASSIGNED)
def test_what_is_assigned_counts_on_every_path_or_is_refused(build, name, value, fixed):
    torch.manual_seed(0)
    module = build().eval()
    if fixed:
        before = getattr(module, name)
        with pytest.raises(AttributeError, match=rf"{type(module).__name__}\.{name} cannot be"):
            setattr(module, name, value)
        assert getattr(module, name) is before
        return
    x = torch.randn(2, 40, 4, E)[:, :, : 4 if isinstance(module, HeadNorm) else 1].squeeze(2)
    old, _ = _both(module, x)
    assert name in vars(module)
    setattr(module, name, value)
    native, differentiable = _both(module, x)
    torch.testing.assert_close(native, differentiable, rtol=1e-4, atol=1e-5)
    silent = ("dropout", "preferred", "calls_all")  # the same numbers, or of training alone
    assert name in silent or not torch.allclose(native, old, rtol=1e-3, atol=1e-4)


def test_every_public_attribute_of_these_modules_is_tested():
    torchs = {*vars(torch.nn.Module()), "normalized_shape", "elementwise_affine"}
    modules = [(build(), {*fixed, *live}) for build, fixed, live in CASES.values()]
    for module, _ in modules:
        found = {
            name
            for name, value in vars(module).items()
            if name not in torchs and name[0] != "_" and not isinstance(value, torch.nn.Module)
        }
        named = {
            name for each, names in modules if isinstance(module, type(each)) for name in names
        }
        modules_or_none = {"shared", "shared_gate", "cross_attention"}
        assert found - named <= modules_or_none, type(module)
    assert code() is not None  # otherwise both paths above are torch's


def test_configurations_of_a_model_cannot_be_assigned():
    config = TransformerConfig(
        vocab_size=16,
        embed_dim=E,
        max_positions=8,
        layers=(LayerConfig(HEADS, NETWORK),),
        kind="decoder",
    )
    model, other = ph.Transformer(config), replace(config, logit_scale=2.0)
    with pytest.raises(AttributeError, match=r"Transformer\.config cannot be assigned"):
        model.config = other
    with pytest.raises(AttributeError, match=r"Embedding\.config cannot be assigned"):
        model.embedding.config = replace(model.config.embedding, scale=2.0)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_an_offset_without_a_weight_is_added_to_nothing_on_every_path(kind):
    x = torch.randn(3, E)
    norm = kind(E, weight=False)
    wanted = norm(x)
    norm.weight_offset = 1.0
    for y in _both(norm, x.requires_grad_()):
        torch.testing.assert_close(y, wanted)
