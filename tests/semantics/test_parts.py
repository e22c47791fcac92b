"""Masks and biases of one's own: one rule is enough, and another rule inherits no shortcut."""

import pytest
import torch

import polyhead as ph
from polyhead.semantics.biases import Bias

H, T, S = 4, 9, 21


class Ahead(ph.Causal):
    """Means the opposite of the class that it inherits from."""

    def rule(self, of):
        q, k = of.q_position, of.k_position
        return lambda pair: k(pair) > q(pair)


class Drawn(ph.Window):
    """Likewise, and is no function of one pair."""

    def visible(self, q, k, device):
        return ~super().visible(q, k, device)


class Squared(ph.ALiBi):
    def rule(self, of):
        slope, q, k = of.per_head(self.slopes), of.q_position, of.k_position
        return lambda pair: slope(pair) ** 2 * (k(pair) - q(pair))


class Twofold(Bias):
    """A bias of two tensors that says nothing but its rule."""

    def __init__(self, scale, power):
        self.tensors = scale, power

    tensors = ()

    def with_tensors(self, tensors):
        return Twofold(*tensors)

    def of_heads(self, heads):
        return Twofold(*(x[list(heads)] for x in self.tensors))

    def check(self, batch, heads, queries, keys):
        pass

    def rule(self, of):
        (scale, power), q, k = map(of.per_head, self.tensors), of.q_place, of.k_place
        return lambda pair: scale(pair) * ((q(pair) - k(pair)).abs() + 1.0) ** power(pair)


def qkv():
    torch.manual_seed(0)
    return [torch.randn(2, n, x, 8).requires_grad_() for n, x in ((H, T), (2, S), (2, S))]


def agree(leaves, **arguments):
    found = []
    for kernel in ("reference", "tiled", "auto"):
        out = ph.attention(*leaves[:3], kernel=kernel, **arguments)
        found.append([out, *torch.autograd.grad(out.cos().sum(), leaves, retain_graph=True)])
    for parts in found[1:]:
        torch.testing.assert_close(parts, found[0], atol=1e-5, rtol=1e-5)
    return found[0][0]


@pytest.mark.parametrize(
    ("mask", "same"),
    [
        (Ahead(), ~ph.Causal()),
        (Drawn(5), ~ph.Window(5)),
        (Ahead() | Drawn(5) & ph.Prefix(9), ~ph.Causal() | ~ph.Window(5) & ph.Prefix(9)),
    ],
    ids=["rule", "visible", "both"],
)
def test_a_mask_that_means_another_thing_inherits_no_shortcut(mask, same, small_tiles):
    leaves = qkv()
    torch.testing.assert_close(agree(leaves, mask=mask), agree(leaves, mask=same))
    assert mask.has_rule() == isinstance(mask, Ahead)


def test_a_bias_that_means_another_thing_inherits_no_shortcut(small_tiles):
    leaves = [*qkv(), torch.randn(H, requires_grad=True)]
    drawn = leaves[3][:, None, None] ** 2 * (torch.arange(S) - torch.arange(S - T, S)[:, None])
    found = agree(leaves, bias=Squared(leaves[3]), mask=ph.Causal())
    torch.testing.assert_close(found, agree(leaves, bias=drawn, mask=ph.Causal()))
    assert "Squared" not in ph.explain(*leaves[:3], bias=Squared(leaves[3])).kernel


def test_a_rule_is_enough_for_a_bias_of_two_tensors(small_tiles):
    leaves = [*qkv(), torch.randn(H, requires_grad=True), torch.rand(H, requires_grad=True)]
    scale, power = (x[:, None, None] for x in leaves[3:])
    apart = (torch.arange(S) - torch.arange(S - T, S)[:, None]).abs() + 1.0
    found = agree(leaves, bias=Twofold(*leaves[3:]), mask=ph.Causal())
    torch.testing.assert_close(found, agree(leaves, bias=scale * apart**power, mask=ph.Causal()))


def test_a_mask_or_a_bias_without_a_rule_says_so():
    with pytest.raises(NotImplementedError, match="Nothing must define rule or visible"):
        ph.attention(*qkv(), mask=type("Nothing", (ph.Mask,), {})())
    blank = {
        "check": lambda *_: None,
        "tensors": (),
        "with_tensors": lambda self, _: self,
        "of_heads": None,
    }
    with pytest.raises(NotImplementedError, match="Nothing must define rule or tile"):
        ph.attention(*qkv(), bias=type("Nothing", (ph.Bias,), blank)())


@pytest.mark.parametrize(
    ("part", "name"),
    [(ph.Window(4), "size"), (ph.ALiBi(4), "slopes"), (ph.Causal() & ph.Window(4), "left")],
)
def test_arguments_cannot_be_assigned(part, name):
    with pytest.raises(AttributeError, match=f"{type(part).__name__}.{name} cannot be assigned"):
        setattr(part, name, getattr(part, name))
