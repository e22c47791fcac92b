"""polyhead's MultiheadAttention against torch.nn.MultiheadAttention, which is the oracle."""

import copy
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from polyhead import UnsupportedError
from polyhead.integrations.torch import MultiheadAttention, replace

EXACT = {"rtol": 1e-9, "atol": 1e-12}  # float64: the same sums in another order
SINGLE = {"rtol": 1e-5, "atol": 1e-6}


@st.composite
def cases(draw):
    """A constructor's options, a shape and what is asked of one forward pass."""
    heads = draw(st.sampled_from([1, 2, 3]))
    batched = draw(st.booleans())
    case = {
        "heads": heads,
        "embed": heads * draw(st.sampled_from([1, 4])),
        "bias": draw(st.booleans()),
        "add_bias_kv": draw(st.booleans()),
        "add_zero_attn": draw(st.booleans()),
        "batch_first": draw(st.booleans()),
        "own_sizes": draw(st.booleans()),
        "batched": batched,
        "batch": draw(st.integers(1, 3)) if batched else 1,
        "queries": draw(st.integers(1, 5)),
        "keys": draw(st.integers(1, 6)),
        "attn_mask": draw(st.sampled_from(["none", "bool", "zero_inf", "float", "causal"])),
        "per_head": draw(st.booleans()),
        "padding": draw(st.sampled_from(["none", "bool", "float", "right", "left"])),
        "weights": draw(st.sampled_from(["none", "mean", "each"])),
        "is_causal": draw(st.booleans()),
        "self": draw(st.booleans()),
        "seed": draw(st.integers(0, 1 << 20)),
    }
    if case["self"]:
        case["keys"], case["own_sizes"] = case["queries"], False
    return case


