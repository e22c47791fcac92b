"""Heads that tell two readings apart are found, and those that only seem to are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import byte_tokenizer, decoder

import polyhead as ph
from polyhead.errors import InputError
from polyhead.interpret.contrast import Contrast

START = "a cat saw a dog as it was "
CATS = [START + word for word in ("shy", "old", "sad", "big", "wet", "hot")]
DOGS = [START + word for word in ("fat", "new", "odd", "dry", "far", "icy")]
KEYS = [("cat", "dog")] * 6


@pytest.fixture(scope="module")
def model() -> ph.LanguageModel:
    return ph.LanguageModel(decoder(), byte_tokenizer(), "tiny").eval()


def _seen(moves: torch.Tensor, controls: torch.Tensor | None = None) -> Contrast:
    return Contrast((0, 1), moves, controls, moves[:, 0, 0], None, draws=500, seed=0)


def _noise(pairs: int, seed: int = 0, size: float = 0.05) -> torch.Tensor:
    return size * torch.randn(pairs, 2, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("pairs", [8, 14])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_head_that_moves_in_every_pair_is_found_alone(pairs: int, sign: float) -> None:
    moves = _noise(pairs)
    moves[:, 1, 2] += sign * 0.4
    heads = _seen(moves, _noise(pairs, 1)).attention()
    assert [(head.layer, head.head) for head in heads if head.found] == [(1, 2)]
    best = heads[0]
    assert best.low < best.move < best.high
    assert best.move == pytest.approx(float(moves[:, 1, 2].mean()))
    assert best.p < 0.05


def test_a_head_that_moves_as_much_for_another_word_is_not_found() -> None:
    moves, controls = _noise(8), _noise(8, 1)
    moves[:, 1, 2] += 0.4
    controls[:, 1, 2] -= 0.4
    best = _seen(moves, controls).attention()[0]
    assert best.p < 0.05
    assert not best.found


def test_a_head_that_moves_either_way_is_not_found() -> None:
    moves = _noise(8)
    moves[:, 1, 2] += torch.tensor([0.5, -0.4] * 4)
    assert not any(head.found for head in _seen(moves).attention())


def test_noise_is_found_in_few_of_many_draws() -> None:
    found = [any(head.found for head in _seen(_noise(8, seed)).attention()) for seed in range(200)]
    assert sum(found) <= 20


def test_missing_heads_are_left_out() -> None:
    moves = _noise(8)
    moves[:, 0, 3] = torch.nan
    heads = _seen(moves).attention()
    assert len(heads) == 7
    assert all(head.p == head.p for head in heads)


def test_a_decoder_asked_before_the_word_moves_nowhere(model: ph.LanguageModel) -> None:
    seen = ph.contrast(model, CATS, DOGS, keys=KEYS, query="it", ablation=False)
    assert torch.equal(seen.moves, torch.zeros_like(seen.moves))
    assert seen.lost is None
    with pytest.raises(InputError, match="ablation=False"):
        seen.ablation()


def test_moves_and_losses_are_those_of_the_weights_and_of_ablation(
    model: ph.LanguageModel,
) -> None:
    seen = ph.contrast(model, CATS, DOGS, keys=KEYS, controls=DOGS)
    assert seen.controls is not None
    assert seen.lost is not None
    assert torch.equal(seen.controls, seen.moves)
    looks, answers, without = [], [], []
    cat, dog = (list(range(start, start + 3)) for start in (2, 12))
    for text in (CATS[1], DOGS[1]):
        ids = torch.tensor([model.tokenizer.encode(text)])
        extra = ids.shape[1] - len(text)  # tokens before the text's bytes
        keys = [[extra + i for i in word] for word in (cat, dog)]
        with ph.probe(model) as views, torch.no_grad():
            logits = model(ids)[0, -1]
        row = views[1].rows()[0, :, -1]
        looks.append(row[:, keys[0]].sum(-1) - row[:, keys[1]].sum(-1))
        one, other = (int(ids[0, word[0]]) for word in keys)
        answers.append(logits[one] - logits[other])
        with ph.ablate(model, {1: [1]}), torch.no_grad():
            logits = model(ids)[0, -1]
        without.append(logits[one] - logits[other])
    torch.testing.assert_close(seen.moves[1, 1], looks[0] - looks[1])
    torch.testing.assert_close(seen.answers[1], answers[0] - answers[1])
    lost = answers[0] - answers[1] - (without[0] - without[1])
    torch.testing.assert_close(seen.lost[1, 1, 1], lost, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("a", "b", "more", "message"),
    [
        (CATS[:1], DOGS[:1], {"keys": KEYS[:1]}, "at least 6 pairs.*got 1"),
        (CATS, DOGS[:5], {}, "b must have one entry.*6: got 5"),
        (CATS, DOGS, {"keys": KEYS[:2]}, "keys must have one entry.*got 2"),
        (CATS, DOGS, {"keys": ["ab"] * 6}, "two words: got 'ab'"),
        (CATS, DOGS, {"controls": CATS[:2]}, "controls must have one entry.*got 2"),
        (CATS[0], DOGS, {}, "a must be a list of texts: got one text, 'a cat"),
        (CATS, DOGS, {"query": "owl"}, "'owl' does not occur"),
        (CATS, DOGS, {"keys": [("cat", "cow")] * 6}, "'cow' does not occur"),
        (CATS, DOGS, {"draws": 0}, "draws"),
    ],
)
def test_wrong_input_is_named(
    model: ph.LanguageModel, a: Any, b: Any, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        ph.contrast(model, a, b, **({"keys": KEYS} | more))
