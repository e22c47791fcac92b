"""The test at first use: small inputs on the device itself, judged by float64.

Whether ``auto`` may take the kernels is asked of each device, dtype and pair of head sizes once,
before their first call; what disagrees or does not compile is switched off with a warning.
"""

from __future__ import annotations

import logging
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from polyhead.kernels.triton import blocks
from polyhead.native.arguments import Extras, Piece
from polyhead.native.dropout import Dropout, kept

_Asked = tuple[str, torch.dtype, blocks.Parts]
_found: dict[_Asked, str | None] = {}
_lock = threading.Lock()
_OLDEST = (9, 0)
"""The compute capability whose registers the tiles are known to fit; on 8.0 some spill."""


def objection(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> str | None:
    """Why ``auto`` may not take the kernels for such heads on this device, or None."""
    asked = _asked(device, dtype, key_dim, value_dim)
    if asked not in _found:
        if torch.cuda.get_device_capability(device) < _OLDEST:
            return "its tiles are not known to fit the registers before compute capability 9.0"
        if torch.cuda.is_current_stream_capturing():
            return "its test at first use waits for the device, which a captured graph must not"
        with _lock:
            if asked not in _found:
                _test(asked, device)
    wrong = _found[asked]
    return None if wrong is None else f"switched off: {wrong}"


# What torch.compiler.assume_constant_result would write, without importing the compiler.
objection._dynamo_marked_constant = True  # type: ignore[attr-defined]


def switched_off() -> dict[str, str]:
    """What was found wrong, by device, dtype and head sizes."""
    return {
        f"{device}, {str(dtype).removeprefix('torch.')}, heads of {parts.head + parts.tail}": wrong
        for (device, dtype, parts), wrong in _found.items()
        if wrong is not None
    }


def switch_off(
    device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, why: str
) -> None:
    """Lets ``auto`` take other kernels from now on, and warns."""
    _note(_asked(device, dtype, key_dim, value_dim), why)


def is_of_compiler(error: Exception) -> bool:
    """Whether Triton says that a kernel cannot be compiled or does not fit the device."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    own = isinstance(error, CompilationError | OutOfResources | PTXASError)
    return own or (type(error) is RuntimeError and "PassManager" in str(error))


def _asked(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> _Asked:
    return str(device), dtype, blocks.parts_of(key_dim, value_dim)


def _test(asked: _Asked, device: torch.device) -> None:
    _, dtype, parts = asked
    logging.getLogger("polyhead").info(
        "compiling and testing Triton kernels for %s on %s: some seconds, once per machine",
        dtype, device,
    )  # fmt: skip
    # In a thread of its own: no transform, mode or autocast of the caller applies there.
    with ThreadPoolExecutor(1) as elsewhere:
        wrong = elsewhere.submit(_tried, device, dtype, parts).result()
    if wrong is None:
        _found[asked] = None
    else:
        _note(asked, wrong)


def _note(asked: _Asked, wrong: str) -> None:
    _found[asked] = wrong
    device, dtype, _ = asked
    warnings.warn(
        f"the Triton kernels for {dtype} on {device} are switched off: {wrong}", stacklevel=2
    )


def _tried(device: torch.device, dtype: torch.dtype, parts: blocks.Parts) -> str | None:
    try:
        return disagreement(device, dtype, parts)
    except Exception as error:  # whatever a compiler or driver raises: other kernels can compute
        return f"{type(error).__name__}: {str(error)[:200]}"


def disagreement(device: torch.device, dtype: torch.dtype, parts: blocks.Parts) -> str | None:
    """What the kernels compute wrongly on small inputs, or None.

    Args:
        device: Where to compute.
        dtype: Of q, k and v.
        parts: Of the head sizes.
    """
    from polyhead.kernels.triton import launch

    generator = torch.Generator("cpu").manual_seed(0)
    close = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    D, V, S = parts.head + parts.tail, parts.value, 150

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    for queries in (1, 40):
        q, k, v = random(1, 4, queries, D), random(1, 2, S, D), random(1, 2, S, V)
        piece, scale, at = Piece(k, v), D**-0.5, torch.arange(S, device=device)
        added, seed = random(1, 4, 1, S).float(), torch.tensor([7], device=device)
        high = at[None, S - queries :] + 1
        bounds = torch.full_like(high, 3), high
        dropout = Dropout(0.25, seed, S - queries, 0)
        everything = Extras(bounds=bounds, bias=added, dropout=dropout)
        share = kept(0.25, seed, (1, 4), at[S - queries :], at).double() / 0.75
        hidden = (at < 3) | (at >= high[0][:, None])
        wide_q, wide_k, wide_v = q.double(), _heads(k), _heads(v)
        plain = wide_q @ wide_k.mT * scale
        scores = (plain + added).masked_fill(hidden, -torch.inf)
        ones = torch.ones_like(share)
        for extras, z, keeps in ((everything, scores, share), (Extras(), plain, ones)):
            exact = z.softmax(dim=-1) * keeps @ wide_v
            out, lse = launch.attend(q, [piece], scale, extras, lse=True)
            if not torch.allclose(out.double(), exact, atol=close, rtol=close):
                return f"attention in {dtype} differs from float64"
            assert lse is not None
            if not torch.allclose(lse.double(), z.logsumexp(dim=-1), atol=close, rtol=close):
                return f"lse in {dtype} differs from float64"
            if max(D, V) > blocks.LARGEST_LEARNT:
                continue
            grad = random(1, 4, queries, V)
            learns = extras.learned is not None
            found = launch.gradients(
                q, piece, scale, extras, (out, lse), (grad, torch.zeros_like(lse)), of_bias=learns
            )
            weights, wide_grad = z.softmax(dim=-1), grad.double()
            d_weights = wide_grad @ wide_v.mT * keeps
            d_z = weights * (d_weights - (wide_grad * exact).sum(dim=-1, keepdim=True))
            wanted = [
                d_z @ wide_k * scale,
                _groups(d_z.mT @ wide_q * scale),
                _groups((weights * keeps).mT @ wide_grad),
                d_z.sum(dim=2, keepdim=True),
            ]
            for mine, theirs in zip(found, wanted, strict=False):
                if not torch.allclose(mine.double(), theirs, atol=4 * close, rtol=4 * close):
                    return f"a gradient in {dtype} differs from float64"
    return None


def _heads(x: Tensor) -> Tensor:
    """Two kv heads in float64, one for each of four query heads."""
    return x.double().repeat_interleave(2, dim=1)


def _groups(x: Tensor) -> Tensor:
    """The sums of two query heads each."""
    return x.reshape(1, 2, 2, *x.shape[2:]).sum(dim=2)
