"""One attention layer, step by step: every matrix with its formula, shape and numbers.

    headᵢ = softmax(X W_Qⁱ (X W_Kⁱ)ᵀ / √d_k) · X W_Vⁱ
    output = Concat(head₁ … head_h) · W_O                      (Vaswani et al. 2017, section 3.2.2)

A trace is for reading, so it is computed in float64 with plain matrix products, and softmax
numerators and denominators are separate steps. ``trace_attention`` works on given matrices,
``polyhead.interpret.trace.model`` on a layer and head of a loaded model.

Letters: T tokens, E embed size, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from polyhead._utils.texts import Texts

# Above this, exp() of a raw score is too long to read; softmax then shows exp(S − max S), which has
# the same quotients.
_LARGEST_READABLE_SCORE = 30.0


@dataclass(frozen=True)
class TraceStep:
    """One named result of the calculation.

    Attributes:
        key: short name, ``"X"``, ``"head1.Q"``, ``"concat"``; unique in its trace.
        title: what it is, in words.
        formula: how it is made, ``"Q₁ = X · W_Q¹"``.
        values: the matrix, float64. −∞ marks a masked score.
        factors: for a matrix product, its (name, matrix) on the left and on the right.
    """

    key: str
    title: str
    formula: str
    values: Tensor
    factors: tuple[tuple[str, Tensor], tuple[str, Tensor]] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def terms(self, row: int, column: int) -> list[tuple[float, float]]:
        """The pairs of numbers whose products add up to ``values[row, column]``.

        Raises:
            ValueError: if this step is not a matrix product.
        """
        if self.factors is None:
            raise ValueError(f"step {self.key!r} is not a matrix product: it has no terms")
        (_, left), (_, right) = self.factors
        pairs = zip(left[row].tolist(), right[:, column].tolist(), strict=True)
        return [(float(a), float(b)) for a, b in pairs]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; a masked score (−∞) is null, which JSON can say."""
        return {
            "key": self.key,
            "title": self.title,
            "formula": self.formula,
            "shape": list(self.shape),
            "values": _finite_lists(self.values.tolist()),
        }


def _finite_lists(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite_lists(item) for item in value]
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Trace:
    """The steps of one attention layer in the order in which they are computed.

    ``trace["head1.A"]`` is the step of that key. ``tokens`` names the rows.
    """

    title: str
    tokens: tuple[str, ...]
    steps: tuple[TraceStep, ...]
    notes: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> TraceStep:
        for step in self.steps:
            if step.key == key:
                return step
        raise KeyError(f"no step {key!r}; steps are {', '.join(step.key for step in self.steps)}")

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "tokens": list(self.tokens),
            "notes": list(self.notes),
            "steps": [step.to_dict() for step in self.steps],
        }


@dataclass(frozen=True)
class AttentionInput:
    """The given matrices of a layer, as the formula writes them (a row of X per token).

    Attributes:
        x: ``[T, E]``.
        w_q: one ``[E, D]`` per query head.
        w_k: one ``[E, D]`` per key/value head; their number divides that of the query heads.
        w_v: one ``[E, Dv]`` per key/value head.
        w_o: ``[H · Dv, E_out]``.
        visible: bool ``[T, T]``, True where the row's token may look; None: everywhere.
        tokens: a name per row of X.
    """

    x: Tensor
    w_q: tuple[Tensor, ...]
    w_k: tuple[Tensor, ...]
    w_v: tuple[Tensor, ...]
    w_o: Tensor
    visible: Tensor | None = None
    tokens: tuple[str, ...] = field(default=())


