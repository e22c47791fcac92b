"""The numbers of the lesson, computed by polyhead when the page is made.

Scripts on the page recompute what a reader changes; tests compare them with these functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn

from polyhead._utils.texts import LANGUAGES
from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    TransformerConfig,
)
from polyhead.interpret.trace.steps import TRACE_EXAMPLE, Trace, TraceStep, example_trace, subscript
from polyhead.models import Transformer
from polyhead.models.parts import layer_of
from polyhead.planning import Preset, cache_saving, plan, presets
from polyhead.planning.layouts import EXAMPLES, layouts
from polyhead.viewer.lesson.exercises import exercises

_DRAWN_KEYS, _DRAWN_SIZE = 8, 256
_LENGTHS = tuple(2**power for power in range(10, 18))
_STACK = {"layers": 4, "width": 64, "heads": 4, "hidden": 256, "vocabulary": 1000, "tokens": 10}
"""The encoder of the text that the lesson follows."""


def lesson_numbers() -> dict[str, Any]:
    """All numbers of the lesson, as plain data."""
    models = [each for each in presets().values() if each.keeps_keys]
    heads, real, training = (_stored(name) for name in ("heads", "real", "training"))
    return {
        "example": example(),
        "scaling": scaling(),
        "heads": heads,
        "real": real,
        "training": training,
        "exercises": exercises(heads, real, training),
        "masks": masks(),
        "cross": cross(),
        "caches": [caches(each) for each in models if each.model.kind != "encoder"],
        "flash": {"scores": [1, 2, 0, 3, 1, 4, 2, 0], "values": [1, 0, 2, 1, 3, 1, 0, 2]},
        "layers": layers(),
        "models": [described(each) for each in models],
        "table": table(),
        "savings": savings(),
    }


def _stored(name: str) -> Any:
    return json.loads((resources.files(__package__) / f"{name}.json").read_text(encoding="utf-8"))


def example() -> dict[str, Any]:
    """Every step of the worked example, and from which numbers each of its numbers is made."""
    traces = {code: example_trace(code) for code in LANGUAGES}
    steps = [
        {
            "key": step.key,
            "name": _name(step),
            "titles": {code: trace[step.key].title for code, trace in traces.items()},
            "formulas": {code: trace[step.key].formula for code, trace in traces.items()},
            "values": step.values.tolist(),
            "made": _made(step, traces["en"]),
        }
        for step in traces["en"].steps
    ]
    first = {"Q": TRACE_EXAMPLE.w_q, "K": TRACE_EXAMPLE.w_k, "V": TRACE_EXAMPLE.w_v}
    return {
        "words": {code: list(trace.tokens) for code, trace in traces.items()},
        "x": TRACE_EXAMPLE.x.tolist(),
        "weights": {letter: matrices[0].tolist() for letter, matrices in first.items()},
        "steps": steps,
    }


def _name(step: TraceStep) -> str:
    """``"A₁"``, the matrix as the formulas call it."""
    head, dot, part = step.key.partition(".")
    number = subscript(int(head.removeprefix("head"))) if dot else ""
    names = {"QK": f"Q{number}K{number}ᵀ", "scaled": f"S{number}", "exp": f"exp(S{number})",
             "sum": f"Σ exp(S{number})", "out": f"head{number}"}  # fmt: skip
    if not dot:
        return {"concat": "Concat"}.get(step.key, step.key)
    return names.get(part, f"{part}{number}")


def _made(step: TraceStep, trace: Trace) -> dict[str, Any]:
    """Which matrices a step is made of, and how their rows, columns or cells make its numbers."""

    def source(key: str) -> dict[str, Any]:
        return {"name": _name(trace[key]), "values": trace[key].values.tolist()}

    if step.factors is not None:
        sides = [{"name": name, "values": values.tolist()} for name, values in step.factors]
        return {"kind": "product", "left": sides[0], "right": sides[1]}
    head, _, part = step.key.partition(".")
    if part == "scaled":
        return {"kind": "cell", "left": source(f"{head}.QK"), "how": "x / √2"}
    if part == "exp":
        return {"kind": "cell", "left": source(f"{head}.scaled"), "how": "exp(x)"}
    if part == "sum":
        return {"kind": "row", "left": source(f"{head}.exp")}
    if part == "A":
        return {"kind": "share", "left": source(f"{head}.exp"), "right": source(f"{head}.sum")}
    if step.key == "concat":
        return {"kind": "part", "left": source("head1.out"), "right": source("head2.out")}
    return {"kind": "given"}


def _drawn(*shape: int, seed: int) -> Tensor:
    """Standard normal numbers in float64, the same at every call, with three decimals."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(1000).round().div(1000)


def scaling() -> dict[str, Any]:
    """A query and eight keys of up to 256 drawn features each."""
    query, keys = _drawn(_DRAWN_SIZE, seed=1), _drawn(_DRAWN_KEYS, _DRAWN_SIZE, seed=2)
    return {"query": query.tolist(), "keys": keys.tolist()}


def masks() -> dict[str, Any]:
    """Queries and keys of six words."""
    words = {"en": ["The", "cat", "sleeps", "because", "it", "tired"],
             "zh": ["猫", "在", "睡觉", "因为", "它", "累"]}  # fmt: skip
    query, keys = _drawn(6, 4, seed=3), _drawn(6, 4, seed=4)
    return {"words": words, "query": query.tolist(), "keys": keys.tolist()}


