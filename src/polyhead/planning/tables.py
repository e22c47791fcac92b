"""A plan as tables for people, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from polyhead.config import TransformerConfig
from polyhead.planning.figures import Figures
from polyhead.planning.mesh import MeshPlan
from polyhead.planning.units import binary, decimal

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WIDTH = 80


def text(plan: Figures) -> str:
    """The tables as plain text."""
    import io

    from rich.console import Console

    screen = Console(
        file=io.StringIO(), width=WIDTH, color_system=None, markup=False, highlight=False
    )
    for part in render(plan):
        screen.print(part)
    stream = screen.file
    stream.seek(0)
    return "\n".join(line.rstrip() for line in stream.read().splitlines())


def render(plan: Figures) -> Iterator[RenderableType]:
    """The tables and sentences of a plan, in order."""
    from rich.text import Text

    model = plan.config
    yield Text(f"{plan.name}: {model.kind}, {shapes(model)}", style="bold")
    yield Text(_setting(plan))
    yield _parameters(plan)
    if plan.cache_layers:
        yield _cache(plan)
    yield _operations(plan)
    yield _memory(plan)
    if plan.decode is not None:
        yield _decode(plan)
    if plan.mesh is not None:
        yield _mesh(plan, plan.mesh)
    if plan.layouts:
        yield _layouts(plan)
        yield Text("FlashAttention changes none of these: it is another way to compute them.")
    for saving in plan.savings:
        yield Text(f"• {saving}")
    for note in plan.notes:
        yield Text(f"! {note}", style="yellow")


def shapes(model: TransformerConfig) -> str:
    """Layers, width and heads of the first layer, in words."""
    first = model.layers[0].attention
    layers = f"{len(model.layers)}"
    if model.encoder_layers:
        layers = f"{len(model.encoder_layers)} + {layers}"
    return f"{layers} layers × {model.embed_dim:,}, {first.described}"


def _setting(plan: Figures) -> str:
    words = [f"{plan.tokens:,} tokens × batch {plan.batch_size:,}", f"weights {plan.dtype}"]
    if plan.cache_layers:
        words.append(f"cache {plan.kv_dtype}")
    if plan.page_size is not None:
        words.append(f"pages of {plan.page_size} tokens")
    if plan.evicting is not None:
        words.append(f"evicting by {plan.evicting}")
    if plan.tensor_parallel > 1:
        words.append(f"{plan.tensor_parallel} ranks")
    return ", ".join(words)


def _table(title: str, *columns: str) -> Table:
    """The first column is words, the others numbers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(f"\n{title}", style="bold"),
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=bool(i))
    return table


def _parameters(plan: Figures) -> Table:
    table = _table("parameters", "part", "parameters", "share")
    total = plan.parameters.total
    for name, count in vars(plan.parameters).items():
        if count:
            table.add_row(name.replace("_", "-"), f"{count:,}", f"{count / total:.1%}")
    table.add_row("total", f"{total:,}", "", style="bold")
    if plan.active_parameters != total:
        share = f"{plan.active_parameters / total:.1%}"
        table.add_row("active per token", f"{plan.active_parameters:,}", share)
    return table


def _cache(plan: Figures) -> Table:
    where = "cache" if plan.tensor_parallel == 1 else "cache on each rank"
    table = _table(where, "layers", "kv heads", "per token", "each layer", "all of them")
    for row in plan.cache_layers:
        attention = f"{len(row.layers)} × {row.attention}" + (" (cross)" if row.cross else "")
        table.add_row(
            attention,
            "latent"
            if any(kind in row.attention for kind in ("MLA", "GLA"))
            else str(row.num_kv_heads),
            f"{row.token_bytes:,.0f} B",
            binary(row.bytes),
            binary(row.bytes * len(row.layers)),
        )
    token = f"{plan.cache_token_bytes:,.0f} B"
    table.add_row("total", "", token, "", binary(plan.cache_bytes), style="bold")
    return table


def _operations(plan: Figures) -> Table:
    passes = [("prompt" if plan.decode is not None else "forward pass", plan.prefill)]
    if plan.decode is not None:
        passes.append(("decode step", plan.decode))
    table = _table("operations (FLOP)", "part", *(name for name, _ in passes))
    rows = {
        "projections": "projections",
        "scores": "scores and values",
        "feed_forward": "feed-forward",
        "head": "head, last token",
    }
    for field, words in rows.items():
        table.add_row(words, *(decimal(getattr(each, field)) for _, each in passes))
    table.add_row("model: visible pairs", *(decimal(f.model) for _, f in passes), style="bold")
    table.add_row("hardware: whole tiles", *(decimal(f.hardware) for _, f in passes))
    return table


