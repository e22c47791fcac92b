"""``polyhead doctor``: what this machine can run, and what would enable the rest."""

from __future__ import annotations

import os
import platform
import warnings
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyhead.cli import options

if TYPE_CHECKING:
    from rich.console import Console

_PACKAGES = ("polyhead", "torch", "numpy", "tokenizers", "safetensors", "gguf", "huggingface_hub")
_PEERS = ("transformers", "triton")
# Instruction sets that decide the speed of attention: vector width, and matrix units in bfloat16.
_INSTRUCTIONS = (
    "avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "bf16", "i8mm", "sve", "sve2", "sme",
)  # fmt: skip

_CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu (without CUDA)"


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Also show how each layer of this decoder runs a decoding step."
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Show what this machine can run, and the command that would enable each missing part."""
    from polyhead.cli.terminal import console, print_json

    report = examine()
    if model is not None:
        report["decoding"] = {"model": model, "layers": decoding(model)}
    if json:
        print_json(report)
    else:
        _show(report, console())


def examine() -> dict[str, Any]:
    """Everything that ``doctor`` shows, as plain data."""
    return {
        "versions": versions(),
        "machine": machine(),
        "kernels": _kernels(),
        "models": _models(),
        "cache": _cache(),
    }


def decoding(name: str) -> list[str]:
    """How each layer of a decoder runs a decoding step: in native code, or why not."""
    import torch

    from polyhead.cli.models import load_expecting
    from polyhead.generation import LanguageModel

    transformer = load_expecting(name, None, LanguageModel).transformer
    cache = transformer.new_cache()
    with torch.inference_mode():
        for count in (4, 1, 1):  # the second makes room for more
            transformer(torch.zeros(1, count, dtype=torch.int64), cache=cache)
    lines: list[str] = transformer.decode_plan(cache).explain().splitlines()
    return lines


def versions() -> dict[str, str | None]:
    """Versions of Python and of every package that matters; None if it is not installed."""
    import torch

    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in (*_PACKAGES, *_PEERS):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["torch"] = torch.__version__  # names the build, which the package may not
    return found


def machine() -> dict[str, Any]:
    """Processor, cores, threads, memory, instruction sets and accelerators."""
    import torch

    from polyhead import native
    from polyhead._utils.system_memory import system_memory

    flags = _cpu_flags()
    accelerators = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        accelerators.append("Apple GPU (mps)")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": system_memory().total,
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "native_code": None if (chosen := native.code()) is None else chosen.name,
        "native_code_measured": _measured(),
        "native_code_left_out": native.left_out(),
        "native_code_switched_off": native.switched_off(),
        "triton_switched_off": _triton_switched_off(),
        "no_decoding_graphs": _no_graphs(),
        "instructions": [name for name in _INSTRUCTIONS if name in flags],
        "accelerators": accelerators,
        "smaller_torch": _CPU_TORCH if torch.version.cuda and not accelerators else None,
    }


def _measured() -> dict[str, dict[str, Any]]:
    """What the codes took of which the fastest was chosen, by dtype; empty where none was."""
    from polyhead import native

    return {
        str(dtype).removeprefix("torch."): choice._asdict()
        for dtype, choice in native.choices().items()
    }


def _triton_switched_off() -> dict[str, str]:
    """Which of our Triton kernels fail their first-use test here, for common head sizes."""
    import torch

    from polyhead.kernels import KERNELS
    from polyhead.kernels.triton import blocks, self_test

    if KERNELS["triton"].unavailable() is None and torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the reason is shown
            for dtype in (torch.bfloat16, torch.float32):
                self_test.unsupported_reason(
                    torch.device("cuda:0"), dtype, blocks.parts_of(64, 64), None
                )
    return self_test.switched_off()


def _no_graphs() -> str | None:
    """Why decoding steps are not replayed from a CUDA graph here, or None."""
    import torch

    from polyhead.kernels import KERNELS

    if not torch.cuda.is_available():
        return "no CUDA device"
    if (why := KERNELS["triton"].unavailable()) is not None:
        return f"kernel 'triton' {why}"
    return None


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _cpu_flags() -> set[str]:
    first = _cpuinfo()
    return set((first.get("flags") or first.get("Features") or "").split())


def _processor() -> str:
    facts = _cpuinfo()
    name = facts.get("model name") or platform.processor() or "unknown"
    if "cpu family" in facts and "model" in facts:  # one name may stand for several generations
        name += f" (family {facts['cpu family']}, model {facts['model']})"
    return name


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _kernels() -> list[dict[str, Any]]:
    from polyhead.kernels import KERNELS

    return [
        {
            "name": kernel.name,
            "live": (why := kernel.unavailable()) is None,
            "summary": kernel.summary,
            "to_enable": why,
        }
        for kernel in KERNELS.values()
    ]


def _models() -> list[dict[str, Any]]:
    from polyhead.checkpoints import available

    return [
        {
            "name": state.model.name,
            "description": state.model.description,
            "path": None if state.path is None else str(state.path),
            "to_install": None if state.found else state.model.install,
        }
        for state in available()
    ]


def _cache() -> dict[str, Any]:
    from polyhead.checkpoints import cache_directory

    folder = cache_directory()
    total = 0
    for path in folder.rglob("*") if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # another process may remove an old copy meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return {"directory": str(folder), "bytes": total}


def _show(report: dict[str, Any], screen: Console) -> None:
    from rich.text import Text

    def section(title: str) -> None:
        screen.print(Text(f"\n{title}" if title != "versions" else title, style="bold"))

    def row(name: str, value: str, style: str = "") -> None:
        line = Text.assemble(("  " + name.ljust(18), "cyan"), (value, style))
        screen.print(line, soft_wrap=True)

    def mark(good: bool) -> tuple[str, str]:
        return ("✓ ", "green") if good else ("✗ ", "red")

    section("versions")
    for name, number in report["versions"].items():
        row(name, number or "not installed", "" if number else "dim")

    machine = report["machine"]
    section("machine")
    row("system", machine["system"])
    row("processor", machine["processor"])
    row("cores", f"{machine['cores']}, torch uses {machine['threads']} threads")
    if machine["memory_bytes"]:
        row("memory", f"{machine['memory_bytes'] / 2**30:.1f} GiB")
    row("instructions", " ".join(machine["instructions"]) or "none known")
    row("torch kernels for", machine["vector_instructions"])
    row("native code for", machine["native_code"] or "none")
    for dtype, choice in machine["native_code_measured"].items():
        steps, prompts = choice["steps"], choice["prompts"]
        used = f"{steps} for steps, {prompts} for prompts" if steps != prompts else steps
        row(f"  {dtype}", f"{used}; measured at first use, in µs:")
        for name, works in choice["times"].items():
            row("", f"{name}: " + ", ".join(f"{w} {1e6 * s:.0f}" for w, s in works.items()), "dim")
    if better := machine["native_code_left_out"]:
        row(
            "  not compiled",
            f"{better}, the best for this processor: install polyhead again",
            "red",
        )
    for name, wrong in machine["native_code_switched_off"].items():
        row("  switched off", f"{name}: {wrong}", "red")
    row("accelerators", ", ".join(machine["accelerators"]) or "none")
    for name, wrong in machine["triton_switched_off"].items():
        row("  Triton is off", f"{name}: {wrong}", "red")
    why = machine["no_decoding_graphs"]
    row("decoding graphs", "recorded by stream and generate" if why is None else f"none: {why}")
    if machine["smaller_torch"]:
        row("a smaller torch", machine["smaller_torch"])

    section("kernels, in the order of preference")
    for kernel in report["kernels"]:
        screen.print(
            Text.assemble(
                "  ", mark(kernel["live"]), (kernel["name"].ljust(16), "cyan"), kernel["summary"]
            ),
            soft_wrap=True,
        )
        if not kernel["live"]:
            screen.print(Text(f"      to enable: {kernel['to_enable']}"), soft_wrap=True)

    if (found := report.get("decoding")) is not None:
        section(f"decoding of {found['model']}")
        for line in found["layers"]:
            screen.print(Text(f"  {line}"), soft_wrap=True)

    section("models")
    for model in report["models"]:
        found = model["path"] is not None
        screen.print(
            Text.assemble(
                "  ", mark(found), (model["name"].ljust(16), "cyan"), model["description"]
            ),
            soft_wrap=True,
        )
        detail = model["path"] if found else f"to install: {model['to_install']}"
        screen.print(Text(f"      {detail}", style="dim" if found else ""), soft_wrap=True)

    section("converted models are kept in")
    cache = report["cache"]
    screen.print(Text(f"  {cache['directory']} ({cache['bytes'] / 1e6:,.0f} MB)"), soft_wrap=True)