def trace_attention(
    given: AttentionInput, title: str | None = None, *, language: str = "en"
) -> Trace:
    """Works one multi-head attention layer from its matrices.

    Titles are in ``language``, a code of ``polyhead._utils.texts.LANGUAGES``.

    Heads are counted from 1, as in the formula: keys are ``X``, ``head1.Q``, ``head1.K``,
    ``head1.V``, ``head1.QK``, ``head1.scaled``, ``head1.masked`` (with a mask), ``head1.exp``,
    ``head1.sum``, ``head1.A``, ``head1.out``, …, ``concat``, ``output``.
    """
    said = Texts(language, "trace")
    x = given.x.double()
    group = len(given.w_q) // len(given.w_k)
    tokens = given.tokens or tuple(said("token", number=i + 1) for i in range(x.shape[0]))
    steps = [TraceStep("X", said("input"), "X", x)]
    outputs = []
    for index, w_q in enumerate(given.w_q):
        head, kv_head = index + 1, index // group + 1
        w_k, w_v = given.w_k[kv_head - 1], given.w_v[kv_head - 1]
        weights = {"Q": (w_q, head), "K": (w_k, kv_head), "V": (w_v, kv_head)}
        projected: dict[str, Tensor] = {}
        for letter, (weight, number) in weights.items():
            steps.append(projection_step(letter, head, number, x, weight.double(), said))
            projected[letter] = steps[-1].values
        steps += head_steps(
            head, projected["Q"], projected["K"], projected["V"], visible=given.visible, said=said
        )
        outputs.append(steps[-1].values)
    steps += combine_steps(outputs, given.w_o.double(), said=said)
    return Trace(title or said("title"), tokens, tuple(steps))


def titled(said: Texts, head: int, what: str) -> str:
    """``"Head 1: what"``."""
    return f"{said('head', head=head)}: {what}"


def projection_step(
    letter: str, head: int, number: int, x: Tensor, weight: Tensor, said: Texts
) -> TraceStep:
    """``Qᵢ = X · W_Qⁱ``; ``number`` is the key/value head that head ``head`` reads."""
    name = f"W_{letter}{superscript(number)}"
    shared = said("shared", head=number) if number != head else ""
    return TraceStep(
        f"head{head}.{letter}",
        titled(said, head, said(letter) + shared),
        f"{letter}{subscript(head)} = X · {name}",
        x @ weight,
        (("X", x), (name, weight)),
    )


def head_steps(
    head: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    visible: Tensor | None = None,
    sink: float | None = None,
    said: Texts,
) -> list[TraceStep]:
    """The steps of one head from its queries, keys and values to its output (the last step).

    Args:
        head: the number that names the steps.
        q: ``[T, D]`` float64, as the scores use it (after rotary and the like).
        k: ``[S, D]``.
        v: ``[S, Dv]``.
        scale: factor of the scores; None: 1/√D.
        softcap: scores become softcap · tanh(score / softcap).
        bias: ``[T, S]``, added to the scaled scores.
        visible: bool ``[T, S]``, True where a query may look.
        sink: a logit that joins the denominator only.
    """
    i, key = subscript(head), f"head{head}"

    def who(name: str) -> str:
        return titled(said, head, said(name))

    raw = q @ k.T
    steps = [
        TraceStep(
            f"{key}.QK",
            who("QK"),
            f"Q{i} · K{i}ᵀ",
            raw,
            ((f"Q{i}", q), (f"K{i}ᵀ", k.T)),
        )
    ]
    if scale is None:
        scores = raw / math.sqrt(q.shape[-1])
        formula = f"S{i} = Q{i} · K{i}ᵀ / √{q.shape[-1]}"
    else:
        scores = raw * scale
        formula = f"S{i} = Q{i} · K{i}ᵀ × {scale:.6g}"
    steps.append(TraceStep(f"{key}.scaled", who("scaled"), formula, scores))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
        formula = f"S{i} ← {softcap:g} · tanh(S{i} / {softcap:g})"
        steps.append(TraceStep(f"{key}.capped", who("capped"), formula, scores))
    if bias is not None:
        scores = scores + bias
        steps.append(TraceStep(f"{key}.biased", who("biased"), f"S{i} ← S{i} + B{i}", scores))
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
        formula = said("masked_formula", scores=f"S{i}")
        steps.append(TraceStep(f"{key}.masked", who("masked"), formula, scores))
    steps += _softmax_steps(head, scores, sink, said)
    attention = steps[-1].values
    steps.append(
        TraceStep(
            f"{key}.out",
            who("out"),
            f"head{i} = A{i} · V{i}",
            attention @ v,
            ((f"A{i}", attention), (f"V{i}", v)),
        )
    )
    return steps


