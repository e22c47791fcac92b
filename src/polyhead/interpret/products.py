"""How one query and one key come to their weight: the products by dimension, the score, the row.

    score_j = softcap(scale · Σ_d q_d k_jd) + bias_j        weight_j = exp(score_j − lse)

Queries and keys are those that the scores used: normalized and rotated where the model does so; of
latent attention those of the computation that ran.

Letters: D head size, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead._utils.checks import check_int
from polyhead.interpret.view import AttentionView


@dataclass(frozen=True, eq=False)
class Product:
    """One query of one head, and one of its keys, float32.

    Attributes:
        q: ``[D]`` the query.
        k: ``[D]`` the key; ``q * k`` are the products whose sum is the raw score.
        raw: ``[S]`` q·k of this query and every key.
        scores: ``[S]`` scaled, soft-capped, with its bias; −∞ where the query may not look.
        weights: ``[S]`` the softmax row.
    """

    q: Tensor
    k: Tensor
    raw: Tensor
    scores: Tensor
    weights: Tensor


@torch.no_grad()
def product(view: AttentionView, head: int, query: int, key: int) -> Product:
    """The product of a query and a key in one head of the first text of a batch.

    Args:
        view: A layer's attention, with its queries and keys.
        head: Index of the query head, from 0.
        query: Index of the query, from 0.
        key: Index of the key, from 0.

    Raises:
        InputError: A head that is not there, or only statistics were kept.
        ValueError: A query or key that is not there.
    """
    call = view.call
    check_int("query", query, least=0, most=call.q_tokens.length - 1)
    check_int("key", key, least=0, most=call.k_tokens.length - 1)
    weights = view.rows([head], slice(query, query + 1))[0, 0, 0].float()
    place = view.heads.index(head)
    q = call.q[0, place, query].float()
    keys = call.k[0, call.kv_heads[place]].float()
    logs = call.log_weights(place, call.q_tokens.slice(query, query + 1), call.k_tokens)
    lse = call.lse[0, place, query]
    scores = logs[0, 0, 0] + torch.where(lse.isneginf(), 0.0, lse)
    return Product(q, keys[key], keys @ q, scores.float(), weights)
