"""Cross-entropy of the next token, without the logits of all tokens at once.

A vocabulary of 50,000 makes the logits of 8,192 tokens 1.6 GB in float32, and their gradient as
much again. Here the logits of some tokens are made, used for the loss and its gradients, and let
go, before those of the next (torch's ``linear_cross_entropy``).

Shape letters: B batch, T tokens, N tokens that have a label, E embed size, V vocabulary size.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from polyhead._utils.checks import check_number
from polyhead.layers import linear_gradients
from polyhead.layers.linear import product
from polyhead.models import Transformer
from polyhead.models.heads import transformed
from polyhead.semantics.tokens import is_traced

Reduction = Literal["mean", "sum"]

IGNORED = -100
"""The label of tokens that are not learned, as in torch."""

_CHUNK_BYTES = 64 << 20
"""Logits that are held at once."""


def loss(
    model: Transformer,
    ids: Tensor,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    **call: Any,
) -> Tensor:
    """How badly a model predicts ``labels``.

        loss(model, ids, ids).backward()                                # a decoder
        loss(model, read, written, encoder_ids=source)                  # an encoder-decoder

    Args:
        model: A decoder; an encoder-decoder; or an encoder with a head over its vocabulary.
        ids: ``[B, T]`` tokens.
        labels: ``[B, T]`` int64; −100 is ignored. Of a decoder those of ``ids``: the label of token
            t is predicted from the tokens before it, and the first is not used.
        label_smoothing: Probability of each label that is spread over all tokens (Szegedy et al.
            2016).
        reduction: ``"mean"`` over the tokens that have a label, or ``"sum"``.
        **call: Other arguments of the model, such as ``mask``, ``positions``, ``encoder_ids``.

    Returns:
        A float32 scalar in nats; of no labels 0.

    Raises:
        ValueError: Labels of another shape than ids, a token outside the vocabulary, a model
            without a head, or a number out of its range.
    """
    if labels.shape != ids.shape:
        raise ValueError(
            f"labels must have the shape of ids, {list(ids.shape)}: got {list(labels.shape)}"
        )
    hidden = model.hidden_states(ids, **call)
    if model.config.kind == "decoder":
        hidden, labels = hidden[:, :-1], labels[:, 1:]
    return cross_entropy(
        model, hidden, labels, label_smoothing=label_smoothing, reduction=reduction
    )


def cross_entropy(
    model: Transformer,
    hidden: Tensor,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Cross-entropy of ``model.logits(hidden)`` and labels, for hidden states ``[B, T, E]``.

    Args:
        model: Whose head is used.
        hidden: ``[B, T, E]`` final hidden states, as ``model.hidden_states`` returns them.
        labels: ``[B, T]`` int64, −100 for none.
        label_smoothing, reduction: As in ``loss``.

    Raises:
        ValueError: As in ``loss``.
    """
    check_number("label_smoothing", label_smoothing, least=0.0, most=1.0)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum': got {reduction!r}")
    head, config = model.head, model.config
    if head is None:
        raise ValueError(
            "this model has no head over its vocabulary: compute the loss from its hidden states"
        )
    learned = labels != IGNORED
    hidden, labels = hidden[learned], labels[learned]
    count = len(labels)
    if not count:
        return hidden.float().sum() * 0.0  # a loss over no tokens, which still has gradients
    if labels.is_cpu and not 0 <= int(labels.min()) <= int(labels.max()) < config.num_logits:
        wrong = labels[(labels < 0) | (labels >= config.num_logits)][0]
        raise ValueError(
            f"labels must be {IGNORED} or tokens from 0 to {config.num_logits - 1}: got {wrong}"
        )
    hidden = transformed(hidden, head.transforms)
    if config.logit_scale != 1.0:
        hidden = hidden * config.logit_scale
    weight: Tensor = model.unembedding
    plain = config.logit_softcap is None and label_smoothing == 0.0
    if plain and (head.bias is None or config.logit_scale == 1.0):
        hidden, weight, bias = _one_dtype(hidden, weight, head.bias)
        if not is_traced(hidden):
            share = 1.0 / count if reduction == "mean" else 1.0
            found: Tensor = _InChunks.apply(hidden, weight, bias, labels, share)  # type: ignore[no-untyped-call]
            return found
        each = F.linear_cross_entropy(
            hidden,
            weight,
            labels,
            linear_bias=bias,
            reduction="none",  # a sum in bfloat16 is wrong by up to a hundredth
            options=nn.LinearCrossEntropyOptions(
                batch_chunk_size=min(count, _rows_at_once(weight))
            ),
        )
        total = each.float().sum()
    else:
        total = _in_chunks(model, hidden, labels, weight, label_smoothing)
    return total / count if reduction == "mean" else total


