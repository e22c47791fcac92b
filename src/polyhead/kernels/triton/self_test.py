"""The test at first use: small inputs on the device itself, judged by float64.

Whether ``auto`` may take the kernels is asked of each device, dtype and pair of head sizes once,
before their first call; what disagrees or does not compile is switched off with a warning.
"""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyhead.kernels.triton import blocks
from polyhead.kernels.triton.waiting import waiting
from polyhead.native.arguments import KVSegment, ScoreMods
from polyhead.native.coding import Coding
from polyhead.native.dropout import Dropout, kept
from polyhead.semantics.recurrence import recur
from polyhead.semantics.recurrence_call import RecurrenceCall, recurrence_call_of

Bits = tuple[int, int]
"""Bits of a key's and of a value's codes; 0: the value is part of the key."""


class States(NamedTuple):
    """What the recurrence's kernels are compiled for.

    Attributes:
        decay: ``""``, ``"token"`` (for each head too) or ``"feature"``.
        delta: Whether by the delta rule.
    """

    decay: str
    delta: bool

    @classmethod
    def of(cls, call: RecurrenceCall) -> States:
        """What a call asks for."""
        decay = call.decay
        return cls("" if decay is None else "feature" if decay.ndim == 4 else "token", call.delta)


_Asked = tuple[str, torch.dtype, blocks.Parts, Bits | States | None]
_found: dict[_Asked, str | None] = {}
_lock = threading.Lock()


_CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def unsupported_reason(
    device: torch.device, dtype: torch.dtype, parts: blocks.Parts, kind: Bits | States | None
) -> str | None:
    """Why ``auto`` may not take the kernels for such heads on this device, or None."""
    asked = str(device), dtype, parts, kind
    if asked not in _found:
        if torch.cuda.get_device_capability(device) not in blocks.KNOWN:
            major, minor = torch.cuda.get_device_capability(device)
            return f"its tiles are not known to fit compute capability {major}.{minor}"
        if torch.cuda.is_current_stream_capturing():
            return "its test at first use waits for the device, which a captured graph must not"
        with _lock:
            if asked not in _found:
                _test(asked, device)
    wrong = _found[asked]
    return None if wrong is None else f"switched off: {wrong}"


# What torch.compiler.assume_constant_result would write, without importing the compiler.
unsupported_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]


def switched_off() -> dict[str, str]:
    """What was found wrong, by device, dtype and head sizes."""
    return {
        f"{device}, {_words(dtype, parts, kind)}": wrong
        for (device, dtype, parts, kind), wrong in _found.items()
        if wrong is not None
    }


def switch_off(
    device: torch.device,
    dtype: torch.dtype,
    parts: blocks.Parts,
    kind: Bits | States | None,
    why: str,
) -> None:
    """Lets ``auto`` take other kernels from now on, and warns."""
    _note((str(device), dtype, parts, kind), why)


