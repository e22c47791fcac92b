"""Saved probes whose header or tensors lie: a probe that can be looked at, or a sentence."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import polyhead as ph
from fuzz.mutation import MOST_TEXT
from fuzz.targets.saved_caches import VALUES, damage
from polyhead.interpret.files import KEY
from polyhead.interpret.probe import Probe
from polyhead.interpret.statistics import TABLE
from polyhead.layers import AttentionConfig, FeedForwardConfig, LayerConfig
from polyhead.semantics import TensorBias

KINDS = ("ALiBi", "Held", "Keep", "Documents", "Tokens", "TokenIds", "KeptCall", "Causal", "")
_LAYER = LayerConfig(AttentionConfig(4, 2, 4, sinks=True), FeedForwardConfig(16))
_MODEL = ph.TransformerConfig("decoder", 20, 16, 16, (_LAYER,))
_saved: list[tuple[dict[str, Any], dict[str, torch.Tensor]]] = []


path = Path()


@torch.no_grad()
def prepare() -> None:
    global path
    path = Path(tempfile.mkdtemp()) / "probe"
    torch.manual_seed(0)
    layer = ph.MultiHeadAttention(16, 4, 2, head_dim=4)
    x = torch.randn(2, 7, 16)
    mask = ph.KeyLengths([7, 5]) & ~ph.Prefix(2) & ph.Keep(torch.rand(7, 7) < 0.9) | ph.Window(3)
    biases = (ph.ALiBi(4), ph.RelativeBias(torch.randn(8, 4)), TensorBias(torch.randn(4, 7, 7)))
    for number, bias in enumerate(biases):
        statistics = ("entropy", "top_keys", "received", "max_key") if number == 2 else None
        packed = [3, 4] if number == 0 else None
        with ph.probe(layer, documents=packed, statistics=statistics) as seen:
            layer(x, mask=mask & ph.Causal(), bias=bias)
        _keep(seen)
    model = ph.Transformer(_MODEL).eval()
    ids = torch.randint(20, (2, 6))
    cache = model.new_cache()
    with ph.probe(model, ids=ids) as seen:
        model(ids[:, :4], cache=cache)
        model(ids[:, 4:], cache=cache)
    _keep(seen)


def _keep(seen: Probe) -> None:
    seen.save(path)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()[KEY])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # the file itself cannot be iterated
    _saved.append((header, tensors))


@torch.no_grad()
def case(random: Random) -> None:
    header, tensors = copy.deepcopy(random.choice(_saved))
    kind = random.random()
    for _ in range(0 if kind < 0.05 else random.choice((1, 1, 2, 3))):
        damage(random, header, tensors, _lie, in_tensors=kind < 0.3)
    text = json.dumps(header)
    if len(text) > MOST_TEXT:  # lies within lies
        return
    save_file(tensors, path, {KEY: text})
    seen = Probe.load(path)
    assert len(seen) == len([*seen]) or len(seen.layers) < len(seen)
    for name in [*seen.modules]:
        if name not in header["content"]["dict"]["views"]["dict"]:
            continue
        view = seen[name]
        view.nbytes, repr(view)
        if view._call is None:
            continue
        view.rows()
        known = {name for name, each in TABLE.items() if each.needs != "tokens"}
        if view.call.ids is not None:
            known = {*TABLE}
        if view.call.documents is None:
            known -= {"document_mass"}
        view.measure(sorted(known))


def _lie(random: Random, header: dict[str, Any]) -> None:
    """Another value, or none, somewhere in the header."""
    at: Any = header
    if random.random() < 0.95 and isinstance(header.get("content"), dict) and header["content"]:
        at = header["content"]
    while True:
        keys = list(at) if isinstance(at, dict) else range(len(at))
        if not keys:
            return
        key = random.choice(list(keys))
        if isinstance(at[key], dict | list) and at[key] and random.random() < 0.9:
            at = at[key]
            continue
        old = at[key]
        if random.random() < 0.1:
            del at[key]
        elif isinstance(old, int) and random.random() < 0.5:
            at[key] = old + random.choice((-1, 1, 7))
        elif isinstance(old, str) and random.random() < 0.6:
            at[key] = random.choice((*KINDS, *map(str, range(12))))
        elif random.random() < 0.1:
            at[key] = [copy.deepcopy(old) for _ in range(random.choice((1, 2, 900)))]
        else:
            at[key] = random.choice(VALUES)
        return
