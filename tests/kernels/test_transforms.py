"""attention under torch.compile, export, torch.func, autocast, checkpoint and on meta tensors."""

import pytest
import torch
from torch.func import grad, hessian, vmap
from torch.utils.checkpoint import checkpoint

import polyhead as ph

B, H, G, T, D = 2, 4, 2, 20, 8
DRAWN = torch.Generator().manual_seed(0)
TABLE, SINKS = torch.randn(12, H, generator=DRAWN), torch.randn(H, generator=DRAWN)
SLOPES = torch.rand(H, generator=DRAWN)
LENGTHS, POSITIONS = torch.tensor([17, 20]), torch.arange(T)

FEATURES = {
    "plain": dict,
    "causal": lambda: {"mask": ph.Causal()},
    "everything": lambda: {
        "mask": ph.Causal() & ph.Window(5) & ph.KeyLengths(LENGTHS),
        "bias": ph.RelativeBias(TABLE),
        "softcap": 5.0,
        "sinks": SINKS,
    },
    "alibi": lambda: {"mask": ph.Causal(), "bias": ph.ALiBi(SLOPES)},
    "documents": lambda: {"mask": ph.Causal() & ph.Documents([5, 15])},
    "positions": lambda: {
        "mask": ph.Causal(),
        "q_positions": POSITIONS,
        "kv_positions": POSITIONS.flip(0),
    },
}
features = pytest.mark.parametrize("features", FEATURES)
kernels = pytest.mark.parametrize("kernel", ["auto", "tiled", "reference"])


def qkv(tokens=T, *, requires_grad=False):
    torch.manual_seed(0)
    shapes = [(B, H, tokens, D), (B, G, tokens, D), (B, G, tokens, D)]
    return [torch.randn(*shape, requires_grad=requires_grad) for shape in shapes]


def function(features, kernel="auto"):
    def call(q, k, v):
        return ph.attention(q, k, v, kernel=kernel, **FEATURES[features]())

    return call


@pytest.mark.parametrize(
    ("features", "kernel"),
    [
        ("everything", "auto"),
        # The reference has no operator of its own: its graph is torch's, whatever the feature.
        ("everything", "reference"),
        *(
            pytest.param(features, kernel, marks=pytest.mark.slow)
            for features in FEATURES
            for kernel in ("auto", "reference")
            if features != "everything"
        ),
    ],
)
def test_compiles_as_one_graph_with_the_same_gradients(features, kernel):
    f, inputs = function(features, kernel), qkv(requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    expected, found = f(*inputs), compiled(*inputs)
    assert torch.equal(expected, found)
    for a, b in zip(
        torch.autograd.grad(expected.sin().sum(), inputs),
        torch.autograd.grad(found.sin().sum(), inputs),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-6)


BIASES = {
    "T5": (ph.RelativeBias, (12, H)),
    "ALiBi": (ph.ALiBi, (H,)),
    "tensor": (lambda tensor: tensor, (H, 1, T)),
    "content": (lambda x: ph.RelativeContentBias(x, x / 2, max_distance=9), (1, H, T, 12)),
}
biases = pytest.mark.parametrize(
    "bias", [*[*BIASES][:-1], pytest.param("content", marks=pytest.mark.slow)]
)


def learning(bias):
    """A function of q, k, v and the tensor behind a bias, and these."""
    make, shape = BIASES[bias]

    def call(q, k, v, tensor):
        return ph.attention(q, k, v, mask=ph.Causal(), bias=make(tensor))

    return call, [*qkv(requires_grad=True), torch.rand(shape, requires_grad=True)]


@biases
def test_a_learned_bias_compiles_as_one_graph_with_the_same_gradients(bias):
    f, inputs = learning(bias)
    expected = torch.autograd.grad(f(*inputs).sin().sum(), inputs)
    torch.compiler.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*inputs).sin().sum(), inputs)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@biases
def test_an_exported_bias_learns(bias):
    f, (*inputs, tensor) = learning(bias)
    expected = torch.autograd.grad(f(*inputs, tensor).sin().sum(), tensor)
    exported = torch.export.export(Module(f, tensor.detach()), tuple(inputs)).module()
    found = torch.autograd.grad(exported(*inputs).sin().sum(), list(exported.parameters()))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
@biases
def test_gradients_of_a_learned_bias_under_vmap_equal_a_loop(bias, compiled):
    f, inputs = learning(bias)
    many = [torch.stack([x, 2 * x, x + 1]).detach().requires_grad_() for x in inputs]
    torch.compiler.reset()
    batched = torch.compile(vmap(f), fullgraph=True, backend="aot_eager") if compiled else vmap(f)
    found = torch.autograd.grad(batched(*many).sin().sum(), many)
    looped = torch.stack([f(*one) for one in zip(*many, strict=True)])
    expected = torch.autograd.grad(looped.sin().sum(), many)
    # Hundreds of terms, times distances up to 19, are added up in another order.
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


class Module(torch.nn.Module):
    def __init__(self, f, *learned):
        super().__init__()
        self.f = f
        self.learned = torch.nn.ParameterList(learned)

    def forward(self, q, k, v):
        return self.f(q, k, v, *self.learned)


@features
def test_exports(features):
    inputs = qkv()
    exported = torch.export.export(Module(function(features)), tuple(inputs)).module()
    assert torch.allclose(exported(*inputs), function(features)(*inputs), atol=1e-6)