def build(case, dtype=torch.float64):
    """torch's module, ours with its weights, the inputs and the keyword arguments."""
    torch.manual_seed(case["seed"])
    sizes = {"kdim": 5, "vdim": 7} if case["own_sizes"] else {}
    options = {
        "bias": case["bias"],
        "add_bias_kv": case["add_bias_kv"],
        "add_zero_attn": case["add_zero_attn"],
        "batch_first": case["batch_first"],
        "dtype": dtype,
        **sizes,
    }
    theirs = nn.MultiheadAttention(case["embed"], case["heads"], **options)
    ours = MultiheadAttention(case["embed"], case["heads"], **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    N, L, S = case["batch"], case["queries"], case["keys"]

    def tokens(count, size):
        x = torch.randn(N, count, size, dtype=dtype)
        if not case["batched"]:
            x = x[0]
        elif not case["batch_first"]:
            x = x.transpose(0, 1)
        return x.detach().requires_grad_()

    query = tokens(L, case["embed"])
    inputs = [query, query, query]
    if not case["self"]:
        inputs = [query, tokens(S, theirs.kdim), tokens(S, theirs.vdim)]
    return theirs, ours, inputs, arguments(case, dtype)


def arguments(case, dtype):
    N, L, S = case["batch"], case["queries"], case["keys"]
    shape = (N * case["heads"], L, S) if case["per_head"] else (L, S)
    hidden = torch.rand(shape) < 0.4
    kind = case["attn_mask"]
    mask = None
    if kind == "causal":
        mask = torch.ones(L, S, dtype=torch.bool).triu(1)
    elif kind == "bool":
        mask = hidden
    elif kind == "zero_inf":
        mask = torch.zeros(shape, dtype=dtype).masked_fill(hidden, -torch.inf)
    elif kind == "float":
        mask = torch.randn(shape, dtype=dtype).masked_fill(hidden, -torch.inf)
    columns = torch.arange(S).expand(N, S)
    length = torch.randint(1, S + 1, (N, 1))
    padding = {
        "none": None,
        "bool": torch.rand(N, S) < 0.3,
        "float": torch.randn(N, S, dtype=dtype),
        "right": columns >= length,
        "left": columns < S - length,
    }[case["padding"]]
    if padding is not None and not case["batched"]:
        padding = padding[0]
    return {
        "attn_mask": mask,
        "key_padding_mask": padding,
        "need_weights": case["weights"] != "none",
        "average_attn_weights": case["weights"] == "mean",
        # Only a true hint, and no extra keys: there torch's two paths contradict each other.
        "is_causal": case["is_causal"]
        and kind == "causal"
        and not (case["add_bias_kv"] or case["add_zero_attn"]),
    }


@settings(max_examples=150, deadline=None)
@given(cases())
def test_equals_torch_wherever_torch_is_finite(case):
    theirs, ours, inputs, keywords = build(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # masks of two dtypes, which torch deprecates
        want, want_weights = theirs(*inputs, **keywords)
    got, weights = ours(*inputs, **keywords)
    assert got.shape == want.shape
    assert got.isfinite().all()
    finite = want.isfinite()
    torch.testing.assert_close(got[finite], want[finite], **EXACT)
    assert (weights is None) == (want_weights is None)
    if weights is not None:
        assert weights.shape == want_weights.shape
        assert weights.isfinite().all()
        finite_weights = want_weights.isfinite()
        torch.testing.assert_close(weights[finite_weights], want_weights[finite_weights], **EXACT)

    pull = torch.randn_like(got)
    wanted = [*inputs, *theirs.parameters()]
    mine = [*inputs, *ours.parameters()]
    loss = (got * pull).sum()
    if weights is not None:
        weight_pull = torch.randn_like(weights)
        loss = loss + (weights * weight_pull).sum()
    gradients = torch.autograd.grad(loss, mine, allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in gradients)
    if finite.all():
        loss = (want * pull).sum()
        if weights is not None:
            loss = loss + (want_weights * weight_pull).sum()
        for g, w in zip(
            gradients, torch.autograd.grad(loss, wanted, allow_unused=True), strict=True
        ):
            torch.testing.assert_close(
                torch.zeros(()).double() if g is None else g,
                torch.zeros(()).double() if w is None else w,
                **EXACT,
            )


def test_equals_torch_in_single_precision_to_1e_6():
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(32, 4, batch_first=True)
    ours = replace(copy.deepcopy(theirs))
    x = torch.randn(3, 40, 32)
    padding = torch.arange(40)[None] >= torch.tensor([40, 13, 27])[:, None]
    for need_weights in (False, True):
        want = theirs(x, x, x, key_padding_mask=padding, need_weights=need_weights)
        got = ours(x, x, x, key_padding_mask=padding, need_weights=need_weights)
        torch.testing.assert_close(got, want, **SINGLE)


def test_state_dict_goes_both_ways():
    for options in ({}, {"kdim": 3, "vdim": 5, "add_bias_kv": True}, {"bias": False}):
        theirs = nn.MultiheadAttention(8, 2, **options)
        ours = MultiheadAttention(8, 2, **options)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        ours.load_state_dict(theirs.state_dict())
        theirs.load_state_dict(ours.state_dict())


def test_a_new_module_starts_from_torchs_initialisation():
    for options in ({}, {"kdim": 3, "vdim": 5, "add_bias_kv": True}):
        torch.manual_seed(1)
        theirs = nn.MultiheadAttention(8, 2, **options)
        torch.manual_seed(1)
        ours = MultiheadAttention(8, 2, **options)
        for name, parameter in theirs.named_parameters():
            assert torch.equal(ours.get_parameter(name), parameter), name


def test_fully_padded_rows_are_finite_with_finite_gradients():
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2, batch_first=True)
    ours = replace(copy.deepcopy(theirs))
    x = torch.randn(2, 5, 8, requires_grad=True)
    padding = torch.tensor([[False] * 5, [True] * 5])
    want, _ = theirs(x, x, x, key_padding_mask=padding)
    assert want[1].isnan().all(), "torch's oldest bug is gone: tell the docs"
    for need_weights in (False, True):
        out, weights = ours(x, x, x, key_padding_mask=padding, need_weights=need_weights)
        assert torch.equal(out[1], ours.out_proj.bias.expand(5, 8))
        if need_weights:
            assert (weights[1] == 0).all()
        gradients = torch.autograd.grad(out.square().sum(), [x, *ours.parameters()])
        assert all(g.isfinite().all() for g in gradients)
        assert (gradients[0][1] == 0).all()


def test_garbage_under_the_padding_never_leaks():
    torch.manual_seed(0)
    ours = MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    padding = torch.arange(5).expand(2, 5) >= 3
    want = ours(x, x, x, key_padding_mask=padding)
    memory = x.clone()
    memory[:, 3] = torch.nan
    memory[:, 4] = torch.inf
    query = x.clone().requires_grad_()
    got = ours(query, memory, memory, key_padding_mask=padding)
    torch.testing.assert_close(got, want)
    for result in got:  # output and weights
        (gradient,) = torch.autograd.grad(result.square().sum(), query, retain_graph=True)
        assert gradient.isfinite().all()


def test_dropout_is_on_in_training_only_and_weights_are_those_applied():
    torch.manual_seed(0)
    ours = MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    x = torch.randn(2, 6, 8)
    _, weights = ours(x, x, x, average_attn_weights=False)
    share = (weights == 0).float().mean()
    assert 0.3 < share < 0.7
    out, weights = ours(x, x, x, average_attn_weights=False)
    v = ours._project(x, x, x)[2].unflatten(-1, (2, 4)).transpose(1, 2)
    torch.testing.assert_close(out, ours.out_proj((weights @ v).transpose(1, 2).flatten(2)))
    torch.manual_seed(7)
    first = ours(x, x, x)[0]
    torch.manual_seed(7)
    assert torch.equal(ours(x, x, x)[0], first)
    assert not torch.equal(ours(x, x, x)[0], first)
    ours.eval()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])
    assert not (ours(x, x, x)[1] == 0).any()


