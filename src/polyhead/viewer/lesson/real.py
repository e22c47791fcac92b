"""A real model on a real sentence: makes ``real.json``, which the scenes show beside their numbers.

    python -m polyhead.viewer.lesson.real          # seconds; needs the SmolLM2 file

The model is the 4-bit file of SmolLM2-135M that ``polyhead look`` knows as smollm2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import polyhead as ph
from polyhead._utils.atomic_write import write_file
from polyhead.interpret.heads import TokenizedText
from polyhead.interpret.shuffles import Shuffles
from polyhead.interpret.standing_out import heads_of_pair, standing_out

SENTENCE = "The animal didn't cross the street because it was too tired"
LAYER, HEAD = 11, 1
"""The head whose vectors and scores are shown; the maps are those of its whole layer."""
WORD = " it"
"""The query of the head."""
PAIRS = ((" it", " animal"), (" tired", " animal"), (" street", " cross"))
"""Words that the text names as pairs. It reads *cross* → *street*, which a decoder cannot: *street*
comes later."""
_SHOWN = 8
"""Numbers of q, k and v that are shown."""


def measure(model: ph.LanguageModel) -> dict[str, Any]:
    """What the model computes on ``SENTENCE``, rounded to three decimals."""
    ids = model.tokenizer.encode(SENTENCE)
    words = [model.tokenizer.decode([i]) for i in ids]
    with ph.trace(model) as t, torch.no_grad():
        attention = t.layers[LAYER].attention
        q, k, v = attention.q.save(), attention.k.save(), attention.v.save()
        scores, weights = attention.scores.save(), attention.weights.save()
        streams = [layer.resid_post.save() for layer in t.layers]
        model(torch.tensor([ids]))
    at, group = words.index(WORD), q.value.shape[1] // k.value.shape[1]
    query, keys = q.value[0, HEAD, at], k.value[0, HEAD // group, : at + 1]
    return {
        "sentence": SENTENCE,
        "words": [word.strip() for word in words],
        "layer": LAYER,
        "head": HEAD,
        "at": at,
        "size": query.numel(),
        "q": _rounded(query[:_SHOWN]),
        "k": _rounded(keys[-1, :_SHOWN]),
        "v": _rounded(v.value[0, HEAD // group, at, :_SHOWN]),
        "scores": _rounded(scores.value[0, HEAD, at, : at + 1]),
        "weights": _rounded(weights.value[0, HEAD, at, : at + 1]),
        "maps": _rounded(weights.value[0]),
        "norms": _rounded(torch.stack([each.value[0, at].norm() for each in streams])),
        "heads": q.value.shape[1],
        "kv_heads": k.value.shape[1],
        "layers": len(streams),
        "pairs": pairs(model, words),
    }


def pairs(model: ph.LanguageModel, words: list[str]) -> list[dict[str, Any]]:
    """For each of ``PAIRS`` the head with the largest weight beyond what is expected of it."""
    tokens = TokenizedText.of(model.tokenizer, SENTENCE)
    with ph.probe(model) as seen, torch.inference_mode():
        model(torch.tensor([tokens.ids]))
    shuffles = Shuffles.of(model, tokens, causal=True)
    threshold = standing_out(seen, tokens, shuffles).threshold
    found = []
    for query, key in (map(words.index, pair) for pair in PAIRS):
        best = heads_of_pair(seen, tokens, shuffles, query, key)[0]
        map_ = seen[best.layer].rows(heads=[best.head])[0, 0]
        found.append({"layer": best.layer, "head": best.head, "query": query, "key": key,
                      "weight": round(best.weight, 3), "expected": round(best.expected, 3),
                      "stands_out": best.score >= threshold, "map": _rounded(map_)})  # fmt: skip
    return found


def _rounded(values: torch.Tensor) -> Any:
    rounded = (values.double() * 1000).round() / 1000
    return rounded.tolist()


if __name__ == "__main__":
    text = json.dumps(measure(ph.load("smollm2")), ensure_ascii=False)
    write_file(Path(__file__).with_name("real.json"), text + "\n")