def test_exports_with_a_free_length():
    length = {2: torch.export.Dim("T", min=4, max=512)}
    exported = torch.export.export(
        Module(function("causal")), tuple(qkv()), dynamic_shapes=(length,) * 3
    ).module()
    assert torch.allclose(exported(*qkv(33)), function("causal")(*qkv(33)), atol=1e-6)


@kernels
@features
def test_vmap_equals_a_loop(features, kernel):
    # In float64: under vmap another kernel runs, which rounds differently.
    f = function(features, kernel)
    many = [torch.stack([x, 2 * x, x + 1]).double() for x in qkv()]
    looped = torch.stack([f(*one) for one in zip(*many, strict=True)])
    assert torch.allclose(vmap(f)(*many), looped, rtol=1e-12, atol=1e-12)
    only_q = vmap(f, in_dims=(0, None, None))(many[0], many[1][0], many[2][0])
    one_by_one = torch.stack([f(q, many[1][0], many[2][0]) for q in many[0]])
    assert torch.allclose(only_q, one_by_one, rtol=1e-12, atol=1e-12)


@kernels
@features
def test_vmap_of_grad_equals_autograd(features, kernel):
    f, many = function(features, kernel), [torch.stack([x, 2 * x, x + 1]) for x in qkv()]
    found = vmap(grad(lambda q, k, v: f(q, k, v).sin().sum(), argnums=(0, 1, 2)))(*many)
    for i in range(3):
        leaves = [x[i].clone().requires_grad_() for x in many]
        expected = torch.autograd.grad(f(*leaves).sin().sum(), leaves)
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a[i], b, atol=1e-5)


@pytest.mark.parametrize(
    ("features", "batched"),
    [
        ("everything", True),
        pytest.param("everything", False, marks=pytest.mark.slow),
        pytest.param("plain", True, marks=pytest.mark.slow),
        pytest.param("plain", False, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_derivative_equals_that_of_the_reference(features, batched):
    many = [torch.stack([x, 2 * x]) for x in qkv()]

    def derivative(kernel):
        f = function(features, kernel)
        of_all = grad(lambda q, k, v: f(q, k, v).sin().sum(), argnums=(0, 1, 2))
        return vmap(of_all) if batched else of_all

    inputs = many if batched else [x[0] for x in many]
    torch.compiler.reset()
    found = torch.compile(derivative("auto"), fullgraph=True, backend="aot_eager")(*inputs)
    for a, b in zip(found, derivative("reference")(*inputs), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_vmap_over_the_numbers_of_a_mask():
    q, k, v = qkv()
    kept, lengths = torch.rand(3, T, T) > 0.4, torch.tensor([[3, 4], [5, 6], [20, 1]])
    for make, many in ((ph.Keep, kept), (ph.KeyLengths, lengths)):
        found = vmap(lambda m, make=make: ph.attention(q, k, v, mask=make(m)))(many)
        looped = torch.stack([ph.attention(q, k, v, mask=make(m)) for m in many])
        assert torch.allclose(found, looped, atol=1e-6)


def test_second_derivatives_by_torch_func_equal_the_reference():
    q, k, v = (x[:1, :1, :3, :2].double() for x in qkv())

    def total(kernel):
        return lambda q: (ph.attention(q, k, v, mask=ph.Causal(), kernel=kernel) ** 2).sum()

    assert torch.allclose(hessian(total("tiled"))(q), hessian(total("reference"))(q))


def test_tiled_refuses_a_second_backward_instead_of_returning_a_wrong_one():
    q, k, v = qkv(requires_grad=True)
    out = ph.attention(q, k, v, mask=ph.Causal(), kernel="tiled")
    (first,) = torch.autograd.grad((out**2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiate twice"):
        first.sum().backward()


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_checkpoint_recomputes_the_same(dropout_p):
    inputs = qkv(requires_grad=True)

    def f(q, k, v):
        return ph.attention(q, k, v, dropout_p=dropout_p, **FEATURES["everything"]())

    torch.manual_seed(3)
    expected = torch.autograd.grad(f(*inputs).sin().sum(), inputs)
    torch.manual_seed(3)
    found = torch.autograd.grad(checkpoint(f, *inputs, use_reentrant=False).sin().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@kernels
def test_autocast_lowers_the_inputs_and_nothing_inside(kernel):
    q, k, v = qkv(requires_grad=True)
    low = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    arguments = FEATURES["everything"]()
    with torch.autocast("cpu", torch.bfloat16):
        found = ph.attention(q, k.bfloat16(), v, kernel=kernel, **arguments)
    expected = ph.attention(*low, kernel=kernel, **arguments)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def test_backward_under_autocast_stays_precise():
    inputs = [x.double().requires_grad_() for x in qkv()]
    single = [x.detach().float().requires_grad_() for x in inputs]
    exact = torch.autograd.grad(function("causal", "tiled")(*inputs).sum(), inputs)
    out = function("causal", "tiled")(*single)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(out.sum(), single)
    for a, b in zip(found, exact, strict=True):
        assert (a - b).abs().max() < 1e-5


def test_float64_is_left_alone_by_autocast():
    inputs = [x.double() for x in qkv()]
    with torch.autocast("cpu", torch.bfloat16):
        assert ph.attention(*inputs).dtype == torch.float64


@kernels
def test_meta_tensors_give_the_shape(kernel):
    inputs = [x.to("meta") for x in qkv()]
    out, lse = ph.attention(
        *inputs, mask=ph.Causal() & ph.Window(3), return_lse=True, kernel=kernel
    )
    assert (out.shape, lse.shape) == ((B, H, T, D), (B, H, T))
