"""Published findings on heads, on the trained models at hand: those that hold, and one that does
not. docs/findings/ has the figures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import polyhead as ph
from polyhead.interpret.attribution import LogitAttribution
from polyhead.interpret.circuits import HeadCircuits
from polyhead.interpret.finding import HeadScores, repeated_tokens, score_heads

pytestmark = [pytest.mark.slow, pytest.mark.model]

NAMES = ("Mary", "John", "Tom", "Anna")
PROMPTS = (
    "When {a} and {b} went to the store, {b} gave a drink to",
    "After {a} and {b} had lunch, {b} gave the book to",
)
HALF = 64


def loaded(name: str) -> ph.LanguageModel:
    try:
        model = ph.load(name)
    except ph.ModelNotFoundError as error:
        pytest.skip(str(error))
    assert isinstance(model, ph.LanguageModel)
    return model


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def model(request: pytest.FixtureRequest) -> ph.LanguageModel:
    return loaded(request.param)


@pytest.fixture(scope="module")
def smollm2() -> ph.LanguageModel:
    return loaded("smollm2")


@pytest.fixture(scope="module")
def scores(model: ph.LanguageModel) -> HeadScores:
    return score_heads(model, [PROMPTS[0].format(a="Mary", b="John")])


def losses(model: ph.LanguageModel) -> tuple[float, float]:
    """Nats per token of random tokens, and of their repetition."""
    twice = repeated_tokens(model.config.vocab_size, HALF)
    with torch.inference_mode():
        logits = model(twice)[:, :-1].float()
    each = cross_entropy(logits.flatten(0, 1), twice[:, 1:].flatten(), reduction="none")
    each = each.view(2, -1)
    return float(each[:, : HALF - 1].mean()), float(each[:, HALF:].mean())


def prompts(model: ph.LanguageModel) -> list[tuple[Tensor, int, int]]:
    """Ids, the token of the indirect object, that of the subject."""

    def token(name: str) -> int:
        return model.tokenizer.encode(f"x {name}")[-1]

    return [
        (torch.tensor([model.tokenizer.encode(text.format(a=a, b=b))]), token(a), token(b))
        for text in PROMPTS
        for a in NAMES
        for b in NAMES
        if a != b
    ]


def test_there_are_induction_heads_previous_token_heads_and_mostly_sinks(
    scores: HeadScores,
) -> None:
    induction, previous = scores.mean("induction"), scores.mean("previous-token")
    assert float(induction.max()) > 0.9  # Olsson et al. 2022
    first = int((induction >= 0.4).any(dim=1).nonzero()[0])
    assert float(previous[:first].max()) > 0.6  # the head that they read comes before them
    assert float((scores.mean("sink") >= 0.3).float().mean()) > 0.8  # Xiao et al. 2024


def test_ablating_induction_heads_takes_the_repetition_away(
    model: ph.LanguageModel, scores: HeadScores
) -> None:
    chosen: dict[int, list[int]] = {}
    for layer, head in (scores.mean("induction") >= 0.4).nonzero().tolist():
        chosen.setdefault(layer, []).append(head)
    count = model.config.layers[0].attention.num_heads
    others = {
        layer: [head for head in range(count) if head not in heads][: len(heads)]
        for layer, heads in chosen.items()
    }
    once, again = losses(model)
    with ph.ablate(model, chosen):
        once_without, again_without = losses(model)
    with ph.ablate(model, others):
        _, again_others = losses(model)
    assert again < once - 8
    assert again_without > again + 8
    assert again_others < again + 2
    if "smollm2" in model.origin.lower():  # in Gemma the first pass suffers too: see the page
        assert abs(once_without - once) < 0.5
    else:
        assert once_without > once + 5


def test_some_induction_heads_copy_by_their_weights_and_others_do_not(
    model: ph.LanguageModel, scores: HeadScores
) -> None:
    shares = [
        float(HeadCircuits(model, layer).copying()[head])
        for layer, head in (scores.mean("induction") >= 0.4).nonzero().tolist()
    ]
    assert max(shares) > 0.5
    assert min(shares) < -0.2


@torch.no_grad()
def test_both_models_name_the_indirect_object(model: ph.LanguageModel) -> None:
    for ids, answer, subject in prompts(model):
        logits = model(ids, last=1)[0, -1]
        assert logits[answer] > logits[subject]


@torch.no_grad()
def test_smollm2_lowers_the_subject_more_than_it_raises_the_indirect_object(
    smollm2: ph.LanguageModel,
) -> None:
    """23.3 looks at the second subject and lowers it; 23.0 moves the name; 24.4 works against."""
    writers = ("23.3", "23.0", "24.4")
    shares, seen_at = torch.zeros(3), torch.zeros(3, 2)
    every = prompts(smollm2)
    for ids, answer, subject in every:
        with ph.probe(smollm2, layers=[23, 24]) as seen:
            run = LogitAttribution(smollm2, ids)
        parts = run.parts(answer, subject)
        places = [parts.axes["writer"].index(name) for name in writers]
        shares += parts.values[places] / len(every)
        at = [ids[0].tolist().index(answer), max((ids[0] == subject).nonzero().flatten().tolist())]
        last = slice(ids.shape[1] - 1, ids.shape[1])
        for i, name in enumerate(writers):
            layer, head = map(int, name.split("."))
            seen_at[i] += seen[layer].rows([head], last)[0, 0, 0, at] / len(every)
    assert shares[0] > 2
    assert seen_at[0, 1] > 0.5 > seen_at[0, 0]
    assert shares[1] > 0.5
    assert seen_at[1, 0] > 0.5
    assert shares[2] < -0.3
    assert seen_at[2, 0] > 0.5
