"""The one operation: validate, choose a kernel, run.

    out = attention(q, k, v, mask=Causal() & Window(4096), softcap=50.0)

``explain`` takes the same arguments and says which kernel would run, and why not the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor

from polyhead.errors import UnsupportedError
from polyhead.kernels import KERNELS, Kernel, Refusal, SwitchedOffError
from polyhead.kernels.native import one_query
from polyhead.native import batch_invariant
from polyhead.semantics import (
    Bias,
    Call,
    Causal,
    KeyValueSource,
    Mask,
    Normalizer,
    State,
    add_sinks,
)
from polyhead.semantics.argument_hints import refuse
from polyhead.semantics.arguments import AttentionOptions, call_of, dropout_seed
from polyhead.semantics.scores import (
    autocast_enabled,
    full_precision,
    implicit_replication,
    reproducibly,
)
from polyhead.semantics.storage import check_storage

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@overload
def attention(
    q: Tensor,
    k: Tensor | KeyValueSource,
    v: Tensor | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor | KeyValueSource,
    v: Tensor | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"] | KeyValueSource,
    v: Float[Tensor, "B G S V"] | None = None,
    *,
    mask: Mask | None = None,
    bias: Bias | Float[Tensor, ...] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | Float[Tensor, "#B H T"] | None = None,
    q_positions: Int[Tensor, "*Bq T"] | None = None,
    kv_positions: Int[Tensor, "*Bk S"] | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    normalizer: Normalizer | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head attention (Vaswani et al. 2017, eq. 1) with grouped heads (Ainslie et al. 2023).

        softmax(mask(softcap(Q Kᵀ · scale) + bias)) V

    Query head h attends with kv head h // (H / G); K and V are never expanded. A query that may
    see nothing gives 0 and lse −∞, with gradients 0. Masked keys and values have no effect, even if
    they are NaN or Inf.

    Args:
        q: ``[B, H, T, D]`` queries: float64, float32, bfloat16 or float16, any strides.
        k: ``[B, G, S, D]`` keys, G a divisor of H; or a key/value source, as a cache returns.
        v: ``[B, G, S, V]`` values; None with a source.
        mask: Who may look at whom, over absolute positions; None: everything is visible.
        bias: ``ALiBi``, ``RelativeBias`` or a tensor that broadcasts to ``[B, H, T, S]``.
        scale: Factor of the scores; default 1/√D.
        softcap: c in c · tanh(score / c); None is off.
        sinks: ``[H]`` scores that join the denominator only, or ``[1 or B, H, T]`` of each query.
        q_positions: ``[T]`` or ``[B, T]``; default: the last query lines up with the last key.
        kv_positions: ``[S]`` or ``[B, S]``; default 0 … S − 1.
        dropout_p: Dropout probability of the weights, 0 ≤ p < 1.
        generator: Where dropout's seed is drawn from; default torch's global generator.
        normalizer: What takes the softmax's place, such as ``Sigmoid``; None: the softmax.
        return_lse: Also return the natural-log log-sum-exp of each row (sinks included).
        kernel: ``"auto"`` or a kernel's name; a kernel that is named never falls back.
        **unknown: Refused; where torch or flash_attn have such an argument, the error says what
            polyhead calls it.

    Returns:
        ``out [B, H, T, V]`` in q's dtype; with ``return_lse`` also ``lse [B, H, T]`` in float32
        (float64 for float64).

    Raises:
        TypeError: An argument of the wrong kind, such as a bare bool tensor as mask.
        ValueError: Shapes, dtypes or numbers that do not fit, or an unknown kernel.
        UnsupportedError: The kernel that was named cannot do what is asked; names the feature.
    """
    if unknown:
        refuse("attention", unknown)
    if (
        kernel == "auto"
        and (mask is None or type(mask) is Causal)
        and bias is None
        and softcap is None
        and sinks is None
        and normalizer is None
        and q_positions is None
        and kv_positions is None
        and not (dropout_p or return_lse)
        and (found := one_query(q, k, v, scale)) is not None
    ):
        return found
    if _WATCHED and isinstance(q, Tensor) and isinstance(k, Tensor):
        _watch_layout(q, k)
    call = call_of(
        q, k, v, mask, bias, scale, softcap, sinks, q_positions, kv_positions,
        dropout_seed(q, dropout_p, generator), dropout_p, return_lse, normalizer,
    )  # fmt: skip
    state = run(call, kernel)
    if call.spec.sinks is not None:
        with implicit_replication(state.out, call.spec.sinks):
            state = add_sinks(state, call.spec.sinks)
    if not return_lse:
        return state.out
    if state.lse is None:
        raise RuntimeError("the kernel returned no lse although it was asked for one")
    return state.out, state.lse