def is_of_compiler(error: Exception) -> bool:
    """Whether Triton says that a kernel cannot be compiled or does not fit the device."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    own = isinstance(error, CompilationError | OutOfResources | PTXASError)
    return own or (type(error) is RuntimeError and "PassManager" in str(error))


def _words(dtype: torch.dtype, parts: blocks.Parts, kind: Bits | States | None) -> str:
    words = f"{str(dtype).removeprefix('torch.')}, "
    if isinstance(kind, States):
        decay = f"decay by {kind.decay}" if kind.decay else "no decay"
        return f"{words}states of {parts.head} features, {decay}{', delta rule' * kind.delta}"
    words += f"heads of {parts.head + parts.tail}"
    return words if kind is None else f"{words} in codes of {kind[0]} and {kind[1] or kind[0]} bits"


def _test(asked: _Asked, device: torch.device) -> None:
    _, dtype, parts, kind = asked
    what = f"compiling and testing Triton kernels on {device} for {_words(dtype, parts, kind)}"
    # In a thread of its own: no transform, mode or autocast of the caller applies there.
    with waiting(what), ThreadPoolExecutor(1) as elsewhere:
        wrong = elsewhere.submit(_tried, device, dtype, parts, kind).result()
    if wrong is None:
        _found[asked] = None
    else:
        _note(asked, wrong)


def _note(asked: _Asked, wrong: str) -> None:
    _found[asked] = wrong
    device, dtype, *_ = asked
    warnings.warn(
        f"the Triton kernels for {dtype} on {device} are switched off: {wrong}", stacklevel=2
    )


def _tried(
    device: torch.device, dtype: torch.dtype, parts: blocks.Parts, kind: Bits | States | None
) -> str | None:
    try:
        if isinstance(kind, States):
            return disagreement_of_states(device, dtype, parts, kind)
        if kind is not None:
            return disagreement_of_codes(device, dtype, parts, kind)
        return disagreement(device, dtype, parts)
    except Exception as error:  # whatever a compiler or driver raises: other kernels can compute
        return f"{type(error).__name__}: {str(error)[:200]}"


def disagreement(device: torch.device, dtype: torch.dtype, parts: blocks.Parts) -> str | None:
    """What the kernels compute wrongly on small inputs, or None.

    Args:
        device: Where to compute.
        dtype: Dtype of q, k and v.
        parts: The powers of two that hold a key and a value.
    """
    from polyhead.kernels.triton import launch

    generator = torch.Generator("cpu").manual_seed(0)
    close = _CLOSE[dtype]
    D, V, S = parts.head + parts.tail, parts.value, 150

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    for queries in (1, 40):
        q, k, v = random(1, 4, queries, D), random(1, 2, S, D), random(1, 2, S, V)
        piece, scale, at = KVSegment(k, v), D**-0.5, torch.arange(S, device=device)
        added, seed = random(1, 4, 1, S).float(), torch.tensor([7], device=device)
        high = at[None, S - queries :] + 1
        bounds = torch.full_like(high, 3), high
        dropout = Dropout(0.25, seed, S - queries, 0)
        everything = ScoreMods(bounds=bounds, bias=added, dropout=dropout)
        share = kept(0.25, seed, (1, 4), at[S - queries :], at).double() / 0.75
        hidden = (at < 3) | (at >= high[0][:, None])
        wide_q, wide_k, wide_v = q.double(), _heads(k), _heads(v)
        plain = wide_q @ wide_k.mT * scale
        scores = (plain + added).masked_fill(hidden, -torch.inf)
        ones = torch.ones_like(share)
        for mods, z, keeps in ((everything, scores, share), (ScoreMods(), plain, ones)):
            exact = z.softmax(dim=-1) * keeps @ wide_v
            out, lse = launch.attend(q, [piece], scale, mods, lse=True)
            if not torch.allclose(out.double(), exact, atol=close, rtol=close):
                return f"attention in {dtype} differs from float64"
            assert lse is not None
            if not torch.allclose(lse.double(), z.logsumexp(dim=-1), atol=close, rtol=close):
                return f"lse in {dtype} differs from float64"
            if max(D, V) > blocks.LARGEST_LEARNT:
                continue
            grad = random(1, 4, queries, V)
            learns = mods.learned is not None
            found = launch.gradients(
                q,
                piece,
                scale,
                mods,
                (out, lse),
                (grad, torch.zeros_like(lse)),
                of_bias=learns,
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


def disagreement_of_codes(
    device: torch.device, dtype: torch.dtype, parts: blocks.Parts, bits: Bits
) -> str | None:
    """What is computed wrongly over keys and values in codes, or None."""
    from polyhead.kernels.triton import launch

    generator = torch.Generator("cpu").manual_seed(0)
    (k_bits, v_bits), close = bits, _CLOSE[dtype]
    D, V, group = parts.head + parts.tail, parts.value, 32
    k_codes, k_scale, k_zero, k = _codes(generator, D, k_bits, group, 0)
    share = group if V % group == 0 else V
    v_codes, v = k_codes, k[..., :V]
    of_values: list[Tensor | None] = [None, None]
    if v_bits:
        v_codes, v_scale, v_zero, v = _codes(generator, V, v_bits, group, share)
        of_values = [v_scale, v_zero]
    scales = [k_scale, k_zero, *of_values]
    tensors = [None if x is None else x.to(device) for x in scales]
    coding = Coding(group, D, V, k_bits, v_bits, share, *tensors)  # type: ignore[arg-type]
    k_codes = k_codes.to(device)
    piece = KVSegment(k_codes, v_codes.to(device) if v_bits else k_codes, coding=coding)
    k, v = (_heads(x.to(device, dtype)) for x in (k, v))
    for queries in (1, 40):
        q = torch.randn(1, 4, queries, D, generator=generator).to(device, dtype)
        out, _ = launch.attend(q, [piece], D**-0.5, ScoreMods(), lse=False)
        exact = (q.double() @ k.mT * D**-0.5).softmax(dim=-1) @ v
        if not torch.allclose(out.double(), exact, atol=close, rtol=close):
            return f"attention in {dtype} over codes differs from float64"
    return None


def disagreement_of_states(
    device: torch.device, dtype: torch.dtype, parts: blocks.Parts, states: States
) -> str | None:
    """What the recurrence's kernels compute wrongly of small inputs, or None."""
    from polyhead.kernels.triton import recurrence

    generator = torch.Generator("cpu").manual_seed(0)
    B, H, K, V, close = 2, 2, parts.head, parts.value + 3, _CLOSE[dtype]

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    for tokens in (recurrence.FEW, 70):  # from token to token, and from chunk to chunk
        q, k, v = random(B, 1, tokens, K), random(B, 1, tokens, K), random(B, H, tokens, V)
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        q, k, v = (x.to(device, dtype) for x in (q, k, v))
        decay = None
        if states.decay:
            decay = -random(B, H, tokens, *[K] * (states.decay == "feature")).abs().to(device)
        beta, state = random(B, H, tokens).sigmoid().to(device), random(B, H, K, V).to(device)
        real = (torch.rand(B, tokens, generator=generator) > 0.1).to(device)

        call = recurrence_call_of(q, k, v, decay, beta, states.delta, 1.0, state, real, False)
        wide: dict[str, Any] = {
            name: x.double() for name, x in call.tensors().items() if name != "real"
        }
        found, wanted = recurrence.recur(call), recur(replace(call, **wide))
        for mine, exact in zip(found, wanted, strict=True):
            if not torch.allclose(mine.double(), exact, atol=close, rtol=close):
                return f"the recurrence in {dtype} differs from float64"
    return None


def _codes(
    generator: torch.Generator, size: int, bits: int, group: int, share: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of two kv heads and five units, their scales and zeros, and the numbers meant."""
    shape = (1, 2, 5, group, size // share) if share else (1, 2, 5, 1, size)
    codes = torch.randint(1 << bits, (1, 2, 5, group, size), generator=generator)
    scale, zero = (torch.rand(2, *shape, generator=generator) * 4 / (1 << bits)).bfloat16()
    zero = zero - 2
    wide = (x.float().repeat_interleave(share or 1, dim=-1) for x in (scale, zero))
    factor, start = wide
    packed = codes
    if bits == 4:
        low, high = codes.chunk(2, dim=3)
        packed = low | high << 4
    numbers = (start + codes * factor).flatten(2, 3)
    return packed.to(torch.uint8).flatten(3), scale.flatten(3), zero.flatten(3), numbers


def _heads(x: Tensor) -> Tensor:
    """Two kv heads in float64, one for each of four query heads."""
    return x.double().repeat_interleave(2, dim=1)


def _groups(x: Tensor) -> Tensor:
    """The sums of two query heads each."""
    return x.reshape(1, 2, 2, *x.shape[2:]).sum(dim=2)
