"""transformers' mask functions as typed masks: nothing of T×S size where positions say it all.

transformers describes a mask by a Python predicate, built by nesting the functions of its
``masking_utils`` (causal, sliding window, packed sequences, and their conjunction). Those few are
recognized and become ``Causal()``, ``Window(w)``, ``Documents(lengths)``; padding becomes key
lengths. Any other predicate is drawn as a bool tensor by transformers itself and becomes
``Keep(tensor)``.

Shape letters: B batch, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import masking_utils

from polyhead.errors import UnsupportedError
from polyhead.integrations._masks import all_of, padding
from polyhead.semantics import Causal, Documents, Keep, Mask, Tokens, Window
from polyhead.semantics.tokens import is_traced

Predicate = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class TypedMask:
    """What a model hands from its mask function to its attention layers.

    It stands where models carry a ``[B, 1, T, S]`` tensor. A model that computes with it instead
    of handing it on gets an error and not a wrong number.

    Attributes:
        mask: Who may look at whom; None: everyone at everything.
        q_positions: ``[T]`` positions of the queries, keys standing at 0, 1, …; None: the last
            query lines up with the last key.
        keys: How many of the S keys any query may see: those of a static cache that are filled.
        shape: ``(B, 1, T, S)``.
        compiled: Mask and ``q_positions`` over all S keys, for calls that are compiled: a graph
            that knew how many slots are filled would be compiled anew for every token.
    """

    mask: Mask | None
    q_positions: Tensor | None
    keys: int
    shape: tuple[int, int, int, int]
    compiled: tuple[Mask | None, Tensor] | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def to(self, *args: Any, **kwargs: Any) -> TypedMask:
        """Returns itself: it holds nothing that must move to a device."""
        return self

    def contiguous(self) -> TypedMask:
        """Returns itself: generation with static caches calls it."""
        return self

    def _refuse(self, *_: object) -> NoReturn:
        raise UnsupportedError(
            "this model computes with its attention mask instead of handing it to its attention "
            "function, which a typed mask cannot follow; polyhead.integrations.transformers."
            "register(typed_masks=False) gives it bool tensors"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __or__ = _refuse
    __rand__ = __ror__ = __invert__ = __getitem__ = __bool__ = __len__ = _refuse

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        raise UnsupportedError(
            f"torch.{getattr(func, '__name__', func)} cannot take a typed mask; polyhead."
            "integrations.transformers.register(typed_masks=False) gives the model bool tensors"
        )


def typed_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Predicate = masking_utils.causal_mask_function,
    attention_mask: Tensor | TypedMask | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> TypedMask:
    """The mask function that transformers calls once per forward pass and kind of layer.

    Args:
        kv_length: S, as the cache will return them: all slots of a static cache.
        attention_mask: ``[B, ≤ kv_offset + S]`` bool, True for real tokens; or the result of an
            earlier call (generation with static caches prepares masks ahead).
        use_vmap: Whether the predicate takes single numbers only.
    """
    if isinstance(attention_mask, TypedMask):
        return attention_mask
    shape = (batch_size, 1, q_length, kv_length)
    pattern = _translated(mask_function) if not use_vmap and translates() else None
    if pattern is None:
        drawn = tensor_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            use_vmap=use_vmap, device=device,
        )  # fmt: skip
        return TypedMask(Keep(drawn), None, kv_length, shape)

    keys, q_positions, places = kv_length, None, None
    if isinstance(q_offset, Tensor) and is_traced(q_offset):
        q_positions = torch.arange(q_length, device=device) + (q_offset - kv_offset)
    else:
        # A copy: a static cache advances its offset in place before the layers run.
        first = int(q_offset) - kv_offset
        if any(isinstance(part, Causal) for part in pattern):
            keys = min(keys, first + q_length)
        places = torch.arange(first, first + q_length, device=device)
        if first + q_length != keys:
            q_positions = places
    unpadded = all_unpadded = None
    if attention_mask is not None:
        # Slots that the caller's mask does not reach hold nothing.
        beyond = max(0, kv_offset + kv_length - attention_mask.shape[-1])
        real = torch.nn.functional.pad(attention_mask.to(torch.bool), (0, beyond))
        unpadded = padding(real[:, kv_offset : kv_offset + keys])
        all_unpadded = unpadded
        if keys < kv_length:  # causal order hides the slots behind these
            filled = real[:, kv_offset : kv_offset + keys]
            all_unpadded = padding(torch.nn.functional.pad(filled, (0, kv_length - keys), value=1))
    compiled = None if places is None else (all_of(*pattern, all_unpadded), places)
    return TypedMask(all_of(*pattern, unpadded), q_positions, keys, shape, compiled)


def tensor_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Predicate = masking_utils.causal_mask_function,
    attention_mask: Any = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """Likewise, but always a ``[B, 1, T, S]`` bool tensor, True where a query may look."""
    drawn = masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,  # type: ignore[arg-type]  # a tensor for static caches
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    if drawn is None:
        raise RuntimeError("transformers drew no mask although none may be skipped")
    return drawn


def _translated(predicate: Predicate) -> list[Mask] | None:
    """The masks whose conjunction is ``predicate``, or None where it is not known."""
    if predicate is masking_utils.causal_mask_function:
        return [Causal()]
    if predicate is masking_utils.bidirectional_mask_function:
        return []
    if torch.compiler.is_dynamo_compiling():  # it cannot read what a function has closed over
        return None
    if getattr(predicate, "__module__", None) != masking_utils.__name__:
        return None
    maker = predicate.__qualname__.partition(".")[0]
    values = _closure(predicate)
    if maker == "sliding_window_overlay":
        return [Window(values["sliding_window"])]
    if maker == "sliding_window_bidirectional_overlay":
        reach = values["sliding_window"]
        return [Window(reach + 1, ahead=reach)]
    if maker == "and_masks":
        return _conjunction(list(values["mask_functions"]))
    return None


def _conjunction(predicates: list[Predicate]) -> list[Mask] | None:
    masks: list[Mask] = []
    packed = None
    for predicate in predicates:
        if _made_by(predicate, "packed_sequence_mask_function"):
            packed = _documents(_closure(predicate)["packed_sequence_mask"])
            if packed is None:
                return None
            masks.append(packed)
            continue
        if _made_by(predicate, "remap_positions_for_packed_sequence") and packed is not None:
            # Inside one document its own positions and the places differ by a constant.
            predicate = _closure(predicate)["mask_function"]
        parts = _translated(predicate)
        if parts is None:
            return None
        masks += parts
    return masks


def _documents(ids_BS: Tensor) -> Documents | None:
    """Packed documents from ``[B, S]`` document numbers that never fall."""
    if is_traced(ids_BS):
        return None
    return Documents(
        [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in ids_BS]
    )


def _made_by(predicate: Predicate, maker: str) -> bool:
    return (
        getattr(predicate, "__module__", None) == masking_utils.__name__
        and predicate.__qualname__.partition(".")[0] == maker
    )


def _closure(predicate: Any) -> dict[str, Any]:
    """What a nested function has closed over, by name."""
    cells = predicate.__closure__ or ()
    names = predicate.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def translates() -> bool:
    """Whether the installed transformers' predicates mean what is read from them.

    Checked once, against the masks that transformers draws itself; where a release has changed
    something, every mask is drawn by transformers. Ask before anything is traced.
    """
    return _predicates_mean_what_is_read()


@cache
def _predicates_mean_what_is_read() -> bool:
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]], device="cpu")
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 3, 4, 5]], device="cpu")
    window = masking_utils.sliding_window_causal_mask_function(3)
    predicates = [
        masking_utils.causal_mask_function,
        masking_utils.bidirectional_mask_function,
        window,
        masking_utils.sliding_window_bidirectional_mask_function(2),
        masking_utils.packed_sequence_compatibility_function(window, positions, ids),
    ]
    tokens, device = Tokens.of(7), torch.device("cpu")
    for predicate in predicates:
        try:
            pattern = _translated(predicate)
        except (AttributeError, KeyError, TypeError, ValueError):
            return False
        if pattern is None:
            return False
        mask = all_of(*pattern)
        drawn = tensor_mask(2, 7, 7, mask_function=predicate)
        seen = (
            torch.ones(1, dtype=torch.bool, device="cpu")
            if mask is None
            else mask.visible(tokens, tokens, device)
        )
        if not torch.equal(seen.expand_as(drawn), drawn):
            return False
    return True
