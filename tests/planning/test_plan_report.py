"""Plans as text, word for word: a cache in pages, an encoder, a mesh, what fits and what does not.

python tests/planning/test_plan_report.py     writes the texts anew; read what changed
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from polyhead.config import TransformerConfig
from polyhead.layers import AttentionConfig, FeedForwardConfig, LayerConfig
from polyhead.planning import plan
from polyhead.planning.tables import render

FOLDER = Path(__file__).parent / "reports"
MESH: dict[str, Any] = {
    "mesh": {"context": 4, "tensor": 2},
    "link": "50GB/s",
    "flops": "500TFLOP/s",
}
MIXED = TransformerConfig(
    "decoder", 1000, 128, 2048,
    (
        LayerConfig(AttentionConfig(8, 2, 16), FeedForwardConfig(512)),
        LayerConfig(AttentionConfig(4, 4, 32, window=64), FeedForwardConfig(96, gated=False)),
    ),
)  # fmt: skip
CODES = re.compile(r"\x1b\[([\d;]*)m")
SIGNS = {"33": "y", "1": "b", "2": "d"}  # yellow, bold, dim
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "fits": ("llama-3-8b", {"tokens": 8192, "memory": "24GiB", "bandwidth": "1TB/s"}),
    "does-not-fit": (
        "mixtral-8x7b",
        {
            "tokens": 32768,
            "batch_size": 3,
            "memory": "88GiB",
            "flops": "10TFLOP/s",
            "kv_dtype": "int8",
        },
    ),
    "pages": (
        "deepseek-v2",
        {"tokens": 1000, "page_size": 64, "tensor_parallel": 4, "dtype": "int4"},
    ),
    "encoder": ("bert-base", {"tokens": 512, "batch_size": 8, "memory": "1GiB"}),
    "encoder-decoder": ("transformer-base", {"tokens": 100}),
    "layers-of-two-kinds": (MIXED, {"tokens": 512, "bandwidth": "1GB/s", "flops": "1TFLOP/s"}),
    "mesh": ("llama-3-8b", {"tokens": 8192} | MESH),
}


def styled(name: str) -> str:
    """The tables of a terminal, each line behind a sign of its style."""
    config, arguments = CASES[name]
    screen = Console(
        file=io.StringIO(), width=80, color_system="standard", force_terminal=True, markup=False,
        highlight=False, legacy_windows=False,
    )  # fmt: skip
    for part in render(plan(config, **arguments)):
        screen.print(part)
    screen.file.seek(0)
    lines = []
    for line in screen.file.read().splitlines():
        codes = set(";".join(CODES.findall(line)).split(";"))
        sign = next((sign for code, sign in SIGNS.items() if code in codes), " ")
        lines.append(f"{sign} {CODES.sub('', line)}".rstrip() + "\n")
    return "".join(lines)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_says_word_for_word_what_it_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(variable, raising=False)
    assert styled(name) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_an_encoder_has_no_step_and_reads_nothing_for_one() -> None:
    made = plan("bert-base", tokens=512)
    assert made.decode is made.bound is None
    assert made.decode_weight_bytes == made.decode_cache_bytes == made.cache_bytes == 0


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in CASES:
        (FOLDER / f"{each}.txt").write_text(styled(each), encoding="utf-8")
