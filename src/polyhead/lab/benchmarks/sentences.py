"""Cases of a sentence encoder: MiniLM, in three programs."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyhead.checkpoints import find
from polyhead.generation import TextEncoder, load
from polyhead.lab.benchmarks.case import Call, Case, Contestant, Settings, close
from polyhead.lab.benchmarks.limits import matrix_rate
from polyhead.lab.benchmarks.onnx_peer import session_options
from polyhead.lab.benchmarks.peers import MINILM, ONNX_MODELS, installed
from polyhead.planning import plan

MODEL, TOKENS = "minilm", 128


def cases(settings: Settings) -> Iterator[Case]:
    """MiniLM: hidden states of 1 and of 32 sentences of 128 tokens.

    onnxruntime computes in float32, whatever the case's dtype.
    """
    if not installed(MINILM):
        return
    for dtype in settings.dtypes:
        ours = load(MODEL, dtype=dtype, expect=TextEncoder)
        peer = _in_transformers(dtype) if installed("transformers") else None
        for count in (1,) if settings.quick else (1, 32):
            ids = torch.randint(1000, 20_000, (count, TOKENS))
            yield _case(ours, peer, ids, dtype)


def _case(ours: TextEncoder, peer: Any, ids: Tensor, dtype: torch.dtype) -> Case:
    model, count = ours.transformer, len(ids)
    peers = {}
    if peer is not None:
        same = close(dtype)
        peers["transformers"] = Contestant(lambda: peer(ids).last_hidden_state, same)
        if installed(ONNX_MODELS):
            peers[ONNX_MODELS] = Contestant(_in_onnxruntime(ids), same)
    operations = plan(model.config, tokens=TOKENS, batch_size=count).prefill.model
    return Case(
        f"sentences of {TOKENS} tokens:", count, dtype, lambda: model.hidden_states(ids), peers,
        (matrix_rate(dtype, operations),), count, "sentences/s",
    )  # fmt: skip


def _in_transformers(dtype: torch.dtype) -> Any:
    import transformers

    library: Any = transformers
    library.utils.logging.disable_progress_bar()
    return library.AutoModel.from_pretrained(
        find(MODEL).path, dtype=dtype, attn_implementation="sdpa"
    ).eval()


def _in_onnxruntime(ids: Tensor) -> Call:
    """transformers' model, exported for these shapes; float32."""
    import onnxruntime

    model, given = _in_transformers(torch.float32), {"ids": ids.numpy()}
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = Path(folder, "model.onnx")
        # onnxruntime improves the graph itself.
        torch.onnx.export(model, (ids,), file, input_names=["ids"], verbose=False, optimize=False)
        log.setLevel(level)
        session = onnxruntime.InferenceSession(
            str(file), session_options(), providers=["CPUExecutionProvider"]
        )
    return lambda: torch.from_numpy(session.run(None, given)[0])
