"""Heads of running requests are those of the text alone, and looking at them changes no token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import polyhead as ph
from arrangements import model as arranged
from generation.tiny import byte_tokenizer, decoder
from polyhead.config import GatedDeltaNetConfig
from polyhead.models import Transformer
from polyhead.serving.engine import Engine


@pytest.mark.parametrize("lookup_tokens", [0, 3])
@torch.inference_mode()
def test_a_head_of_a_running_row_is_that_of_its_text(lookup_tokens: int) -> None:
    model = ph.LanguageModel(decoder(context=256), byte_tokenizer(), "tiny").eval()
    asked: list[dict[str, Any]] = [
        {"prompt": "abc " * n, "max_new_tokens": 12, "seed": n} for n in (2, 9, 21)
    ]
    engine = Engine(model, max_tokens=400, lookup_tokens=lookup_tokens)
    found = [engine.submit(**each) for each in asked]
    for _ in range(3):
        engine.step()
    looks = [engine.heads.ask(found[n].id, layer, 3 - n) for n in (1, 2) for layer in (0, 1)]
    engine.step()
    for look, (n, layer) in zip(looks, [(1, 0), (1, 1), (2, 0), (2, 1)], strict=True):
        seen = look.result(0)
        prompt = model.tokenizer.encode(asked[n]["prompt"])
        assert seen.ids[: len(prompt)] == prompt
        with ph.probe(model) as alone:
            model(torch.tensor([seen.ids]))
        wanted = alone[layer].rows(heads=3 - n, queries=-1)[0, 0, 0]
        assert torch.tensor(seen.weights).sub(wanted).abs().max() < 1e-4
        assert len(seen.ids) == len(wanted)
    late = engine.heads.ask(found[0].id, 0, 0)
    late.cancel()
    never = engine.heads.ask("another", 0, 0)
    while engine.step():
        pass
    assert not never.done()
    unseen = Engine(model, max_tokens=400)
    same = [unseen.submit(**each) for each in asked]
    while unseen.step():
        pass
    assert [each.result(0).ids for each in found] == [each.result(0).ids for each in same]


def test_heads_that_are_none_are_refused() -> None:
    model = ph.LanguageModel(decoder(), byte_tokenizer(), "tiny").eval()
    engine = Engine(model, max_tokens=96)
    for layer, head, words in ((2, 0, "from 0 to 1: got 2"), (1, 4, "layer 1 are 0 to 3: got 4")):
        with pytest.raises(ph.InputError, match=words):
            engine.heads.ask("a", layer, head)


@torch.inference_mode()
def test_layers_without_weights_say_so_and_the_step_goes_on() -> None:
    transformer = arranged("llama", torch.float32)
    first, *rest = (config := transformer.config).layers
    states = replace(first, attention=GatedDeltaNetConfig(4, 2, head_k_dim=8, head_v_dim=6))
    made = Transformer(replace(config, layers=(states, *rest))).eval()
    model = ph.LanguageModel(made, byte_tokenizer(), "states")
    engine = Engine(model, max_tokens=96)
    asked = engine.submit([1, 2, 3], max_new_tokens=6, eos_token_ids=())
    engine.step()
    none = engine.heads.ask(asked.id, 0, 0)
    engine.step()
    some = engine.heads.ask(asked.id, 1, 0)
    while engine.step():
        pass
    with pytest.raises(ph.UnsupportedError, match="of whole texts: got a cache"):
        none.result(0)
    assert sum(some.result(0).weights) == pytest.approx(1, abs=1e-4)
    unseen = Engine(model, max_tokens=96)
    same = unseen.submit([1, 2, 3], max_new_tokens=6, eos_token_ids=())
    while unseen.step():
        pass
    assert asked.result(0).ids == same.result(0).ids
    assert len(same.result(0).ids) == 6
