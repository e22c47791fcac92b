"""Attention hooks: a layer shows its calls to registered hooks; head edits change its heads.

A hook never changes an output. An edit does: it takes the heads' outputs before the projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from polyhead.errors import UnsupportedError
from polyhead.kernels.dispatch import attention
from polyhead.layers.fixed import Fixed
from polyhead.layers.record import AttentionHook, AttentionRecord, HeadEdit, HookHandle, hooks_here
from polyhead.semantics import KeyValueSource, Specification
from polyhead.semantics.arguments import AttentionOptions, query_tokens, with_source_mask
from polyhead.semantics.scores import accumulation_dtype

_DEFAULTS: AttentionOptions = {
    "mask": None,
    "bias": None,
    "softcap": None,
    "sinks": None,
    "q_positions": None,
    "dropout_p": 0.0,
    "kernel": "auto",
}
"""What a layer need not name; the scale is always its own."""


class Hooked(Fixed):
    """A module whose calls of ``attention`` can be watched."""

    projects_heads = True
    """Whether what ``q_proj`` and ``k_proj``, if it has them, make of a token is heads."""

    def __init__(self) -> None:
        super().__init__()
        self._hooks: dict[HookHandle[AttentionHook], AttentionHook] = {}
        self._edits: dict[HookHandle[HeadEdit], HeadEdit] = {}

    def register_attention_hook(self, hook: AttentionHook) -> HookHandle[AttentionHook]:
        """Calls ``hook(record)`` with an ``AttentionRecord`` of every call from now on.

        The outputs stay bit-identical. While a gradient is being recorded the log-sum-exp takes a
        second, gradient-free call, so that the first can use the kernel it would have used. The
        hook sees the calls of the thread or task that registers it, and of no other.

        Returns:
            A handle; ``handle.remove()`` ends it, and so does leaving ``with handle:``.
        """
        return HookHandle(self._hooks, hook)

    @property
    def is_split(self) -> bool:
        """Whether this process computes some of its heads or tokens (``polyhead.parallel``)."""
        return "_computed" in self.__dict__

    @property
    def has_active_hooks(self) -> bool:
        """Whether a hook or an edit applies to the calls of this thread or task."""
        watched = bool(self._hooks or self._edits)
        return watched and bool(hooks_here(self._hooks) or hooks_here(self._edits))

    def register_head_edit(self, edit: HeadEdit) -> HookHandle[HeadEdit]:
        """Puts ``edit(out)`` in the place of the heads' outputs ``[B, H, T, V]`` from now on.

        These are what the output projection reads, behind gates and norms of a head's output.
        Edits come after hooks, in the order of their registration; what an edit is given is not to
        be changed in place.

        Returns:
            A handle, as ``register_attention_hook`` does.
        """
        return HookHandle(self._edits, edit)

    def _attend(
        self, q: Tensor, source: KeyValueSource, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        """``attention`` ``[B, H, T, V]``, shown to the hooks and to who observes the source."""
        call: dict[str, Any] = {**_DEFAULTS, **options}
        observed = source.observer is not None
        if self.is_split and (observed or self.has_active_hooks):
            raise UnsupportedError(
                "hooks and edits need all heads and tokens, as caches that evict do: this layer's "
                "are spread over processes"
            )
        hooks = hooks_here(self._hooks) if self._hooks else ()
        if hooks or observed:
            return attention_with_hooks(self, hooks, q, source, **call)
        return self._computed(q, source, **call)

    def _computed(self, q: Tensor, source: KeyValueSource, **call: Any) -> Tensor:
        """The heads' outputs ``[B, H, T, V]``: what a layer replaces whose tokens or heads are
        spread over processes (``polyhead.parallel``)."""
        out: Tensor = attention(q, source, **call)
        return out

    def _edited(self, out: Tensor) -> Tensor:
        """The heads' outputs as the output projection reads them, ``[B, H, T, V]``."""
        for edit in hooks_here(self._edits):
            out = edit(out)
        return out


def attention_with_hooks(
    layer: nn.Module,
    hooks: Iterable[AttentionHook],
    q: Tensor,
    source: KeyValueSource,
    *,
    dropout_p: float,
    kernel: str,
    **meaning: Any,
) -> Tensor:
    """``attention`` ``[B, H, T, V]``, of which every hook is shown a record.

    Who observes the source is shown the call after the hooks, since it may change what is held.

    Args:
        layer: The module that makes the call.
        hooks: Who is shown it.
        q: As in ``attention``.
        source: Keys and values.
        dropout_p: As in ``attention``.
        kernel: As in ``attention``.
        meaning: ``mask``, ``bias``, ``scale``, ``softcap``, ``sinks`` and ``q_positions`` as in
            ``attention``, all of them, and ``normalizer`` where there is one.
    """
    call: Callable[..., Any] = partial(attention, q, source, **meaning)
    out: Tensor
    if (normalizer := meaning.get("normalizer")) is not None:
        if source.observer is not None:
            raise UnsupportedError(
                f"a cache that evicts keys reads the softmax's weights: got {normalizer!r}"
            )
        out = call(dropout_p=dropout_p, kernel=kernel)
        lse = out.new_full(out.shape[:-1], torch.nan, dtype=accumulation_dtype(out.dtype))
    elif torch.is_grad_enabled():
        out = call(dropout_p=dropout_p, kernel=kernel)
        with torch.no_grad():
            _, lse = call(return_lse=True)
    else:
        out, lse = call(dropout_p=dropout_p, kernel=kernel, return_lse=True)
    q_tokens = query_tokens(q, source, meaning.pop("q_positions"))
    mask = with_source_mask(meaning.pop("mask"), source)
    if hooks := tuple(hooks):
        k, v = source.gather()
        record = AttentionRecord(
            layer=layer,
            q=q,
            k=k,
            v=v,
            mask=mask,
            q_tokens=q_tokens,
            kv_tokens=source.tokens,
            out=out,
            lse=lse,
            **meaning,
        )
        for hook in hooks:
            hook(record)
    if source.observer is not None:
        spec = Specification(meaning["scale"], mask, meaning["bias"], meaning["softcap"])
        source.observer(q, lse, spec, q_tokens)
    return out
