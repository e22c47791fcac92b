"""Removes one feature's line at a time from each kernel and room and shows that the tests fail.

    python tests/mutation.py [--only WORD | --room ROOM] [--write]

Prints a table; exit code 1 if a mutant survives. ``--write`` puts that of the kernels into
docs/capabilities.md. The mutants of the kernels are listed here, those of the rooms in
``mutants.py`` with the test files that must notice; these run in a fork of a process with torch.

The tree is not touched: every mutant is a copy of the package in a temporary directory. Mutants of
the C++ are compiled there, and run without the test at first use, which would switch them off.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from mutants import ROOMS

ROOT = Path(__file__).parents[1]
SOURCES = ["src", "csrc", "setup.py", "pyproject.toml", "README.md", "LICENSE"]
TESTS = [
    "tests/kernels/test_matrix.py",
    "tests/kernels/test_native.py",
    "tests/kernels/test_native_codes.py",
    "tests/kernels/test_native_gradients.py",
    "tests/kernels/test_promises.py",
    "tests/kernels/test_flex.py",
    "tests/semantics/test_mask_ranges.py",
    "tests/semantics/test_parts.py",
    "tests/semantics/test_block_sparse.py",
    "tests/semantics/test_fire.py",
    "tests/semantics/test_laws.py",
    "tests/semantics/test_weights.py",
    "tests/inspection/test_statistics.py",
]
KEYWORDS = (
    "covering or feature_alone or minus_infinity or sdpa_can_do or poison or masked_for_all"
    " or garbage or kv_heads or skipped or head_size or merging or finite_differences"
    " or functions_match or masked_keys or queries_that_see or range_of_positions"
    " or native_can_do or any_problem or shapes_of_decoding or does_not_leak or read_where_they_lie"
    " or explicit_positions or it_cannot_do or same_bits or far_apart or goes_another_way"
    " or both_hide"
    " or shapes_of_training or gives_and_takes or gets_the_sum or bit_identical or pass_over_a_tile"
    " or over_codes or that_codes_say or coded or unwritten_codes or of_codes_are_checked"
    " or scale_may_be or no_shortcut or are_kept or are_empty or blocks_of_the_table or all_tensors"
)


@dataclass(frozen=True)
class Mutation:
    feature: str
    file: str
    line: str
    instead: str
    tests: str = ""
    """The test files that must notice; empty: those of the kernels, ``TESTS``."""

    @property
    def path(self) -> Path:
        """Where the file lies in the tree; of a room, the file that holds the line."""
        path = Path("" if self.file.startswith("csrc/") else "src/polyhead") / self.file
        if not (ROOT / path).is_dir():
            return path
        files = sorted((ROOT / path).rglob("*.py"))
        found = [file for file in files if self.line in file.read_text(encoding="utf-8")]
        return found[0].relative_to(ROOT) if len(found) == 1 else path


def _m(feature: str, file: str, line: str, instead: str) -> Mutation:
    return Mutation(feature, file, line, instead)


REFERENCE, SCORES = "semantics/reference.py", "semantics/scores.py"
FLEX, FLEX_BLOCKS = "kernels/flex.py", "kernels/flex_blocks.py"
PAIRS, PARTS = "semantics/pairs.py", "semantics/parts.py"
BLOCK_SPARSE = "semantics/masks/block_sparse.py"
WEIGHTS = "semantics/weights.py"
TILED, SDPA, STATE = "kernels/tiled.py", "kernels/sdpa.py", "semantics/state.py"
NATIVE, ALGEBRA = "kernels/native.py", "semantics/masks/algebra.py"
POSITIONAL, PACKED = "semantics/masks/positional.py", "semantics/masks/packed.py"
ROWS_CPP, ATTEND_CPP = "csrc/scores.h", "csrc/attend.h"
FEW_CPP, MANY_CPP, BLOCKS_CPP = "csrc/few_rows.h", "csrc/many_rows.h", "csrc/plan.h"
STATISTICS_CPP = "csrc/statistics.h"
MANY_PRODUCTS_CPP, MANY_NETWORKS_CPP = "csrc/many_products.h", "csrc/many_networks.h"
CODES_CPP, FEW_CODES_CPP, INTEGERS_CPP = "csrc/codes.h", "csrc/few_codes.h", "csrc/few_integers.h"
CODING, DROPOUT = "native/coding.py", "native/dropout.py"
GRADIENTS_CPP, BIAS_CPP = "csrc/gradients.h", "csrc/bias_gradients.h"
OPERATOR, EXTRAS, BIASES = "kernels/operators.py", "kernels/extras.py", "semantics/biases.py"

MUTATIONS = [
    _m("scale", REFERENCE, "q.to(precise) * spec.scale", "q.to(precise)"),
    _m("dropout", REFERENCE, "if spec.dropout_p:", "if False:"),
    _m("quarantine", REFERENCE, "if spec.mask is not None:", "if False:"),
    _m(
        "silent queries",
        REFERENCE,
        "q_scaled.where(seen.any(dim=-1, keepdim=True), 0.0)",
        "q_scaled",
    ),
    _m("a seen NaN shows", REFERENCE, "if bad is not None:", "if False:"),
    _m("empty row: weights", REFERENCE, "lse).masked_fill(empty, 0.0)", "lse)"),
    _m("empty row: lse", REFERENCE, "lse.masked_fill(empty, -torch.inf)", "lse"),
    _m("softcap (reference, tiled)", SCORES, "if spec.softcap is not None:", "if False:"),
    _m("bias (reference, tiled)", SCORES, "if spec.bias is not None:", "if False:"),
    _m("mask (reference, tiled)", SCORES, "if spec.mask is not None and", "if False and"),
    _m("scale", TILED, "to(precise) * spec.scale).contiguous", "to(precise)).contiguous"),
    _m("scale, backward: k", TILED, "0.0) * spec.scale", "0.0)"),
    _m("scale, backward: q", TILED, "grad_q_rows * spec.scale", "grad_q_rows"),
    _m("running maximum", TILED, "torch.maximum(peak, tile_peak)", "tile_peak"),
    _m("rescaled sum", TILED, "total * rescale + tile_total", "total + tile_total"),
    _m("rescaled values", TILED, "acc * rescale[..., None] + tile_acc", "acc + tile_acc"),
    _m("empty row: peak", TILED, "new_peak.masked_fill(new_peak.isneginf(), 0.0)", "new_peak"),
    _m("empty row: sum", TILED, "some = total.masked_fill(total == 0, 1.0)", "some = total"),
    _m("lse", TILED, "peak + torch.log(some)", "peak"),
    _m("dropout", TILED, "weights = weights * keep_weights(", "keep_weights("),
    _m("dropout's factor", TILED, "(some * (1.0 - spec.dropout_p))", "some"),
    _m(
        "dropout, backward",
        TILED,
        "kept_weights, grad_weights = weights * kept, grad_weights * kept",
        "pass",
    ),
    _m("quarantine", TILED, "            k, v, bad = quarantine(k, v)", "            pass"),
    _m(
        "quarantine, backward",
        TILED,
        "k_tile, v_tile, _ = quarantine(k_tile, v_tile)",
        "pass",
    ),
    _m("a seen NaN shows", TILED, "if spoiled is not None:", "if False:"),
    _m("silent rows, backward", TILED, "silent = lse_rows.isneginf() |", "silent ="),
    _m("spoiled rows, backward", TILED, "| (out_rows.isnan()", "& (out_rows.isnan()"),
    _m("bias, backward", TILED, "spec.bias.add_gradients(grad_bias,", "(lambda *a: 0)(grad_bias,"),
    _m(
        "softcap, backward",
        TILED,
        "if capped is not None and spec.softcap is not None:",
        "if False:",
    ),
    _m("softcapped scores kept", TILED, "scores = scores.clone()", "pass"),
    _m("row sums, backward", TILED, "(grad_weights - delta[..., None])", "grad_weights"),
    _m(
        "gradient through lse",
        TILED,
        "delta = delta - _rows_of(grad_lse, rows).masked_fill(silent, 0.0)",
        "pass",
    ),
    _m("tiles skipped", TILED, "if kind is not Visibility.NONE:", "if True:"),
    _m("mask", SDPA, "is_causal=True", "is_causal=False"),
    _m(
        "scale", SDPA, "q, k, v, is_causal=is_causal, scale=scale,", "q, k, v, is_causal=is_causal,"
    ),
    _m("scale, with lse", SDPA, "0.0, is_causal, scale=scale", "0.0, is_causal"),
    _m("quarantine", SDPA, "k, v, bad = quarantine(k, v)", "bad = None"),
    _m("a seen NaN shows", SDPA, "if bad is None:", "if True:"),
    _m("refuses softcap", SDPA, "if spec.softcap is not None:", "if False:"),
    _m("refuses bias", SDPA, "if spec.bias is not None:", "if False:"),
    _m("refuses dropout", SDPA, "if spec.dropout_p:", "if False:"),
    _m("refuses strided rows", SDPA, "if not _rows_are_dense(call):", "if False:"),
    _m("refuses other masks", SDPA, "if is_causal and not", "if False and not"),
    _m(
        "refuses a gradient through lse",
        SDPA,
        "if call.needs_lse and call.requires_grad:",
        "if False:",
    ),
    _m(
        "mask",
        FLEX,
        "spec.bias.rule(of)\n    if spec.mask is not None:",
        "spec.bias.rule(of)\n    if False:",
    ),
    _m("scale", FLEX, "blocks, spec.scale, call.groups > 1", "blocks, None, call.groups > 1"),
    _m("quarantine", FLEX, "k, v, bad = quarantine(k, v)", "pass"),
    _m("a seen NaN shows", FLEX, "if bad is not None and bool(bad.any()):", "if False:"),
    _m("refuses dropout", FLEX, "if spec.dropout_p:", "if False:"),
    _m("softcap", FLEX, "torch.tanh(score / cap) * cap", "score"),
    _m("bias", FLEX, "score if bias is None else score + bias((b, h, q, k))", "score"),
    _m("written tensors", FLEX_BLOCKS, "version == x._version", "True"),
    _m("whole blocks", FLEX_BLOCKS, "(low_most <= starts)", "(low <= starts)"),
    _m("cut blocks", FLEX_BLOCKS, "full & _inside(q.length, k.length, device) & (", "full & ("),
    _m("another meaning", PARTS, "setattr(cls, name, getattr(base, name))", "pass"),
    _m("queries before keys", BLOCK_SPARSE, "q(pair).clamp(min=0)", "q(pair)"),
    _m("gradients by the tile", BIASES, "total += piece", "pass"),
    _m(
        "queries of one pair", PAIRS, "return self._place(self.q, 2)", "return lambda pair: pair[2]"
    ),
    _m("keys of one pair", PAIRS, "return self._place(self.k, 3)", "return lambda pair: pair[3]"),
    _m("quarantine", WEIGHTS, "k, _, bad = quarantine(k, k[..., :0])", "bad = None"),
    _m("a seen NaN shows", WEIGHTS, "if bad is not None:", "if False:"),
    _m("empty row", WEIGHTS, "lse.to(precise).masked_fill(empty, torch.inf)", "lse.to(precise)"),
    _m("one thread", SCORES, "if spec.deterministic and x.is_cpu", "if False"),
    _m("sinks", "functional.py", "if call.spec.sinks is not None:", "if False:"),
    _m("sinks: share", STATE, "state.out * share[..., None]", "state.out"),
    _m("sinks: lse", STATE, "torch.logaddexp(lse, sink)", "lse"),
    _m("sinks: empty row", STATE, "state.lse.masked_fill(empty, 0.0)", "state.lse"),
    _m("merge: empty row", STATE, "peak.masked_fill(peak.isneginf(), 0.0)", "peak"),
    _m("mask's rules", EXTRAS, "bounds = _bounds(found, q)", "pass"),
    _m("mask's tensors", EXTRAS, "if found.keep is not None:", "if False:"),
    _m(
        "both of two tensors",
        ALGEBRA,
        "torch.logical_and, left.keep, right.keep",
        "torch.logical_or, left.keep, right.keep",
    ),
    _m("scale", NATIVE, "attend(call.q, pieces, spec.scale", "attend(call.q, pieces, 1.0"),
    _m("scale, differentiable", NATIVE, "call.q, spec.scale, plan)", "call.q, 1.0, plan)"),
    _m("softcap", EXTRAS, "Extras(spec.softcap or 0.0", "Extras(0.0"),
    _m(
        "bias",
        EXTRAS,
        "slopes, by_distance, numbers.tensor",
        "slopes, by_distance, None",
    ),
    _m("bias by position", EXTRAS, "if numbers.tensor is None:", "if False:"),
    _m("bias, backward", OPERATOR, "of_bias = ctx.needs_input_grad[3]", "of_bias = False"),
    _m("buckets behind", BIASES, "Tokens.of(1, shift=self.max_distance)", "Tokens.of(1)"),
    _m("positions", EXTRAS, "if tokens.positions is not None or tokens.stride != 1:", "if False:"),
    _m("strided rows", NATIVE, "k=dense(piece.k), v=dense(piece.v)", "k=piece.k, v=piece.v"),
    _m("refuses a cache's gradients", NATIVE, "if call.requires_grad:", "if False:"),
    _m("refuses far distances", BIASES, "if self.max_distance > FARTHEST:", "if False:"),
    _m("refuses other biases", EXTRAS, "if found_numbers is None:", "if False:"),
    _m("dropout", EXTRAS, "if spec.dropout_p else None", "if False else None"),
    _m("dropout alone", EXTRAS, "and not spec.dropout_p", ""),
    _m(
        "dropout, differentiable",
        OPERATOR,
        "if seed is None else Dropout(",
        "if True else Dropout(",
    ),
    _m("heads and rows", DROPOUT, "_mix(seed + rows)", "_mix(seed + 0 * rows)"),
    _m("queries", DROPOUT, " + queries[:, None]", ""),
    _m("keys", DROPOUT, " + keys)", ")"),
    _m("the avalanche", DROPOUT, "return (x >> 16) ^ x", "return x"),
    _m("refuses float64", NATIVE, "if q.dtype not in DTYPES:", "if False:"),
    _m("refuses other masks", EXTRAS, "if found is None:", "if False:"),
    _m("window's far side", POSITIONAL, "at + self.ahead + 1)", "None)"),
    _m("documents' starts", PACKED, "Range(starts.gather(1, ids),", "Range(None,"),
    _m("refuses places moved", PACKED, "return None\n        ends", "pass\n        ends"),
    _m("and: low", ALGEBRA, "_either(torch.maximum, left.low, right.low)", "left.low"),
    _m("and: high", ALGEBRA, "_either(torch.minimum, left.high, right.high)", "left.high"),
    _m("or: high", ALGEBRA, "torch.maximum(left.high, right.high)", "left.high"),
    _m("or: holes", ALGEBRA, " or left.low is not None or right.low is not None", ""),
    _m("scale, beside others", ROWS_CPP, "if (factor != late_scale(c))", "if (false)"),
    _m("scale of weights", ROWS_CPP, "power = scale * kLog2OfE", "power = kLog2OfE"),
    _m("scale of sums", ROWS_CPP, "(before - peak) * scale", "(before - peak)"),
    _m("scale below 0", ROWS_CPP, ": c.scale > 0 ?", ": true ?"),
    _m("softcap", ROWS_CPP, "if (c.softcap > 0) {", "if (false) {"),
    _m(
        "bias",
        ROWS_CPP,
        "if (c.slopes || c.by_distance || c.bias) add_bias(c,",
        "if (false) hide(c,",
    ),
    _m("ALiBi", ROWS_CPP, "s[j] -= slope * apart;", ""),
    _m("T5's far keys behind", ROWS_CPP, "s[j] += numbers[0];", ";"),
    _m("T5's near keys", ROWS_CPP, "s[j] += numbers[at.column + j];", ";"),
    _m("T5's far keys ahead", ROWS_CPP, "s[j] += numbers[last];", ";"),
    _m("T5, positions", ROWS_CPP, "numbers[column_of(c, query, keys.positions[j])]", "numbers[0]"),
    _m("dropout", ROWS_CPP, "if (c.dropout.least) {", "if (false) {"),
    _m(
        "dropout: heads and rows", ROWS_CPP, "(uint32_t)(rows.batch * c.heads + rows.head(i))", "0u"
    ),
    _m("dropout: queries", ROWS_CPP, " + (uint32_t)rows.token(i)", ""),
    _m("dropout: blocks of keys", ROWS_CPP, " + (uint32_t)keys.index;", ";"),
    _m("dropout: place of queries", ROWS_CPP, "row + d.query", "row"),
    _m("dropout: place of keys", ROWS_CPP, " + d.key + ", " + "),
    _m("dropout: next keys", ROWS_CPP, "place_ += (uint32_t)W;", ""),
    _m("dropout: the avalanche", ROWS_CPP, "return (x >> 16) ^ x;", "return x;"),
    _m("mask", ROWS_CPP, "if (visible == Visible::some) hide(c, rows, i, keys, s);", ""),
    _m("mask's tensors", ROWS_CPP, "if (!keep[j]) s[j] = kMinusInfinity;", ";"),
    _m("padding of a block", ROWS_CPP, "j < padded; ++j) s[j] = kMinusInfinity", "false;)"),
    _m("running maximum", ROWS_CPP, "peak = peak > before ? peak : before;", ""),
    _m(
        "rescaled sum", ROWS_CPP, "multiply_add(sum(all), state.total[i], factor)", "state.total[i]"
    ),
    _m("empty row: peak", ROWS_CPP, "if (peak == kMinusInfinity) {", "if (false) {"),
    _m("rescaled values", "csrc/few_products.h", "n * W) * factors[m]", "n * W)"),
    _m("quarantine", FEW_CPP, "if (watch && !all_finite<T>(c, keys, from)) {", "if (false) {"),
    _m(
        "rescaled values",
        MANY_CPP,
        "values, p.width, p.width / W, factors, after_v);\n    }\n}",
        "values, p.width, p.width / W, nullptr, after_v);\n    }\n}",
    ),
    _m("quarantine", MANY_CPP, "if (watch && !all_finite<T>(c, keys,", "if (false && (c, keys,"),
    _m("a seen NaN shows", BLOCKS_CPP, "if (sees(c, rows, i, keys, j))", "if (false)"),
    _m("skipped blocks", BLOCKS_CPP, "if (visible != Visible::none) block", "block"),
    _m(
        "codes: scale",
        CODES_CPP,
        "store(start + load(codes + j * stride + d) * factor,",
        "store(start + load(codes + j * stride + d),",
    ),
    _m(
        "codes: zero",
        CODES_CPP,
        "store(zero + load(codes + d) * scale,",
        "store(load(codes + d) * scale,",
    ),
    _m(
        "codes: columns beyond vectors",
        CODES_CPP,
        "round_to(zero + to_float(codes[d]) * scale,",
        "round_to(zero,",
    ),
    _m(
        "codes: high halves",
        CODES_CPP,
        "if (low < count) run((const HighHalf*)",
        "if (low < count) run((const LowHalf*)",
    ),
    _m(
        "codes: part of a unit",
        CODES_CPP,
        "first = (at + j + piece.skipped) % group",
        "first = 0 * (at + j)",
    ),
    _m(
        "codes: page table",
        CODES_CPP,
        "place = piece.pages[rows.batch * piece.pages_batch + unit / in_page];",
        "",
    ),
    _m(
        "codes: key scale",
        FEW_CODES_CPP,
        "store_any(scaled + m * D + d, x * scale)",
        "store_any(scaled + m * D + d, x)",
    ),
    _m(
        "codes: key zero", FEW_CODES_CPP, "s[m * kFewKeys + j] += start", "s[m * kFewKeys + j] += 0"
    ),
    _m(
        "codes: value scale",
        FEW_CODES_CPP,
        "weight * load(room.scale + i * kFewKeys + j)",
        "weight",
    ),
    _m(
        "codes: value zero",
        FEW_CODES_CPP,
        "all += weight * load(room.zero + i * kFewKeys + j);",
        "",
    ),
    _m(
        "codes: rescaled values",
        FEW_CODES_CPP,
        "load(to + d) * factors[m] + start",
        "load(to + d) + start",
    ),
    _m("codes: quarantine", FEW_CPP, "if (!block.finite) return false;", ""),
    _m("whole numbers: key scale", INTEGERS_CPP, "factor = x * scale;", "factor = x;"),
    _m("whole numbers: key zero", INTEGERS_CPP, "starts[m] += x * zero;", ""),
    _m("whole numbers: high digit", INTEGERS_CPP, "acc[i] <<= 8;", "acc[i] <<= 0;"),
    _m("whole numbers: value scale", INTEGERS_CPP, "weight * load(scale + j);", "weight;"),
    _m(
        "whole numbers: scales of hidden tokens",
        INTEGERS_CPP,
        "most = larger(factors[j / W], most);",
        "most = larger(load(scale + j), most);",
    ),
    _m("whole numbers: value zero", INTEGERS_CPP, "start += weight * load(zero + j);", ""),
    _m("whole numbers: low digit", INTEGERS_CPP, "Vec) * 256.0f +", "Vec) * 256.0f + 0.0f *"),
    _m(
        "whole numbers: rescaled values",
        INTEGERS_CPP,
        "load(to) * factors[m] + left",
        "load(to) + left",
    ),
    _m(
        "whole numbers: loose tokens",
        INTEGERS_CPP,
        "if ((at + j) % 4 == 0 && j + 4 <= count) {",
        "if (j + 4 <= count) {",
    ),
    _m("codes: sizes", CODING, "codes.shape[3] * 8 != count * bits", "False"),
    _m("codes: sizes of scales", CODING, "or x.shape != (*codes.shape[:3], width)", ""),
    _m(
        "empty row: sum",
        ATTEND_CPP,
        "total == 0 ? 0.0f : c.dropout.factor / total",
        "c.dropout.factor / total",
    ),
    _m("dropout's factor", ATTEND_CPP, "c.dropout.factor / total", "1.0f / total"),
    _m("lse", ATTEND_CPP, "* scale + __builtin_logf(total)", "* scale"),
    _m("scale of lse", ATTEND_CPP, "state.peak[i] * scale", "state.peak[i]"),
    _m(
        "scale of merged parts",
        ATTEND_CPP,
        "(into.peak[i] - peak) * scale",
        "(into.peak[i] - peak)",
    ),
    _m(
        "merged sums",
        ATTEND_CPP,
        "multiply_add(part.total[i] * b, into.total[i], a)",
        "into.total[i]",
    ),
    _m(
        "merged values",
        ATTEND_CPP,
        "multiply_add(load(y + d) * b, load(x + d), splat(a))",
        "load(x + d)",
    ),
    _m(
        "softcap's slope",
        GRADIENTS_CPP,
        "if (c.softcap > 0) change = change *",
        "if (false) change =",
    ),
    _m("scale of weights", GRADIENTS_CPP, "late_scale(c) * kLog2OfE", "kLog2OfE"),
    _m("scale", GRADIENTS_CPP, "change = change * c.scale;", ""),
    _m("zeros round a strip", GRADIENTS_CPP, "if (j < strip.from || j >= strip.to)", "if (false)"),
    _m("strips before a key", GRADIENTS_CPP, "strip.to <= m ||", "strip.to <= m + keys ||"),
    _m("strips behind a key", GRADIENTS_CPP, "strip.from >= m + keys", "strip.from >= m"),
    _m("keys of a strip", GRADIENTS_CPP, "block.k_rows + k * p.key_width", "block.k_rows"),
    _m("what the sum takes", GRADIENTS_CPP, "* share - delta)", "* share)"),
    _m(
        "dropout of what comes back",
        GRADIENTS_CPP,
        "(load(gradients + j) * share",
        "(load(gradients + j)",
    ),
    _m("dropout of weights", GRADIENTS_CPP, "weights + j, weight * share", "weights + j, weight"),
    _m("gradient of lse", GRADIENTS_CPP, "delta - g.grad_lse[at]", "delta"),
    _m("rows that saw nothing", GRADIENTS_CPP, "lse == kMinusInfinity || strange", "strange"),
    _m("rows that saw NaN", GRADIENTS_CPP, "&& has_nan(out, V)", "&& false"),
    _m(
        "quarantine",
        GRADIENTS_CPP,
        "if ((c.low || c.keep) && !all_finite",
        "if (false && !all_finite",
    ),
    _m("sum of parts", GRADIENTS_CPP, "load(sum + d) + load(next + d)", "load(sum + d)"),
    _m("bias", GRADIENTS_CPP, "if (bias.to) add_bias_gradient(", "if (false) add_bias_gradient("),
    _m("bias's own sums", GRADIENTS_CPP, "p.bias.part && task < tasks", "p.bias.part && task < 1"),
    _m("turns of batch rows", GRADIENTS_CPP, "!g.bias_batch ? c.batch : 1", "false ? c.batch : 1"),
    _m("turns of heads", GRADIENTS_CPP, "!g.bias_head ? c.kv_heads : 1", "false ? c.kv_heads : 1"),
    _m("bias: heads", BIAS_CPP, " * bias.head;", " * 0;"),
    _m("bias: queries", BIAS_CPP, "rows.token(i) * bias.query", "0"),
    _m("bias: keys", BIAS_CPP, "keys.index * bias.key", "0"),
    _m("bias: sum over keys", BIAS_CPP, "*to += sum_of(changes", "*to = sum_of(changes"),
    _m("ALiBi's distances", BIAS_CPP, "changes[j] *= apart;", ""),
    _m("T5's far keys behind", BIAS_CPP, "to[0] +=", "to[0] ="),
    _m("T5's near keys", BIAS_CPP, "at.far - at.near", "0"),
    _m("T5's far keys ahead", BIAS_CPP, "to[last] +=", "to[last] ="),
    _m("T5, positions", BIAS_CPP, "column_of(c, query, keys.positions[j])", "0"),
    _m("rest of a sum", BIAS_CPP, "total += x[j];", ";"),
    *(
        Mutation(feature, "csrc/training.h", line, instead, "tests/layers/test_fused.py")
        for feature, line, instead in (
            ("a gate's slope", "load_some(up + i, n) * a.slope", "load_some(up + i, n) * a.value"),
            ("silu's slope", "(1.0f + near * (1.0f - share))", "1.0f"),
            (
                "far below 0",
                "larger(least, x) * share, share * (1.0f + near",
                "x * share, share * (1.0f + near",
            ),
            ("a norm's mean, backward", " - number * back", ""),
            (
                "a norm's offset, backward",
                "(load_some(weight + d, n) + p.offset) - number",
                "load_some(weight + d, n) - number",
            ),
            ("shares of a norm", "i < shares; ++i)\n        for", "i < 1; ++i)\n        for"),
            ("the last numbers", "if (n >= W) return store(x, p);", "return store(x, p);"),
            ("dropout's factor", "load_some(x + i, n) * factor)", "load_some(x + i, n))"),
            ("a residual path", "if (e.plus) y +=", "if (false) y +="),
        )
    ),
    *(
        Mutation(feature, f"csrc/{file}", line, instead, "tests/layers/test_eights.py")
        for file, feature, line, instead in (
            ("eights.h", "the middle of x's codes", "return -Whole<B>::kMiddle;", "return 0;"),
            ("eights.h", "minima", "* (float)total;", "* 0.0f;"),
            (
                "eights.h",
                "fifth bits in whole numbers",
                "nibbles(at + 6) | fifth",
                "nibbles(at + 6) & fifth",
            ),
            (
                "eights.h",
                "two scales of a unit",
                "Lanes{a, a, a, a, b, b, b, b}",
                "Lanes{a, a, a, a, a, a, a, a}",
            ),
            ("eights.h", "what is not finite", "sum(all) != 0.0f", "false"),
            (
                "product_calls.h",
                "later rows in 8 bits",
                "(const char*)p.x + m * p.x_stride * size",
                "(const char*)p.x",
            ),
        )
    ),
    *(
        Mutation(feature, f"csrc/{file}", line, instead, "tests/quantization")
        for file, feature, line, instead in (
            ("quantized.h", "Q4_0's middle", "-8.0f * *d", "-7.0f * *d"),
            (
                "quantized.h",
                "the fifth bit",
                "with_fifth_bits(low_bits(at + 6, v), bits, v)",
                "low_bits(at + 6, v)",
            ),
            (
                "quantized.h",
                "six bits of a scale",
                "(c & kFour) | (a >> 6 & kTwo) << 4",
                "(c & kFour)",
            ),
            (
                "quantized.h",
                "six bits of a minimum",
                "(c >> 4 & kFour) | (b >> 6 & kTwo) << 4",
                "(c >> 4 & kFour)",
            ),
            (
                "quantized.h",
                "Q6_K's second half",
                "load_any<Bytes>(at + 16 * j + 32)",
                "load_any<Bytes>(at + 16 * j)",
            ),
            ("quantized.h", "the second scale", "(v < kVectors / 2 ? first : second);", "first;"),
            ("quantized.h", "Q3_K's third bit", "(load_bytes(at + v * W) >> j & 1) * 4 - 4", "-4"),
            (
                "quantized.h",
                "half of the smallest scales",
                "at[0] < 2 ? 0x00200000u << at[0] :",
                "false ? 0u :",
            ),
            (
                "quantized_products.h",
                "scales of each row",
                "at + r * (B::kScaled ? 2 : B::kHalves)",
                "at",
            ),
            (
                "quantized_products.h",
                "rows that share scales",
                "(n + r) / from.rows * from.row",
                "(n + r) * from.row",
            ),
            (
                "quantized_products.h",
                "later groups of numbers",
                "const int64_t i = k / from.numbers, end",
                "const int64_t i = 0 * k, end",
            ),
            (
                "quantized_products.h",
                "zeros of signed codes",
                "(float)(int8_t)from.zeros[place]",
                "(float)from.zeros[place]",
            ),
            (
                "quantized_scaled.h",
                "codes that are no number, as halves",
                "_mm256_cmpeq_epi8_mask(codes | _mm256_set1_epi8(-128), _mm256_set1_epi8(-1))",
                "0",
            ),
            ("quantized_scaled.h", "the sign of 8-bit floats", "| code >> 7 << 31", ""),
            ("quantized_scaled.h", "the middle of 4 bits", "kMiddle = 8;", "kMiddle = 7;"),
            (
                "weight_calls.h",
                "scales of every number",
                "!scales.is(0, count) || !scales.is(1, s.row) ||",
                "",
            ),
            (
                "weight_calls.h",
                "zeros of every number",
                "!zeros.is(0, count) || !zeros.is(1, s.row) ||",
                "",
            ),
            ("quantized_products.h", "both sums", "acc[r][0] += acc[r][s];", ";"),
            (
                "quantized_products.h",
                "later runs of a row",
                "first / B::kNumbers * B::kBytes",
                "0 * B::kBytes",
            ),
            (
                "quantized_products.h",
                "sums in the order of float32",
                "acc[r][v % kSums] = multiply_add(acc[r][v % kSums]",
                "acc[r][0] = multiply_add(acc[r][0]",
            ),
            (
                "product_calls.h",
                "pairs: blocks beside numbers",
                "return by_row && kinds.blocks && kinds.numbers",
                "return false && kinds.numbers",
            ),
            (
                "weight_calls.h",
                "sizes of blocks",
                "weight.size[1] != (type ? row_bytes : inputs)",
                "(!type && weight.size[1] != inputs)",
            ),
        )
    ),
    *(
        Mutation(feature, f"csrc/{file}", line, instead, "tests/layers/test_step_caches.py")
        for file, feature, line, instead in (
            ("step.h", "what several tokens see", "high[m] = at[m] + 1;", "high[m] = INT64_MAX;"),
            (
                "step.h",
                "what a window hides",
                "s.window ? at - s.window + 1 : INT64_MIN",
                "INT64_MIN",
            ),
            (
                "step.h",
                "positions of queries of each row",
                "c.q_positions_batch = s.uneven ? s.tokens : 0;",
                "c.q_positions_batch = 0;",
            ),
            ("step.h", "what a chunk hides", "s.chunk ? at - at % s.chunk : s.window", "s.window"),
            (
                "step.h",
                "temperatures of rows",
                "s.temperatures[(position_of(s, m) + s.offset) / s.every]",
                "s.temperatures[(s.position + s.offset) / s.every]",
            ),
            (
                "step_calls.h",
                "positions without a temperature",
                "(at + s.offset) / s.every >= s.periods)",
                "false)",
            ),
            (
                "step.h",
                "the page of a token",
                "row = held.pages[b * held.pages_batch",
                "row = held.pages[0 * b",
            ),
            (
                "step.h",
                "the end of a ring",
                "for (; back > s.cache[i].length; --i)",
                "for (; false; --i)",
            ),
            ("sinks.h", "a sink", "sigmoid(lse - sink)", "sigmoid(lse)"),
            (
                "few_rows.h",
                "bits of what nobody sees",
                "few_block<T>(c, rows, keys, visible, q, row_bytes, good",
                "few_block<T>(c, rows, keys, visible, q, row_bytes, from",
            ),
        )
    ),
    *(
        Mutation(feature, "csrc/step_calls.h", line, instead, "tests/models/test_layer_runs.py")
        for feature, line, instead in (
            ("what a layer of a run reads", "s.x = i ? y : x", "s.x = x"),
            ("rotations of a run", "if (pair != turned_by_) {", "if (!turned_by_) {"),
            (
                "layers of a run that changed",
                "!is_as_it_was(layers_[i]->guard)",
                "!is_as_it_was(layers_[0]->guard)",
            ),
            ("layers behind one that ended early", "done == kParts * i && ", ""),
        )
    ),
    *(
        Mutation(feature, f"csrc/{file}", line, instead, "tests/layers/test_step.py")
        for file, feature, line, instead in (
            (
                "step.h",
                "a factor of the residual path",
                "if (s.residual_scale != 1.0f)",
                "if (false)",
            ),
            (
                "step.h",
                "norms behind sums",
                "if (s.post) norm_with(s, norm, y,",
                "if (false) norm_with(s, norm, y,",
            ),
            ("step.h", "networks beside attention", "add_rows(made, sum, features, made);", ""),
            (
                "step.h",
                "norms behind rotation",
                "if (s.norm_place == kAfterTurn) both_normed();",
                "",
            ),
            (
                "step.h",
                "norms of all heads",
                "whole = s.norm_place == kFullWidth;",
                "whole = false;",
            ),
            ("step.h", "temperatures", "if (s.temperatures) temper(", "if (false) temper("),
            ("step.h", "slopes that are rounded", "c.rounded = s.rounded", "c.rounded = 0.0f"),
            (
                "layer_calls.h",
                "numbers of an activation that moved",
                "alphas == Py_None || (remember_weight(",
                "true || (remember_weight(",
            ),
            ("step.h", "norms of latents", "if (l.norm.there) {", "if (false) {"),
            (
                "step.h",
                "rotated keys of latents",
                "turn(s, token + R, width, 1, P, turned, threads);",
                "",
            ),
            ("step.h", "a context for several rows", "c.queries = queries;", "c.queries = 1;"),
            (
                "step.h",
                "positions of keys",
                "c.pieces[i].position = next",
                "c.pieces[i].position = 0",
            ),
            (
                "step.h",
                "the context's norm",
                "read = entered(sum, s.cross.norm, h);",
                "read = sum;",
            ),
            (
                "step_calls.h",
                "a step without its context",
                "if (c.q.weight) s.network = Network{}, s.experts = nullptr;",
                "",
            ),
            (
                "step_calls.h",
                "experts that changed",
                "if (!is_as_it_was(self.data_.guards[chosen[i]])) return false;",
                "",
            ),
            (
                "step.h",
                "limits of queries",
                "if (s.clip < __builtin_inff()) clip(",
                "if (false) clip(",
            ),
            ("step.h", "features nobody asks for", "piece.k += skipped * sizeof(T);", ""),
            ("guards.h", "where weights lie", "PyLong_AsVoidPtr(address) == w.view.at", "true"),
            ("guards.h", "turned weights", "!is_true(call(torch_.is_contiguous, x))", "false"),
            ("guards.h", "negated weights", "is_true(call(torch_.is_neg, x))", "false"),
            ("guards.h", "what modules hold", "key != fact.entries[n] || value", "value"),
            (
                "guards.h",
                "classes of modules",
                "return (PyObject*)Py_TYPE(fact.thing) == fact.value;",
                "return true;",
            ),
        )
    ),
    Mutation(
        "gradients of a row alone",
        "csrc/gradients.h",
        "(c.by_row ? 1 : c.batch / p.batch_turns)",
        "(c.batch / p.batch_turns)",
        "tests/test_same_bits_gradients.py",
    ),
    Mutation(
        "rows of prompts as in decoding",
        "csrc/plan.h",
        "p.by_row = c.by_row || c.queries == 1 ||",
        "p.by_row = c.queries == 1 ||",
        "tests/kernels/test_native.py",
    ),
    Mutation(
        "shares that begin where they always do",
        "csrc/plan.h",
        "p.by_row ? fixed_share_at(p.first_share + i, p.share_keys) - p.origin :",
        "p.by_row ? fixed_share_at(i, p.share_keys) - (c.queries > 1 && i == 1 ? 64 : 0) :",
        "tests/kernels/test_native.py",
    ),
    *(
        Mutation(feature, file, line, instead, "tests/test_same_bits.py")
        for feature, file, line, instead in (
            ("rings: lanes of their keys", "csrc/joined.h", "place % (2 * W);", "0;"),
            (
                "rings: blocks at places",
                "csrc/joined.h",
                "(place / size + 1) * size - p.origin;",
                "index + size;",
            ),
            (
                "rings: shares at places",
                "csrc/plan.h",
                "p.joined ? c.pieces[0].position : 0;",
                "0;",
            ),
            (
                "rings: around the end",
                "csrc/joined.h",
                "absent || found.left < keys.length;",
                "absent;",
            ),
            ("rings: keys that are none", "csrc/scores.h", "j < keys.absent; ++j)", "j < 0; ++j)"),
        )
    ),
    Mutation(
        "the same sums for one row",
        "csrc/products.h",
        "constexpr int S = kSums;",
        "constexpr int S = M == 1 ? 4 : kSums;",
        "tests/test_sharing.py",
    ),
    Mutation(
        "GELU: which side of the normal distribution",
        "csrc/vector.h",
        "choose((VecInt)(x < Vec{}), beyond, 1.0f - beyond)",
        "1.0f - beyond",
        "tests/layers/test_linear.py",
    ),
    Mutation(
        "xIELU near zero",
        "csrc/products.h",
        "choose((VecInt)(x > splat(-0.5f)), p * x * x,",
        "choose((VecInt)(x > Vec{}), p * x * x,",
        "tests/layers/test_linear.py",
    ),
    Mutation(
        "biases that are rounded",
        "csrc/scores.h",
        "rounded<BFloat16>(rounded<BFloat16>(splat(slope)) * rounded<BFloat16>(at));",
        "splat(slope) * at;",
        "tests/kernels/test_native.py",
    ),
    Mutation(
        "gradients of biases that are rounded",
        NATIVE,
        "extras_of(call, rounds=plainly)",
        "extras_of(call, rounds=True)",
        "tests/kernels/test_native.py",
    ),
    Mutation(
        "norms of each head",
        "csrc/products.h",
        "own = m % p.heads * p.dim;",
        "own = 0;",
        "tests/layers/test_choices.py",
    ),
    Mutation(
        "LayerNorm's mean",
        "csrc/products.h",
        "mean = total / (float)p.dim;",
        "mean = 0;",
        "tests/layers/test_norms.py",
    ),
    Mutation(
        "LayerNorm's bias",
        "csrc/products.h",
        "store(bias ? scaled + load(bias + d) : scaled, y + d);",
        "store(scaled, y + d);",
        "tests/layers/test_norms.py",
    ),
    Mutation(
        "by heads: the last columns",
        "csrc/products.h",
        "for (; d < last; ++d)\n        for (int m = 0; m < M; ++m) {",
        "for (; d < last; ++d)\n        for (int m = 0; m < 1; ++m) {",
        "tests/layers/test_linear.py",
    ),
    Mutation(
        "by heads: where a share begins",
        "csrc/products.h",
        "const int64_t first = unit * run;",
        "const int64_t first = 0;",
        "tests/layers/test_linear.py",
    ),
    *(
        Mutation(feature, file, line, instead, "tests/layers/test_linear.py")
        for file, feature, line, instead in (
            (
                MANY_PRODUCTS_CPP,
                "many rows: the end of a row",
                "for (int64_t k = K / W * W; k < K; ++k)\n            for",
                "for (int64_t k = K; k < K; ++k)\n            for",
            ),
            (MANY_PRODUCTS_CPP, "many rows: runs", "from ? held[r * C + c] : Vec{};", "Vec{};"),
            (
                MANY_PRODUCTS_CPP,
                "many rows: a second weight",
                "(T*)p.y + (block + row) * p.y_stride + column + n",
                "(T*)p.y + (block + row) * p.y_stride + n",
            ),
            (
                MANY_PRODUCTS_CPP,
                "many rows: uneven tiles",
                "(i < rows % count ? i : rows % count)",
                "0",
            ),
            (
                MANY_PRODUCTS_CPP,
                "many rows: blocks",
                "(const T*)p.x + (block + row) * p.x_stride",
                "(const T*)p.x + row * p.x_stride",
            ),
            (MANY_PRODUCTS_CPP, "pairs: the end of a row", "(K - whole) * sizeof *from", "0"),
            ("csrc/products.h", "pairs: the end of few rows", "add(last, 2 * W, columns);", ""),
            (
                "csrc/product_calls.h",
                "pairs: many rows as few",
                "p.pairs = !by_row || !kinds.blocks;",
                "p.pairs = !by_row;",
            ),
            (MANY_NETWORKS_CPP, "many rows: biases of gates", "+ load(gate_bias + i)", ""),
            (
                MANY_NETWORKS_CPP,
                "many rows: the limit of values",
                "value = larger(-most",
                "larger(-most",
            ),
            (
                MANY_NETWORKS_CPP,
                "many rows: a gate's own panel",
                "panel(thread) + panel_numbers(K)",
                "panel(thread)",
            ),
        )
    ),
    _m("0 · −∞", STATISTICS_CPP, "larger(log, splat(kLeastLog))", "log"),
    _m("sums of keys", STATISTICS_CPP, "load(received + j) + weight", "weight"),
    _m("order of the largest", STATISTICS_CPP, "place > 0 && above(", "false && above("),
    _m("first of a run", STATISTICS_CPP, "t.first + j", "j"),
    _m("a seen NaN shows", STATISTICS_CPP, "strange ? total : peak", "peak"),
]

MUTATIONS_OF_ROOMS = [
    Mutation(feature, room, line, instead, tests)
    for room, groups in ROOMS.items()
    for tests, changes in groups.items()
    for feature, line, instead in changes
]


def run(mutation: Mutation | None) -> tuple[bool, str]:
    """Whether the tests fail on a copy with this line changed, and the first failure."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in SOURCES:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, folder / source)
            else:
                shutil.copy(ROOT / source, folder)
        if mutation is not None:
            replace_once(folder / mutation.path, mutation.line, mutation.instead)
            if mutation.file.startswith("csrc/"):
                compile_untested(folder)
        options = ["-x", "-p", "no:cacheprovider", "--tb=no", "-m", "not slow"]
        if mutation is not None and mutation.tests:
            code, told = forked([*options, *mutation.tests.split()], folder)
        else:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, "-k", KEYWORDS, *TESTS],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(folder / "src")},
                capture_output=True,
                text=True,
            )
            code, told = done.returncode, done.stdout + done.stderr
        failures = [line for line in told.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if code not in (0, 1) and not (mutation is not None and failures):
            raise SystemExit(told)
        first = failures[0].split("::")[-1].split(" - ")[0] if failures else ""
        return code != 0, first


def forked(arguments: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and output of pytest on the package in ``folder``; torch is imported once."""
    for name in ("torch", "pytest", "hypothesis", "safetensors.torch", "transformers", "rich"):
        importlib.import_module(name)
    if "polyhead" in sys.modules:
        raise SystemExit("polyhead was imported before its mutant could be")
    output = folder / "output.txt"
    child = os.fork()
    if child == 0:
        import pytest

        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(ROOT)
        sys.path.insert(0, str(folder / "src"))
        os.environ["PYTHONPATH"] = str(folder / "src")
        code = pytest.main(["--timeout=120", *arguments])
        sys.stdout.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), output.read_text(encoding="utf-8", errors="replace")


def replace_once(path: Path, line: str, instead: str) -> None:
    if path.is_dir():
        raise SystemExit(f"{path.name}: {line!r} is not in exactly one file of the room")
    text = path.read_text(encoding="utf-8")
    if text.count(line) != 1:
        raise SystemExit(f"{path.name}: {line!r} is there {text.count(line)} times")
    path.write_text(text.replace(line, instead), encoding="utf-8")


def compile_untested(folder: Path) -> None:
    """Builds the native code of a copy, which is then used however wrong it is."""
    tested = "if wrong is None:"
    replace_once(folder / "src/polyhead/native/selection.py", tested, "if True:")
    replace_once(folder / "setup.py", '"-O3"', '"-O1"')  # takes half as long to compile
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode or "error:" in done.stderr:
        raise SystemExit(f"the mutant does not compile: {done.stdout}{done.stderr}")


def can_run(mutation: Mutation) -> bool:
    """Mutants of native code need a compiler, and that the tree's own code was compiled.

    Those of Triton's need it, interpreted: ``TRITON_INTERPRET=1 python tests/mutation.py --room
    kernels/triton``.
    """
    if mutation.file == "kernels/triton":
        return find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
    needs = mutation.file in (NATIVE, EXTRAS, OPERATOR, "native") or mutation.file.startswith(
        "csrc/"
    )
    if not needs:
        return True
    return compiled() and shutil.which("g++") is not None


@cache
def compiled() -> bool:
    """Asked elsewhere: what this process has imported its forks would test in place of a mutant."""
    code = "import sys; from polyhead import native; sys.exit(native.unavailable() is not None)"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutations whose feature or file has this word")
    parser.add_argument("--write", action="store_true", help="write docs/capabilities.md")
    parser.add_argument("--room", choices=["kernels", "rooms", *ROOMS], help="only one's mutations")
    asked = parser.parse_args()
    everything = [*MUTATIONS, *MUTATIONS_OF_ROOMS]
    if asked.room is not None:
        everything = MUTATIONS if asked.room == "kernels" else MUTATIONS_OF_ROOMS
    if asked.room in ROOMS:
        everything = [m for m in everything if m.file == asked.room]
    if any(not m.tests for m in everything):
        failed, first = run(None)
        if failed:
            raise SystemExit(f"the tests fail without a mutation: {first}")
    chosen = [m for m in everything if asked.only in m.feature or asked.only in m.file]
    if left_out := [m for m in chosen if not can_run(m)]:
        print(
            f"{len(left_out)} mutants are left out: no compiled code or interpreted Triton here\n"
        )
        chosen = [m for m in chosen if can_run(m)]
    lines = ["| file | removed | caught by |", "|---|---|---|"]
    print(*lines, sep="\n")
    survivors = 0
    for mutation in chosen:
        caught, first = run(mutation)
        survivors += not caught
        verdict = f"`{first}`" if caught else "**survives**"
        lines.append(f"| {mutation.file} | {mutation.feature} | {verdict} |")
        print(lines[-1], flush=True)
    summary = f"{len(chosen) - survivors} of {len(chosen)} mutants are caught"
    print(f"\n{summary}")
    if asked.write:
        write(f"`python tests/mutation.py --write`: {summary}.", lines)
    return survivors > 0


def write(summary: str, lines: list[str]) -> None:
    """Puts the table at the end of docs/capabilities.md."""
    page = ROOT / "docs/capabilities.md"
    before = page.read_text(encoding="utf-8").partition("\n## Mutations")[0]
    table = "\n".join(lines)
    page.write_text(f"{before}\n## Mutations\n\n{summary}\n\n{table}\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