def cross() -> dict[str, Any]:
    """Three words that are written and four that are read, for the example's first head."""
    source = [[1, 0, 0, 1], [0, 1, 1, 0], [0, 0, 1, 1], [1, 1, 0, 0]]
    words = {
        "target": {"en": ["the", "cat", "sleeps"], "zh": ["the", "cat", "sleeps"]},
        "source": {"en": ["猫", "在", "睡", "觉"], "zh": ["猫", "在", "睡", "觉"]},
    }
    return {"target": TRACE_EXAMPLE.x.tolist(), "source": source, "words": words}


def caches(preset: Preset) -> dict[str, Any]:
    """A known model's cache with its own head layout and with the others, at several lengths."""
    model = preset.model
    lengths = [n for n in _LENGTHS if n <= model.max_positions] or [model.max_positions]
    by_length = [
        layouts(model, tokens=tokens, batch_size=1, kv_dtype="bfloat16", page_size=None)
        for tokens in lengths
    ]
    rows = [
        {
            "name": row.name,
            "current": row.current,
            "elements": row.elements,
            "bytes": [rows[place].cache_bytes for rows in by_length],
        }
        for place, row in enumerate(by_length[0])
    ]
    return {
        "name": preset.name,
        "title": preset.title,
        "layers": len(model.layers),
        "heads": model.layers[0].attention.num_heads,
        "tokens": lengths,
        "rows": rows,
    }


def described(preset: Preset) -> dict[str, Any]:
    """A known model's layers, heads, width and size of a head."""
    model = preset.model
    attention = model.layers[0].attention
    held = attention.kv
    size = attention.value_dim if held.latent else held.key_dim
    return {"title": preset.title, "layers": len(model.layers), "heads": attention.num_heads,
            "width": model.embed_dim, "size": size}  # fmt: skip


def layers() -> dict[str, Any]:
    """Four layers with drawn weights on ten tokens, and what each adds to every token."""
    E, H = _STACK["width"], _STACK["heads"]
    norm = NormConfig("layernorm", bias=True)
    attention = AttentionConfig(H, H, E // H, qkv_bias=True, out_bias=True)
    network = FeedForwardConfig(_STACK["hidden"], "relu", gated=False, bias=True)
    config = TransformerConfig(
        "encoder",
        _STACK["vocabulary"],
        E,
        32,
        (LayerConfig(attention, network, norm),) * _STACK["layers"],
        embedding=EmbeddingConfig(positions="learned"),
        final_norm=norm,
        head=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer(config).double().eval()
        for module in model.modules():  # torch's default size, so that layers have visible effects
            if isinstance(module, nn.Linear | nn.Embedding):
                module.reset_parameters()
        ids = torch.randint(_STACK["vocabulary"], (1, _STACK["tokens"]))
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    added: list[Tensor] = []
    hooks = []
    for number in range(_STACK["layers"]):
        layer = layer_of(model, number)
        hooks += [
            layer.attention.register_forward_hook(lambda _, args, out: added.append(out[0])),
            layer.register_forward_hook(
                lambda _, args, out: seen.append((args[0][0], added[-1], out[0]))
            ),
        ]
    try:
        with torch.no_grad():
            model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return {
        "shape": [1, *seen[0][0].shape],
        "tokens": _STACK["tokens"],
        "input": {"values": _rounded(seen[0][0])},
        "layers": [_layer(*each) for each in seen],
        "parameters": {"each": sum(p.numel() for p in model.layers[0].parameters())},
    }


def _layer(x: Tensor, attention: Tensor, out: Tensor) -> dict[str, Any]:
    """The changes that one layer made to ``x [T, E]``."""
    return {
        "values": _rounded(out),
        "mean": float(out.mean()),
        "std": float(out.std()),
        "attention": attention.norm(dim=-1).tolist(),
        "network": (out - x - attention).norm(dim=-1).tolist(),
        "path": out.norm(dim=-1).tolist(),
        "alike": torch.cosine_similarity(x, out).tolist(),
    }


def _rounded(values: Tensor) -> list[list[float]]:
    return [[round(x, 3) for x in row] for row in values.tolist()]


def table() -> list[dict[str, Any]]:
    """The variants side by side: heads, numbers that are cached, models."""
    bytes_of = {row["name"].split("-")[0]: row for row in caches(presets()["llama-2-70b"])["rows"]}
    formulas = {"MHA": ("h", "h", "2 · h · d_k"), "GQA": ("h", "g", "2 · g · d_k"),
                "MQA": ("h", "1", "2 · d_k"), "MLA": ("h", "c", "d_c + d_R")}  # fmt: skip
    rows: list[dict[str, Any]] = [
        {"name": name, "queries": queries, "kv": kv, "cache": cache,
         "llama": bytes_of[name]["elements"], "models": EXAMPLES[name]}
        for name, (queries, kv, cache) in formulas.items()
    ]  # fmt: skip
    flash = {"queries": "–", "kv": "–", "cache": None, "llama": "–", "models": ""}
    return [*rows, {"name": "FlashAttention"} | flash]


def savings() -> Mapping[str, str]:
    """How much less DeepSeek-V2 caches, by what it is compared with."""
    v2, other = presets()["deepseek-v2"].model, presets()["deepseek-67b"].model
    made = plan("deepseek-v2", tokens=1024)
    public = next(each for each in made.savings if "67B" in each.baseline)
    heads = made.layouts
    mha = next(row for row in heads if row.name == "MHA")
    mla = next(row for row in heads if row.name == "MLA")
    return {
        "public": f"{public.fraction:.1%}",
        "alike": f"{cache_saving(v2, other):.1%}",
        "mha": f"{1 - mla.elements / mha.elements:.1%}",
    }
