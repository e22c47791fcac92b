"""Runs: pairs begin alike, and a comparison that was stopped goes on."""

import math

import pytest
import torch

from polyhead.errors import CheckpointError, ConfigError, DivergedError, InputError
from polyhead.lab.comparison import runs
from polyhead.lab.comparison.experiment import Experiment, read_json, tokens_for
from polyhead.lab.comparison.runs import Schedule, batches, begin
from polyhead.lab.comparison.variants import Sizes, decoder, variant, variants

SIZES = Sizes(32, 2, 4, 48, 300)


def test_pairs_begin_with_the_same_values_where_names_and_shapes_agree():
    mha, mqa = (
        dict(begin(decoder(variant(n), SIZES), 3).named_parameters()) for n in ("mha", "mqa")
    )
    same = {name for name in mha if name in mqa and mha[name].shape == mqa[name].shape}
    assert {"embedding.tokens.weight", "layers.1.attention.o_proj.weight"} <= same
    assert "layers.0.attention.k_proj.weight" not in same
    assert all(torch.equal(mha[name], mqa[name]) for name in same)
    other = dict(begin(decoder(variant("mha"), SIZES), 4).named_parameters())
    assert not torch.equal(mha["embedding.tokens.weight"], other["embedding.tokens.weight"])


def test_what_writes_to_the_residual_stream_begins_smaller():
    parameters = dict(begin(decoder(variant("mha"), Sizes(128, 2)), 0).named_parameters())
    for name, std in (("q_proj", 0.02), ("o_proj", 0.02 / 2)):
        found = parameters[f"layers.0.attention.{name}.weight"].std().item()
        assert found == pytest.approx(std, rel=0.05)


def test_pairs_read_every_block_once_in_the_order_of_their_seed():
    text, schedule = torch.arange(8 * 16 + 5, dtype=torch.int32), Schedule(1, 16, 2)

    def firsts(seed, count):
        source = batches(text, schedule, seed)
        return [int(row[0]) // 16 for n in range(count) for row in source(n)["input_ids"]]

    assert sorted(firsts(0, 4)) == [*range(8)]
    assert sorted(firsts(0, 8)) == sorted([*range(8)] * 2)
    assert firsts(0, 8) == firsts(0, 8) != firsts(1, 8)
    block = batches(text, schedule, 0)(0)["labels"][0]
    assert torch.equal(block, torch.arange(int(block[0]), int(block[0]) + 16))


def test_learning_rate_rises_and_falls():
    schedule = Schedule(100 * 16, 8, 2, rate=1.0).of_run
    rates = [schedule.rate(step, step / 100) for step in range(schedule.steps)]
    assert len(rates) == 100
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0], rel=0.01)
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.001)


def test_a_run_learns_and_says_what_it_found(tokens):
    schedule = Schedule(4096, 32, 4, rate=1e-2)
    made = runs.run(decoder(variant("mqa"), SIZES), tokens, schedule, 0, name="mqa")
    assert [count for count, _ in made["curve"]] == [1024, 2048, 4096]
    assert made["tokens"] == 4096
    first, _, last = (value for _, value in made["curve"])
    assert last < first < math.log(300)
    assert made["loss"] == last
    ratio = len(tokens.validation) / tokens.validation_bytes
    assert made["bits_per_byte"] == pytest.approx(last * ratio / math.log(2))


def test_a_comparison_that_was_stopped_goes_on_and_finds_the_same(experiment, tmp_path, tokens):
    chosen = variants("mqa", experiment.sizes)
    whole = list(experiment.train(chosen, 2))
    assert [(r["seed"], r["variant"]) for r in whole] == [
        (0, "mha"),
        (0, "mqa"),
        (1, "mha"),
        (1, "mqa"),
    ]

    folder = tmp_path / "again"
    again = Experiment.create(folder, experiment.sizes, experiment.schedule, tokens)
    calls = []

    def interrupt(what, done, total):
        calls.append(done)
        if len(calls) == 2 * experiment.schedule.steps - 1:  # in the second run
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(again.train(chosen, 2, advance=interrupt))
    assert [path.name for path in (folder / "runs").iterdir()] == ["mha.seed-0.json"]
    resumed = Experiment.load(folder)
    assert [(each.name, seed) for each, seed in resumed.missing(chosen, 2)] == [
        ("mqa", 0), ("mha", 1), ("mqa", 1),
    ]  # fmt: skip
    assert len(list(resumed.train(chosen, 2))) == 3
    assert not resumed.missing(chosen, 2)
    for made in whole:
        kept = resumed.results(chosen, 2)[made["variant"]][made["seed"]]
        assert kept["loss"] == made["loss"]
    assert list(resumed.train(chosen, 2)) == []


def test_a_folder_is_never_overwritten_and_damage_is_named(experiment, tmp_path, tokens):
    with pytest.raises(InputError, match="holds a comparison already: --resume"):
        Experiment.create(experiment.folder, experiment.sizes, experiment.schedule, tokens)
    with pytest.raises(InputError, match="holds no comparison"):
        Experiment.load(tmp_path)
    said = experiment.folder / "experiment.json"
    whole = said.read_text()
    for damaged in (whole[:40], whole.replace('"context"', '"contexts"'), "{}"):
        said.write_text(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            Experiment.load(experiment.folder)
    said.write_text(whole.replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="format 2: this version reads 1"):
        Experiment.load(experiment.folder)
    run = experiment.folder / "runs" / "mha.seed-0.json"
    run.write_text('{"loss": 1')
    with pytest.raises(CheckpointError, match=r"mha.seed-0.json is damaged, remove it"):
        experiment.results([variant("mha")], 1)
    with pytest.raises(CheckpointError, match="damaged"):
        read_json(run)


def test_a_text_that_is_too_short_is_refused(tmp_path, tokens):
    for schedule, part in (
        (Schedule(1, 2048, 64), "training"),
        (Schedule(1, 2000, 1), "validation"),
    ):
        with pytest.raises(InputError, match=f"the {part} part of the text has"):
            Experiment.create(tmp_path / "short", SIZES, schedule, tokens)
    assert not (tmp_path / "short").exists()


def test_a_loss_that_is_no_number_ends_the_run(tokens):
    with pytest.raises(DivergedError, match=r"mha, seed 0: the .* at step .*lower lr"):
        runs.run(decoder(variant("mha"), SIZES), tokens, Schedule(2048, 32, 4, 1e17), 0, name="mha")


def test_a_budget_is_shared_by_all_runs():
    schedule = Schedule(1, 32, 4)
    assert tokens_for(60, 6, 128.0, schedule) == 1280
    assert tokens_for(1, 1000, 1.0, schedule) == 128
    with pytest.raises(ConfigError, match="dtype must be one of 'float32', 'bfloat16'"):
        Schedule(1, dtype="float8")
