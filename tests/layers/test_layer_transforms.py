"""The layers under torch.compile, export, torch.func, autocast and checkpoint."""

import shutil

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import polyhead as ph
from polyhead.config import AttentionConfig, FeedForwardConfig, MixtureConfig
from polyhead.layers import Experts
from polyhead.layers.quantized import QuantizedLinear
from polyhead.quantization import block_type
from random_blocks import random_blocks

E, H, T = 32, 4, 12


def latent(computation):
    layer = ph.MultiHeadLatentAttention(
        E, H, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
    )
    return layer, {"mask": ph.Causal(), "computation": computation}


LAYERS = {
    "rotary window": lambda: (
        ph.MultiHeadAttention(E, H, num_kv_heads=1, rope=ph.RoPE(), window=5),
        {"mask": ph.Causal() & ph.KeyLengths([9, 12])},
    ),
    "latent absorbed": lambda: latent("absorbed"),
    "latent expanded": lambda: latent("expanded"),
    "transformer": lambda: (
        ph.TransformerLayer(E, H, num_kv_heads=2, rope=ph.RoPE(), gated=True, norm="rmsnorm"),
        {"mask": ph.Causal()},
    ),
}
layers = pytest.mark.parametrize("layer", LAYERS)
EXPERTS = MixtureConfig(FeedForwardConfig(16), 4, 2)


