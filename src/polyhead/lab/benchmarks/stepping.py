"""A whole model reads a prompt and takes steps, ours and transformers', on any device.

Decoding steps are given their tokens, so that all programs compute the same logits. On a GPU ours
are taken once as Python calls them and once from a captured graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhead.errors import UnsupportedError
from polyhead.generation import LanguageModel
from polyhead.generation.decoding import graphs
from polyhead.generation.decoding.captured_steps import replayer
from polyhead.generation.decoding.sampling import Sampler, Sampling
from polyhead.generation.decoding.steps import DecoderSteps
from polyhead.lab.benchmarks.case import Call, Case, Contestant, Differs
from polyhead.lab.benchmarks.limits import matrix_rate, read_rate
from polyhead.planning import plan

PROMPT, STEPS = 128, 16
UNCAPTURED = "polyhead, no graph"
"""Ordinary steps, beside those from a graph."""
# Fraction of positions at which both must say the same likeliest token.
_AGREEMENT = {torch.float32: 0.999, torch.float16: 0.95, torch.bfloat16: 0.9}


def decode_on_device(
    model: LanguageModel, theirs: Any, ids: Tensor, dtype: torch.dtype, prompt: int = PROMPT
) -> Case:
    """The same tokens after the same prompt, from a graph where the model's steps are captured.

    Args:
        model: Ours, on the device, its weights in the dtype.
        theirs: The same in transformers, there too; None: not installed.
        ids: ``[1, tokens]`` there, more than prompt and steps.
    """
    before, tokens = ids[:, :prompt], ids[:, prompt : prompt + STEPS]
    same, peers, group = says_the_same(dtype), {}, f"decode after {prompt} tokens, steps:"
    ours = steps(model, before, tokens)
    if graphs.unsupported_reason(model.transformer, None) is None:
        peers[UNCAPTURED] = Contestant(ours, same)
        ours, group = captured_steps(model, before, tokens), f"captured, {group}"
    if theirs is not None:
        peers["transformers"] = Contestant(their_steps(theirs, before, tokens), same)
    limit = read_rate(float(sum(x.nbytes for x in model.parameters())))
    return Case(
        group, STEPS, dtype, ours, peers, (limit.times(STEPS),), STEPS, "tokens/s"
    )  # fmt: skip


def prefill_on_device(model: LanguageModel, theirs: Any, ids: Tensor, dtype: torch.dtype) -> Case:
    """A whole prompt into an empty cache; arguments as of ``decode_on_device``."""
    tokens, peers = ids.shape[1], {}
    if theirs is not None:
        peers["transformers"] = Contestant(their_reading(theirs, ids), says_the_same(dtype))
    limit = matrix_rate(dtype, plan(model.config, tokens=tokens).prefill.model)
    return Case(
        "prefill, tokens:", tokens, dtype, reading(model, ids), peers, (limit,), tokens, "tokens/s"
    )  # fmt: skip


def steps(model: LanguageModel, prompt: Tensor, tokens: Tensor) -> Call:
    """Logits of tokens behind a prompt, one at a time, through a cache."""
    count = tokens.shape[1]
    cache = model.new_cache(prompt.shape[1] + count)
    model(prompt, cache=cache, last=1)

    def run() -> Tensor:
        logits = [model(tokens[:, i : i + 1], cache=cache, last=1) for i in range(count)]
        cache.rollback(count)
        return torch.cat(logits, dim=1)

    return run


def captured_steps(model: LanguageModel, prompt: Tensor, tokens: Tensor) -> Call:
    """The same from a captured graph."""
    count = tokens.shape[1]
    # Room for the steps that come before the graph: the cache must not move.
    cache = model.new_cache(prompt.shape[1] + count + 2, kind="dense")
    model(prompt, cache=cache, last=1)
    steps = DecoderSteps(model.transformer, [], cache)
    running = replayer(steps, [Sampler(Sampling(), prompt.device)])
    step = running.step

    def run() -> Tensor:
        logits = []
        for i in range(count):
            step.ids.copy_(tokens[:, i : i + 1])
            running.advance()
            logits.append(step.logits.clone())
        cache.rollback(count)
        step.at.fill_(prompt.shape[1])
        return torch.stack(logits, dim=1)

    run()
    if running.graph is None:
        raise UnsupportedError(f"decoding steps are not captured: {running.why}")
    return run


def their_steps(model: Any, prompt: Tensor, tokens: Tensor) -> Call:
    """``steps`` of transformers."""
    count = tokens.shape[1]
    past = model(prompt, use_cache=True, logits_to_keep=1).past_key_values

    def run() -> Tensor:
        logits = [
            model(tokens[:, i : i + 1], past_key_values=past, use_cache=True).logits
            for i in range(count)
        ]
        past.crop(-count)
        return torch.cat(logits, dim=1)

    return run


def reading(model: LanguageModel, ids: Tensor) -> Call:
    """Logits after a prompt that goes into an empty cache."""
    return lambda: model(ids, cache=model.new_cache(ids.shape[1]), last=1)


def their_reading(model: Any, ids: Tensor) -> Call:
    """The same of transformers."""
    return lambda: model(ids, use_cache=True, logits_to_keep=1).logits


def says_the_same(dtype: torch.dtype) -> Differs:
    """A test that both find the same tokens likeliest, at nearly all places, by like logits."""

    def differs(ours: Tensor, theirs: Tensor) -> str | None:
        same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
        error = (ours.float() - theirs.float()).abs().max().item()
        if same >= _AGREEMENT[dtype] and error <= 0.1 * ours.float().abs().max().item():
            return None
        return f"the likeliest token agrees at {same:.0%} of places, logits differ by {error:.2g}"

    return differs
