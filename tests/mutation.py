"""Removes one feature's line at a time from each kernel and shows that the tests fail.

    python tests/mutation.py [--only WORD] [--write]

Prints a table; exit code 1 if a mutant survives. ``--write`` puts it into docs/capabilities.md.

The tree is not touched: every mutant is a copy of the package in a temporary directory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = [
    "tests/kernels/test_matrix.py",
    "tests/kernels/test_promises.py",
    "tests/kernels/test_flex.py",
    "tests/semantics/test_laws.py",
    "tests/semantics/test_weights.py",
]
KEYWORDS = (
    "covering or feature_alone or minus_infinity or sdpa_can_do or poison or masked_for_all"
    " or garbage or kv_heads or skipped or head_size or merging or finite_differences"
    " or functions_match or masked_keys or queries_that_see"
)


@dataclass(frozen=True)
class Mutation:
    feature: str
    file: str
    line: str
    instead: str


def _m(feature: str, file: str, line: str, instead: str) -> Mutation:
    return Mutation(feature, file, line, instead)


REFERENCE, SCORES = "semantics/reference.py", "semantics/scores.py"
FLEX, FUNCTIONS = "kernels/flex.py", "kernels/flex_functions.py"
WEIGHTS = "semantics/weights.py"
TILED, SDPA, STATE = "kernels/tiled.py", "kernels/sdpa.py", "semantics/state.py"

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
    _m("empty row: sum", TILED, "torch.where(total == 0, 1.0, total)", "total"),
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
    _m("bias, backward", TILED, "spec.bias.add_gradient(grad_bias,", "(lambda *a: 0)(grad_bias,"),
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
    _m("refuses other masks", SDPA, "if call.visibility is not Visibility.ALL and", "if False and"),
    _m(
        "refuses a gradient through lse",
        SDPA,
        "if call.needs_lse and call.requires_grad:",
        "if False:",
    ),
    _m(
        "mask",
        FLEX,
        "blocks = call.spec, None\n    if spec.mask is not None:",
        "blocks = call.spec, None\n    if False:",
    ),
    _m("scale", FLEX, "blocks, spec.scale, call.groups > 1", "blocks, None, call.groups > 1"),
    _m("quarantine", FLEX, "k, v, bad = quarantine(k, v)", "pass"),
    _m("a seen NaN shows", FLEX, "if bad is not None and bool(bad.any()):", "if False:"),
    _m("refuses dropout", FLEX, "if spec.dropout_p:", "if False:"),
    _m("softcap", FUNCTIONS, "torch.tanh(score / cap) * cap", "score"),
    _m("bias", FUNCTIONS, "score if added is None else score + added(b, h, q, k)", "score"),
    _m("quarantine", WEIGHTS, "k, _, bad = quarantine(k, k[..., :0])", "bad = None"),
    _m("a seen NaN shows", WEIGHTS, "if bad is not None:", "if False:"),
    _m("empty row", WEIGHTS, "lse.masked_fill(empty, 0.0)", "lse"),
    _m("sinks", "functional.py", "if call.spec.sinks is not None:", "if False:"),
    _m("sinks: share", STATE, "state.out * share[..., None]", "state.out"),
    _m("sinks: lse", STATE, "torch.logaddexp(lse, sink)", "lse"),
    _m("sinks: empty row", STATE, "torch.where(empty, 0.0, state.lse)", "state.lse"),
    _m("merge: empty row", STATE, "torch.where(peak.isneginf(), 0.0, peak)", "peak"),
]


def run(mutation: Mutation | None) -> tuple[bool, str]:
    """Whether the tests fail on a copy with this line changed, and the first failure."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src/polyhead", Path(folder) / "polyhead")
        if mutation is not None:
            path = Path(folder) / "polyhead" / mutation.file
            text = path.read_text(encoding="utf-8")
            if text.count(mutation.line) != 1:
                raise SystemExit(f"{mutation}: the line is there {text.count(mutation.line)} times")
            path.write_text(text.replace(mutation.line, mutation.instead), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tb=no"]
        done = subprocess.run(
            [*command, "-m", "not slow", "-k", KEYWORDS, *TESTS],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": folder},
            capture_output=True,
            text=True,
        )
        failures = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        if done.returncode not in (0, 1):
            raise SystemExit(done.stdout + done.stderr)
        first = failures[0].split("::")[-1].split(" - ")[0] if failures else ""
        return done.returncode == 1, first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutations whose feature or file has this word")
    parser.add_argument("--write", action="store_true", help="write docs/capabilities.md")
    asked = parser.parse_args()
    failed, first = run(None)
    if failed:
        raise SystemExit(f"the tests fail without a mutation: {first}")
    chosen = [m for m in MUTATIONS if asked.only in m.feature or asked.only in m.file]
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