class Told(nn.Module):
    """A layer with everything but x given."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.arguments = LAYERS[name]()

    def forward(self, x):
        return self.layer(x, **self.arguments)


TRACED = {
    **{name: lambda name=name: Told(name) for name in LAYERS},
    "sinks": lambda: ph.MultiHeadAttention.from_config(E, AttentionConfig(H, 2, 8, sinks=True)),
    "experts": lambda: Experts(E, EXPERTS),
    "blocks": lambda: QuantizedLinear(random_blocks(block_type("Q8_0"), 5, E), block_type("Q8_0")),
}


def tokens(length=T):
    return torch.randn(2, length, E, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradients(module, function, x):
    return torch.autograd.grad(function(x).float().sin().sum(), (x, *module.parameters()))


def close(found, expected, atol):
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=atol)


@pytest.mark.parametrize(
    "layer",
    [
        *("latent absorbed", "transformer"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("rotary window", "latent expanded")
        ),
    ],
)
def test_compiles_as_one_graph_with_the_same_gradients(layer):
    module, x = Told(layer), tokens()
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), module(x), atol=1e-6)
    close(gradients(module, compiled, x), gradients(module, module, x), 1e-5)


def test_compiles_as_one_graph_for_any_sizes():
    module, x = Told("rotary window"), tokens().detach()
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="eager")
    for other in (x, torch.randn(2, 17, E)):
        assert torch.allclose(compiled(other), module(other), atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@layers
def test_inductor_gives_the_same_within_rounding(layer):
    module, x = Told(layer), tokens()
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True)
    assert torch.allclose(compiled(x), module(x), atol=1e-5)
    close(gradients(module, compiled, x), gradients(module, module, x), 1e-4)


@layers
def test_exports(layer):
    module, x = Told(layer), tokens().detach()
    exported = torch.export.export(module, (x,)).module()
    assert torch.allclose(exported(x), module(x), atol=1e-6)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_layer_takes_the_mask_it_was_exported_with(strict):
    def mask(lengths):
        return ph.Causal() & ph.Window(5) & ph.KeyLengths(torch.tensor(lengths))

    layer, x = ph.MultiHeadAttention(E, H, rope=ph.RoPE()), tokens().detach()
    exported = torch.export.export(layer, (x,), {"mask": mask([9, 12])}, strict=strict).module()
    wanted = layer(2 * x, mask=mask([9, 12]))
    assert torch.allclose(exported(2 * x, mask=mask([9, 12])), wanted, atol=1e-6)
    with pytest.raises(ValueError, match="tree spec"):
        exported(x, mask=mask([8, 12]))


def test_masks_and_biases_equal_those_of_the_same_class_and_arguments():
    table = torch.randn(4, H)
    makers = [
        ph.Causal,
        lambda: ph.Window(3),
        lambda: ph.Causal() & ph.Window(3),
        lambda: ~ph.Documents([2, 3]),
        lambda: ph.KeyLengths([2, 3]),
        lambda: ph.KeyLengths(torch.tensor([2, 3])),
        lambda: ph.Keep(table > 0),
        lambda: ph.Keep(table > 1),
        lambda: ph.RelativeBias(table.clone()),
        lambda: ph.RelativeBias(table + 1),
    ]
    for i, one in enumerate(makers):
        assert hash(one()) == hash(one())
        assert [one() == other() for other in makers] == [i == j for j in range(len(makers))]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAYERS, "sinks", "experts"])
def test_a_layer_exports_to_onnx_and_onnxruntime_computes_it(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    module, length = TRACED[name]().eval(), {1: torch.export.Dim("T", min=4, max=64)}
    free = name == "transformer"
    shapes = {"dynamic_shapes": (length,)} if free else {}
    with torch.no_grad():
        exported = torch.onnx.export(module, (tokens().detach(),), verbose=False, **shapes)
        exported.save(tmp_path / "layer.onnx")
        other = torch.randn(2, 33 if free else T, E)
        wanted = module(other)
    session = onnxruntime.InferenceSession(tmp_path / "layer.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
    assert torch.allclose(torch.from_numpy(found), wanted, atol=1e-6)


@pytest.mark.slow
def test_weights_in_blocks_are_refused_by_onnx_by_name():
    pytest.importorskip("onnxscript")
    module = TRACED["blocks"]().eval()
    with torch.no_grad(), pytest.raises(Exception, match="load the model with dtype="):
        torch.onnx.export(module, (tokens().detach(),), verbose=False)


def test_exports_with_a_free_length_after_running_at_a_fixed_one():
    module, x = Told("transformer"), tokens().detach()
    module(x)  # rotary tables of this length must not fix the exported one
    length = {1: torch.export.Dim("T", min=4, max=512)}
    exported = torch.export.export(module, (x,), dynamic_shapes=(length,)).module()
    longer = tokens(33).detach()
    assert torch.allclose(exported(longer), module(longer), atol=1e-6)


@pytest.mark.filterwarnings("ignore:Converting a tensor")  # sizes that arguments are checked by
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("name", TRACED)
def test_a_traced_module_computes_what_the_module_does_on_other_tokens(name, with_gradients):
    torch.manual_seed(0)
    module = TRACED[name]().eval()
    x, other = tokens().detach(), torch.randn(2, T, E)
    with torch.set_grad_enabled(with_gradients):
        traced = torch.jit.trace(module, x, check_trace=False)
    assert torch.allclose(traced(other), module(other), atol=1e-6)
    if with_gradients and name != "blocks":
        wanted = torch.autograd.grad(module(other).sin().sum(), list(module.parameters()))
        found = torch.autograd.grad(traced(other).sin().sum(), list(traced.parameters()))
        close(found, wanted, 1e-5)


def test_reproducible_refuses_to_be_traced():
    module, x = Told("transformer"), tokens().detach()
    with (
        ph.batch_invariant(),
        torch.no_grad(),
        pytest.raises(ph.UnsupportedError, match=r"jit\.trace"),
    ):
        torch.jit.trace(module, x)


@layers
def test_vmap_of_grad_gives_the_gradients_of_each_example(layer):
    module = Told(layer)
    many = torch.stack([tokens().detach(), 2 * tokens().detach()])

    def total(parameters, x):
        return functional_call(module, parameters, (x,)).sin().sum()

    parameters = {name: p.detach() for name, p in module.named_parameters()}
    found = vmap(grad(total), in_dims=(None, 0))(parameters, many)
    for i, x in enumerate(many):
        expected = torch.autograd.grad(module(x).sin().sum(), list(module.parameters()))
        close([piece[i] for piece in found.values()], expected, 1e-4)


@layers
def test_checkpoint_recomputes_the_same(layer):
    module, x = Told(layer), tokens()
    kept = gradients(module, module, x)
    again = gradients(module, lambda x: checkpoint(module, x, use_reentrant=False), x)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


@layers
def test_autocast_computes_in_bfloat16_and_keeps_single_gradients(layer):
    module, x = Told(layer), tokens()
    exact = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        low = module(x)
        attended = ph.attention(*(x.detach()[:, None] for _ in range(3)))
    assert attended.dtype == torch.bfloat16
    error = (low.float() - exact).abs().max()
    assert 0 < error < 0.02 * exact.abs().max()
    found = torch.autograd.grad(low.float().sin().sum(), (x, *module.parameters()))
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in found)
