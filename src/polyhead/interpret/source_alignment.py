"""Which part of the source each token of a translation or transcript reads.

    found = ph.align(model, source_ids, target_ids)
    found.sources            # [T] the source token that each new target token reads most
    found.heads              # the cross-attention heads that say so, the best first

Some heads of cross-attention follow the source token by token, others look at one end of it or
everywhere. Which is which is measured without being told what is right: draw a source token s as
target token t reads it, then a target token as s is read; a head that aligns comes back to t.

    score = 1/T Σ_t Σ_s p(s | t) · p(t | s)         p(t | s) = p(s | t) / Σ_t' p(s | t')

It is 1 where every target token reads source tokens of its own, and 1/T where all read alike.

Shape letters: L layers, H heads, T target tokens, S source tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyhead._utils.checks import check_int, check_number
from polyhead.errors import InputError
from polyhead.interpret.probe import probe
from polyhead.interpret.tables import aligned
from polyhead.models.naming import attention_modules, is_cross
from polyhead.models.parts import device_of, transformer_of


@dataclass(frozen=True, eq=False)
class SourceAlignment:
    """What each new target token reads of the source.

    Attributes:
        heads: (layer, head) of the cross-attention heads that are used, the best first.
        scores: ``[L, H]`` how well each head aligns, from 1/T to 1.
        weights: ``[T, S]`` mean weights of those heads; row t is of the step that wrote the t-th
            new token.
    """

    heads: tuple[tuple[int, int], ...]
    scores: Tensor
    weights: Tensor

    @property
    def sources(self) -> Tensor:
        """``[T]`` the source token that each new token reads most."""
        return self.weights.argmax(dim=-1)

    def monotone(self) -> Tensor:
        """``[T]`` the same where the order of the source is kept, as of speech.

        Of all sequences that never go back it is the one of the greatest total weight.
        """
        T, S = self.weights.shape
        came = torch.empty(T, S, dtype=torch.int64, device="cpu")
        total = self.weights.new_zeros(S)
        for t, row in enumerate(self.weights):
            total, came[t] = torch.cummax(total, dim=0)
            total = total + row
        path = [int(total.argmax())]
        for t in range(T - 1, 0, -1):
            path.append(int(came[t, path[-1]]))
        return torch.tensor(path[::-1], device="cpu")


def alignment_scores(weights: Tensor) -> Tensor:
    """``[...]`` how well weights ``[..., T, S]`` align targets with sources, each on its own."""
    read = weights.sum(dim=-2, keepdim=True)
    back = torch.where(read > 0, weights / read, 0.0)
    return (weights * back).sum(dim=(-2, -1)) / weights.shape[-2]


@torch.no_grad()
def align(
    model: nn.Module,
    source: Tensor,
    target: Tensor | Sequence[int],
    *,
    prompt: int = 1,
    heads: Sequence[tuple[int, int]] | None = None,
    above: float = 0.5,
) -> SourceAlignment:
    """Finds which part of a source each token of a text reads.

    Args:
        model: An encoder-decoder, as ``polyhead.load`` makes it or a ``Transformer``.
        source: Ids ``[S]`` or ``[1, S]``; features ``[mels, frames]`` or ``[1, mels, frames]``.
        target: Ids that the decoder read and wrote, ``[P + T]``: the prompt, then the new ones.
        prompt: P, tokens of the prompt, at least the start token.
        heads: (layer, head) of those to use; None: those that score best on this text.
        above: Fraction of the best score that heads must have to be used, where none are given.

    Raises:
        InputError: The model has no cross-attention, no new tokens, or a head that is not there.
        ValueError: ``above`` is not from 0 to 1.
    """
    transformer = transformer_of(model)
    check_number("above", above, least=0.0, most=1.0)
    read = torch.as_tensor(target).reshape(1, -1)
    if not check_int("prompt", prompt, least=1) < read.shape[1]:
        raise InputError(
            f"target must hold new tokens after a prompt of {prompt}: got {read.shape[1]} tokens"
        )
    given = transformer.config.encoder.embedding
    rank = 2 if given is not None and given.frontend is not None else 1
    batch = source.reshape(1, *source.shape[-rank:])
    names = [name for name in attention_modules(transformer) if is_cross(name)]
    if not names:
        raise InputError(f"{type(model).__name__} has no cross-attention to align with")
    device = device_of(transformer)
    if batch.is_floating_point():
        batch = batch.to(transformer.embedding.like.dtype)
    with probe(transformer, layers=names) as seen:
        transformer.hidden_states(read[:, :-1].to(device), encoder_ids=batch.to(device))
    rows = [view.rows(queries=slice(prompt - 1, None))[0].float().cpu() for view in seen.cross]
    scores = aligned([alignment_scores(each) for each in rows])
    chosen = _best(scores, above) if heads is None else _checked(heads, rows)
    weights = torch.stack([rows[layer][head] for layer, head in chosen]).mean(dim=0)
    return SourceAlignment(tuple(chosen), scores, weights)


def _best(scores: Tensor, above: float) -> list[tuple[int, int]]:
    """Heads with at least a fraction of the best score, the best first."""
    flat = scores.nan_to_num(nan=-1.0).flatten()
    order = flat.argsort(descending=True, stable=True).tolist()
    least = above * float(flat.max())
    return [divmod(number, scores.shape[1]) for number in order if flat[number] >= least]


def _checked(heads: Sequence[tuple[int, int]], rows: Sequence[Tensor]) -> list[tuple[int, int]]:
    found = [(int(layer), int(head)) for layer, head in heads]
    if not found:
        raise InputError("heads must be at least one (layer, head): got none")
    for layer, head in found:
        if not (0 <= layer < len(rows) and 0 <= head < len(rows[layer])):
            raise InputError(
                f"heads must be (layer, head) of cross-attention, layers 0 to {len(rows) - 1}: got "
                f"({layer}, {head})"
            )
    return found
