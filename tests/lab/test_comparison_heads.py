"""How many heads: the task, and what heads of a trained decoder are worth."""

import pytest
import torch

from polyhead.errors import ConfigError
from polyhead.interpret.ablation import ablate
from polyhead.lab.comparison import runs
from polyhead.lab.comparison.heads import Outcome, name_tokens, redundancy, summary, sweep
from polyhead.lab.comparison.runs import begin, validation_loss
from polyhead.lab.comparison.variants import Sizes, decoder, variant


@pytest.mark.slow
def test_one_head_cannot_name_four_tokens_and_four_heads_can():
    one, four = name_tokens(1, 0), name_tokens(4, 0)
    assert one.all <= 0.2
    assert four.all >= 0.99
    assert one.parameters == four.parameters


@pytest.mark.slow
def test_one_head_cannot_and_four_can_over_five_seeds():
    rows = {row["heads"]: row for row in summary(sweep([1, 4], 5))}
    assert rows[1]["all_most"] <= 0.2
    assert rows[4]["all_least"] >= 0.99


def test_the_task_depends_on_its_seed_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, other = name_tokens(2, 1, steps=5), name_tokens(2, 2, steps=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert name_tokens(2, 1, steps=5) == first != other


def test_outcomes_are_summed_up_by_number_of_heads():
    found = [Outcome(1, 0, 9, 0.5, 0.1), Outcome(4, 0, 9, 1.0, 1.0), Outcome(1, 1, 9, 0.7, 0.3)]
    one, four = summary(found)
    assert one == {
        "heads": 1, "parameters": 9, "seeds": 2, "each": pytest.approx(0.6),
        "all": pytest.approx(0.2), "all_least": 0.1, "all_most": 0.3,
    }  # fmt: skip
    assert four["seeds"] == 1


@pytest.mark.parametrize("heads", [0, 3, 64])
def test_heads_that_do_not_divide_are_refused(heads):
    with pytest.raises(ConfigError, match="heads must divide 64 features"):
        name_tokens(heads, 0, steps=1)


def test_what_heads_are_worth_is_what_their_ablation_costs(tokens):
    sizes = Sizes(32, 2, 4, 48, 300)
    schedule = runs.Schedule(4096, 32, 4, 1e-2)
    blocks = tokens.validation[: 6 * 32].view(6, 32).long()
    kept = {}

    def finish(model, held_out):
        kept.update(model=model, found=redundancy(model, blocks))
        return kept["found"]

    made = runs.run(decoder(variant("mha"), sizes), tokens, schedule, 0, name="mha", finish=finish)
    found, model = made["heads"], kept["model"]
    assert [len(layer) for layer in found["rises"]] == [4, 4]
    with ablate(model, {1: [2]}):
        without = validation_loss(model, blocks[:4])
    assert found["rises"][1][2] == pytest.approx(
        without - validation_loss(model, blocks[:4]), abs=1e-4
    )
    flat = [rise for layer in found["rises"] for rise in layer]
    assert found["idle"] == pytest.approx(sum(rise < 0.005 for rise in flat) / 8)
    least = {
        i: sorted(range(4), key=layer.__getitem__)[:2] for i, layer in enumerate(found["rises"])
    }
    with ablate(model, least):
        rest = validation_loss(model, blocks)
    assert found["halved"] == pytest.approx(rest - validation_loss(model, blocks), abs=1e-4)
    assert redundancy(begin(decoder(variant("heads:1"), sizes), 0), blocks)["halved"] is None
