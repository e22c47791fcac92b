"""Models of real families on a mesh compute what one process computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cases_of_decoding import WAYS
from cases_of_layers import LAYERS, NOT_ON_TENSOR
from cases_of_models import FAMILIES, MESHES
from worlds import World


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_logits_and_gradients_equal_one_process(two: World, family: str) -> None:
    two.run("cases_of_models:equal_all", [family], ["tensor", "context", "shard"], "float64")


@pytest.mark.parametrize("family", ["Mixtral", "gpt-oss", "DeepSeek"])
def test_experts_by_rank_equal_one_process(two: World, family: str) -> None:
    two.run("cases_of_models:equal_all", [family], ["expert"], "float64")


def test_logits_and_tokens_that_stay_in_parts_equal_one_process(two: World) -> None:
    for family, options in (
        ("Gemma 2", {"sequence_parallel": True}),
        ("GPT-2", {"sequence_parallel": True, "loss_parallel": True}),
        ("DeepSeek", {"loss_parallel": True}),
    ):
        two.run("cases_of_models:equal_all", [family], ["tensor"], "float64", options)


@pytest.mark.parametrize("family", ["GPT-2", "Llama"])
def test_a_rank_may_have_no_token_of_the_vocabulary(two: World, family: str) -> None:
    two.run("cases_of_models:of_one_token", family)


def test_an_encoder_has_positions_of_its_own(two: World) -> None:
    two.run("cases_of_models:of_a_longer_encoder", "T5")


@pytest.mark.parametrize("dimension", ["tensor", "context", "shard"])
def test_a_layer_alone_equals_one_process(two: World, dimension: str) -> None:
    for name in LAYERS if dimension == "tensor" else LAYERS | NOT_ON_TENSOR:
        two.run("cases_of_layers:equal", name, dimension)
    if dimension != "shard":  # whose ranks have tokens of their own
        for kind, text in two.tell("cases_of_layers:other_tokens", dimension):
            assert kind == "RankError", text
            assert "rank 1" in text or "rank 0 holds 9" in text, text


@pytest.mark.parametrize("exchange", ["gather", "heads"])
def test_latents_are_expanded_where_they_arrive(two: World, exchange: str) -> None:
    options = {"exchange": exchange, "order": "striped"}
    two.run("cases_of_models:equal_all", ["DeepSeek"], ["context"], "float64", options)


def test_copies_over_data_equal_one_process(two: World) -> None:
    two.run("cases_of_models:equal_all", ["Llama"], ["data"], "float64")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("ranks", [4, 8])
def test_families_times_meshes_equal_one_process(ranks: int, dtype: str) -> None:
    meshes = [
        name for name, (names, _) in MESHES.items()
        if 2 ** len(names) <= ranks and "expert" not in names
    ]  # fmt: skip
    if ranks == 8:
        meshes.remove("tensor")  # 4 heads
    with World(ranks, timeout=280) as world:
        for family in FAMILIES:
            world.run("cases_of_models:equal_all", [family], meshes, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_experts_times_meshes_equal_one_process(ranks: int) -> None:
    meshes = [name for name, (names, _) in MESHES.items() if "expert" in names]
    with World(ranks, timeout=280) as world:
        for family in ("Mixtral", "gpt-oss", "DeepSeek"):
            alone = [] if ranks == 8 and family != "Mixtral" else ["expert"]  # 4 experts
            chosen = [name for name in meshes if name != "expert"] + alone
            world.run("cases_of_models:equal_all", [family], chosen, "float64")


@pytest.mark.slow
def test_eight_ranks_share_eight_heads() -> None:
    with World(8, timeout=280) as world:
        for family in ("Llama", "Falcon", "GPT-2", "gpt-oss", "DeepSeek"):
            world.run("cases_of_models:of_eight_heads", family)


@pytest.mark.slow
def test_tokens_and_logits_in_parts_on_meshes_of_two_dimensions() -> None:
    with World(4, timeout=280) as world:
        for family in ("Gemma 2", "GPT-2", "Falcon", "DeepSeek", "gpt-oss"):
            for options in ({"sequence_parallel": True}, {"loss_parallel": True}):
                world.run(
                    "cases_of_models:equal_all", [family],
                    ["tensor", "tensor + context", "shard + tensor"], "float64", options,
                )  # fmt: skip


@pytest.mark.slow
def test_a_model_by_other_exchanges_and_orders_equals_one_process() -> None:
    with World(2, timeout=280) as world:
        for exchange, order in (("gather", "striped"), ("heads", "contiguous")):
            for family in FAMILIES:
                world.run(
                    "cases_of_models:equal_all", [family], ["context"], "float64",
                    {"exchange": exchange, "order": order},
                )  # fmt: skip


@pytest.mark.parametrize(
    ("dimension", "family", "kind"),
    [
        ("context", "Gemma 2", "dense"),
        ("context", "gpt-oss", "paged"),
        ("context", "DeepSeek", "dense"),
        ("tensor", "gpt-oss", "auto"),
        ("tensor", "DeepSeek", "auto"),
        ("expert", "Mixtral", "auto"),
        ("shard", "Llama", "auto"),
    ],
)
def test_decoding_equals_one_process(two: World, dimension: str, family: str, kind: str) -> None:
    two.run("cases_of_decoding:decoded", dimension, family, kind)


def test_codes_of_a_spread_cache_are_as_near_as_in_one_process(two: World) -> None:
    two.run("cases_of_decoding:quantized", "Llama")


def test_generate_writes_what_one_process_writes(two: World) -> None:
    for mesh, family, ways in (
        ("context", "T5", ["beams", "prompts of two lengths"]),
        ("tensor", "T5", ["beams"]),  # whose rows share an encoder's output
        ("context", "gpt-oss", ["prompts of two lengths", "drawn, in pages"]),
    ):
        two.run("cases_of_decoding:generated", mesh, [family], ways)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", ["tensor", "context", "tensor + context", "shard + tensor", "shard + context"]
)
def test_generate_on_four_ranks_writes_what_one_process_writes(mesh: str) -> None:
    families = ["Llama", "Falcon", "Gemma 2", "gpt-oss", "Bloom", "DeepSeek", "T5"]
    with World(4, timeout=280) as world:
        world.run("cases_of_decoding:generated", mesh, families, [*WAYS])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("heads", "H = 3 query heads and G = 3 kv heads on 2 ranks"),
        ("another model", "the model's configuration must be the same on all ranks of 'context'"),
        ("other weights", "the weights (a checksum of some) must be the same on all ranks of 't"),
        ("an argument", "the arguments (exchange, order, training, loss_parallel, sequence_para"),
        ("on one rank", "'rings'"),
        ("a length", "T, the tokens of ids, must be the same on all ranks of 'tensor': got 10 on"),
        ("other tokens", "the tokens (a checksum of ids) must be the same on all ranks of 'tens"),
        ("tokens that were drawn", "; give ranks that draw tokens one seed"),
        ("a name", "may be data, shard, context, tensor, expert: got tp"),
        ("tokens", "holds 9 tokens of ids and should hold 11 of 21"),
        ("an id", "must be 0 to 46 (vocab_size=47): got 47"),
        ("too long", "the model's context is 64 tokens: got 66 on all ranks"),
        ("a kernel", "kernel='sdpa' by name where tokens are spread"),
        ("a probe", "hooks and edits need all heads and tokens"),
        ("twice", "parallel already"),
        ("outside", "of the job is not on the mesh, which holds 1 of 2 processes"),
        ("experts", "4 experts on 3 ranks"),
        ("no experts", "a model without experts on the dimension 'expert'"),
        ("no tensor", "sequence_parallel needs a dimension 'tensor': got context"),
        ("an encoder", "sequence_parallel with an encoder-decoder"),
    ],
)
def test_what_cannot_be_done_is_refused_on_every_rank(two: World, what: str, words: str) -> None:
    for kind, text in two.tell("cases_of_decoding:refused", what):
        assert kind != "ok"
        assert words in text, text


def test_classes_that_ranks_do_not_know_are_refused_by_name(two: World) -> None:
    two.run("cases_of_classes:refused_all")


@pytest.mark.parametrize(("first", "second"), [("shard", "tensor"), ("tensor", "context")])
def test_a_run_saved_in_shares_resumes_on_another_mesh(
    two: World, tmp_path: Path, first: str, second: str
) -> None:
    two.run("cases_of_training:resumed", str(tmp_path / "saved"), first, second)


@pytest.mark.parametrize("what", ["ring", "gather", "heads", "tensor"])
def test_bytes_that_are_sent_and_held_are_those_of_the_plan(two: World, what: str) -> None:
    two.run("cases_of_bytes:as_planned", what)


@pytest.mark.parametrize(
    ("dimension", "family"), [("shard", "Gemma 2"), ("data", "Llama"), ("expert", "Mixtral")]
)
def test_bytes_of_weights_and_gradients_are_those_of_the_plan(
    two: World, dimension: str, family: str
) -> None:
    two.run("cases_of_bytes:trained_as_planned", dimension, family)


def test_a_plan_says_what_is_split_where_and_what_is_sent(two: World) -> None:
    said = two.run("cases_of_bytes:printed", ["tensor"], 2)[0]
    assert "2 ranks: tensor 2" in said
    assert "2 × layers.attention.q_proj.weight" in said
    assert re.search(r"2 × layers.attention.sinks +held whole, the rank's heads are used", said)
    assert re.search(r"8 × layers.feed_forward.experts.down_proj.bias +held whole, added on", said)
    assert "tensor   sends a layer" in said
    said = two.run("cases_of_bytes:printed", ["context"], 2)[1]
    # 10 tokens of 2 rows, 2 kv heads of 8 + 8 numbers, 4 bytes; backward once more, and gradients.
    assert f"ring     sends a layer {10 * 2 * 2 * 16 * 4:,} B, backward" in said
    assert "q_proj" not in said
