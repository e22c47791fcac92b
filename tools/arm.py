"""Compiles the native code for ARM and compares what it computes under emulation with float64.

    python tools/arm.py        about 5 minutes on 2 cores; needs g++-aarch64-linux-gnu and qemu-user

Each code runs on a processor that has what it needs (``qemu-aarch64 -cpu``): products dense and in
blocks of a few rows and of many, in three dtypes, with bytes multiplied as bytes, attention and its
gradients of few queries and of many, and the keys that queries choose.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyhead.layers.quantized import int8_activations
from polyhead.native.arguments import Scales
from polyhead.quantization import block_type, scaled
from polyhead.quantization.unpacking import grids

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from random_blocks import by_package, random_blocks  # noqa: E402

COMPILER = "aarch64-linux-gnu-g++"
FLAGS = [
    "-std=c++17", "-O2", "-Icsrc", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
    "-fno-strict-aliasing", "-Wno-psabi",
]  # fmt: skip
CODES: dict[str, tuple[list[str], str]] = {
    "portable": ([], "cortex-a57"),
    "neon_dot": (["-march=armv8.2-a+dotprod"], "cortex-a76"),
    "neon_bf16": (["-march=armv8.2-a+dotprod+bf16+i8mm"], "max"),
}
"""Flags of each code, as in setup.py, and the oldest processor that has its instructions."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
BLOCKS = ("Q4_0", "Q8_0", "Q5_1", "Q4_K", "Q6_K")
INT8_BLOCKS = (
    *BLOCKS, "Q2_K", "Q3_K", "MXFP4", "TQ1_0", "TQ2_0", "IQ3_XXS", "IQ2_XS", "IQ1_M", "I8", "U8",
    "U4",
)  # fmt: skip


@dataclass
class Case:
    """What the harness reads, and what it is to write: shapes, dtypes and values in float64.

    Attributes:
        name: For messages.
        kind: 1 is a product, 2 is attention with its gradients, 3 a choice of keys.
        fields: Whole numbers, and floats where the harness reads one.
        tensors: What it reads then, bytes each.
        results: By name: dtype, values and the error that is allowed.
    """

    name: str
    kind: int
    fields: list[int | float]
    tensors: list[bytes]
    results: dict[str, tuple[torch.dtype, Tensor, float]]


