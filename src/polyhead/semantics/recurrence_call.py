"""The arguments of a recurrence, checked; errors name the argument.

Shape letters: B batch, H heads (states), T tokens, K key size, V value size. q, k and v may each
have fewer heads than H, as in grouped attention: head h uses head h // (H / heads) of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from polyhead._utils.checks import check_bool, check_number, shown
from polyhead.semantics.scores import accumulation_dtype, autocast_enabled
from polyhead.semantics.tokens import is_traced


class Precise(NamedTuple):
    """The numbers of a call in the dtype that it is computed in; what is not real is 0.

    Attributes:
        q: ``[B, H, T, K]``, times the scale.
        k: ``[B, H, T, K]``.
        v: ``[B, H, T, V]``.
        decay: Logarithms ``[B or 1, H, T, K or 1]``, or None.
        beta: ``[B, H, T]``, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    beta: Tensor | None


@dataclass(eq=False, slots=True)
class RecurrenceCall:
    """One recurrence to compute.

    Attributes:
        q: ``[B, H or fewer, T, K]``, any strides.
        k: ``[B, H or fewer, T, K]``.
        v: ``[B, H or fewer, T, V]``.
        heads: H, the number of states.
        decay: ``[H]``, ``[B, H, T]`` or ``[B, H, T, K]`` logarithms of what the state is multiplied
            with, or None.
        beta: ``[B, H, T]`` how much of a token is written, or None: all.
        delta: Whether a token first takes out what the state answers to its key.
        scale: Factor of q.
        state: ``[B, H, K, V]`` before the first token, or None: zeros.
        real: ``[B, T]`` False for tokens that are padding, or None.
        in_place: Whether ``state`` becomes the last state.
        requires_grad: Whether a gradient may be asked for.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    heads: int
    decay: Tensor | None
    beta: Tensor | None
    delta: bool
    scale: float
    state: Tensor | None
    real: Tensor | None
    in_place: bool
    requires_grad: bool

    @property
    def dtype(self) -> torch.dtype:
        """What it is computed in, and the dtype of the state."""
        return accumulation_dtype(self.q.dtype)

    def tokens(self, start: int, stop: int) -> RecurrenceCall:
        """The same call of some of its tokens."""
        q, k, v = (x[:, :, start:stop] for x in (self.q, self.k, self.v))
        decay, beta = (
            x if x is None or x.ndim == 1 else x[:, :, start:stop] for x in (self.decay, self.beta)
        )
        real = None if self.real is None else self.real[:, start:stop]
        return replace(self, q=q, k=k, v=v, decay=decay, beta=beta, real=real)

    def tensors(self) -> dict[str, Tensor]:
        """The arguments that are tensors, by name."""
        found = {
            "q": self.q, "k": self.k, "v": self.v, "decay": self.decay, "beta": self.beta,
            "state": self.state, "real": self.real,
        }  # fmt: skip
        return {name: x for name, x in found.items() if x is not None}

    def log_decay(self) -> Tensor | None:
        """``[B or 1, H, T, K or 1]`` in ``dtype``; 0 for tokens that are not real."""
        decay = self.decay
        if decay is None:
            return None
        decay = decay.to(self.dtype)
        if decay.ndim == 1:
            decay = decay[None, :, None].expand(1, -1, self.q.shape[2])
        return self._cleared(decay[..., None] if decay.ndim == 3 else decay)

    def precise(self, heads: int | None = None) -> Precise:
        """The numbers to compute with, q and k with ``heads`` heads (None: H)."""
        q, k, v = (self._cleared(x.to(self.dtype)) for x in (self.q, self.k, self.v))
        beta = None if self.beta is None else self._cleared(self.beta.to(self.dtype)[..., None])
        return Precise(
            with_heads(q, heads or self.heads) * self.scale,
            with_heads(k, heads or self.heads),
            with_heads(v, self.heads),
            self.log_decay(),
            None if beta is None else beta[..., 0],
        )

    def first_state(self) -> Tensor:
        """The state before the first token, in ``dtype``."""
        if self.state is not None:
            return self.state
        return self.v.new_zeros(
            self.q.shape[0], self.heads, self.q.shape[3], self.v.shape[3], dtype=self.dtype
        )

    def rounded(self, out: Tensor) -> Tensor:
        """``out`` as it is returned: in q's dtype, 0 where a token is not real."""
        return self._cleared(out).to(self.q.dtype)

    def _cleared(self, x: Tensor) -> Tensor:
        """``[B, heads, T, …]`` with 0 for what is not real, which may be NaN."""
        return x if self.real is None else x.where(self.real[:, None, :, None], 0.0)