def test_a_wrong_causal_hint_does_not_drop_the_mask():
    torch.manual_seed(0)
    ours = MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 4, 8)
    mask = torch.rand(4, 4) < 0.4
    mask.fill_diagonal_(False)
    want = ours(x, x, x, attn_mask=mask, need_weights=False)[0]
    got = ours(x, x, x, attn_mask=mask, need_weights=False, is_causal=True)[0]
    assert torch.equal(got, want)


def test_the_causal_hint_does_not_hide_the_extra_keys():
    """With the hint torch hides them from the first queries; with the mask alone it does not."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True)
    ours = replace(copy.deepcopy(theirs))
    x = torch.randn(1, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
    want = theirs(x, x, x, attn_mask=mask, need_weights=False)[0]
    for hint in (False, True):
        got = ours(x, x, x, attn_mask=mask, need_weights=False, is_causal=hint)[0]
        torch.testing.assert_close(got, want, **SINGLE)


def test_causal_needs_no_mask_tensor():
    torch.manual_seed(0)
    for options in ({}, {"add_bias_kv": True, "add_zero_attn": True}):
        ours = MultiheadAttention(8, 2, batch_first=True, **options)
        x, memory = torch.randn(1, 4, 8), torch.randn(1, 6, 8)
        mask = torch.ones(4, 6, dtype=torch.bool).triu(1)
        want = ours(x, memory, memory, attn_mask=mask)
        torch.testing.assert_close(ours(x, memory, memory, is_causal=True), want)


def test_a_learned_float_mask_gets_torchs_gradient():
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    ours = replace(copy.deepcopy(theirs))
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    mask = torch.zeros(4, 4, dtype=torch.float64, requires_grad=True)
    (want,) = torch.autograd.grad(theirs(x, x, x, attn_mask=mask)[0].square().sum(), mask)
    (got,) = torch.autograd.grad(ours(x, x, x, attn_mask=mask)[0].square().sum(), mask)
    torch.testing.assert_close(got, want, **EXACT)


def test_wrong_shapes_are_named():
    ours = MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 4, 8)
    with pytest.raises(ValueError, match=r"attn_mask must be \[L, S\] = \[4, 4\]"):
        ours(x, x, x, attn_mask=torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"key_padding_mask must be \[N, S\] = \[2, 4\]"):
        ours(x, x, x, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="bool or floating point: got"):
        ours(x, x, x, attn_mask=torch.zeros(4, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="share the batch"):
        ours(x, x[:1], x[:1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_close_to_torch(dtype):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(16, 2, batch_first=True, dtype=dtype)
    ours = replace(copy.deepcopy(theirs))
    x = torch.randn(2, 9, 16, dtype=dtype)
    exact = copy.deepcopy(theirs).double()(x.double(), x.double(), x.double())[0]
    band = torch.finfo(dtype).eps
    error = (theirs(x, x, x)[0] - exact).abs().max()
    assert (ours(x, x, x)[0] - exact).abs().max() <= 2 * error + band


@pytest.mark.parametrize("own_sizes", [False, True])
def test_parameters_and_inputs_of_two_dtypes_are_refused_by_name(own_sizes):
    sizes = {"kdim": 5, "vdim": 7} if own_sizes else {}
    x = torch.randn(3, 2, 8).double()
    inputs = [x, torch.randn(3, 2, 5).double(), torch.randn(3, 2, 7).double()]
    inputs = inputs if own_sizes else [x, x, x]
    # torch appends bias_k and bias_v to keys and values of any dtype, and adds narrow biases to
    # products of some shapes.
    extra = ("bias_k", "bias_v", "in_proj_bias", "out_proj.bias")
    names = dict(MultiheadAttention(8, 2, add_bias_kv=True, **sizes).named_parameters())
    for name in names:
        module = MultiheadAttention(8, 2, add_bias_kv=True, **sizes).double()
        where, _, leaf = name.rpartition(".")
        owner = module.get_submodule(where)
        setattr(owner, leaf, nn.Parameter(getattr(owner, leaf).detach().half()))
        if name in extra:
            got = module(*inputs)[0]
            torch.testing.assert_close(got, copy.deepcopy(module).double()(*inputs)[0], **EXACT)
            continue
        with pytest.raises(ValueError, match=f"float64 and {name} torch.float16"):
            module(*inputs)
    module = MultiheadAttention(8, 2, **sizes).double()
    with pytest.raises(ValueError, match=r"got query torch\.float32 and"):
        module(*(y.float() for y in inputs))
    module.float().out_proj.bias.data = module.out_proj.bias.data.double()
    with pytest.raises(ValueError, match=r"a narrower one: got query torch\.float32 and out_proj"):
        module(*(y.float() for y in inputs))
    module.double()
    with pytest.raises(ValueError, match=r"float64 and value torch\.float32"):
        module(*inputs[:2], inputs[2].float())


def test_fields_handed_to_torchs_function_mean_what_they_mean_of_torchs_module():
    for sizes in ({}, {"kdim": 5, "vdim": 7}):
        module = MultiheadAttention(8, 2, **sizes)
        query = torch.randn(3, 2, 8)
        key, value = torch.randn(4, 2, module.kdim), torch.randn(4, 2, module.vdim)
        out, weights = nn.functional.multi_head_attention_forward(
            query, key, value, module.embed_dim, module.num_heads,
            module.in_proj_weight, module.in_proj_bias, module.bias_k, module.bias_v,
            module.add_zero_attn, module.dropout, module.out_proj.weight, module.out_proj.bias,
            use_separate_proj_weight=not module._qkv_same_embed_dim,
            q_proj_weight=module.q_proj_weight, k_proj_weight=module.k_proj_weight,
            v_proj_weight=module.v_proj_weight,
        )  # fmt: skip
        got = module(query, key, value)
        torch.testing.assert_close(got[0], out, **SINGLE)
        torch.testing.assert_close(got[1], weights, **SINGLE)


@pytest.mark.parametrize("place", ["replaced before", "replaced after"])
def test_peft_trains_it_as_it_trains_torchs(place, monkeypatch):
    # In eval torch's encoder goes round the module, and with it round the adapter.
    monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["self_attn"], r=2, init_lora_weights=False)

    def adapted(prepare):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        return peft.get_peft_model(prepare(layer), config)

    theirs = adapted(lambda layer: layer)
    ours = adapted(replace) if place == "replaced before" else replace(adapted(lambda m: m))
    x, hidden = torch.randn(2, 5, 8), torch.arange(5) >= torch.tensor([[5], [3]])
    for training in (True, False):
        want, got = (m.train(training)(x, src_key_padding_mask=hidden) for m in (theirs, ours))
        torch.testing.assert_close(got[~hidden], want[~hidden], **SINGLE)
        wanted, gradients = (
            torch.autograd.grad(
                y[~hidden].square().sum(), [p for p in m.parameters() if p.requires_grad]
            )
            for y, m in ((want, theirs), (got, ours))
        )
        assert len(gradients) == 4
        for g, w in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
    merged = [model.merge_and_unload().eval() for model in (theirs, ours)]
    assert isinstance(merged[1].self_attn, MultiheadAttention)
    want, got = (model(x) for model in merged)
    torch.testing.assert_close(got, want, **SINGLE)


def test_torch_jit_script_is_refused_in_a_sentence():
    module = MultiheadAttention(8, 2).eval()
    with pytest.raises(UnsupportedError, match=r"use torch\.compile, torch\.export or"):
        torch.jit.script(nn.Sequential(module))


class Asked(nn.Module):
    """A module and how it is called; masks are inputs."""

    def __init__(self, module, **asked):
        super().__init__()
        self.module, self.asked = module, asked

    def forward(self, query, key, value, padding, mask):
        out, weights = self.module(query, key, value, padding, attn_mask=mask, **self.asked)
        return out if weights is None else torch.cat((out, weights), dim=-1)


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning"
)  # sizes that arguments are checked by
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_a_traced_module_computes_what_the_module_does_of_other_inputs(
    options, weights, with_gradients
):
    torch.manual_seed(0)
    module = MultiheadAttention(8, 2, batch_first=True, **options)
    # The mask that it is traced with is causal, as the hint says; the other one is not.
    asked = Asked(module, need_weights=weights, is_causal=True).eval()
    same, causal = torch.randn(2, 5, 8), torch.ones(5, 5, dtype=torch.bool).triu(1)
    first = (same, same, same, torch.zeros(2, 5, dtype=torch.bool), causal)
    other = (*torch.randn(3, 2, 5, 8), torch.rand(2, 5) < 0.3, torch.rand(5, 5) < 0.3)
    with torch.set_grad_enabled(with_gradients):
        traced = torch.jit.trace(asked, first, check_trace=False)
        want, got = asked(*other), traced(*other)
    torch.testing.assert_close(got, want, **SINGLE)
    if with_gradients:
        wanted = torch.autograd.grad(want.sin().sum(), list(asked.parameters()))
        found = torch.autograd.grad(got.sin().sum(), list(traced.parameters()))
        torch.testing.assert_close(found, wanted, **SINGLE)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_traced_module_draws_dropout_anew_and_refuses_weights_with_it():
    module, x = MultiheadAttention(8, 2, dropout=0.5), torch.randn(5, 2, 8)
    with pytest.raises(UnsupportedError, match="need_weights=True: pass need_weights=False"):
        torch.jit.trace(module, (x, x, x))
    asked, nothing = Asked(module, need_weights=False), torch.zeros(2, 5, dtype=torch.bool)
    traced = torch.jit.trace(asked, (x, x, x, nothing, torch.zeros(5, 5)), check_trace=False)
    torch.manual_seed(1)
    want = asked(x, x, x, nothing, torch.zeros(5, 5))
    assert not torch.equal(traced(x, x, x, nothing, torch.zeros(5, 5)), want)
    torch.manual_seed(1)
    torch.testing.assert_close(traced(x, x, x, nothing, torch.zeros(5, 5)), want, **SINGLE)


def of_rows(lengths, layout):
    rows = [torch.randn(n, 8, requires_grad=True) for n in lengths]
    return rows, torch.nested.as_nested_tensor(rows, layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_computed_as_their_rows_one_by_one(layout, causal, options):
    torch.manual_seed(0)
    module = MultiheadAttention(8, 2, batch_first=True, **options)
    for kinds in ("aaa", "abb", "abc"):
        made = {kind: of_rows((3, 5, 0) if kind == "a" else (4, 2, 6), layout) for kind in "abc"}
        given = [made[kind] for kind in kinds]
        rows, nested = zip(*given, strict=True)
        out, weights = module(*nested, is_causal=causal, average_attn_weights=False)
        if layout == torch.jagged:
            (out + nested[0]).unbind()  # which torch does only for the same offsets
        padding = torch.ones_like(weights, dtype=torch.bool)
        alone = []
        for i, (got, q, k, v) in enumerate(zip(out.unbind(), *rows, strict=True)):
            want, want_weights = module(q, k, v, is_causal=causal, average_attn_weights=False)
            torch.testing.assert_close(got, want, **SINGLE)
            columns = [*range(len(k)), *range(weights.shape[-1] - len(options), weights.shape[-1])]
            torch.testing.assert_close(
                weights[i, :, : len(q)][..., columns], want_weights, **SINGLE
            )
            padding[i, :, : len(q), columns] = False
            alone.append(want)
        assert (weights[padding] == 0).all()
        leaves = [row for each in rows for row in each]
        gradients = (
            torch.autograd.grad(sum(y.sin().sum() for y in found), leaves)
            for found in (out.unbind(), alone)
        )
        for found, wanted in zip(*gradients, strict=True):
            torch.testing.assert_close(found, wanted, **SINGLE)
        assert module(*nested, need_weights=False)[1] is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_that_cannot_be_computed_are_refused_by_name():
    module = MultiheadAttention(8, 2, batch_first=True)
    _, x = of_rows((3, 5), torch.strided)
    with pytest.raises(UnsupportedError, match="masks: value is padded"):
        module(x, x, torch.randn(2, 5, 8))
    with pytest.raises(UnsupportedError, match="masks: batch_first is False"):
        MultiheadAttention(8, 2)(x, x, x)
    with pytest.raises(UnsupportedError, match="masks: attn_mask is given"):
        module(x, x, x, attn_mask=torch.zeros(5, 5))
    with pytest.raises(ValueError, match=r"equally long: got \[3, 5\] and \[5, 3\]"):
        module(x, x, of_rows((5, 3), torch.strided)[1])
    with pytest.raises(ValueError, match="nested query must hold rows"):
        module(*[torch.nested.nested_tensor([])] * 3)
