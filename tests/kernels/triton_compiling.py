"""Compiles our Triton kernels for GPUs that need not be here, and says what they take of one.

    python tests/kernels/triton_compiling.py 80 90 [--only bfloat16]

Every launch of ``launch.attend``, ``launch.gradients`` and ``recurrence.recur`` over tensors
without meaning is compiled with the very arguments that a launch has. A line of JSON for each:
registers of a thread, bytes that are spilled, shared memory of a program, whether products run on
``wgmma`` or ``tcgen05``, and whether `auto` may take such heads. Triton's own cache keeps what is
compiled.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from polyhead.kernels.triton import blocks, launch
from polyhead.kernels.triton import recurrence as states
from polyhead.kernels.triton.device import backward, forward, merge, recurrence
from polyhead.native.arguments import KVSegment, ScoreMods
from polyhead.native.coding import Coding
from polyhead.native.dropout import Dropout
from polyhead.semantics.recurrence_call import RecurrenceCall, recurrence_call_of


class Compiling:
    """Stands in for a kernel: ``kernel[grid](...)`` compiles in place of launching."""

    def __init__(self, kernel: Any, capability: int, found: list[dict[str, Any]]) -> None:
        self.kernel, self.found = kernel, found
        self.target = GPUTarget("cuda", capability, 32)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._compiled

    def _compiled(self, *arguments: Any, **options: Any) -> None:
        backend = make_backend(self.target)
        kernel = self.kernel
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialized, options = bind(*arguments, **options)
        packed = kernel._pack_args(backend, options, bound, specialized, options)
        parsed, signature, constants, attributes = packed
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            built = triton.compile(
                ASTSource(kernel, signature, constants, attributes),
                target=self.target,
                options=parsed.__dict__,
            )
        said = log.getvalue()
        numbers = [
            re.search(pattern, said) for pattern in (r"Used (\d+) reg", r"(\d+) bytes spill")
        ]
        self.found.append(
            {
                "kernel": kernel.__name__,
                "capability": self.target.arch,
                "registers": None if numbers[0] is None else int(numbers[0][1]),
                "spilled": None if numbers[1] is None else int(numbers[1][1]),
                "shared": built.metadata.shared,
                "wgmma": "wgmma" in built.asm["ptx"],
                "tcgen05": "tcgen05.mma" in built.asm["ptx"],
                "mma": "mma.sync" in built.asm["ptx"],
            }
        )


EVERYTHING = ("bounds", "softcap", "bias", "dropout")


def score_mods_of(names: tuple[str, ...], B: int, H: int, T: int, S: int) -> ScoreMods:
    """Extras of these names over tensors of zeros."""
    made: dict[str, Any] = {}
    if "bounds" in names:
        made["bounds"] = torch.zeros(2, 1, T, dtype=torch.int64).unbind()
    if "keep" in names:
        made["keep"] = torch.zeros(1, 1, T, S, dtype=torch.bool)
    if "softcap" in names:
        made["softcap"] = 30.0
    if "bias" in names:
        made["bias"] = torch.zeros(1, H, T, S)
    if "slopes" in names:
        made |= {"slopes": torch.zeros(H), "q_positions": torch.zeros(T, dtype=torch.int64)}
    if "dropout" in names:
        made["dropout"] = Dropout(0.1, torch.zeros(1, dtype=torch.int64), 0, 0)
    return ScoreMods(**made)


def piece_of(k: torch.Tensor, v: torch.Tensor, bits: int) -> KVSegment:
    """Keys and values, or codes of so many bits in their place; a latent's value is in its key."""
    if not bits:
        return KVSegment(k, v)
    (B, G, S, D), V, latent = k.shape, v.shape[3], v.shape[3] < k.shape[3]

    def codes(width: int, scales: int) -> tuple[torch.Tensor, ...]:
        made = torch.zeros(B, G, S // 32, 32 * width * bits // 8, dtype=torch.uint8)
        return made, *torch.zeros(2, B, G, S // 32, scales, dtype=torch.bfloat16)

    k, *of_keys = codes(D, D)
    v, *of_values = (k, None, None) if latent else codes(V, V)
    return KVSegment(
        k, v, coding=Coding(32, D, V, bits, 0 if latent else bits, 32, *of_keys, *of_values)
    )


def cases() -> Iterator[tuple[torch.dtype, int, int, int, tuple[str, ...], bool]]:
    """dtype, key size, value size, queries, extras, and whether gradients are asked for."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for size in (64, 128, 256):
            yield dtype, size, size, 512, ("bounds",), True
            yield dtype, size, size, 1, (), False
            if dtype == torch.bfloat16:
                yield dtype, size, size, 512, EVERYTHING, True
                yield dtype, size, size, 512, ("bounds", "slopes"), True
        yield dtype, 576, 512, 1, ("bounds",), False
    for size in (64, 128, 256):
        yield torch.bfloat16, size, size, 512, ("bounds", "keep"), True
        yield torch.bfloat16, size, size, 1, ("bounds", "pages"), False
        yield torch.bfloat16, size, size, 1, ("bounds", "pages", "codes of 4 bits"), False
    for size in (64, 128, 256, 576):
        for codes in ("codes of 8 bits", "codes of 4 bits"):
            yield torch.bfloat16, size, min(size, 512), 1, ("bounds", codes), False
        if size < 576:
            yield torch.bfloat16, size, size, 512, ("bounds", "codes of 4 bits"), False
    for size in (80, 96, 192):
        mods = EVERYTHING if size == 96 else ("bounds",)
        yield torch.bfloat16, size, 128 if size == 192 else size, 512, mods, True


def state_cases() -> Iterator[tuple[str, RecurrenceCall]]:
    """Recurrences of one token and of many, in place, with padding."""
    kinds = itertools.product((torch.bfloat16, torch.float32), ("", "token", "feature"), (0, 1))
    for dtype, decay, delta in kinds:
        for (K, V), T in itertools.product(((16, 1), (64, 64), (128, 128), (256, 64)), (1, 512)):
            q, v = torch.zeros(1, 2, T, K, dtype=dtype), torch.zeros(1, 4, T, V, dtype=dtype)
            beta, real = torch.zeros(1, 4, T), torch.ones(1, T, dtype=torch.bool)
            logs = torch.zeros(1, 4, T, K)
            logs = None if not decay else logs if decay == "feature" else logs[..., 0]
            name = f"{str(dtype).removeprefix('torch.')} states of {K} x {V} T={T} decay {decay}"
            rest = (beta if delta else None, bool(delta), None, torch.zeros(1, 4, K, V), real, True)
            yield name + delta * " delta", recurrence_call_of(q, q, v, logs, *rest)


def main(capabilities: list[int], only: str) -> None:
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True
    kernels = [(forward, "attend"), (merge, "merge"), (backward, "keys_pass")]
    kernels.append((backward, "queries_pass"))
    kernels += [(recurrence, name) for name in ("steps", "chunk_pairs", "chunks")]
    own = [getattr(module, name) for module, name in kernels]
    for capability in capabilities:
        found: list[dict[str, Any]] = []
        table = blocks.table_of(divmod(capability, 10))
        launch._table = lambda device, table=table: table  # type: ignore[assignment]
        for (module, name), kernel in zip(kernels, own, strict=True):
            setattr(module, name, Compiling(kernel, capability, found))
        for dtype, D, V, T, names, learns in cases():
            case = f"{str(dtype).removeprefix('torch.')} {D}/{V} T={T} {'+'.join(names) or 'plain'}"
            if only not in case:
                continue
            coded = any(name.startswith("codes") for name in names)
            fits = blocks.fits(blocks.parts_of(D, V), dtype.itemsize, coded=coded)
            S, H, G = 4096, 8, 2
            if D == 576:
                H, G = 128, 1
            q, k = torch.zeros(1, H, T, D, dtype=dtype), torch.zeros(1, G, S, D, dtype=dtype)
            v = k[..., :V] if D == 576 else torch.zeros(1, G, S, V, dtype=dtype)
            mods = score_mods_of(names, 1, H, T, S)
            found.clear()
            bits = next((int(name[9]) for name in names if name.startswith("codes")), 0)
            piece = piece_of(k, v, bits)
            if "pages" in names:  # one page that holds all
                table = torch.zeros(1, 1, dtype=torch.int64)
                piece = piece._replace(pages=table, paged=piece.k.shape[2])
            out, lse = launch.attend(q, [piece], 1.0, mods, lse=True)
            if learns:
                grads = torch.zeros_like(out), torch.zeros_like(lse)
                of_bias = mods.learned is not None
                launch.gradients(q, KVSegment(k, v), 1.0, mods, (out, lse), grads, of_bias=of_bias)
            for each in found:
                print(json.dumps({"case": case, "fits": fits} | each), flush=True)
        for case, call in state_cases():
            if only in case:
                found.clear()
                states.recur(call)
                for each in found:
                    print(json.dumps({"case": case, "fits": True} | each), flush=True)


if __name__ == "__main__":
    before, _, after = " ".join(sys.argv[1:]).partition("--only")
    main([int(word) for word in before.split()] or [80, 90], after.strip())