def _memory(plan: Figures) -> Table:
    ranks = plan.tensor_parallel
    table = _table("memory" if ranks == 1 else "memory of each rank", "what", "bytes", "")
    table.add_row("weights", binary(plan.rank_weight_bytes), f"{plan.rank_weight_bytes:,}")
    if plan.cache_layers:
        table.add_row("cache", binary(plan.cache_bytes), f"{plan.cache_bytes:,}")
    table.add_row("both", binary(plan.rank_bytes), f"{plan.rank_bytes:,}", style="bold")
    prompt = "prompt in one piece, at most" if plan.decode is not None else "activations, at most"
    table.add_row(prompt, binary(plan.activation_bytes), f"{plan.activation_bytes:,}")
    fit = plan.fit
    if fit is not None:
        verdict = "fits" if fit.fits else "does not fit"
        table.add_row(f"of {binary(fit.memory)}: {verdict}", binary(fit.free), "beside the weights")
        if plan.cache_layers:
            longest, largest = fit.longest_context, fit.largest_batch
            table.add_row(
                f"longest context at batch {plan.batch_size:,}",
                "unlimited" if longest is None else f"{longest:,}",
                "tokens",
            )
            table.add_row(
                f"largest batch at {plan.tokens:,} tokens",
                "unlimited" if largest is None else f"{largest:,}",
                "sequences",
            )
            table.caption_justify = "left"
            table.caption = "what fits counts weights and cache; activations come on top"
    return table


def _decode(plan: Figures) -> Table:
    read = plan.decode_weight_bytes + plan.decode_cache_bytes
    ranks = "" if plan.tensor_parallel == 1 else " on each rank"
    table = _table(f"a decode step{ranks}", "what", "", "")
    table.add_row("weights read", binary(plan.decode_weight_bytes), "")
    table.add_row("cache read", binary(plan.decode_cache_bytes), "")
    table.add_row("bytes read", binary(read), f"{read:,}", style="bold")
    bound = plan.bound
    if bound is None:
        return table
    for words, seconds in (
        ("time to read", bound.memory_seconds),
        ("time to compute", bound.compute_seconds),
    ):
        if seconds is not None:
            table.add_row(words, f"{seconds * 1e3:,.3f} ms", "")
    table.add_row(
        f"at least (bound by {bound.bound})",
        f"{bound.seconds * 1e3:,.3f} ms",
        f"at most {bound.tokens_per_second:,.1f} tokens/s",
        style="bold",
    )
    return table


def _mesh(plan: Figures, mesh: MeshPlan) -> Table:
    words = " × ".join(f"{name} {size}" for name, size in mesh.mesh)
    table = _table(f"each of {mesh.ranks:,} ranks: {words}", "what", "bytes", "backward")
    table.add_row(f"weights; {mesh.tokens:,} tokens of a sequence", binary(mesh.weight_bytes), "")
    if plan.cache_layers:
        table.add_row("cache", binary(mesh.cache_bytes), "")
    table.add_row("prompt in one piece, at most", binary(mesh.activation_bytes), "")
    for each in mesh.sent:
        row = f"sent in a step of training: {each.what}"
        table.add_row(row, binary(each.forward), binary(each.backward))
    if mesh.step_seconds is not None:
        work, transfer = (f"{seconds * 1e3:,.3f} ms" for seconds in mesh.step_seconds)
        table.add_row("a step of the ring: attention, transfer", work, transfer)
        table.add_row("transfers hide from", f"{mesh.hides_from:,}", "tokens of a rank")
    return table


def _layouts(plan: Figures) -> Table:
    heads = plan.layouts[0].query_heads
    table = _table(
        f"head layouts at the same width, {heads} query heads", "", "kv", "kept", "cache", "of MHA",
        "weights", "scores",
    )  # fmt: skip
    table.padding = (0, 1, 0, 0)  # seven columns in the 60 of a narrow terminal
    for row in plan.layouts:
        table.add_row(
            f"{row.name}{'←' if row.current else ''}",
            "latent" if row.num_kv_heads is None else str(row.num_kv_heads),
            f"{row.elements:,}",
            binary(row.cache_bytes),
            f"{row.ratio:.1%}",
            decimal(row.parameters),
            decimal(row.decode_flops),
            style="bold" if row.current else "",
        )
    table.caption_justify = "left"
    table.caption = (
        "kept: numbers per token and layer; cache: at these tokens, all layers; weights: of "
        "attention; scores: FLOP of one decode step"
    )
    return table
