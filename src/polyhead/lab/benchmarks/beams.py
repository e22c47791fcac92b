"""Cases of beam search: a translator of Marian's size, and SmolLM2, beside transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from polyhead.checkpoints import load_checkpoint
from polyhead.config import TransformerConfig
from polyhead.generation.decoding.options import GenerationOptions
from polyhead.generation.decoding.rules import rules_of
from polyhead.generation.decoding.search import BeamSearch
from polyhead.generation.decoding.steps import steps_of
from polyhead.lab.benchmarks import model as of_models
from polyhead.lab.benchmarks.case import Case, Contestant, Settings
from polyhead.lab.benchmarks.peers import SMOLLM2, in_transformers, installed
from polyhead.models import Transformer

BEAMS, SOURCE, NEW = 4, 32, 32


def cases(settings: Settings) -> Iterator[Case]:
    """Four beams: a translator of the 2017 paper's size, one source and eight, and SmolLM2.

    In float32, in which both must find the same tokens.
    """
    if torch.float32 not in settings.dtypes:
        return
    ours = Transformer(TransformerConfig.vanilla(32_000)).eval()
    for name, parameter in ours.named_parameters():
        if parameter.ndim > 1:  # texts that do not repeat one token
            torch.nn.init.normal_(parameter, std=0.02 if "embedding" in name else 0.08)
    theirs = in_transformers(ours, "MarianMTModel") if installed("transformers") else None
    for count in (1,) if settings.quick else (1, 8):
        yield _case("translate, sources:", ours, theirs, count)
    if not settings.quick and installed(SMOLLM2):
        decoder = load_checkpoint(of_models.MODEL, torch.float32).model
        peer = of_models.theirs() if installed("transformers") else None
        yield _case("continue, prompts:", decoder, peer, 1)


def _case(group: str, ours: Transformer, theirs: Any, count: int) -> Case:
    """``count`` sources of 32 tokens, 32 new tokens each."""
    read = torch.randint(5, 30_000, (count, SOURCE), generator=torch.Generator().manual_seed(0))
    rows, stop = read.tolist(), frozenset(ours.config.eos_token_ids)
    encoded = ours.config.kind == "encoder-decoder"
    prompts = [[ours.config.pad_token_id or 0]] * count if encoded else rows
    options = GenerationOptions(num_beams=BEAMS, min_new_tokens=NEW)
    search = BeamSearch(options, rules_of(options, sorted(stop), NEW), stop, NEW)

    def run() -> Tensor:
        steps = steps_of(ours, prompts, ours.new_cache(), rows if encoded else None)
        return torch.tensor([texts[0].ids for texts in search.run(steps, prompts)])

    def their_run() -> Tensor:
        made: Tensor = theirs.generate(
            read,
            attention_mask=torch.ones_like(read),
            num_beams=BEAMS,
            min_new_tokens=NEW,
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=sorted(stop),
            pad_token_id=ours.config.pad_token_id or 0,
        )
        return made[:, -NEW:]

    peers = {} if theirs is None else {"transformers": Contestant(their_run, _differs)}
    tokens = count * NEW
    return Case(group, count, torch.float32, run, peers, (), tokens, "tokens/s")


def _differs(ours: Tensor, theirs: Tensor) -> str | None:
    same = (ours == theirs).all(dim=-1).float().mean().item()
    return None if same == 1.0 else f"{1 - same:.0%} of the texts are others"