_WATCHED = [True]
"""Empty once the warning of a likely [B, T, H, D] was given."""


def _watch_layout(q: Tensor, k: Tensor) -> None:
    """Warns once per process where q and k look like ``[B, T, H, D]``.

    They have more heads than tokens, as many kv heads, and heads that lie apart in memory further
    than tokens, where those of a projection lie side by side.
    """
    if torch.compiler.is_compiling() or q.ndim != 4 or not q.shape[1] > q.shape[2] > 1:
        return
    if q.shape == k.shape and q.is_contiguous() and k.is_contiguous() and _WATCHED:
        _WATCHED.clear()
        warnings.warn(
            f"q and k {list(q.shape)} have {q.shape[1]} heads and {q.shape[2]} tokens: attention "
            "takes [B, H, T, D]; if they are [B, T, H, D], give q.transpose(1, 2) (said once)",
            stacklevel=3,
        )


def run(call: Call, kernel: str = "auto") -> State:
    """Computes a call that was checked, without its sinks: these join when all keys are seen.

    Args:
        call: What to compute.
        kernel: ``"auto"`` or a kernel's name.

    Raises:
        ValueError: An unknown kernel.
        UnsupportedError: The kernel that was named cannot do what is asked; names the feature.
    """
    chosen, plan = _choose(call, kernel)
    if not chosen.checks_storage:
        for name, x in call.tensors().items():
            check_storage(name, x)
    try:
        if autocast_enabled(call.q) or call.spec.deterministic:
            with full_precision(call.q), reproducibly(call.spec, call.q):
                return chosen.run(call, plan)
        return chosen.run(call, plan)
    except SwitchedOffError:
        if kernel != "auto":
            raise
    return run(call)


def gradients(
    call: Call, result: State, grads: tuple[Tensor, Tensor], kernel: str = "auto"
) -> list[Tensor] | None:
    """Gradients of a call whose result was merged with those of other keys (``Kernel.gradients``).

    Args:
        call: A call on dense keys and values, with ``requires_grad``.
        result: The output over all keys, in the dtype of q, and its lse.
        grads: The gradients of both.
        kernel: ``"auto"`` or a kernel's name.

    Returns:
        Those of q, k and v, and of the bias's tensors if any of these requires a gradient; None:
        the kernel has no backward pass apart from autograd's.
    """
    with torch.enable_grad():  # what a kernel makes of a bias is pulled back through
        chosen, plan = _choose(call, kernel)
    with torch.no_grad(), full_precision(call.q), reproducibly(call.spec, call.q):
        return chosen.gradients(call, plan, result, grads)


