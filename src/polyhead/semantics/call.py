"""The arguments of a kernel: queries, a key/value source, and a specification.

None of them changes once it is made. They are not frozen dataclasses because those take 2 µs each
to make, which is what a small call of torch's own attention takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from polyhead.semantics.biases import Bias
from polyhead.semantics.masks import Mask, Visibility
from polyhead.semantics.normalizer import Normalizer
from polyhead.semantics.sources import DenseSource, KeyValueSource
from polyhead.semantics.tokens import Tokens


@dataclass(eq=False, slots=True)
class Specification:
    """The specification of an attention call besides q, k and v.

        softmax(mask(softcap(Q Kᵀ · scale) + bias)) V

    Attributes:
        scale: Factor of the scores.
        mask: Who may look at whom, or None: everyone at everything.
        bias: Added after softcap, or None.
        softcap: c in c · tanh(score / c), or None.
        sinks: ``[H]`` scores, or ``[1 or B, H, T]``, that join the denominator only, or None.
        dropout_p: Dropout probability of the weights, the rest scaled by 1 / (1 − p).
        seed: A whole number tensor that decides which weights are dropped, or None.
        deterministic: Whether gradients must be bit-identical from run to run.
        heads: Which query heads these are of how many, where others are computed elsewhere: the
            number of the first, and of all. Dropout's hash counts all of them.
        normalizer: How scores become weights; None: by the softmax.
    """

    scale: float
    mask: Mask | None = None
    bias: Bias | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None
    deterministic: bool = False
    heads: tuple[int, int] | None = None
    normalizer: Normalizer | None = None

    def of_heads(self, heads: Sequence[int]) -> Specification:
        """The specification for some query heads alone."""
        return replace(
            self,
            mask=None if self.mask is None else self.mask.of_heads(heads),
            bias=None if self.bias is None else self.bias.of_heads(heads),
            sinks=None if self.sinks is None else sinks_of_heads(self.sinks, heads),
            normalizer=None if self.normalizer is None else self.normalizer.of_heads(heads),
        )


def sinks_of_heads(sinks: Tensor, heads: Sequence[int]) -> Tensor:
    """The sinks ``[H]`` or ``[1 or B, H, T]`` of some heads alone."""
    return sinks[list(heads)] if sinks.ndim == 1 else sinks[:, list(heads)]


@dataclass(eq=False, slots=True)
class Call:
    """One attention to compute.

    Attributes:
        q: ``[B, H, T, D]`` queries, any strides.
        source: Keys and values.
        spec: The specification, its mask simplified for this call.
        q_tokens: The T queries: their positions and places.
        needs_lse: Whether the log-sum-exp is to be returned.
        visibility: What the mask leaves of all pairs; ALL where there is no mask.
        requires_grad: Whether a gradient may be asked for.
    """

    q: Tensor
    source: KeyValueSource
    spec: Specification
    q_tokens: Tokens
    needs_lse: bool
    visibility: Visibility
    requires_grad: bool

    @property
    def groups(self) -> int:
        """Query heads per kv head, H // G."""
        return self.q.shape[1] // self.source.num_kv_heads

    def tensors(self) -> dict[str, Tensor]:
        """q, and keys, values and bias where these are plain arguments, by name."""
        source, bias = self.source, self.spec.bias
        found = {"q": self.q}
        if isinstance(source, DenseSource):
            found["k"], found["v"] = source.k, source.v
        if bias is not None:
            found.update((f"bias ({i})" if i else "bias", x) for i, x in enumerate(bias.tensors))
        return found


def simplify_mask(
    mask: Mask | None, queries: Tokens, keys: Tokens
) -> tuple[Mask | None, Visibility]:
    """The simplified mask for these tokens, and its visibility (none, some or all)."""
    if mask is None:
        return None, Visibility.ALL
    visibility = mask.classify(queries, keys)
    if visibility is Visibility.ALL:
        return None, visibility
    return mask.simplify(queries, keys), visibility