def with_heads(x: Tensor, heads: int) -> Tensor:
    """``[B, heads, …]``: every head of x for the neighbours that share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def recurrence_call_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    delta: bool,
    scale: float | None,
    state: Tensor | None,
    real: Tensor | None,
    in_place: bool,
) -> RecurrenceCall:
    """Checks every argument and puts them into a call."""
    for name, x in {"q": q, "k": k, "v": v}.items():
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor: got {_named(x)}")
        if x.ndim != 4 or not all(x.shape[1::2]):
            raise ValueError(f"{name} must be [B, heads, T, size]: got {list(x.shape)}")
    if autocast_enabled(q):
        lower = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(lower) for x in (q, k, v))
    B, _, T, K = q.shape
    heads = max(x.shape[1] for x in (q, k, v))
    for name, x in {"k": k, "v": v}.items():
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} must share dtype and device with q, {q.dtype} on {q.device}: got "
                f"{x.dtype} on {x.device}"
            )
        if (x.shape[0], x.shape[2]) != (B, T):
            raise ValueError(
                f"{name} must have the batch and the tokens of q, {B} and {T}: got {list(x.shape)}"
            )
    if k.shape[3] != K:
        raise ValueError(f"k must have the key size of q, {K}: got {k.shape[3]}")
    for name, x in {"q": q, "k": k, "v": v}.items():
        if heads % x.shape[1]:
            raise ValueError(
                f"the heads of {name} must divide the largest number of heads, {heads}: got "
                f"{x.shape[1]}"
            )
    if decay is not None:
        allowed = {"[H]": (heads,), "[B, H, T]": (B, heads, T), "[B, H, T, K]": (B, heads, T, K)}
        _check_tensor("decay", decay, allowed, q)
    if beta is not None:
        _check_tensor("beta", beta, {"[B, H, T]": (B, heads, T)}, q)
    check_bool("delta", delta)
    check_bool("in_place", in_place)
    scale = 1.0 / math.sqrt(K) if scale is None else check_number("scale", scale)
    if state is not None:
        _check_tensor("state", state, {"[B, H, K, V]": (B, heads, K, v.shape[3])}, q)
        if state.dtype != accumulation_dtype(q.dtype):
            raise ValueError(
                f"state must be {accumulation_dtype(q.dtype)} beside q of {q.dtype}: got "
                f"{state.dtype}"
            )
    elif in_place:
        raise ValueError("in_place=True needs the state that it overwrites: got state=None")
    given = (q, k, v, decay, beta, state)
    requires_grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in given
    )
    if in_place and requires_grad:
        raise ValueError(
            "in_place=True overwrites what gradients need: leave it out, or use torch.no_grad()"
        )
    return RecurrenceCall(
        q, k, v, heads, decay, beta, delta, scale, state, _real_mask(real, q), in_place,
        requires_grad,
    )  # fmt: skip


def _real_mask(real: Tensor | None, q: Tensor) -> Tensor | None:
    """``[B, T]`` bool from a mask or from lengths."""
    if real is None:
        return None
    B, _, T, _ = q.shape
    if not isinstance(real, Tensor) or real.is_floating_point() or real.is_complex():
        raise TypeError(
            f"real must be a bool tensor [B, T] or whole numbers [B] (lengths): got {_named(real)}"
        )
    masks = real.dtype == torch.bool
    if real.shape != ((B, T) if masks else (B,)):
        wanted = f"[B, T] = {[B, T]} of bool" if masks else f"[B] = {[B]} of lengths"
        raise ValueError(f"real must be {wanted}: got shape {list(real.shape)} of {real.dtype}")
    if real.device != q.device:
        raise ValueError(f"real must be on the device of q, {q.device}: got {real.device}")
    if masks:
        return real
    if not is_traced(real) and B and not 0 <= int(real.min()) <= int(real.max()) <= T:
        raise ValueError(f"real must be lengths from 0 to {T}: got {shown(real.tolist())}")
    return torch.arange(T, device=q.device) < real[:, None]


def _check_tensor(name: str, x: Tensor, allowed: dict[str, tuple[int, ...]], q: Tensor) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor or None: got {_named(x)}")
    if tuple(x.shape) not in allowed.values():
        wanted = " or ".join(f"{letters} = {list(shape)}" for letters, shape in allowed.items())
        raise ValueError(f"{name} must be {wanted}: got shape {list(x.shape)}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}: got {x.device}")


def _named(value: object) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
