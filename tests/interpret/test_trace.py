"""The worked example of multi-head attention, against every number that its source text prints.

The text ("四、逐步拆解计算过程") computes T = 3 words, d_model = 4, h = 2 heads by hand. Its
numbers are copied here as data and compared to ±0.001, because the text rounds to three decimals
at every step and goes on with the rounded numbers. Two of its numbers are printed with two decimals
and are off by more: e^2.828 as 16.93 (it is 16.919) and the sum 22.04 (it is 22.032). They are
compared to ±0.012, and with their true values to ±0.001.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.errors import InputError
from polyhead.interpret.trace.document import parse_trace_input, parse_trace_json
from polyhead.interpret.trace.model import trace_model
from polyhead.interpret.trace.steps import TRACE_EXAMPLE, Trace, trace_attention
from polyhead.layers import (
    AttentionConfig,
    MultiHeadAttention,
    NormConfig,
    QKNormConfig,
    RopeConfig,
)
from polyhead.semantics import ALiBi, Causal

TOLERANCE = 1e-3
TWO_DECIMALS = 0.012

# Every matrix that the text prints, in its order.
PRINTED: dict[str, list[list[float]]] = {
    "X": [[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]],
    "head1.Q": [[2, 0], [0, 2], [1, 1]],
    "head1.K": [[1, 1], [1, 0], [1, 0]],
    "head1.V": [[1, 0], [1, 1], [1, 1]],
    "head2.Q": [[0, 2], [2, 0], [1, 1]],
    "head2.K": [[0, 2], [2, 0], [1, 1]],
    "head2.V": [[0, 1], [1, 1], [1, 1]],
    "head1.QK": [[2, 2, 2], [2, 0, 0], [2, 1, 1]],
    "head1.scaled": [[1.414, 1.414, 1.414], [1.414, 0.000, 0.000], [1.414, 0.707, 0.707]],
    "head1.A": [[0.333, 0.333, 0.333], [0.673, 0.164, 0.164], [0.503, 0.248, 0.248]],
    "head1.out": [[1.000, 0.667], [1.000, 0.327], [1.000, 0.497]],
    "head2.QK": [[4, 0, 2], [0, 4, 2], [2, 2, 2]],
    "head2.scaled": [[2.828, 0.000, 1.414], [0.000, 2.828, 1.414], [1.414, 1.414, 1.414]],
    "head2.A": [[0.768, 0.045, 0.187], [0.045, 0.768, 0.187], [0.333, 0.333, 0.333]],
    "head2.out": [[0.232, 1.000], [0.955, 1.000], [0.667, 1.000]],
    "concat": [
        [1.000, 0.667, 0.232, 1.000],
        [1.000, 0.327, 0.955, 1.000],
        [1.000, 0.497, 0.667, 1.000],
    ],
    "output": [
        [1.232, 0.899, 2.000, 1.667],
        [1.955, 1.282, 2.000, 1.327],
        [1.667, 1.164, 2.000, 1.497],
    ],
}

# The right-hand factors that the text prints: weights, transposed keys, values.
PRINTED_FACTORS: dict[str, list[list[float]]] = {
    "head1.Q": [[1, 0], [0, 1], [1, 0], [0, 1]],
    "head1.K": [[1, 0], [0, 0], [0, 1], [1, 0]],
    "head1.V": [[1, 0], [0, 1], [0, 0], [1, 0]],
    "head2.Q": [[0, 1], [1, 0], [0, 1], [1, 0]],
    "head2.K": [[0, 1], [1, 0], [0, 1], [1, 0]],
    "head2.V": [[0, 1], [1, 0], [0, 0], [0, 1]],
    "head1.QK": [[1, 1, 1], [1, 0, 0]],
    "head2.QK": [[0, 2, 1], [2, 0, 1]],
    "head1.out": [[1, 0], [1, 1], [1, 1]],
    "head2.out": [[0, 1], [1, 1], [1, 1]],
    "output": [[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1]],
}

# The sums that the text writes out line by line: a word's row of the left factor, printed once per
# column of the result.
PRINTED_ROWS: dict[str, list[list[float]]] = {
    **{f"head{h}.{letter}": PRINTED["X"] for h in (1, 2) for letter in "QKV"},
    "head1.QK": PRINTED["head1.Q"],
    "head2.QK": PRINTED["head2.Q"],
    "head1.out": PRINTED["head1.A"],
    "head2.out": PRINTED["head2.A"],
    "output": PRINTED["concat"],
}

# (key, row, numerators, their tolerances, denominator, its tolerance): the softmax lines.
PRINTED_SOFTMAX = [
    ("head1", 1, [4.113, 1, 1], [TOLERANCE] * 3, 6.113, TOLERANCE),
    ("head1", 2, [4.113, 2.028, 2.028], [TOLERANCE] * 3, 8.169, TOLERANCE),
    ("head2", 0, [16.93, 1, 4.113], [TWO_DECIMALS, TOLERANCE, TOLERANCE], 22.04, TWO_DECIMALS),
    ("head2", 1, [1, 16.93, 4.113], [TOLERANCE, TWO_DECIMALS, TOLERANCE], 22.04, TWO_DECIMALS),
]


@pytest.fixture(scope="module")
def example() -> Trace:
    return trace_attention(TRACE_EXAMPLE)


@pytest.mark.parametrize("key", PRINTED)
def test_example_reproduces_every_printed_matrix(example: Trace, key: str) -> None:
    torch.testing.assert_close(example[key].values, _matrix(PRINTED[key]), atol=TOLERANCE, rtol=0.0)


@pytest.mark.parametrize("key", PRINTED_FACTORS)
def test_example_reproduces_every_printed_sum_term_by_term(example: Trace, key: str) -> None:
    left, right, result = PRINTED_ROWS[key], PRINTED_FACTORS[key], PRINTED[key]
    for row in range(len(result)):
        for column in range(len(result[0])):
            terms = example[key].terms(row, column)
            assert [a for a, _ in terms] == pytest.approx(left[row], abs=TOLERANCE)
            assert [b for _, b in terms] == [line[column] for line in right]
            total = sum(a * b for a, b in terms)
            assert total == pytest.approx(result[row][column], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("head", "row", "numerators", "bands", "denominator", "band"), PRINTED_SOFTMAX
)
def test_example_reproduces_every_printed_softmax_line(
    example: Trace,
    head: str,
    row: int,
    numerators: list[float],
    bands: list[float],
    denominator: float,
    band: float,
) -> None:
    shown = example[f"{head}.exp"].values[row].tolist()
    for got, printed, tolerance in zip(shown, numerators, bands, strict=True):
        assert got == pytest.approx(printed, abs=tolerance)
    assert float(example[f"{head}.sum"].values[row]) == pytest.approx(denominator, abs=band)
    quotients = [n / denominator for n in numerators]
    assert example[f"{head}.A"].values[row].tolist() == pytest.approx(quotients, abs=TOLERANCE)


def test_numbers_that_the_text_prints_too_large_have_their_true_values(example: Trace) -> None:
    largest = math.exp(4 / math.sqrt(2))
    assert float(example["head2.exp"].values[0, 0]) == pytest.approx(largest, abs=TOLERANCE)
    total = largest + 1 + math.exp(math.sqrt(2))
    assert float(example["head2.sum"].values[0, 0]) == pytest.approx(total, abs=TOLERANCE)
    assert largest == pytest.approx(16.919, abs=TOLERANCE)
    assert total == pytest.approx(22.032, abs=TOLERANCE)


def test_scores_are_divided_by_the_root_of_the_head_size(example: Trace) -> None:
    # The text: √2 ≈ 1.414.
    ratio = example["head1.QK"].values[0, 0] / example["head1.scaled"].values[0, 0]
    assert float(ratio) == pytest.approx(1.414, abs=TOLERANCE)


def test_strongest_weights_lie_where_the_matrices_say(example: Trace) -> None:
    """The text's closing remark has head 1's 0.673 as word 2 on itself; its matrix, on word 1."""
    assert float(example["head1.A"].values[1, 0]) == pytest.approx(0.673, abs=TOLERANCE)
    assert float(example["head2.A"].values[0, 0]) == pytest.approx(0.768, abs=TOLERANCE)
    assert float(example["head2.A"].values[1, 1]) == pytest.approx(0.768, abs=TOLERANCE)


def test_steps_come_in_the_order_of_the_formula(example: Trace) -> None:
    head = ["Q", "K", "V", "QK", "scaled", "exp", "sum", "A", "out"]
    wanted = ["X", *(f"head{h}.{name}" for h in (1, 2) for name in head), "concat", "output"]
    assert [step.key for step in example.steps] == wanted
    assert example["output"].shape == example["X"].shape == (3, 4)


def test_trace_equals_torchs_attention() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, w_q, w_k, w_v, w_o = draw(5, 6), draw(4, 6, 3), draw(2, 6, 3), draw(2, 6, 2), draw(8, 7)
    given = parse_trace_input(
        {
            "X": x.tolist(),
            "W_Q": w_q.tolist(),
            "W_K": w_k.tolist(),
            "W_V": w_v.tolist(),
            "W_O": w_o.tolist(),
            "causal": True,
        }
    )
    trace = trace_attention(given)
    heads = [
        F.scaled_dot_product_attention(
            (x @ w_q[h])[None], (x @ w_k[h // 2])[None], (x @ w_v[h // 2])[None], is_causal=True
        )[0]
        for h in range(4)
    ]
    out = torch.cat(heads, dim=-1)
    torch.testing.assert_close(trace["concat"].values, out)
    torch.testing.assert_close(trace["output"].values, out @ w_o)
    assert trace["head1.masked"].values[0, 1] == -math.inf
    assert "shared: key/value head 1" in trace["head2.K"].title
    assert "W_K¹" in trace["head2.K"].formula


def test_large_scores_do_not_overflow() -> None:
    trace = trace_attention(parse_trace_input(_valid() | {"X": [[900.0], [1.0]]}))
    assert trace["head1.exp"].values.isfinite().all()
    assert "max of the row" in trace["head1.exp"].formula
    torch.testing.assert_close(trace["head1.A"].values.sum(-1), torch.ones(2).double())


def test_tokens_of_a_document_name_the_rows() -> None:
    trace = trace_attention(parse_trace_input(_valid() | {"tokens": ["a", 5]}))
    assert trace.tokens == ("a", "5")
    assert trace_attention(parse_trace_input(_valid())).tokens == ("token 1", "token 2")


def test_row_that_sees_nothing_has_weights_and_output_zero() -> None:
    data = _valid() | {"mask": [[False, False], [True, True]]}
    trace = trace_attention(parse_trace_input(data))
    assert trace["head1.A"].values[0].tolist() == [0.0, 0.0]
    assert trace["head1.out"].values[0].tolist() == [0.0]


def test_whole_matrices_mean_the_same_as_heads_apart() -> None:
    def whole(matrices: tuple[Tensor, ...]) -> list[list[float]]:
        return torch.cat(matrices, dim=1).tolist()

    data = {
        "X": TRACE_EXAMPLE.x.tolist(),
        "W_Q": whole(TRACE_EXAMPLE.w_q),
        "W_K": whole(TRACE_EXAMPLE.w_k),
        "W_V": whole(TRACE_EXAMPLE.w_v),
        "W_O": TRACE_EXAMPLE.w_o.tolist(),
        "num_heads": 2,
    }
    trace = trace_attention(parse_trace_json(json.dumps(data).encode()))
    torch.testing.assert_close(
        trace["output"].values, trace_attention(TRACE_EXAMPLE)["output"].values
    )


def test_masked_scores_are_null_in_json() -> None:
    trace = trace_attention(parse_trace_input(_valid() | {"causal": True}))
    data = trace.to_dict()
    text = json.dumps(data, allow_nan=False)
    step = next(s for s in json.loads(text)["steps"] if s["key"] == "head1.masked")
    assert step["values"][0][1] is None
    assert step["shape"] == [2, 2]


def test_step_that_is_no_product_has_no_terms(example: Trace) -> None:
    with pytest.raises(ValueError, match=r"head1\.A.*not a matrix product"):
        example["head1.A"].terms(0, 0)


def test_unknown_step_names_the_known_ones(example: Trace) -> None:
    with pytest.raises(KeyError, match=r"head9\.Q.*head1\.Q"):
        example["head9.Q"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"W_O": None}, "W_O is missing"),
        ({"W_X": []}, "unknown key 'W_X'"),
        ({"X": [[1, 2], [3]]}, "X must be nested lists of numbers with rows of equal length"),
        ({"X": [["a"]]}, "X must be nested lists"),
        ({"X": []}, "X must hold at least one number"),
        ({"X": [1, 2]}, r"X must have shape \[T, E\].*got \[2\]"),
        ({"X": [[float("nan")]]}, "X must hold finite numbers"),
        ({"W_Q": [[[1.0], [2.0], [3.0]]]}, r"W_Q must have shape \[heads, 1, D\].*got \[1, 3, 1\]"),
        ({"W_Q": [[1.0, 2.0]]}, r"W_Q is one whole matrix \[1, 2\], so num_heads must be"),
        ({"W_Q": [[1.0, 2.0, 3.0]], "num_heads": 2}, "W_Q has 3 columns, which num_heads = 2"),
        ({"W_K": [[[1.0, 2.0]]]}, r"W_K must have heads of W_Q's shape \[1, 1\]: got \[1, 2\]"),
        ({"W_K": [[[1.0]], [[1.0]]]}, "W_K must have a number of heads that divides .*1: got 2"),
        ({"W_V": [[[1.0]], [[1.0]]]}, "W_V must have as many heads as W_K, 1: got 2"),
        ({"W_O": [[1.0], [2.0]]}, r"W_O must have shape \[1, E_out\].*got \[2, 1\]"),
        ({"mask": [[True]]}, r"mask must be \[2, 2\]"),
        ({"mask": [[1, 1], [1, 1]]}, "mask must be .* true"),
        ({"causal": 1}, "causal must be true or false"),
        ({"tokens": ["one"]}, "tokens must be 2 names"),
        ({"num_heads": 3}, "W_Q must have num_heads = 3 heads: got 1"),
    ],
)
def test_bad_input_names_the_key_and_what_is_wanted(change: dict[str, object], words: str) -> None:
    data = {key: value for key, value in (_valid() | change).items() if value is not None}
    with pytest.raises(InputError, match=words):
        parse_trace_input(data)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe{", "not UTF-8"),
        (b"{", "not JSON.*line 1"),
        (b"[]", "must be an object with the keys X, W_Q"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_file_that_is_no_layer_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_trace_json(content, "mine.json")


def _valid() -> dict[str, object]:
    return {
        "X": [[1.0], [2.0]],
        "W_Q": [[[1.0]]],
        "W_K": [[[1.0]]],
        "W_V": [[[1.0]]],
        "W_O": [[1.0]],
    }


def _matrix(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


class _Model(torch.nn.Module):
    """An embedding and two attention layers, called with ids as a Transformer is."""

    def __init__(self, bias: ALiBi | Tensor | None = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias = bias
        config = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6, **options)
        self.embedding = torch.nn.Embedding(20, 8)
        self.layers = torch.nn.ModuleList(
            MultiHeadAttention.from_config(8, config) for _ in range(2)
        )
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x, mask=Causal(), bias=self.bias)
        return x


NORM = QKNormConfig(norm=NormConfig(), place="before_rope")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rope": RopeConfig(theta=50.0)},
        {"qkv_bias": True, "out_bias": True, "softcap": 3.0, "sinks": True},
        {"bias": ALiBi(4)},
        {"bias": torch.linspace(-2, 2, 100).view(1, 4, 5, 5)},
        {"rope": RopeConfig(), "qk_norm": NORM, "window": 3, "scale": 0.2, "v_head_dim": 5},
    ],
)
@pytest.mark.parametrize(("layer", "head"), [(0, 0), (1, 2)])
def test_steps_of_a_models_head_end_in_the_layers_own_output(
    options: dict[str, Any], layer: int, head: int
) -> None:
    model, outputs = _Model(**options), []
    handle = model.layers[layer].register_forward_hook(lambda *call: outputs.append(call[2]))
    with torch.no_grad():
        model(torch.tensor([[3, 1, 4, 1, 5]]))
    handle.remove()
    trace = trace_model(model, [3, 1, 4, 1, 5], layer, head)
    output = outputs[0][0].double()
    torch.testing.assert_close(trace["output"].values, output, atol=1e-4, rtol=1e-4)
    size = 5 if "v_head_dim" in options else 6
    own = trace["concat"].values[:, head * size : (head + 1) * size]
    torch.testing.assert_close(trace[f"head{head}.out"].values, own, atol=1e-4, rtol=1e-4)
    (_, q), (_, k_transposed) = trace[f"head{head}.QK"].factors
    (_, v) = trace[f"head{head}.out"].factors[1]
    torch.testing.assert_close(trace[f"head{head}.V"].values, v, atol=1e-4, rtol=1e-4)
    assert all(isinstance(step.formula, str) for step in trace.steps)
    capped = f"head{head}.capped" in {step.key for step in trace.steps}
    assert capped == ("softcap" in options)
    if capped:
        scaled, cap = trace[f"head{head}.scaled"].values, trace[f"head{head}.capped"]
        torch.testing.assert_close(cap.values, 3 * torch.tanh(scaled / 3))
        assert "3 · tanh(" in cap.formula
    if "rope" not in options:
        torch.testing.assert_close(trace[f"head{head}.Q"].values, q, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            trace[f"head{head}.K"].values, k_transposed.T, atol=1e-4, rtol=1e-4
        )
    placed = f"head{head}.Q_placed" in {step.key for step in trace.steps}
    assert placed == ("rope" in options)


def test_steps_of_a_models_head_name_its_key_value_head_and_layer() -> None:
    trace = trace_model(_Model(rope=RopeConfig(), qk_norm=NORM), [1, 2], 1, 3, ["a", "b"])
    assert trace["head3.K"].formula == "K₃ = X · W_K¹"
    assert trace["head3.Q_placed"].formula == "Q₃ ← rotary(norm(Q₃))"
    after = QKNormConfig(norm=NormConfig(), place="after_rope")
    other = trace_model(_Model(rope=RopeConfig(), qk_norm=after), [1, 2], 1, 3)
    assert other["head3.K_placed"].formula == "K₃ ← norm(rotary(K₃))"
    assert trace["head3.Q_placed"].title == (
        "Head 3: queries normalized and rotated to their positions"
    )
    assert "Layer 1, head 3 of 4" in trace.title
    assert trace.tokens == ("a", "b")
    assert "largest difference" in trace.notes[0]


@pytest.mark.parametrize(
    ("layer", "head", "words"),
    [(2, 0, "layer must be from 0 to 1: got 2"), (0, 4, "head must be from 0 to 3: got 4")],
)
def test_layer_or_head_that_is_not_there_is_refused(layer: int, head: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trace_model(_Model(), [1], layer, head)