def as_bytes(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def product(
    dtype: torch.dtype, rows: int, block: str | None, *, int8: bool = False, by_columns: str = ""
) -> Case:
    """x Wᵀ + b of 512 features, dense or in blocks; ``by_columns`` names x, w or both."""
    inside, outside = 512, 70
    x, bias = torch.randn(rows, inside).to(dtype), torch.randn(outside).to(dtype)
    groups, by = (outside, inside // 64), None
    if block is None:
        weight, number = torch.randn(outside, inside).to(dtype), 0
        stored, exact = as_bytes(weight.mT if "w" in by_columns else weight), weight.double()
    elif block in scaled.TYPES:
        kind = scaled.TYPES[block]
        zeros = torch.randint(256, groups, dtype=torch.uint8)
        by = Scales(0.01 * torch.randn(groups), zeros, 64, 1)
        coded = torch.randint(256, (outside, kind.row_octets(inside)), dtype=torch.uint8)
        number, stored = kind.number, as_bytes(coded)
        exact = scaled.numbers_of(coded, kind, by).double()
    else:
        kind = block_type(block)
        coded, number = random_blocks(kind, outside, inside), kind.number
        stored, exact = as_bytes(coded), by_package(coded, kind).double()
    y = (int8_activations(x.float()) if int8 else x).double() @ exact.mT + bias.double()
    size = float(exact.abs().mean() * x.double().abs().mean() * inside**0.5)
    error = CLOSE[dtype] * 4 * max(size, 1.0)
    return Case(
        f"product {dtype} {rows} rows {block or 'dense'}{' int8' if int8 else ''}{by_columns}", 1,
        [
            DTYPES.index(dtype), rows, inside, outside, number, int(int8), "x" in by_columns,
            "w" in by_columns,
        ],
        [
            as_bytes(x.mT if "x" in by_columns else x), stored, as_bytes(bias),
            *((b"", b"") if by is None else (as_bytes(by.scales), as_bytes(zeros))),
        ],
        {"y": (dtype, y, error)},
    )  # fmt: skip


def attention(dtype: torch.dtype, queries: int, D: int, V: int, group: int) -> Case:
    """Causal attention of the last queries over 150 keys, and its gradients."""
    B, G, S, scale = 2, 2, 150, D**-0.5
    H = G * group
    q = torch.randn(B, H, queries, D).to(dtype)
    k, v = torch.randn(B, G, S, D).to(dtype), torch.randn(B, G, S, V).to(dtype)
    grad = torch.randn(B, H, queries, V).to(dtype)
    high = torch.arange(S - queries, S) + 1
    low = torch.full_like(high, 3)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wide_k, wide_v = (x.repeat_interleave(group, dim=1) for x in exact[1:])
    at = torch.arange(S)
    hidden = (at < low[:, None]) | (at >= high[:, None])
    scores = (exact[0] @ wide_k.mT * scale).masked_fill(hidden, -torch.inf)
    out = scores.softmax(dim=-1) @ wide_v
    out.backward(grad.double())
    close = CLOSE[dtype]
    lse = scores.detach().logsumexp(dim=-1)
    results = {"out": (dtype, out.detach(), 2 * close), "lse": (torch.float32, lse, 4 * close)}
    for name, x in zip("qkv", exact, strict=True):
        assert x.grad is not None
        largest = float(x.grad.abs().max())
        results[f"grad_{name}"] = (dtype, x.grad, 4 * close * max(1.0, largest))
    return Case(
        f"attention {dtype} {queries} queries {D}/{V}, groups of {group}", 2,
        [DTYPES.index(dtype), B, H, G, queries, S, D, V, scale],
        [as_bytes(x) for x in (q, k, v, low, high, grad)], results,
    )  # fmt: skip


def choice(dtype: torch.dtype, queries: int, heads: int, D: int) -> Case:
    """The best 20 of 150 keys by whole numbers, which are exact and often equal."""
    B, S, count = 2, 150, 20
    shapes = ((B, heads, queries, D), (B, S, D), (B, heads, queries))
    q, k, weights = (torch.randint(-2, 3, shape).float() for shape in shapes)
    scores = (weights[..., None] * (q @ k[:, None].mT).relu()).sum(dim=1)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    tensors = [as_bytes(q.to(dtype)), as_bytes(k.to(dtype)), as_bytes(weights)]
    return Case(
        f"choice {dtype} {queries} queries, {heads} heads of {D}", 3,
        [DTYPES.index(dtype), B, heads, queries, S, D, count],
        tensors, {"chosen": (torch.int64, best.sort(dim=-1).values.double(), 0.0)},
    )  # fmt: skip


def every_case() -> list[Case]:
    torch.manual_seed(0)
    found: list[Case] = []
    for dtype in DTYPES:
        found += [product(dtype, rows, None) for rows in (1, 3, 8, 9, 33, 70)]
        found += [product(dtype, rows, block) for block in BLOCKS for rows in (1, 5, 20, 70)]
        found += [product(dtype, 71, None, by_columns=which) for which in ("x", "w", "xw")]
        found += [
            product(dtype, rows, block, int8=True) for block in INT8_BLOCKS for rows in (1, 3, 29)
        ]
        found += [
            attention(dtype, queries, *sizes)
            for queries in (1, 5, 40)
            for sizes in ((64, 64, 1), (32, 48, 3), (40, 24, 4), (128, 128, 8))
        ]
        found += [choice(dtype, n, *sizes) for n in (1, 9) for sizes in ((64, 128), (5, 19))]
    return found


def write(cases: list[Case], path: Path, threads: int) -> None:
    with path.open("wb") as file:
        file.write(as_bytes(grids()))
        for case in cases:
            file.write(np.array([case.kind, threads], np.int64).tobytes())
            for field in case.fields:
                kind = np.float64 if isinstance(field, float) else np.int64
                file.write(np.array([field], kind).tobytes())
            for tensor in case.tensors:
                file.write(np.array([len(tensor)], np.int64).tobytes() + tensor)
        file.write(np.array([0], np.int64).tobytes())


def disagreements(cases: list[Case], written: bytes) -> list[str]:
    """Results that differ from float64 by more than is allowed."""
    found, at = [], 0
    for case in cases:
        for name, (dtype, exact, error) in case.results.items():
            size = exact.numel() * dtype.itemsize
            piece = torch.frombuffer(bytearray(written[at : at + size]), dtype=dtype)
            at += size
            far = (piece.double().view(exact.shape) - exact).abs().max().item()
            if not far <= error:
                found.append(f"{case.name}: {name} differs by {far:.2e}, allowed {error:.2e}")
    if at != len(written):
        found.append(f"{len(written)} bytes were written, {at} expected")
    return found


def compiled(folder: Path) -> Path:
    """The harness with every code."""
    sources: dict[str, tuple[str, list[str]]] = {"harness": ("tools/arm_harness.cpp", [])}
    for name, (flags, _) in CODES.items():
        sources[name] = f"csrc/instruction_sets/{name}.cpp", flags

    def one(name: str) -> Path:
        source, flags = sources[name]
        target = folder / f"{name}.o"
        command = [COMPILER, *FLAGS, *flags, "-c", source, "-o", str(target)]
        subprocess.run(command, cwd=ROOT, check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = [str(path) for path in pool.map(one, sources)]
    program = folder / "harness"
    # Of equal inline functions the linker keeps the first, which runs on every processor.
    first = sorted(objects, key=lambda path: ("harness" not in path, "portable" not in path))
    subprocess.run([COMPILER, "-static", *first, "-o", str(program), "-lgomp"], check=True)
    return program


def main() -> int:
    cases, failed = every_case(), False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = compiled(folder)
        for code, (_, processor) in CODES.items():
            for threads in (1, 2):
                write(cases, folder / "cases", threads)
                command = ["qemu-aarch64", "-cpu", processor, str(program), code]
                files = [str(folder / "cases"), str(folder / "results")]
                done = subprocess.run([*command, *files], check=False)
                wrong = (
                    [f"it ended with {done.returncode}"]
                    if done.returncode
                    else disagreements(cases, (folder / "results").read_bytes())
                )
                failed |= bool(wrong)
                said = f"{code}, {threads} threads, on {processor}: {len(cases)} cases"
                print(f"{said}, {len(wrong)} differ", *wrong[:20], sep="\n  ")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