def _rows_at_once(weight: Tensor) -> int:
    return max(1, _CHUNK_BYTES // (4 * len(weight)))


def _one_dtype(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """All in the dtype of autocast, or in that of the hidden states."""
    kind, dtype = hidden.device.type, hidden.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class _InChunks(torch.autograd.Function):
    """The cross-entropy of some tokens at a time, whose gradients are made beside it.

    As torch's ``linear_cross_entropy``, which sums bfloat16 in bfloat16, on CPUs multiplies it in
    float32, and passes over the weight's gradient once more. Sums here are float32.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, share: float
    ) -> Tensor:
        rows, total = _rows_at_once(weight), hidden.new_zeros((), dtype=torch.float32)
        of_hidden, of_weight, of_bias = torch.empty_like(hidden), None, None
        for first in range(0, len(labels), rows):
            part, wanted = hidden[first : first + rows], labels[first : first + rows, None]
            scores = linear_gradients.linear(part, weight, bias).float()
            scores.sub_(scores.amax(dim=-1, keepdim=True))
            found = scores.gather(1, wanted)
            sums = scores.exp_().sum(dim=-1, keepdim=True)
            total += (sums.log() - found).sum()
            if not any(ctx.needs_input_grad):
                continue
            scores.mul_(share / sums).scatter_add_(1, wanted, torch.full_like(found, -share))
            changes = scores.to(hidden.dtype)
            of_hidden[first : first + rows] = linear_gradients.matmul(changes, weight)
            if ctx.needs_input_grad[1]:
                made = linear_gradients.matmul(changes.mT, part)
                made = made.float() if rows < len(labels) else made  # sums are float32
                of_weight = made if of_weight is None else of_weight.add_(made)
            if ctx.needs_input_grad[2]:
                made = scores.sum(dim=0)
                of_bias = made if of_bias is None else of_bias.add_(made)
        ctx.found = of_hidden, of_weight, of_bias
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total * share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        same = bool(grad == 1.0)
        found = (
            None if x is None else (x if same else x * grad).to(dtype)
            for x, dtype in zip(ctx.found, ctx.dtypes, strict=True)
        )
        return (*found, None, None)


def _in_chunks(
    model: Transformer, hidden: Tensor, labels: Tensor, weight: Tensor, label_smoothing: float
) -> Tensor:
    """The sum where torch's function would hold all logits: with a softcap, or smoothed labels.

    Each chunk's logits are made again for its gradients.
    """
    assert model.head is not None
    bias, cap, scale = model.head.bias, model.config.logit_softcap, model.config.logit_scale

    def of_chunk(part: Tensor, wanted: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits = product(part, weight, None).float()
        if bias is not None:
            logits = logits + bias * scale
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return F.cross_entropy(logits, wanted, reduction="sum", label_smoothing=label_smoothing)

    rows = _rows_at_once(weight)
    total = hidden.new_zeros((), dtype=torch.float32)
    for part, wanted in zip(torch.split(hidden, rows), torch.split(labels, rows), strict=True):
        made: Tensor = checkpoint(of_chunk, part, wanted, weight, bias, use_reentrant=False)
        total = total + made
    return total
