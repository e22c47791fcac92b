"""torch.nn.MultiheadAttention, computed by polyhead.

    from polyhead.integrations.torch import MultiheadAttention, replace

    model = replace(model)      # every torch.nn.MultiheadAttention in it, in place

Same constructor, forward signature, parameters and state_dict; the same numbers wherever torch's
are finite. What changes: a query whose keys are all masked gives weights 0 and the output bias
(torch: NaN), and the memory is O(T) unless weights are asked for.

Shape letters: N batch, L queries, S keys, E embed size, H heads, D head size.
"""

from __future__ import annotations

import logging
import math
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from polyhead.errors import UnsupportedError
from polyhead.integrations import _nested as nested
from polyhead.integrations._masks import additive, all_of, padding
from polyhead.integrations._weights import attention_with_weights
from polyhead.kernels.dispatch import attention
from polyhead.layers.linear import product
from polyhead.semantics import Causal, Drop, Keep, Mask
from polyhead.semantics.tokens import is_traced

logger = logging.getLogger(__name__)


_NO_SCRIPT = (
    "torch.jit.script cannot compile polyhead's MultiheadAttention: use torch.compile, "
    "torch.export or torch.jit.trace, or script the model before replace()"
)


def _nothing(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook that does nothing."""


class MultiheadAttention(nn.MultiheadAttention):
    """A drop-in for ``torch.nn.MultiheadAttention``; takes its arguments and its state_dict.

    Masks have torch's polarity: True in a bool mask means "may NOT attend", a float mask is added
    to the scores. ``is_causal`` is torch's hint that ``attn_mask`` is the causal mask; here the
    hint is checked, and where it is wrong the mask is what counts. ``is_causal`` without a mask,
    which torch refuses, means causal from the first key on.

    ``torch.nn.TransformerEncoderLayer`` goes round its attention module on a fused path of its own,
    unless a forward hook could miss its call: a hook that does nothing keeps it from that.

    Attributes:
        kernel: Kernel that runs, as in ``polyhead.attention``.
    """

    kernel: str = "auto"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stay_off_the_fused_path()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._stay_off_the_fused_path()

    def _stay_off_the_fused_path(self) -> None:
        if _nothing not in self._forward_hooks.values():
            self.register_forward_hook(_nothing)

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by ``torch.jit.script`` first."""
        raise UnsupportedError(_NO_SCRIPT)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of ``query`` over ``key`` and ``value``; everything as in torch.

        Args:
            query: ``[L, N, E]``; ``[N, L, E]`` with ``batch_first``; ``[L, E]`` unbatched.
            key: ``[S, N, kdim]``, likewise.
            value: ``[S, N, vdim]``, likewise.
            key_padding_mask: ``[N, S]`` (``[S]`` unbatched): True or −∞ hides a key.
            need_weights: Also return the weights, which costs the L×S matrix.
            attn_mask: ``[L, S]`` or ``[N · H, L, S]``: True or −∞ hides a pair.
            average_attn_weights: Weights as their mean over heads.
            is_causal: Hint that ``attn_mask`` is the causal mask.

        Returns:
            The output in the layout of ``query``, and the weights: ``[N, L, S]``, per head
            ``[N, H, L, S]``, without N when unbatched, None without ``need_weights``. With
            ``add_bias_kv`` and ``add_zero_attn`` S counts the extra keys. Of nested tensors L and S
            are the longest, and the weights of padding are 0.

        Raises:
            ValueError: Shapes or dtypes that do not fit.
            UnsupportedError: Nested tensors beside padded ones, with masks, without
                ``batch_first`` or in ``torch.jit.trace``; that trace with dropout and weights.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
            nested.check(
                {"query": query, "key": key, "value": value}, masks, batch_first=self.batch_first
            )
            return self._nested(
                query, key, value, need_weights=need_weights,
                average_attn_weights=average_attn_weights, is_causal=is_causal,
            )  # fmt: skip
        batched = query.ndim == 3
        self._check(query, key, value, batched)
        self._check_dtypes(query, key, value)
        q_NLE, k_NSE, v_NSE = self._project(query, key, value)
        if not batched:
            q_NLE, k_NSE, v_NSE = q_NLE[None], k_NSE[None], v_NSE[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            q_NLE, k_NSE, v_NSE = (x.transpose(0, 1) for x in (q_NLE, k_NSE, v_NSE))

        options = self._options(q_NLE, k_NSE, key_padding_mask, attn_mask, is_causal)
        k_NSE, v_NSE = self._extended(k_NSE, self.bias_k), self._extended(v_NSE, self.bias_v)
        q, k, v = (
            x.reshape(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for x in (q_NLE, k_NSE, v_NSE)
        )
        options["dropout_p"] = self.dropout if self.training else 0.0
        options["kernel"] = self.kernel
        weights = None
        if need_weights:
            if options["dropout_p"] and torch._C._is_tracing():
                raise UnsupportedError(
                    "torch.jit.trace would record one draw of dropout with need_weights=True: "
                    "pass need_weights=False, or call eval() first"
                )
            scale = 1.0 / math.sqrt(self.head_dim)
            out, weights = attention_with_weights(q, k, v, scale=scale, **options)
            if average_attn_weights:
                weights = weights.mean(dim=1)
            weights = weights if batched else weights[0]
        else:
            out = attention(q, k, v, **options)

        # Adapters and torch itself change the projection's tensors and never call it.
        out = _linear(out.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        if not batched:
            return out[0], weights
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor, batched: bool) -> None:
        if query.ndim not in (2, 3) or not query.ndim == key.ndim == value.ndim:
            raise ValueError(
                "query, key and value must all be 3-D, or all 2-D for unbatched input: got "
                f"{query.ndim}-D, {key.ndim}-D and {value.ndim}-D"
            )
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                f"key and value must share batch and length: got {list(key.shape)} and "
                f"{list(value.shape)}"
            )
        batch = 0 if self.batch_first else 1
        if batched and query.shape[batch] != key.shape[batch]:
            raise ValueError(
                f"query and key must share the batch: got {query.shape[batch]} and "
                f"{key.shape[batch]} (batch_first={self.batch_first})"
            )
        for name, x, size in (
            ("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)
        ):  # fmt: skip
            if x.shape[-1] != size:
                raise ValueError(f"{name} must have {size} features: got {x.shape[-1]}")

    def _check_dtypes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Refuses what F.linear would take or reject depending on its shapes."""
        if torch.is_autocast_enabled(query.device.type):
            return
        for name, x in (
            ("key", key), ("value", value), ("in_proj_weight", self.in_proj_weight),
            ("q_proj_weight", self.q_proj_weight), ("k_proj_weight", self.k_proj_weight),
            ("v_proj_weight", self.v_proj_weight), ("out_proj.weight", self.out_proj.weight),
        ):  # fmt: skip
            if x is not None and x.dtype != query.dtype:
                raise ValueError(
                    f"query, key, value and the projections must share one dtype: got query "
                    f"{query.dtype} and {name} {x.dtype}"
                )
        for name, bias in (
            ("in_proj_bias", self.in_proj_bias), ("out_proj.bias", self.out_proj.bias)
        ):  # fmt: skip
            if bias is not None and torch.promote_types(bias.dtype, query.dtype) != query.dtype:
                raise ValueError(
                    f"biases must have the dtype of query or a narrower one: got query "
                    f"{query.dtype} and {name} {bias.dtype}"
                )

    def _nested(
        self, query: Tensor, key: Tensor, value: Tensor, **asked: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of nested tensors: ``nn.TransformerEncoder`` makes one of padding."""
        # torch's to_padded_tensor refuses views, and rows that are all empty.
        padded = {
            id(x): pad_sequence(list(x.unbind()), batch_first=True) for x in (query, key, value)
        }
        q, k, v = (padded[id(x)] for x in (query, key, value))
        out, weights = self.forward(q, k, v, nested.beyond(key, k), **asked)  # type: ignore[arg-type]
        if weights is not None:
            empty = nested.beyond(query, q)[:, :, None]
            weights = weights.masked_fill(empty if weights.ndim == 3 else empty[:, None], 0.0)
        return nested.like(query, out), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """q, k and v of E features each, in the layout of the inputs."""
        if self.in_proj_weight is not None and query is key and key is value:
            return _linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(map(_linear, (query, key, value), weights, biases))

    @property
    def _extra_keys(self) -> int:
        return (self.bias_k is not None) + bool(self.add_zero_attn)

    def _extended(self, x_NSE: Tensor, bias: Tensor | None) -> Tensor:
        """Keys or values with the learned extra one and the zero one after them."""
        N, _, E = x_NSE.shape
        if bias is not None:
            x_NSE = torch.cat([x_NSE, bias.to(x_NSE.dtype).expand(N, 1, E)], dim=1)
        return F.pad(x_NSE, (0, 0, 0, 1)) if self.add_zero_attn else x_NSE

    def _options(
        self,
        q_NLE: Tensor,
        k_NSE: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> dict[str, Any]:
        """``mask``, ``bias`` and ``q_positions`` for ``attention``."""
        N, L, S = q_NLE.shape[0], q_NLE.shape[1], k_NSE.shape[1]
        extra = self._extra_keys
        masks: list[Mask | None] = []
        biases: list[Tensor] = []
        q_positions = None
        pattern = None if attn_mask is None else self._four_dimensional(attn_mask, N, L, S)
        if is_causal and (pattern is None or _is_causal_mask(pattern)):
            # torch's corner is the first key; every query sees the extra keys.
            causal: Mask = Causal()
            if extra:
                after = torch.arange(S + extra, device=q_NLE.device) >= S
                causal = causal | Keep(after)
            masks.append(causal)
            if extra or L != S:
                q_positions = torch.arange(L, device=q_NLE.device)
        elif pattern is not None:
            pattern = F.pad(pattern, (0, extra)) if extra else pattern
            self._add("attn_mask", pattern, masks, biases)
        if key_padding_mask is not None:
            if key_padding_mask.shape != (N, S):
                raise ValueError(
                    f"key_padding_mask must be [N, S] = [{N}, {S}] ([S] unbatched): got "
                    f"{list(key_padding_mask.shape)}"
                )
            padded = F.pad(key_padding_mask, (0, extra)) if extra else key_padding_mask
            if padded.dtype == torch.bool:
                masks.append(padding(~padded))
            else:
                self._add("key_padding_mask", padded[:, None, None, :], masks, biases)
        return {
            "mask": all_of(*masks),
            "bias": sum(biases[1:], start=biases[0]) if biases else None,
            "q_positions": q_positions,
        }

    def _four_dimensional(self, mask: Tensor, N: int, L: int, S: int) -> Tensor:
        if mask.shape == (L, S):
            return mask[None, None]
        if mask.shape == (N * self.num_heads, L, S):
            return mask.reshape(N, self.num_heads, L, S)
        raise ValueError(
            f"attn_mask must be [L, S] = [{L}, {S}] or [N · num_heads, L, S] = "
            f"[{N * self.num_heads}, {L}, {S}]: got {list(mask.shape)}"
        )

    @staticmethod
    def _add(name: str, mask: Tensor, masks: list[Mask | None], biases: list[Tensor]) -> None:
        """Puts torch's bool or float mask where it belongs."""
        if mask.dtype == torch.bool:
            masks.append(Drop(mask))
        elif mask.is_floating_point():
            keep, bias = additive(mask, floor=-math.inf)
            masks.append(keep)
            biases.extend([] if bias is None else [bias])
        else:
            raise ValueError(f"{name} must be bool or floating point: got {mask.dtype}")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b, whose bias may be narrower: torch takes one or not depending on the shapes."""
    return product(x, weight, None if bias is None else bias.to(weight.dtype))


def _is_causal_mask(mask: Tensor) -> bool:
    """Whether torch's 4-D mask hides exactly what lies after the diagonal from the first key."""
    if is_traced(mask) or mask.shape[:2] != (1, 1):
        return False
    L, S = mask.shape[-2:]
    after = torch.ones(L, S, dtype=torch.bool, device=mask.device).triu(1)
    if mask.is_floating_point():
        after = torch.zeros(L, S, dtype=mask.dtype, device=mask.device).masked_fill(
            after, -math.inf
        )
    return bool((mask == after).all())


def replace(model: nn.Module, *, kernel: str = "auto") -> nn.Module:
    """Makes every ``torch.nn.MultiheadAttention`` of a model compute with polyhead, in place.

    The modules stay the same objects with the same parameters, hooks and state_dict: only their
    class changes. ``torch.nn.TransformerEncoder`` is kept from its nested-tensor path, which would
    go round the module. ``replaced(model)`` lists what was swapped, and it is logged.

    Args:
        model: A module, or a ``torch.nn.MultiheadAttention`` itself.
        kernel: Kernel for all of them, as in ``polyhead.attention``.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: There is nothing in the model to swap.
        UnsupportedError: A subclass of ``torch.nn.MultiheadAttention`` has a forward of its own,
            which may compute something else. Nothing is swapped then.
    """
    swap: list[nn.MultiheadAttention] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        if type(module) not in (nn.MultiheadAttention, MultiheadAttention):
            raise UnsupportedError(
                f"cannot replace {name or 'the model'}: {type(module).__name__} is a subclass of "
                "torch.nn.MultiheadAttention and may mean something else; call replace on the "
                "other submodules"
            )
        swap.append(module)
    if not swap:
        raise ValueError(
            f"no torch.nn.MultiheadAttention in {type(model).__name__}: nothing to replace"
        )
    for module in swap:
        module.__class__ = MultiheadAttention
        ours = cast(MultiheadAttention, module)
        ours.kernel = kernel
        ours._stay_off_the_fused_path()
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and replaced(module):
            module.use_nested_tensor = False
    logger.info("polyhead computes %d MultiheadAttention of %s", len(swap), type(model).__name__)
    return model


def replaced(model: nn.Module) -> list[str]:
    """Names of the modules of ``model`` that are polyhead's ``MultiheadAttention``."""
    return [name for name, m in model.named_modules() if isinstance(m, MultiheadAttention)]
