"""Heads that map each query to the key that it belongs to: words of a translation, atoms.

A trained head can say more than a direction: in a model of chemical reactions one points from every
atom of the product to the atom of the reactants that it was (Schwaller et al. 2021, "Extraction of
organic chemistry grammar from unsupervised learning of chemical reactions"). Such a head is found
by asking, of every query whose key is known, whether the largest weight lies there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyhead.errors import InputError
from polyhead.interpret.tables import aligned, run_ids


@dataclass(frozen=True, eq=False)
class Alignment:
    """A text and, for some of its tokens, the keys that they should look at.

    Attributes:
        ids: ``[T]`` the tokens.
        keys: For each such token, counted from 0, the tokens that are right.
        among: The tokens among which the largest weight is looked for; empty: all.
    """

    ids: Tensor
    keys: Mapping[int, Collection[int]]
    among: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        length = self.ids.shape[-1]
        named = {*self.keys, *self.among, *(key for right in self.keys.values() for key in right)}
        if not self.keys:
            raise InputError("an alignment needs at least one query and its keys: got none")
        if outside := [token for token in named if not 0 <= token < length]:
            raise InputError(f"tokens of an alignment are 0 to {length - 1}: got {outside[0]}")


def alignment_score(model: nn.Module, text: Alignment) -> Tensor:
    """``[layers, heads]`` the fraction of queries whose largest weight lies on a right key.

    Args:
        model: What a probe can watch and that takes ids.
    """
    among = list(text.among or range(text.ids.shape[-1]))
    right = torch.zeros(len(text.keys), len(among), dtype=torch.bool, device="cpu")
    for row, keys in zip(right, text.keys.values(), strict=True):
        row[[among.index(key) for key in keys if key in among]] = True
    shares = []
    for view in run_ids(model, text.ids.reshape(1, -1)):
        rows = torch.stack([view.call.row(query)[0] for query in text.keys], dim=1)
        best = rows[..., among].argmax(dim=-1).cpu()  # [H, queries]
        shares.append(right.gather(1, best.mT).float().mean(dim=0))
    return aligned(shares)
