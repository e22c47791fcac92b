"""``polyhead plan``: parameters, operations, cache bytes and what fits."""

from __future__ import annotations

from typing import Annotated

import typer

from polyhead.cli import options


def _sizes(text: str) -> dict[str, int]:
    """``tensor=8,context=4`` as numbers by name."""
    from polyhead.errors import ConfigError

    found = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not size.strip().isdecimal():
            raise ConfigError(f"--mesh must be sizes such as tensor=8,context=4: got {text!r}")
        found[name.strip()] = int(size)
    return found


def _presets(incomplete: str) -> list[str]:
    from polyhead.planning.presets import presets

    return [name for name in presets() if name.startswith(incomplete)]


_Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG_OR_NAME",
        help="A config.json, its directory, or a preset such as llama-3-8b.",
        show_default=False,
        autocompletion=_presets,
    ),
]
_Tokens = Annotated[
    str | None,
    typer.Option(
        metavar="COUNT",
        help="Context of each sequence, such as 8192 or 128k (k is 1,024, m 1,024²); default: "
        "the model's maximum.",
    ),
]
_Batch = Annotated[int, typer.Option("--batch-size", "--batch", help="Number of sequences.")]
_Dtype = Annotated[
    str,
    typer.Option(
        help="Dtype of weights: float32, bfloat16, float16, float8, int8, int4; file: as "
        "stored in a quantized directory."
    ),
]
_KvDtype = Annotated[
    str | None,
    typer.Option(
        help="Dtype of the cache: float32, bfloat16, float16, int8, int4; default: dtype."
    ),
]
_Page = Annotated[
    int | None,
    typer.Option("--page-size", "--page", help="Tokens per cache page; default: not paged."),
]
_TensorParallel = Annotated[int, typer.Option(help="Ranks of tensor parallelism.")]
_Memory = Annotated[
    str | None, typer.Option(help="Memory of one rank, such as 24GiB; shows what fits.")
]
_Bandwidth = Annotated[
    str | None, typer.Option(help="Memory bandwidth of one rank, such as 3.35TB/s.")
]
_Flops = Annotated[str | None, typer.Option(help="Compute rate of one rank, such as 989TFLOP/s.")]
_Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="SIZES",
        help="A mesh, such as tensor=8,context=4: shows what a rank holds and sends.",
    ),
]
_Link = Annotated[
    str | None, typer.Option(help="Bandwidth from one rank to the next, such as 50GB/s.")
]
_Presets = Annotated[
    bool,
    typer.Option("--presets", help="List the presets and exit; with --json, their sources."),
]


def plan(
    config: _Config = "",
    tokens: _Tokens = None,
    batch_size: _Batch = 1,
    dtype: _Dtype = "bfloat16",
    kv_dtype: _KvDtype = None,
    page_size: _Page = None,
    tensor_parallel: _TensorParallel = 1,
    memory: _Memory = None,
    bandwidth: _Bandwidth = None,
    flops: _Flops = None,
    mesh: _Mesh = None,
    link: _Link = None,
    presets: _Presets = False,
    json: options.Json = False,
) -> None:
    """Plan a model: parameters, FLOPs, cache bytes, what fits.

    Example: polyhead plan llama-3-8b --tokens 8192 --memory 24GiB
    """
    from polyhead.cli.terminal import console, print_json
    from polyhead.errors import InputError
    from polyhead.planning import plan as plan_model
    from polyhead.planning.presets import presets as known
    from polyhead.planning.tables import render, shapes
    from polyhead.planning.units import token_count

    screen = console()
    if presets:
        if json:
            said = ("title", "source", "checked", "unchecked")
            print_json(
                {name: {key: getattr(p, key) for key in said} for name, p in known().items()}
            )
            return
        for name, preset in known().items():
            line = f"{name:<20} {shapes(preset.model)}"
            screen.print(line, no_wrap=True, overflow="ellipsis")
        return
    if not config:
        raise InputError(f"no model: give a config.json or a preset: {', '.join(known())}")
    made = plan_model(
        config,
        tokens=None if tokens is None else token_count("--tokens", tokens),
        batch_size=batch_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=page_size,
        tensor_parallel=tensor_parallel,
        memory=memory,
        bandwidth=bandwidth,
        flops=flops,
        mesh=None if mesh is None else _sizes(mesh),
        link=link,
    )
    if json:
        print_json(made.to_dict())
        return
    for part in render(made):
        screen.print(part)
