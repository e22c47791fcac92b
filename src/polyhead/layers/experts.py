"""A mixture of experts: every token is processed by a few of many feed-forward networks.

    s = score(x Wr)                      softmax over all experts, a sigmoid or √softplus each
    chosen = the k greatest s + bias     among the best groups of experts, where there are groups
    out = scale · Σ_chosen w_e expert_e(x) + shared_scale · shared(x),   w = s, or s / Σ_chosen s

Shazeer et al. 2017; Mixtral (2024); DeepSeek-V2 (2024), §2.2; DeepSeek-V3 (2024), §2.1.2: the bias
decides which experts are visited, never their weight.

Shape letters: B batch, T tokens, E embed size, M all tokens of the batch, X experts, K visited.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead import native
from polyhead.config import MixtureConfig
from polyhead.errors import UnsupportedError
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.fixed import Fixed
from polyhead.layers.gemm import as_rows, code_for_few_rows
from polyhead.layers.linear import weight_of
from polyhead.layers.registry import register_builder
from polyhead.native import batch_invariant
from polyhead.native.arguments import SCORINGS, Routing


class Experts(Fixed):
    """A mixture of experts in place of a ``FeedForward``.

    Args:
        embed_dim: Embedding size E of the residual stream.
        config: The experts and the choice.

    Attributes:
        router: ``[X, E]`` weight, and where the configuration says so a bias ``[X]``.
        choice_bias: ``[X]``, or None.
        experts: The routed networks.
        shared: The network that every token visits, or None.
        shared_gate: ``[1, E]`` weight, or None.
        output_bias: ``[E]``, or None.
        calls_all: Whether experts that no token visits are called too, on no tokens: processes that
            reduce gradients together must have gradients of the same parameters.
    """

    choice_bias: Tensor | None
    output_bias: nn.Parameter | None

    def __init__(self, embed_dim: int, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        self.calls_all = False
        read = config.router_features(embed_dim)
        self.router = nn.Linear(read, config.choices, bias=config.router_bias)
        bias = torch.zeros(config.choices) if config.choice_bias else None
        self.register_buffer("choice_bias", bias)
        self.experts = nn.ModuleList(
            FeedForward.from_config(embed_dim, config.expert) for _ in range(config.num_experts)
        )
        shared = config.shared
        self.shared = None if shared is None else FeedForward.from_config(embed_dim, shared)
        self.shared_gate = nn.Linear(embed_dim, 1, bias=False) if config.shared_gate else None
        added = nn.Parameter(torch.zeros(embed_dim)) if config.output_bias else None
        self.register_parameter("output_bias", added)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, E]`` to ``[B, T, E]``."""
        weights, chosen, share = self._routed(x.reshape(-1, x.shape[-1]))
        if self.config.capacity is not None:
            in_time = self._in_time(chosen.view(*x.shape[:-1], -1), self.config.capacity)
            if batch_invariant.is_enabled() and not in_time.all():
                raise UnsupportedError(
                    "batch_invariant() cannot keep the bits of full experts "
                    f"(capacity={self.config.capacity}): who finds room depends on the call"
                )
            weights = weights * in_time
        return self._answered(x, weights, chosen, share)

    def _answered(
        self, x: Tensor, weights: Tensor, chosen: Tensor, share: Tensor | None = None
    ) -> Tensor:
        """``[B, T, E]`` what the visited experts and the shared network give."""
        out = self._visited(x.reshape(-1, x.shape[-1]), weights, chosen).view_as(x)
        if self.output_bias is not None:
            out = out + self.output_bias
        if self.shared is None:
            return out
        shared: Tensor = self.shared(x)
        if share is not None:
            shared = (shared * share.view(*x.shape[:-1], 1)).to(x.dtype)
        elif self.shared_gate is not None:
            shared = self.shared_gate(x).sigmoid() * shared
        scale = self.config.shared_scale
        return out + (shared if scale == 1.0 else shared * scale)

    def _visited(self, flat: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """``[M, E]`` what the visited experts give, weighed: what a mixture replaces whose experts
        are spread over processes (``polyhead.parallel``)."""
        if len(flat) == 1 and not self.calls_all and not _is_recorded():
            return self._of_one(flat, weights, chosen)
        return self._of_all(flat, weights, chosen)

    def _of_all(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """``[M, E]``, expert after expert."""
        out = torch.zeros_like(x)
        all_of_them = self.calls_all or _is_recorded()
        numbers = range(self.router.out_features) if all_of_them else torch.unique(chosen).tolist()
        for number in numbers:
            rows, places = torch.where(chosen == number)
            made = self._weighed(number, x[rows], weights[rows, places, None])
            out = out.index_add(0, rows, made)
        return out

    def _of_one(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The same for one token, for decoding: no rows need to be collected."""
        out = torch.zeros_like(x)
        visits = zip(chosen[0].tolist(), weights[0].unbind(), strict=True)
        for number, weight in sorted(visits, key=lambda visit: visit[0]):
            out = out + self._weighed(number, x, weight)
        return out

    def _weighed(self, number: int, x: Tensor, weight: Tensor) -> Tensor:
        """What an expert gives, times its weight."""
        expert = self.experts[number]
        into = self.config.weighs == "input"
        made: Tensor = expert(x * weight.to(x.dtype) if into else x)
        return made if into else (made * weight).to(x.dtype)

    def _in_time(self, chosen: Tensor, capacity: int) -> Tensor:
        """``[M, K]`` whether an expert still has room for a token: its sequence's first come first.

        Args:
            chosen: ``[B, T, K]``.
            capacity: Tokens of a sequence that an expert takes.
        """
        B, _, K = chosen.shape
        visits = F.one_hot(chosen.reshape(B, -1), self.config.choices)
        order = (visits.cumsum(dim=1) * visits).sum(dim=-1)
        return (order <= capacity).view(-1, K)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights ``[M, K]`` in float32 and numbers ``[M, K]`` of the experts that tokens visit.

        Args:
            x: ``[M, E]``.
        """
        weights, chosen, _ = self._routed(x)
        return weights, chosen

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same, and the share ``[M]`` of the shared network where native code makes it."""
        code = code_for_few_rows(x)
        routing = None if code is None else native_routing(self, x)
        if code is None or routing is None:
            return *self._scored(x), None
        weights, chosen = code.route(as_rows(x), routing)
        K = routing.visited
        return weights[:, :K], chosen, None if routing.shared_gate is None else weights[:, K]

    def _logits(self, x: Tensor) -> Tensor:
        """``[M, X]`` in float32 or more, of ``[M, E]``."""
        precise = torch.promote_types(x.dtype, torch.float32)
        router, bias = self.router, self.router.bias
        return F.linear(
            x.to(precise), router.weight.to(precise), None if bias is None else bias.to(precise)
        )

    def _weights(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """``[M, K]`` weights of chosen experts."""
        weights = scores.gather(1, chosen)
        if self.config.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.config.scale

    def _scored(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config, logits = self.config, self._logits(x)
        if config.scoring == "sparsemixer":
            weights, chosen = _sparsemixer(logits, config.experts_per_token, config.jitter)
            return weights * config.scale, chosen
        scores = scores_of(logits, config.scoring)
        choice = logits if config.choice_bias_of == "logits" else scores
        if self.choice_bias is not None:
            choice = choice + self.choice_bias
        if config.groups > 1:
            grouped = choice.view(len(x), config.groups, -1)
            best = grouped.topk(2 if config.group_score == "best two" else 1, dim=-1).values
            kept = best.sum(dim=-1).topk(config.groups_per_token, dim=-1).indices
            open_ = torch.zeros_like(grouped[..., 0]).scatter(1, kept, 1.0)
            closed = -torch.inf if config.closed_score is None else config.closed_score
            choice = grouped.masked_fill(open_[..., None] == 0.0, closed).flatten(1)
        chosen = choice.topk(config.experts_per_token, dim=-1).indices
        return self._weights(scores, chosen), chosen

    def extra_repr(self) -> str:
        config = self.config
        return f"{config.experts_per_token} of {config.num_experts}, scoring={config.scoring}"


def scores_of(logits: Tensor, scoring: str) -> Tensor:
    """The experts' scores ``[M, X]``."""
    if scoring == "sqrtsoftplus":
        return F.softplus(logits).sqrt()
    return logits.sigmoid() if scoring == "sigmoid" else logits.softmax(dim=-1)


def _is_recorded() -> bool:
    """Whether the operations are recorded to run for other tokens, which visit other experts."""
    return torch.compiler.is_exporting() or torch._C._is_tracing()


def _sparsemixer(logits: Tensor, count: int, jitter: float) -> tuple[Tensor, Tensor]:
    """Weights and numbers ``[M, count]``, one expert after the other (Liu et al. 2024, eq. 12).

    The weight of each is a softmax over the experts whose score is near the best that is left.
    transformers draws the experts at random when training; here they are the best.
    """
    left, weights, chosen = logits, [], []
    for _ in range(count):
        best, expert = left.max(dim=-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * jitter
        near = left.masked_fill(far, -torch.inf).softmax(dim=-1)
        weights.append(near.gather(1, expert))
        chosen.append(expert)
        left = left.scatter(1, expert, -torch.inf)
    return torch.cat(weights, dim=1), torch.cat(chosen, dim=1)


def native_routing(experts: Experts, x: Tensor) -> Routing | None:
    """How tokens choose, as native code takes it; None where it cannot read the weights.

    Args:
        experts: Mixture-of-experts module.
        x: Whose dtype the weights must have.
    """
    config, modules = experts.config, experts._modules
    router, gate = weight_of(modules["router"], x), modules.get("shared_gate")
    gate_weight = None if gate is None else weight_of(gate, x)
    bias = experts._buffers["choice_bias"]
    if (
        router is None
        or config.choice_bias_of != "scores"
        or config.closed_score is not None
        or config.scoring not in SCORINGS
        or len(router.weight) != config.num_experts
        or (gate is not None and gate_weight is None)
        or not (bias is None or bias.dtype in (x.dtype, torch.float32))
        or not (bias is None or native.is_plain(bias, bias))
    ):
        return None
    return Routing(
        router,
        bias,
        gate_weight,
        config.experts_per_token,
        SCORINGS[config.scoring],
        config.normalize,
        config.scale,
        config.groups,
        config.groups_per_token,
        config.group_score == "best two",
        config.jitter,
    )


register_builder(MixtureConfig, Experts)