def _softmax_steps(head: int, scores: Tensor, sink: float | None, said: Texts) -> list[TraceStep]:
    """Numerators, denominators and weights; a row that sees nothing has weights 0."""
    i, key = subscript(head), f"head{head}"
    finite = scores[scores.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    if sink is not None:
        largest = max(largest, abs(sink))
    if largest <= _LARGEST_READABLE_SCORE:
        shift, exponent = torch.zeros_like(scores[:, :1]), f"S{i}"
    else:
        shift = scores.amax(dim=-1, keepdim=True)
        if sink is not None:
            shift = shift.clamp_min(sink)
        shift = shift.masked_fill(shift == -math.inf, 0.0)
        exponent = said("less_most", scores=f"S{i}")
    numerators = torch.exp(scores - shift)
    total = numerators.sum(dim=-1, keepdim=True)
    summed = f"Σ exp({exponent})"
    if sink is not None:
        total = total + torch.exp(sink - shift)
        summed += " + exp(sink)"
    weights = torch.where(total > 0, numerators / total, torch.zeros_like(numerators))
    return [
        TraceStep(f"{key}.exp", titled(said, head, said("exp")), f"exp({exponent})", numerators),
        TraceStep(f"{key}.sum", titled(said, head, said("sum")), summed, total),
        TraceStep(
            f"{key}.A",
            titled(said, head, said("weights" if sink is None else "weights_sink")),
            said("weights_formula", weights=f"A{i}", scores=f"S{i}"),
            weights,
        ),
    ]


def combine_steps(
    outputs: Sequence[Tensor], w_o: Tensor, names: str | None = None, *, said: Texts
) -> list[TraceStep]:
    """Concatenation of all heads' outputs ``[T, Dv]`` and the output projection."""
    concat = torch.cat(list(outputs), dim=-1)
    names = names or ", ".join(f"head{subscript(i + 1)}" for i in range(len(outputs)))
    return [
        TraceStep("concat", said("concat"), f"Concat({names})", concat),
        TraceStep(
            "output",
            said("output"),
            "output = Concat · W_O",
            concat @ w_o,
            (("Concat", concat), ("W_O", w_o)),
        ),
    ]


def subscript(number: int) -> str:
    return str(number).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))


def superscript(number: int) -> str:
    return str(number).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _matrices(*matrices: Iterable[Iterable[float]]) -> tuple[Tensor, ...]:
    return tuple(
        torch.tensor(list(matrix), dtype=torch.float64, device="cpu") for matrix in matrices
    )


TRACE_EXAMPLE = AttentionInput(
    x=_matrices([[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]])[0],
    w_q=_matrices([[1, 0], [0, 1], [1, 0], [0, 1]], [[0, 1], [1, 0], [0, 1], [1, 0]]),
    w_k=_matrices([[1, 0], [0, 0], [0, 1], [1, 0]], [[0, 1], [1, 0], [0, 1], [1, 0]]),
    w_v=_matrices([[1, 0], [0, 1], [0, 0], [1, 0]], [[0, 1], [1, 0], [0, 0], [0, 1]]),
    w_o=_matrices([[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1]])[0],
)
"""Three words, d_model = 4, two heads of size 2: small enough to follow with a pencil."""


def example_trace(language: str = "en") -> Trace:
    """The worked example, ``TRACE_EXAMPLE``, with its words and titles in a language."""
    said = Texts(language, "trace")
    words = tuple(said("word", number=i + 1) for i in range(len(TRACE_EXAMPLE.x)))
    given = replace(TRACE_EXAMPLE, tokens=words)
    return trace_attention(given, said("example"), language=language)
