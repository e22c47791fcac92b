"""Decoding over ranks, checkpoints that go to other numbers of ranks, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from cases_of_attention import mesh_of
from cases_of_models import FAMILIES, W, batch, made, mesh_named
from torch.distributed.device_mesh import DeviceMesh

import polyhead as ph
from polyhead import parallel
from polyhead.caches import Quantized
from polyhead.generation.decoding.batch import continued
from polyhead.generation.decoding.options import GenerationOptions
from polyhead.parallel.experts import check_experts
from polyhead.parallel.ranks import Ranks


def _tokens(model: ph.Transformer, cache: Any, ids: torch.Tensor, count: int) -> list[Any]:
    """Greedy tokens one by one, with a roll-back on the way; all logits."""
    seen = [model(ids, cache=cache)[:, -1]]
    for step in range(count):
        chosen = seen[-1].argmax(dim=-1, keepdim=True)
        if step == 3:
            model(chosen, cache=cache)
            cache.rollback(1)
        seen.append(model(chosen, cache=cache)[:, -1])
    return seen


def decoded(dimension: str, family: str, kind: str) -> None:
    """Tokens and logits equal one process, after fork and reorder too."""
    ids = batch(family)[0][:, :9]
    one, model = (made(family, torch.float64).eval() for _ in range(2))
    parallel.parallelize(model, mesh_of(dimension), training=False)
    with torch.inference_mode():
        caches = [each.new_cache(kind=kind) for each in (one, model)]
        runs = [_tokens(m, c, ids, 6) for m, c in zip((one, model), caches, strict=True)]
        for cache in caches:
            cache.reorder([1, 0, 1])
            if kind != "auto":  # a window takes no token back
                cache.rollback([0, 3, 1])
        more = torch.randint(W, (3, 2), generator=torch.Generator().manual_seed(1))
        forks = [cache.fork() for cache in caches]
        runs[0].append(one(more, cache=caches[0]))
        runs[1].append(model(more, cache=caches[1]))
        assert [fork.length for fork in forks] == [caches[0].length - 2] * 2
    for theirs, ours in zip(*runs, strict=True):
        apart = (ours - theirs).abs().max().item()
        assert apart <= 1e-11, f"logits differ by {apart:.1e}"
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    if dimension == "context":
        held = sum(layer.part.length for layer in caches[1].layers)
        total = torch.tensor(held)
        dist.all_reduce(total)
        assert total == sum(layer.length for layer in caches[1].layers)
        assert held < total


def quantized(family: str) -> None:
    """Codes of a spread cache are of other groups, and as near to exact as in one process."""
    ids = batch(family)[0][:, :9]
    one, model = (made(family, torch.float64).eval() for _ in range(2))
    parallel.parallelize(model, mesh_of("context"), training=False)
    codes = Quantized(8, 8, group=2, sink_tokens=0, recent=0)
    with torch.inference_mode():
        exact, alone, spread = (
            torch.stack([logits[:, -1] for logits in _given(each, ids, cache)])
            for each, cache in (
                (one, one.new_cache()),
                (one, one.new_cache(kind="dense", quantized=codes)),
                (model, model.new_cache(kind="dense", quantized=codes)),
            )
        )
    own, error = (alone - exact).abs().max().item(), (spread - exact).abs().max().item()
    assert 0 < error <= 3 * own, f"{error:.1e}, in one process {own:.1e}"


def _given(model: ph.Transformer, ids: torch.Tensor, cache: Any) -> list[torch.Tensor]:
    """Logits of a prompt and of the same tokens one by one."""
    return [model(part, cache=cache) for part in (ids, *ids.split(1, dim=1))]


class _Numbers:
    """A tokenizer whose texts are the numbers of the tokens."""

    def stream(self) -> _Numbers:
        return self

    def push(self, token: int) -> str:
        return f"{token} "

    def flush(self) -> str:
        return ""


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "prompts of two lengths": {},
    "beams": {"num_beams": 3},
    "drawn, in pages": {"temperature": 1.0, "seed": 3},
}


def generated(mesh: str, families: list[str], ways: list[str]) -> None:
    """What ``generate`` writes is token for token what one process writes."""
    for family in families:
        one, model = (made(family, torch.float64).eval() for _ in range(2))
        parallel.parallelize(model, mesh_named(mesh), training=False)
        for way in ways:
            wanted, found = (_written(each, family, way) for each in (one, model))
            assert found == wanted, f"{family} on {mesh}, {way}: {found} for {wanted}"
            assert len(wanted[0]) == 8


def _written(model: ph.Transformer, family: str, way: str) -> list[tuple[int, ...]]:
    ids, _, more = batch(family)
    prompts: Any = ids[:, :9].tolist()
    sources = more["encoder_ids"].tolist() if more else None
    if sources is not None:
        prompts = [[0]] * len(sources)
    if way == "prompts of two lengths":
        of_two = prompts if sources is None else sources
        of_two[1] = of_two[1][:-3]
    options = GenerationOptions(max_new_tokens=8, **WAYS[way])
    cache = {"kind": "paged"} if way == "drawn, in pages" else {}
    found = continued(model, _Numbers(), prompts, options, frozenset(), (), cache, sources)  # type: ignore[arg-type]
    return [each.ids for each in found]


def refused(what: str) -> None:
    """What a mesh cannot do with a model, before anything is changed."""
    if what == "heads":
        model = made("Qwen 3", torch.float64)
        config = model.config
        layers = tuple(
            ph.config.LayerConfig(ph.config.AttentionConfig(3, 3, 8), layer.feed_forward)
            for layer in config.layers
        )
        model = ph.Transformer(ph.config.TransformerConfig("decoder", W, 32, 64, layers))
        parallel.parallelize(model, mesh_of("tensor"))
    elif what == "another model":
        family = "Llama" if dist.get_rank() == 0 else "Falcon"
        parallel.parallelize(made(family, torch.float64), mesh_of("context"))
    elif what == "other weights":
        torch.manual_seed(dist.get_rank())
        parallel.parallelize(ph.Transformer(FAMILIES["Llama"]()), mesh_of("tensor"))
    elif what == "an argument":
        order = "zigzag" if dist.get_rank() == 0 else "striped"
        parallel.parallelize(made("Llama", torch.float64), mesh_of("context"), order=order)  # type: ignore[arg-type]
    elif what == "on one rank":
        exchange = "ring" if dist.get_rank() == 0 else "rings"
        parallel.parallelize(made("Llama", torch.float64), mesh_of("context"), exchange=exchange)  # type: ignore[arg-type]
    elif what in ("a length", "other tokens"):
        model = parallel.parallelize(made("Llama", torch.float64), mesh_of("tensor"))
        length = 10 + dist.get_rank() * (what == "a length")
        model(torch.full((1, length), 3 + dist.get_rank()))
    elif what == "tokens that were drawn":
        model = parallel.parallelize(made("Llama", torch.float64), mesh_of("context"))
        with torch.inference_mode():
            cache = model.new_cache()
            model(torch.zeros(1, 5, dtype=torch.int64), cache=cache)
            model(torch.full((1, 1), dist.get_rank()), cache=cache)
    elif what == "a name":
        parallel.parallelize(made("Llama", torch.float64), mesh_of("tp"))
    elif what == "tokens":
        model = parallel.parallelize(made("Llama", torch.float64), mesh_of("context"))
        model(torch.zeros(1, 9 + 3 * dist.get_rank(), dtype=torch.int64))
    elif what == "an id":
        model = parallel.parallelize(made("Llama", torch.float64), mesh_of("context"))
        model(torch.full((1, 10), 46 + dist.get_rank()))
    elif what == "too long":
        model = parallel.parallelize(made("Llama", torch.float64), mesh_of("context"))
        model(torch.zeros(1, 33, dtype=torch.int64))
    elif what == "a kernel":
        model = parallel.parallelize(made("Llama", torch.float64), mesh_of("context"))
        model(torch.zeros(1, 10, dtype=torch.int64), kernel="sdpa")
    elif what == "a probe":
        model = parallel.parallelize(made("Llama", torch.float64), mesh_of("context"))
        with model.layers[1].attention.register_attention_hook(print):
            model(torch.zeros(1, 10, dtype=torch.int64))
    elif what == "outside":
        mesh = DeviceMesh("cpu", [0], mesh_dim_names=("context",))
        if dist.get_rank() == 0:
            raise ValueError("of the job is not on the mesh, which holds 1 of 2 processes")
        parallel.parallelize(made("Llama", torch.float64), mesh)
    elif what == "experts":
        ranks = replace(Ranks.of(mesh_of("expert"), "expert"), size=3)
        check_experts(made("gpt-oss", torch.float64), ranks)
    elif what == "no experts":
        parallel.parallelize(made("Llama", torch.float64), mesh_of("expert"))
    elif what == "no tensor":
        model = made("Llama", torch.float64)
        parallel.parallelize(model, mesh_of("context"), sequence_parallel=True)
    elif what == "an encoder":
        parallel.parallelize(made("T5", torch.float64), mesh_of("tensor"), sequence_parallel=True)
    elif what == "twice":
        model = parallel.parallelize(made("Llama", torch.float64), mesh_of("context"))
        parallel.parallelize(model, mesh_of("context"))
