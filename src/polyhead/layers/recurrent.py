"""Layers that remember a state or the last few inputs in place of every token.

Such a layer is causal by nature: a token reads what earlier ones left. It says what one call makes
of packed tokens, ``_run``; everything around that is here: checks, padding, the steps of a cache.

Shape letters: B batch, T tokens, H heads (states), K key size, V value size, W width, E embed size.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead import native
from polyhead._utils.checks import check_probability
from polyhead.caches import SequenceCache
from polyhead.caches.layer_cache import Packing, Step
from polyhead.config import HeadLayout
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.kernels.recurrence.dispatch import recurrence
from polyhead.layers.attention_parts import (
    check_input,
    check_layer_cache,
    check_sizes,
    ragged_positions,
)
from polyhead.layers.handed import Handed
from polyhead.layers.hooks import Hooked
from polyhead.layers.positions import RoPE
from polyhead.layers.record import AttentionHook, RecurrenceHook, hooks_here
from polyhead.native import batch_invariant
from polyhead.semantics import Causal, KeyLengths, Mask
from polyhead.semantics.argument_hints import refuse
from polyhead.semantics.masks.algebra import And
from polyhead.semantics.recurrence_call import RecurrenceCall, recurrence_call_of


class RecurrentLayer(Hooked):
    """A layer that takes a sequence token after token.

    Attributes:
        config: Its configuration; it cannot be assigned.
        embed_dim: E, features of ``x`` and of the output.
    """

    reads_by_heads: ClassVar[bool] = False
    """Whether its states are heads, which a probe shows as such."""
    config: Any

    @classmethod
    def from_config(cls, embed_dim: int, config: Any, *, rope: RoPE | None = None) -> Self:
        """The layer that ``config`` describes.

        Args:
            embed_dim: E.
            config: Of the class that the layer was registered for.
            rope: Rotary positions built from ``config.rope``, or None.
        """
        layer = cls.__new__(cls)
        Hooked.__init__(layer)
        layer._begin(embed_dim, config)
        layer._build(rope)
        return layer

    def _begin(self, embed_dim: int, config: HeadLayout) -> None:
        check_sizes(embed_dim=embed_dim)
        check_probability("dropout", config.dropout, error=ConfigError)
        self.config, self.embed_dim = config, embed_dim

    @abstractmethod
    def _build(self, rope: RoPE | None) -> None:
        """Makes the parameters."""

    @abstractmethod
    def _run(self, x: Tensor, real: Tensor | None, kernel: str, step: Step | None) -> Tensor:
        """``[B, T, E]`` what the layer makes of packed tokens.

        Args:
            x: ``[B, T, E]``, the real tokens of each row first, then padding.
            real: ``[B, T]`` which tokens are real; None: all.
            kernel: As in ``forward``.
            step: Of the layer's cache; None: nothing came before.
        """

    def forward(
        self,
        x: Tensor,
        context: None = None,
        *,
        mask: Mask | None = None,
        bias: None = None,
        positions: Tensor | None = None,
        cache: SequenceCache | None = None,
        kernel: str = "auto",
        handed: Handed | None = None,
        **unknown: Any,
    ) -> Tensor:
        """``[B, T, E]`` to ``[B, T, E]``; with a cache, the state goes on from earlier calls.

        Args:
            x: ``[B, T, E]``.
            context: None: a state belongs to one sequence.
            mask: ``Causal()``, which the layer is by nature, also ``& KeyLengths(n)`` without a
                cache: tokens from n on are padding.
            bias: None: there are no scores.
            positions: ``[T]`` or ``[B, T]``; below 0 is padding. Other values mean nothing here.
            cache: A ``LayerCache`` of the memories of this layout.
            kernel: ``"auto"`` or the name of a kernel of ``recurrence``.
            handed: What the model hands on, for a layer that reads ids too.
            **unknown: Refused.

        Raises:
            ValueError: Shapes that do not fit, or no causal mask.
            UnsupportedError: A context, a bias, another mask, or a watching hook.
            TypeError: A cache of another kind.
        """
        if unknown:
            refuse(type(self).__name__, unknown)
        if context is not None or bias is not None:
            given = "a context" if context is not None else "a bias of scores"
            raise UnsupportedError(f"a layer with a state takes no {given[2:]}: got {given}")
        check_input(x, self.embed_dim)
        real = real_tokens(mask, x, positions, cached=cache is not None)
        if hooks := hooks_here(self._hooks):
            self._check_hooks(hooks, real, cache)
        ids = self._ids(handed)
        if cache is None:
            return self._over(x, ids, real, kernel)
        held = check_layer_cache(cache)
        if positions is None:
            positions = ragged_positions(held, x)
        with held.step(x, positions) as step:
            ids = None if ids is None else step.pack(ids)
            return step.unpack(self._run_with(step.pack(x), ids, step.real, kernel, step))

    def _check_hooks(
        self, hooks: tuple[AttentionHook, ...], real: Tensor | None, cache: SequenceCache | None
    ) -> None:
        """Raises UnsupportedError unless the hooks can be shown what this call reads."""
        if not (self.reads_by_heads and all(isinstance(hook, RecurrenceHook) for hook in hooks)):
            raise UnsupportedError(
                "a layer with a state computes no weights that a hook could see: "
                "polyhead.recurrence_rows makes those of chosen rows"
            )
        if cache is not None or (real is not None and bool((real[:, 1:] & ~real[:, :-1]).any())):
            got = "a cache" if cache is not None else "padding before tokens"
            raise UnsupportedError(
                f"a probe shows what a state's heads read of whole texts: got {got}"
            )

    def _ids(self, handed: Handed | None) -> Tensor | None:
        """``[B, T]`` the ids of the call, for a layer that reads them."""
        return None

    def _run_with(
        self, x: Tensor, ids: Tensor | None, real: Tensor | None, kernel: str, step: Step | None
    ) -> Tensor:
        """``_run``, with the ids ``[B, T]`` of packed tokens for a layer that reads them."""
        return self._run(x, real, kernel, step)

    def _over(self, x: Tensor, ids: Tensor | None, real: Tensor | None, kernel: str) -> Tensor:
        """A whole sequence; padding is moved behind the real tokens of its row and back."""
        packing = Packing(None if real is None else ~real)
        ids = None if ids is None else packing.pack(ids)
        return packing.unpack(self._run_with(packing.pack(x), ids, packing.real, kernel, None))

    def _recurrence(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        real: Tensor | None,
        kernel: str,
        step: Step | None,
        *,
        decay: Tensor | None = None,
        beta: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """``[B, H, T, V]``, as ``polyhead.recurrence``; the state is the memory ``"state"``."""
        for hook in hooks_here(self._hooks):
            if isinstance(hook, RecurrenceHook):
                hook.show(self, _shown(q, k, v, real, decay, beta, options))
        outs = []
        for piece in [slice(None)] if step is None else step.pieces:
            by_token = {"decay": decay, "beta": beta}
            options |= {
                name: each if each is None or each.ndim < 3 else each[:, :, piece]
                for name, each in by_token.items()
            }
            outs.append(
                recurrence(
                    q[:, :, piece], k[:, :, piece], v[:, :, piece], kernel=kernel,
                    real=None if real is None else real[:, piece],
                    state=None if step is None else step.state("state"),
                    in_place=step is not None, **options,
                )
            )  # fmt: skip
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.config.described}"


def _shown(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real: Tensor | None,
    decay: Tensor | None,
    beta: Tensor | None,
    options: dict[str, Any],
) -> RecurrenceCall:
    delta, scale = options.get("delta", False), options.get("scale")
    return recurrence_call_of(q, k, v, decay, beta, delta, scale, None, real, False)


def real_tokens(
    mask: Mask | None,
    x: Tensor,
    positions: Tensor | None,
    *,
    cached: bool,
    what: str = "a layer with a state",
) -> Tensor | None:
    """``[B, T]`` which tokens are no padding, None: all; refuses masks that hide single ones.

    Args:
        mask: Of the call.
        x: ``[B, T, E]``.
        positions: ``[T]`` or ``[B, T]``, below 0 for padding.
        cached: Whether there is a cache, which leaves padding out by itself.
        what: What errors call the layer.
    """
    if mask is None:
        raise ValueError(f"{what} is causal: got mask=None; pass mask=Causal()")
    parts = list(mask.walk())
    if not any(type(part) is Causal for part in parts):
        raise ValueError(f"{what} is causal: got mask={mask!r}, without Causal()")
    B, T, _ = x.shape
    real = None
    if positions is not None and not cached and bool((positions < 0).any()):
        real = (positions >= 0).expand(B, T)
    for part in parts:
        if type(part) is KeyLengths and not cached:
            lengths = part.length.tensor(x.device)
            within = (torch.arange(T, device=x.device) < lengths[:, None]).expand(B, T)
            real = within if real is None else real & within
        elif type(part) not in (Causal, And):
            beside = " beside a cache" if type(part) is KeyLengths else ""
            raise UnsupportedError(f"{what} cannot hide single tokens: got {part!r}{beside}")
    return real


def with_tail(name: str, x: Tensor, tokens: int, step: Step | None) -> Tensor:
    """``[B, tokens + T, W]``: packed inputs ``[B, T, W]`` of a convolution behind earlier ones.

    Args:
        name: The memory of a layer's cache.
        x: The inputs.
        tokens: Earlier inputs; zeros before a sequence.
        step: None: a sequence from its start.
    """
    return F.pad(x, (0, 0, tokens, 0)) if step is None else step.tail(name, x)


def as_heads(x: Tensor, heads: int) -> Tensor:
    """``[B, T, heads · D]`` as ``[B, heads, T, D]``."""
    B, T, width = x.shape
    return x.view(B, T, heads, width // heads).transpose(1, 2)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dilation: int = 1,
    beside: bool = False,
) -> Tensor:
    """``[B, T, W]`` the causal convolution of each channel, in float32 or more.

    Term after term: faster here than torch's grouped ``conv1d``, and a token's bits depend on its
    own inputs alone.

    Args:
        x: ``[B, (n − 1) · dilation + T, W]``.
        weight: ``[W, n]``.
        bias: ``[W]``.
        dilation: Tokens from one input of an output to the next.
        beside: Whether a token's own input is added too.
    """
    precise = torch.promote_types(x.dtype, torch.float32)
    wide, taps = x.to(precise), weight.to(precise).unbind(1)
    T = x.shape[1] - (len(taps) - 1) * dilation
    y = wide[:, :T] * taps[0]
    for i, tap in enumerate(taps[1:], 1):
        y = y.addcmul_(wide[:, i * dilation : i * dilation + T], tap)
    if beside:
        y = y.add_(wide[:, -T:])
    return (y if bias is None else y + bias).to(x.dtype)


def kernel_of_channels(kernel: str, x: Tensor) -> str:
    """The kernel for states of single channels, where the caller names none.

    Token by token where there is no native code for it: chunks of so many heads, each of one
    value, take forty times the memory of the decays.
    """
    if kernel != "auto" or batch_invariant.is_enabled():
        return kernel
    fast = x.device.type == "cpu" and x.dtype != torch.float64 and native.code() is not None
    return "auto" if fast and not torch.is_grad_enabled() else "reference"
