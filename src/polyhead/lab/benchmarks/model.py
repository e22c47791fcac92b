"""Cases of whole models: SmolLM2 and Gemma 3 decode and read a prompt, in three programs."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from polyhead import native
from polyhead.checkpoints import find
from polyhead.generation import LanguageModel, load
from polyhead.lab.benchmarks.case import Call, Case, Contestant, Settings
from polyhead.lab.benchmarks.limits import matrix_rate, read_rate
from polyhead.lab.benchmarks.llama_cpp import LlamaCpp, Told
from polyhead.lab.benchmarks.peers import GEMMA3, SMOLLM2, installed
from polyhead.lab.benchmarks.stepping import (
    PROMPT,
    STEPS,
    decode_on_device,
    prefill_on_device,
    reading,
    says_the_same,
    steps,
    their_reading,
    their_steps,
)
from polyhead.planning import plan

MODEL = "smollm2"
_MODELS = {MODEL: ("SmolLM2", SMOLLM2), "gemma3-270m": ("Gemma 3", GEMMA3)}
"""Names in tables, and the package of the file, by the catalogue's name."""
INT8 = "polyhead, int8 activations"
"""The same model, which rounds what it multiplies to 8 bits as llama.cpp does."""
UNPACKED = "polyhead, unpacked"
"""The same model with its weights in the case's dtype."""


def cases(settings: Settings) -> Iterator[Case]:
    """SmolLM2-135M and Gemma 3 270M: tokens a second, one by one and a prompt at once.

    Quick: SmolLM2 alone.
    """
    for name, (title, file) in _MODELS.items():
        if installed(file) and (name == MODEL or not settings.quick):
            of_model = _of_model if settings.device == "cpu" else _on_device
            for case in of_model(name, settings):
                yield replace(case, group=f"{title}, {case.group}")


def _on_device(name: str, settings: Settings) -> Iterator[Case]:
    """On a GPU: decoding from a captured graph and without, a prompt, transformers there."""
    here = torch.device("cpu")  # a file is read here, wherever cases are drawn
    with here:
        peer = theirs(name).to(settings.device) if installed("transformers") else None
    for dtype in settings.dtypes:
        with here:
            ours = load(name, dtype=dtype, device=settings.device, expect=LanguageModel)
        text = ours.tokenizer.encode(topics["compound"])
        ids = torch.tensor([text[: 256 if settings.quick else 1024]], device=settings.device)
        if peer is not None:
            peer = _as_dtype(peer, dtype)
        yield decode_on_device(ours, peer, ids, dtype)
        yield prefill_on_device(ours, peer, ids, dtype)


def _of_model(name: str, settings: Settings) -> Iterator[Case]:
    length = 256 if settings.quick else 1024
    peer = theirs(name) if installed("transformers") else None
    llama = LlamaCpp(find(name).path) if installed("llama.cpp") else None
    try:
        for dtype in settings.dtypes:
            ours = load(name, expect=LanguageModel).to(dtype)  # weights as the file holds them
            int8 = None
            if native.code() is not None:
                int8 = load(name, activations="int8", expect=LanguageModel).to(dtype)
            unpacked = load(name, dtype=dtype, expect=LanguageModel)
            ids = torch.tensor([ours.tokenizer.encode(topics["compound"])[:length]])
            if peer is not None:
                peer = _as_dtype(peer, dtype)
            for decode in (True, False):
                yield _case(decode, ours, int8, unpacked, peer, llama, ids, dtype)
    finally:
        if llama is not None:
            llama.close()


def _case(
    decode: bool,
    ours: LanguageModel,
    int8: LanguageModel | None,
    unpacked: LanguageModel,
    theirs: Any,
    llama: LlamaCpp | None,
    ids: Tensor,
    dtype: torch.dtype,
) -> Case:
    """The same 16 tokens after the same prompt; or a whole prompt into an empty cache."""
    prompt, tokens, same = ids[:, :PROMPT], ids[:, PROMPT : PROMPT + STEPS], says_the_same(dtype)

    def run(model: LanguageModel) -> Call:
        return steps(model, prompt, tokens) if decode else reading(model, ids)

    peers = {UNPACKED: Contestant(run(unpacked), same)}
    if int8 is not None:
        peers[INT8] = Contestant(run(int8), _says_nearly_the_same)
    if theirs is not None:
        call = their_steps(theirs, prompt, tokens) if decode else their_reading(theirs, ids)
        peers["transformers"] = Contestant(call, same)
    if llama is not None:
        known = ids[0, : PROMPT + 1 if decode else None].tolist()
        call = partial(llama.decode, known, STEPS) if decode else partial(llama.prefill, known)
        peers["llama.cpp"] = Contestant(call, _knows(llama, known, 0 if decode else -1))
    if decode:
        weights = float(sum(x.nbytes for x in (*ours.parameters(), *ours.buffers())))
        return Case(
            f"decode after {PROMPT} tokens, steps:", STEPS, dtype, run(ours), peers,
            (read_rate(weights).times(STEPS),), STEPS, "tokens/s", _seconds,
        )  # fmt: skip
    count = ids.shape[1]
    limit = matrix_rate(dtype, plan(ours.config, tokens=count).prefill.model)
    return Case(
        "prefill, tokens:", count, dtype, run(ours), peers, (limit,), count, "tokens/s", _seconds
    )


def _seconds(run: Call) -> float:
    """Seconds of a call; a separate process measures them itself."""
    start = time.perf_counter()
    result = run()
    wall = time.perf_counter() - start
    return result.seconds if isinstance(result, Told) else wall


def _says_nearly_the_same(ours: Tensor, theirs: Tensor) -> str | None:
    """In 8 bits: logits within a tenth of the largest."""
    error = (ours.float() - theirs.float()).abs().max().item()
    near = error <= 0.1 * ours.float().abs().max().item()
    return None if near else f"logits differ by {error:.2g}"


def _knows(llama: LlamaCpp, ids: list[int], place: int) -> Callable[[Tensor, Told], str | None]:
    """llama.cpp computes in 4 and 8 bits: its next token must be among our ten likeliest."""

    def differs(ours: Tensor, _: Told) -> str | None:
        token, likely = llama.next_token(ids), ours[0, place].topk(10).indices.tolist()
        return None if token in likely else f"it says token {token}, our likeliest are {likely}"

    return differs


def theirs(name: str = MODEL) -> Any:
    """A model of the catalogue in transformers."""
    import transformers

    file = find(name).path
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="sdpa"
        )
    return model.eval()


def _as_dtype(model: Any, dtype: torch.dtype) -> Any:
    """In another dtype; rotary frequencies stay float32, as when the model is loaded so."""
    rotary = model.model.rotary_emb
    frequencies = {name: each.float() for name, each in rotary.named_buffers()}
    model = model.to(dtype)
    for name, each in frequencies.items():
        setattr(rotary, name, each)
    return model
