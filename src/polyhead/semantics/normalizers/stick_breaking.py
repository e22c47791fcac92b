"""Stick-breaking attention: of what nearer keys leave, each takes its share."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from polyhead.semantics.normalizer import Normalizer, sums_of_later
from polyhead.semantics.tokens import Tokens


class StickBreaking(Normalizer, arguments={}):
    """Weights β_ij Π_l (1 − β_il) with β = σ(score), over the seen keys l behind j.

    Keys come in the order of their positions, the last first, so that nearer keys take their share
    before farther ones; weights sum to less than 1. Positions are in that order: it needs no
    encoding. Tan et al. 2024, "Scaling Stick-Breaking Attention", arXiv 2410.17980, where a query
    does not see its own key (queries one position back under a causal mask).
    """

    def weights(self, scores: Tensor, q: Tokens, k: Tokens) -> Tensor:
        left = -F.softplus(scores)  # log(1 − β); 0 for a key that is not seen
        return (scores + sums_of_later(left, k)).exp()

    def __repr__(self) -> str:
        return "StickBreaking()"
