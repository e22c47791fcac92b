"""Attention over ranks equals attention in one process, or is refused by name on every rank."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cases_of_attention import FEATURES
from worlds import World

import polyhead as ph
from polyhead.parallel import check
from polyhead.parallel.exchanges import EXCHANGES
from polyhead.parallel.order import ORDERS, Spread, visible_pairs
from polyhead.parallel.ranks import fingerprint

ALL = [*FEATURES]


@pytest.mark.parametrize(
    ("exchange", "order"), [("ring", "zigzag"), ("gather", "striped"), ("heads", "contiguous")]
)
def test_every_feature_equals_one_process_forward_and_backward(
    two: World, exchange: str, order: str
) -> None:
    two.run("cases_of_attention:equal_all", exchange, order, "float64", ALL)


def test_kernels_without_a_backward_pass_of_their_own_are_computed_again(two: World) -> None:
    features = ["window", "T5's bias", "sinks", "dropout", "nothing visible"]
    two.run("cases_of_attention:equal_all", "ring", "zigzag", "float64", features, "reference")


def test_pieces_of_a_block_add_up_in_compiled_code_and_beside_every_bias(two: World) -> None:
    features = ["causal", "MQA", "dropout", "ALiBi", "T5's bias", "tensor bias", "latent keys"]
    for exchange, order in (("ring", "striped"), ("gather", "zigzag")):
        two.run("cases_of_attention:in_pieces", exchange, order, "float32", features)
        two.run("cases_of_attention:in_pieces", exchange, order, "float64", features[-3:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_rounded_once_at_the_end(two: World, dtype: str) -> None:
    for exchange in ("ring", "gather"):
        two.run("cases_of_attention:rounded_once", exchange, dtype)


def test_a_rank_holds_its_share_of_what_one_process_holds(two: World) -> None:
    (first, one), (second, _) = two.run("cases_of_memory:share_of_attention", 8192, "ring")
    assert max(first, second) <= 1.15 * one / 2, f"{first}, {second} for {one} bytes"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_rank_of_four_holds_a_quarter_at_32k_tokens(exchange: str) -> None:
    with World(4, timeout=900) as world:
        found = world.run("cases_of_memory:share", 32768, 2, exchange, 256)
        one = found[0][1]
        assert max(held for held, _ in found) <= 1.15 * one / 4, found
        if exchange == "ring":  # heads holds queries twice, gather all keys
            found = world.run("cases_of_memory:share_of_attention", 32768, exchange)
            assert max(held for held, _ in found) <= 1.15 * found[0][1] / 4, found


def test_other_calls_on_one_rank_are_refused_on_all_by_its_name(two: World) -> None:
    for what, words in (
        (
            "tokens",
            "rank 0 holds 19 tokens of q and should hold 17 of 35: the ranks of 'context' hold (19",
        ),
        ("heads", "H must be the same on all ranks of 'context': got 4 on rank 0 and 2 on rank 1"),
        ("mask", "the rest of the call"),
        ("dtype", "rank 1 refused: q, k and v must share a floating-point dtype"),
    ):
        answers = two.tell("cases_of_refusals:differs", what)
        kinds, texts = zip(*answers, strict=True)
        assert "ok" not in kinds, answers
        assert words.removeprefix("rank 1 refused: ") in texts[1], texts[1]
        assert words in texts[0], texts[0]
    # Afterwards nobody waits for anybody: the next call works.
    two.run("cases_of_attention:equal_all", "ring", "zigzag", "float64", ["causal"])


def test_heads_that_ranks_cannot_share_are_refused(two: World) -> None:
    for kind, text in two.tell("cases_of_refusals:odd_heads"):
        assert kind in ("UnsupportedError", "RankError")
        assert "H = 3 query heads and G = 3 kv heads on 2 ranks" in text


def test_masks_of_a_user_are_told_by_their_class_wherever_they_lie_in_memory() -> None:
    class Mine(ph.Mask):
        pass

    first, second = Mine(), Mine()
    assert repr(first) != repr(second)
    assert fingerprint(first) == fingerprint(second) != fingerprint(ph.Causal())


def test_orders_deal_out_every_token_once_and_zigzag_and_stripes_as_much_work() -> None:
    for order in ORDERS:
        for total, ranks in ((17, 3), (64, 4), (8, 4), (5, 1)):
            spread = Spread(order, total, ranks)
            dealt = [index for rank in range(ranks) for index in spread.indexes(rank).tolist()]
            assert sorted(dealt) == list(range(total))
            assert [spread.length(rank) for rank in range(ranks)] == [
                len(spread.indexes(rank)) for rank in range(ranks)
            ]
    for order, most in (("contiguous", 8.0), ("zigzag", 1.05), ("striped", 1.05)):
        spread = Spread(order, 1000, 4)  # type: ignore[arg-type]
        pairs = [visible_pairs(spread, rank) for rank in range(4)]
        assert sum(pairs) == 1000 * 1001 // 2
        assert (max(pairs) / min(pairs) <= 1.05) == (most == 1.05)
    with pytest.raises(ValueError, match="at least 8 tokens: got 7"):
        Spread("zigzag", 7, 4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_whole_matrix_equals_one_process(ranks: int) -> None:
    with World(ranks, timeout=600) as world:
        for exchange in EXCHANGES:
            if exchange == "heads" and ranks == 8:
                continue  # 4 heads
            for order in ORDERS:
                for dtype in ("float64", "float32"):
                    world.run("cases_of_attention:equal_all", exchange, order, dtype, ALL)


def test_a_process_that_dies_is_named_within_seconds() -> None:
    with World(3) as world:
        began = time.monotonic()
        answers = world.tell("cases_of_refusals:dies", 1)
        assert time.monotonic() - began < 20
        assert answers[1][0] == "gone"
        for rank in (0, 2):
            kind, text = answers[rank]
            assert kind == "RankError"
            assert "rank 1 is gone" in text, text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dimension", "family"),
    [("tensor", "Llama"), ("shard", "Llama"), ("context", "Llama"), ("expert", "Mixtral")],
)
def test_a_process_that_dies_between_two_passes_is_named(dimension: str, family: str) -> None:
    with World(2) as world:
        began = time.monotonic()
        answers = world.tell("cases_of_refusals:dies_in_a_step", dimension, family, 1)
        assert time.monotonic() - began < 20
        kind, text = answers[0]
        assert kind == "RankError", text
        assert "rank 1 is gone" in text, text


@pytest.mark.slow
def test_what_one_rank_of_two_dimensions_does_otherwise_all_refuse() -> None:
    with World(4) as world:
        for what, words in (
            ("argument", "'rings'"),
            ("id", "ids must be 0 to 46"),
            ("length", "T, the tokens of ids,"),
            ("tokens", "checksum"),
        ):
            for number in (0, 2):
                began = time.monotonic()
                answers = world.tell("cases_of_refusals:differs_on_a_mesh", what, number)
                assert time.monotonic() - began < 20
                for kind, text in answers:
                    assert kind != "ok", (what, number)
                    assert words in text, text


def test_the_page_lists_every_feature_that_is_compared() -> None:
    page = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| equal \| equal \| equal \|$", page, re.M)
    assert rows == ALL


def test_the_check_says_how_it_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main() == 2
    assert "started by torchrun: torchrun --nproc-per-node" in capsys.readouterr().err


@pytest.mark.slow
def test_the_example_and_the_check_run_on_two_processes() -> None:
    root = Path(__file__).parents[2]
    for what in (["examples/many_processes.py"], ["-m", "polyhead.parallel.check"]):
        made = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
             *what],
            cwd=root, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr[-2000:]
        last = made.stdout.strip().splitlines()[-1]
        assert last == "all equal" or last.startswith("bytes remembered by each rank: 5"), last
