"""Weights that are no softmax's: each normalizer against its formula, written out key by key."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import polyhead as ph
from polyhead.errors import UnsupportedError
from polyhead.kernels import tiled
from polyhead.semantics import Tokens

B, H, G, T, S, D = 2, 4, 2, 37, 45, 8
Rows = Callable[[Tensor, Tensor], Tensor]


def _sigmoid(bias: float | Tensor) -> Rows:
    at = bias[:, None, None] if isinstance(bias, Tensor) else bias
    return lambda s, seen: torch.where(seen, 1 / (1 + torch.exp(-s - at)), 0.0)


def _softpick(s: Tensor, seen: Tensor) -> Tensor:
    terms = torch.where(seen, torch.expm1(s), 0.0)
    return terms.clamp(min=0) / terms.abs().sum(-1, keepdim=True)


def _entmax(alpha: float) -> Rows:
    def weights(s: Tensor, seen: Tensor) -> Tensor:
        """By the support: the n best keys, of which the last has weight above 0."""
        s = torch.where(seen, s * (alpha - 1), -torch.inf)
        low, high = s.amax(-1, keepdim=True) - 1, s.amax(-1, keepdim=True)
        for _ in range(200):
            tau = (low + high) / 2
            enough = ((s - tau).clamp(min=0) ** (1 / (alpha - 1))).sum(-1, keepdim=True) > 1
            low, high = torch.where(enough, tau, low), torch.where(enough, high, tau)
        return torch.where(seen, (s - low).clamp(min=0) ** (1 / (alpha - 1)), 0.0)

    return weights


def _stick_breaking(s: Tensor, seen: Tensor) -> Tensor:
    share, left = torch.where(seen, torch.sigmoid(s), 0.0), torch.ones_like(s[..., 0])
    found = []
    for j in reversed(range(s.shape[-1])):
        found.append(share[..., j] * left)
        left = left * (1 - share[..., j])
    return torch.stack(found[::-1], dim=-1)


def _softmax(s: Tensor, seen: Tensor) -> Tensor:
    terms = torch.where(seen, torch.exp(s), 0.0)
    return terms / terms.sum(-1, keepdim=True)


def _cope(table: Tensor) -> Rows:
    def weights(s: Tensor, seen: Tensor) -> Tensor:
        gates, last = torch.where(seen, torch.sigmoid(s), 0.0), table.shape[-1] - 1
        rows = table.expand(*s.shape[:3], -1)
        added = []
        for j in range(s.shape[-1]):
            at = gates[..., j:].sum(-1).clamp(max=last)
            low = at.detach().long()
            high = (low + 1).clamp(max=last)
            share = at - low
            a, b = (rows.gather(-1, each[..., None])[..., 0] for each in (low, high))
            added.append(a * (1 - share) + b * share)
        return _softmax(s + torch.stack(added, dim=-1), seen)

    return weights


def _talking(before: Tensor | None, after: Tensor | None) -> Rows:
    def weights(s: Tensor, seen: Tensor) -> Tensor:
        if before is not None:
            s = torch.stack([(row[:, None, None] * s).sum(1) for row in before], dim=1)
        w = _softmax(s, seen)
        if after is not None:
            w = torch.stack([(row[:, None, None] * w).sum(1) for row in after], dim=1)
        return w

    return weights


def _convolved(kernel: Tensor, after: Tensor | None = None) -> Rows:
    def weights(s: Tensor, seen: Tensor) -> Tensor:
        s, mixed = torch.where(seen, s, 0.0), torch.zeros_like(s)
        _, rows, columns = kernel.shape
        keys = s.shape[-1]
        for a in range(min(rows, s.shape[2])):
            for b in range(columns):
                ahead = columns // 2 - b
                first, last = max(0, -ahead), min(keys, keys - ahead)
                moved = torch.zeros_like(s)
                moved[:, :, a:, first:last] = s[
                    :, :, : s.shape[2] - a, first + ahead : last + ahead
                ]
                mixed = mixed + kernel[:, a, b][:, None, None] * moved
        w = _softmax(mixed, seen)
        return w if after is None else torch.einsum("hf,bfts->bhts", after, w)

    return weights


def _drawn(*shape: int) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.double
    )


BIAS, TABLE, KERNEL = _drawn(H), _drawn(1, H, T, 9), _drawn(H, 3, 4)
BEFORE, AFTER = _drawn(H, H), _drawn(H, H + 1)[:, 1:]
CASES: dict[str, tuple[Callable[..., ph.Normalizer], Callable[..., Rows], tuple[Tensor, ...]]] = {
    "sigmoid": (lambda: ph.Sigmoid(-math.log(30)), lambda: _sigmoid(-math.log(30)), ()),
    "sigmoid, learned": (ph.Sigmoid, _sigmoid, (BIAS,)),
    "softpick": (lambda: ph.Softpick(0.0), lambda: _softpick, ()),
    "entmax 1.5": (ph.Entmax, lambda: _entmax(1.5), ()),
    "entmax 1.3": (lambda: ph.Entmax(1.3), lambda: _entmax(1.3), ()),
    "sparsemax": (lambda: ph.Entmax(2), lambda: _entmax(2.0), ()),
    "stick-breaking": (ph.StickBreaking, lambda: _stick_breaking, ()),
    "cope": (ph.CoPE, _cope, (TABLE,)),
    "talking heads": (ph.TalkingHeads, _talking, (BEFORE, AFTER)),
    "talking heads, before": (ph.TalkingHeads, lambda x: _talking(x, None), (BEFORE,)),
    "talking heads, after": (
        lambda x: ph.TalkingHeads(after=x), lambda x: _talking(None, x), (AFTER,),
    ),
    "multi-token": (ph.MultiToken, _convolved, (KERNEL,)),
    "multi-token, mixed heads": (ph.MultiToken, _convolved, (KERNEL, AFTER)),
}  # fmt: skip
MASKS: dict[str, Any] = {
    "none": None,
    "causal": ph.Causal(),
    "window": ph.Causal() & ph.Window(9),
    "some rows see nothing": ph.Keep(_drawn(B, 1, T, S) * (_drawn(T, 1) > -0.5) > 0.5),
}
each_case = pytest.mark.parametrize("name", CASES)


def _inputs(dtype: torch.dtype = torch.double) -> list[Tensor]:
    drawn = [_drawn(B, heads, length, D) for heads, length in ((H, T), (G, S), (G, S))]
    drawn[0] = 2 * drawn[0]
    return [x.to(dtype).requires_grad_() for x in drawn]


def _by_formula(
    rows: Rows, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, softcap: float | None = None
) -> Tensor:
    scores = q @ k.repeat_interleave(H // G, 1).mT / math.sqrt(D)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = rows(scores, seen)
    return weights.where(seen, 0.0) @ v.repeat_interleave(H // G, 1)


@each_case
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", ["tiled", "reference"])
def test_weights_are_the_formulas(
    name: str, mask: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "SCORES_PER_TILE", 1)  # 16 queries at a time
    make, formula, learned = CASES[name]
    learned = tuple(x.clone().requires_grad_() for x in learned)
    q, k, v = _inputs()
    seen = torch.ones(B, H, T, S, dtype=torch.bool)
    if MASKS[mask] is not None:
        tokens = Tokens.of(T, shift=S - T), Tokens.of(S)
        seen = MASKS[mask].visible(*tokens, torch.device("cpu")).expand(B, H, T, S)
    out = ph.attention(q, k, v, mask=MASKS[mask], normalizer=make(*learned), kernel=kernel)
    wanted = _by_formula(formula(*learned), q, k, v, seen)
    # A row that sees nothing divides 0 by 0 in a plain formula; here it gives 0.
    wanted = wanted.where(seen.any(-1, keepdim=True), 0.0)
    torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)
    weights, given = _drawn(*out.shape), (q, k, v, *learned)
    found = torch.autograd.grad((out * weights).sum(), given)
    if name.startswith(("entmax", "sparsemax")) or mask == "some rows see nothing":
        return  # bisection has no derivative, and 0 / 0 makes others NaN: see the next test
    wanted_gradients = torch.autograd.grad((wanted * weights).sum(), given)
    torch.testing.assert_close(found, wanted_gradients, rtol=1e-8, atol=1e-8)


@each_case
def test_derivatives_are_of_the_function(name: str) -> None:
    """Those of rows that see nothing too, and the second ones."""
    make, _, learned = CASES[name]
    first = [x[:1, :, -3:, :4] if x.ndim == 4 else x for x in learned]
    q, k, v = (x[:1, :, -5:, :3].detach().requires_grad_() for x in _inputs())
    keep = ph.Keep(torch.tensor([[1, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 0, 1, 1, 1]]).bool())

    def out(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        return ph.attention(
            q[:, :, -3:], k, v, mask=keep, normalizer=make(*learned), kernel="reference"
        )

    given = (q, k, v, *(x.detach().clone().requires_grad_() for x in first))
    assert torch.autograd.gradcheck(out, given, atol=1e-5)
    assert torch.autograd.gradgradcheck(out, given, atol=1e-4)


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    make, _, learned = CASES[name]
    q, k, v = (x.detach() for x in _inputs(dtype))
    out = ph.attention(q, k, v, mask=ph.Causal(), normalizer=make(*learned))
    exact = ph.attention(
        q.double(), k.double(), v.double(), mask=ph.Causal(), normalizer=make(*learned)
    )
    assert out.dtype == dtype
    torch.testing.assert_close(out, exact.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=3e-5)


@each_case
def test_keys_are_taken_in_the_order_of_their_positions(name: str) -> None:
    """However they lie: rows of a cache may differ in what they hold, and where."""
    make, _, learned = CASES[name]
    q, k, v = (x.detach() for x in _inputs())
    options: dict[str, Any] = {"mask": ph.Causal() & ph.Window(19), "normalizer": make(*learned)}
    wanted = ph.attention(q, k, v, **options)
    orders = [torch.randperm(S, generator=torch.Generator().manual_seed(row)) for row in range(B)]
    at, rows = torch.stack(orders), torch.arange(B)[:, None]
    k, v = (x.transpose(1, 2)[rows, at].transpose(1, 2) for x in (k, v))
    options |= {"q_positions": torch.arange(S - T, S), "kv_positions": at}
    torch.testing.assert_close(ph.attention(q, k, v, **options), wanted, rtol=1e-10, atol=1e-10)


@each_case
def test_what_is_masked_has_no_effect(name: str) -> None:
    make, _, learned = CASES[name]
    q, k, v = (x.detach() for x in _inputs())
    normalizer = make(*learned)
    clean = ph.attention(q, k, v, mask=ph.Causal(), normalizer=normalizer)
    k[:, 1, -1], v[:, 1, -2] = torch.nan, torch.inf  # seen by the last two queries
    out = ph.attention(q, k, v, mask=ph.Causal(), normalizer=normalizer)
    torch.testing.assert_close(out[:, :, :-2], clean[:, :, :-2], rtol=1e-12, atol=1e-12)
    spoilt = slice(None) if normalizer.mixes_heads else slice(2, None)
    assert out[:, spoilt, -2:].isnan().all()
    if not normalizer.mixes_heads:
        torch.testing.assert_close(out[:, :2], clean[:, :2], rtol=1e-12, atol=1e-12)


def test_weights_are_dropped_and_scores_capped_as_for_the_softmax() -> None:
    q, k, v = (x.detach() for x in _inputs())
    ones = torch.ones_like(v)
    out = ph.attention(q, k, v, normalizer=ph.Sigmoid(), softcap=0.7)
    seen = torch.ones(B, H, T, S, dtype=torch.bool)
    torch.testing.assert_close(out, _by_formula(_sigmoid(0.0), q, k, v, seen, 0.7))
    both = [
        ph.attention(
            q, k, ones, normalizer=ph.Softpick(), dropout_p=0.4, kernel=kernel,
            generator=torch.Generator().manual_seed(3),
        )
        for kernel in ("tiled", "reference")
    ]  # fmt: skip
    torch.testing.assert_close(*both, rtol=0, atol=1e-14)
    assert not torch.allclose(both[0], ph.attention(q, k, ones, normalizer=ph.Softpick()))


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["native", "sdpa", "flex", "triton"])
def test_other_kernels_refuse_normalizers_by_name(kernel: str) -> None:
    q, k, v = (x.detach().float() for x in _inputs())
    with pytest.raises(UnsupportedError, match=r"normalizer=StickBreaking\(\)|not available"):
        ph.attention(q, k, v, normalizer=ph.StickBreaking(), kernel=kernel)
    said = ph.explain(q, k, v, normalizer=ph.StickBreaking())
    assert said.kernel == "tiled"
    assert "normalizer StickBreaking()" in said.call
    assert "normalizer" in said.refusals[kernel] or "not available" in said.refusals[kernel]
    # One query without options takes a way with few checks: it must not be taken here.
    one = ph.attention(q[:, :, -1:], k, v, normalizer=ph.StickBreaking())
    torch.testing.assert_close(one, ph.attention(q, k, v, normalizer=ph.StickBreaking())[:, :, -1:])


def test_deterministic_gradients_are_refused_where_only_the_normalizer_learns() -> None:
    q, k, v = (x.detach() for x in _inputs())
    bias = BIAS.clone().requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(UnsupportedError, match="no kernel can do deterministic gradients"):
            ph.attention(q, k, v, normalizer=ph.Sigmoid(bias))
        with torch.no_grad():
            ph.attention(q, k, v, normalizer=ph.Sigmoid(bias))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"normalizer": torch.sigmoid}, TypeError, "normalizer must be a Normalizer or None"),
        ({"normalizer": ph.Sigmoid}, TypeError, "the class Sigmoid"),
        ({"normalizer": ph.Sigmoid(), "return_lse": True}, ValueError, "return_lse=True with Sig"),
        ({"normalizer": ph.Sigmoid(), "sinks": torch.zeros(H)}, ValueError, "sinks join"),
        ({"normalizer": ph.Sigmoid(torch.zeros(3))}, ValueError, r"must be \[H\] = \[4\]: got \[3"),
        ({"normalizer": ph.CoPE(TABLE[:, :, 1:])}, ValueError, "T = 37: got"),
        ({"normalizer": ph.TalkingHeads(torch.eye(3))}, ValueError, "needs 3 heads: got 4"),
        ({"normalizer": ph.MultiToken(KERNEL[:2])}, ValueError, "with H = 4: got"),
    ],
)
def test_wrong_normalizers_are_named(
    arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        ph.attention(*(x.detach() for x in _inputs()), **arguments)


def test_wrong_numbers_of_normalizers_are_named() -> None:
    for wrong, said in (
        (lambda: ph.Entmax(1.0), "Entmax alpha must be"),
        (lambda: ph.Entmax(2.5), "Entmax alpha must be"),
        (lambda: ph.Softpick(-1.0), "Softpick eps must be"),
        (lambda: ph.Sigmoid(torch.zeros(2, 2)), r"of shape \[2, 2\]"),
        (ph.TalkingHeads, "before, after or both"),
        (lambda: ph.TalkingHeads(torch.zeros(2, 3)), r"before must be \[H, H\]"),
        (lambda: ph.MultiToken(torch.zeros(2, 3)), r"tensor \[H, Q, K\]"),
        (lambda: ph.MultiToken(KERNEL[:, :0]), "needs a query"),
        (lambda: ph.MultiToken(KERNEL, torch.eye(3)), r"after must be \[H, H\] with H = 4"),
        (lambda: ph.CoPE(torch.zeros(2, 3)), r"tensor \[B, H, T, n\]"),
    ):
        with pytest.raises(ValueError, match=said):
            wrong()
    for wrong, said in (
        (lambda: ph.CoPE(3), r"of_query must be a floating-point tensor \[B, H, T, n\]: got int"),
        (lambda: ph.MultiToken([1.0]), r"kernel must be .* \[H, Q, K\]: got list"),
        (lambda: ph.TalkingHeads("x"), r"before must be .* \[H, H\]: got str"),
    ):
        with pytest.raises(TypeError, match=said):
            wrong()
    with pytest.raises(ValueError, match=r"got torch.int32 of shape \[4, 4\]"):
        ph.TalkingHeads(after=torch.eye(4).int())
    elsewhere, given = ph.Sigmoid(BIAS.to("meta")), [x.detach() for x in _inputs()]
    with pytest.raises(ValueError, match="on the device of q, cpu: got meta"):
        ph.attention(*given, normalizer=elsewhere)
    none = [x[:, :, :0] for x in given]
    assert ph.attention(*none, normalizer=ph.CoPE(TABLE[:, :, :0])).shape == (B, H, 0, D)
    with pytest.raises(UnsupportedError, match="each depends on all"):
        ph.TalkingHeads(torch.eye(4)).of_heads([1])