@dataclass(frozen=True)
class Explanation:
    """Which kernel runs and why not the others; print it.

    Attributes:
        kernel: Name of the kernel that runs.
        summary: What it is good at.
        refusals: Why each other kernel does not run, by name.
        call: The call in one line.
        bytes_read: Bytes of q, k and v, each read once.
        bytes_written: Bytes of the output.
        gather_bytes: Bytes of keys and values that the kernel copies first, to have them in one
            piece.
    """

    kernel: str
    summary: str
    refusals: dict[str, str]
    call: str
    bytes_read: int
    bytes_written: int
    gather_bytes: int

    def __str__(self) -> str:
        width = max(map(len, [self.kernel, *self.refusals]))
        lines = [
            self.call,
            f"  {self.kernel:{width}}  runs: {self.summary}",
            *(f"  {name:{width}}  {why}" for name, why in self.refusals.items()),
            f"  reads at least {self.bytes_read:,} bytes, writes {self.bytes_written:,}"
            + (f", copies {self.gather_bytes:,} first" if self.gather_bytes else ""),
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from polyhead._utils.notebook import lines, panel, table

        moved = str(self).splitlines()[-1].strip()
        rows = [(self.kernel, f"runs: {self.summary}"), *self.refusals.items()]
        return panel(self.call, table(["kernel", ""], rows), lines(moved))


def explain(
    q: Tensor,
    k: Tensor | KeyValueSource,
    v: Tensor | None = None,
    *,
    mask: Mask | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    q_positions: Tensor | None = None,
    kv_positions: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    normalizer: Normalizer | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
    **unknown: Any,
) -> Explanation:
    """Shows which kernel ``attention`` would run for these arguments, and why not the others.

    Takes the arguments of ``attention``, computes nothing, draws no random number, and raises
    the same errors."""
    if unknown:
        refuse("explain", unknown)
    seed = torch.zeros((), dtype=torch.int64, device="cpu") if dropout_p else None
    call = call_of(
        q, k, v, mask, bias, scale, softcap, sinks, q_positions, kv_positions,
        seed, dropout_p, return_lse, normalizer,
    )  # fmt: skip
    q = call.q
    chosen, _ = _choose(call, kernel)
    refusals = {}
    for other in _in_order(call):
        if other is chosen:
            continue
        if (why := other.unavailable()) is not None:
            refusals[other.name] = f"not available: {why}"
        elif isinstance(plan := other.plan_of(call), Refusal):
            refusals[other.name] = f"cannot do {plan.feature}"
        elif (why := other.auto_skip_reason(call)) is not None:
            refusals[other.name] = f"only when named explicitly: {why}; {other.summary}"
        else:
            refusals[other.name] = f"supported, lower priority: {other.summary}"
        if other.needs_contiguous_kv and call.source.gather_bytes:
            refusals[other.name] += f"; would copy {call.source.gather_bytes:,} bytes to read them"
    source = call.source
    per_key = source.batch * source.num_kv_heads * (source.key_dim + source.value_dim)
    out = q.shape[0] * q.shape[1] * q.shape[2] * source.value_dim
    return Explanation(
        kernel=chosen.name,
        summary=chosen.summary,
        refusals=refusals,
        call=_describe(call, mask),
        bytes_read=(q.numel() + per_key * source.tokens.length) * q.element_size(),
        bytes_written=out * q.element_size(),
        gather_bytes=source.gather_bytes if chosen.needs_contiguous_kv else 0,
    )


def _in_order(call: Call) -> Iterable[Kernel[Any]]:
    """The kernels in order of preference; those that would copy cached keys come last."""
    if not call.source.gather_bytes or call.source.tokens.length <= call.q.shape[2]:
        return KERNELS.values()
    return sorted(KERNELS.values(), key=lambda kernel: kernel.needs_contiguous_kv)


def _choose(call: Call, name: str) -> tuple[Kernel[Any], Any]:
    """The kernel named, or the first that can do all of the call, with its plan."""
    if batch_invariant.is_enabled():
        if name not in ("auto", "native"):
            raise UnsupportedError(
                f"batch_invariant() needs kernel='native' or 'auto': got {name!r}"
            )
        by_rows = KERNELS["native"]
        if isinstance(plan := by_rows.plan_of(call), Refusal):
            raise UnsupportedError(f"batch_invariant() cannot keep the bits of {plan.feature}")
        return by_rows, plan
    if name == "auto":
        lacking = "this call"
        for kernel in _in_order(call):
            if kernel.auto_skip_reason(call) is None and kernel.unavailable() is None:
                plan = kernel.plan_of(call)
                if not isinstance(plan, Refusal):
                    return kernel, plan
                lacking = plan.feature
        raise UnsupportedError(f"no kernel can do {lacking}")
    named = KERNELS.get(name) if isinstance(name, str) else None
    if named is None:
        raise ValueError(f"kernel must be 'auto' or one of {', '.join(KERNELS)}: got {name!r}")
    if (why := named.unavailable()) is not None:
        raise UnsupportedError(f"kernel {name!r} is not available: {why}")
    if isinstance(plan := named.plan_of(call), Refusal):
        able = [
            other.name
            for other in KERNELS.values()
            if other.unavailable() is None and not isinstance(other.plan_of(call), Refusal)
        ]
        raise UnsupportedError(f"kernel {name!r} cannot do {plan.feature}; can: {', '.join(able)}")
    return named, plan


def _describe(call: Call, mask: Mask | None) -> str:
    source, spec = call.source, call.spec
    B, H, T, D = call.q.shape
    kind = {H: "MHA", 1: "MQA"}.get(source.num_kv_heads, "GQA")
    words = [
        f"{kind} {H} query / {source.num_kv_heads} kv heads × {D}"
        + (f" (values {source.value_dim})" if source.value_dim != D else ""),
        f"batch {B}, {T} queries, {source.tokens.length} keys",
        f"{str(call.q.dtype).removeprefix('torch.')} on {call.q.device}",
    ]
    if mask is not None:
        words.append(f"mask {mask!r} ({call.visibility.value} visible)")
    if spec.bias is not None:
        words.append(f"bias {spec.bias!r}")
    if spec.softcap is not None:
        words.append(f"softcap {spec.softcap}")
    if spec.dropout_p:
        words.append(f"dropout_p {spec.dropout_p}")
    if spec.sinks is not None:
        words.append("sinks")
    if spec.normalizer is not None:
        words.append(f"normalizer {spec.normalizer!r}")
    return "; ".join(words)
