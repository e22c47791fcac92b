"""Cases of one attention call: prefill, decode, chunk, window, features, mla, backward, growth."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from polyhead.integrations.torch import MultiheadAttention
from polyhead.lab.benchmarks.case import Call, Case, Contestant, Settings, close
from polyhead.lab.benchmarks.limits import matrix_rate, read_rate
from polyhead.lab.benchmarks.peers import contestants
from polyhead.lab.benchmarks.problem import Problem

SDPA, FLEX, X_TRANSFORMERS, ONNX = "torch SDPA", "FlexAttention", "x-transformers", "onnxruntime"
MODULE = "torch MultiheadAttention"
PLAIN = "plain causal"


def prefill(settings: Settings) -> Iterator[Case]:
    """Many queries: the time of the matrix products; and a whole layer against torch's module."""
    lengths = (512, 1024) if settings.quick else (512, 1024, 2048, 4096, 8192)
    for dtype, D, causal, T in itertools.product(
        settings.dtypes, (64, 128), (False, True), lengths
    ):
        heads = max(2, min(8, 16384 // T))
        problem = Problem(heads, heads, T, T, D, dtype, causal=causal)
        names = [SDPA]
        if D == 64 and causal and T == 1024:
            names += [X_TRANSFORMERS] if settings.quick else [X_TRANSFORMERS, FLEX]
        group = f"heads × {D}, {'causal' if causal else 'full'}"
        yield _case(problem, group, T, names)
    for dtype in settings.dtypes:
        yield _layer(512, 8, 1024, dtype)


def _layer(embed_dim: int, heads: int, tokens: int, dtype: torch.dtype) -> Case:
    """Causal self-attention with its projections."""
    theirs = nn.MultiheadAttention(embed_dim, heads, batch_first=True, dtype=dtype).eval()
    ours = MultiheadAttention(embed_dim, heads, batch_first=True, dtype=dtype).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, tokens, embed_dim).to(dtype)
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)

    def run(module: nn.MultiheadAttention) -> Tensor:
        out: Tensor = module(x, x, x, need_weights=False, attn_mask=hidden, is_causal=True)[0]
        return out

    pairs = tokens * (tokens + 1) // 2
    operations = 8.0 * tokens * embed_dim**2 + 4.0 * pairs * embed_dim
    return Case(
        f"layer {embed_dim}, {heads} heads, causal", tokens, dtype, lambda: run(ours),
        {MODULE: Contestant(lambda: run(theirs), close(dtype))},
        (matrix_rate(dtype, operations),), operations,
    )  # fmt: skip


def decode(settings: Settings) -> Iterator[Case]:
    """One query: the time of reading keys and values once."""
    lengths = (1024, 8192) if settings.quick else (1024, 2048, 4096, 8192, 16384, 32768)
    layouts = {(32, 8, 128): lengths, (9, 3, 64): lengths, (32, 1, 128): lengths[1:],
               (32, 32, 128): (4096,)}  # fmt: skip
    for dtype in settings.dtypes:
        for (H, G, D), keys in layouts.items():
            for S in keys:
                problem = Problem(H, G, 1, S, D, dtype, causal=True)
                names = [SDPA, ONNX] if S in (4096, 8192) else [SDPA]
                yield _case(problem, f"{H}/{G} × {D}", S, names)


def chunk(settings: Settings) -> Iterator[Case]:
    """A few queries over a long past: speculative decoding, chunks of a prompt."""
    for dtype in settings.dtypes:
        for T in (4, 16) if settings.quick else (4, 8, 16, 64, 256):
            problem = Problem(32, 8, T, 4096, 128, dtype, causal=True)
            yield _case(problem, "32/8 × 128, 4096 keys, queries:", T, [SDPA])


def window(settings: Settings) -> Iterator[Case]:
    """A causal window; torch needs a mask of T × T, FlexAttention skips blocks as we do."""
    sizes = ((2048, 256),) if settings.quick else ((2048, 256), (8192, 512))
    names = [SDPA] if settings.quick else [SDPA, FLEX]
    for dtype in settings.dtypes:
        for T, size in sizes:
            heads = max(2, 16384 // T)
            problem = Problem(heads, heads, T, T, 64, dtype, causal=True, window=size)
            yield _case(problem, f"heads × 64, window {size}", T, names)


def features(settings: Settings) -> Iterator[Case]:
    """What a feature adds to our own plain causal attention; results checked by another kernel."""
    T = 1024 if settings.quick else 4096
    heads = max(2, 8192 // T)
    third = T // 3
    for dtype in settings.dtypes:
        plain = Problem(heads, heads, T, T, 64, dtype, causal=True)
        variants = {
            "softcap": replace(plain, softcap=30.0),
            "ALiBi": replace(plain, alibi=True),
            "sinks": replace(plain, sinks=True),
            "documents": replace(plain, documents=(third, T - 2 * third, third)),
        }
        for name, problem in variants.items():
            names = [SDPA] if settings.quick else [SDPA, FLEX]
            tensors = problem.draw()
            case = _case(problem, f"{heads} × 64, {name}", T, names, tensors)
            others = {
                PLAIN: Contestant(lambda t=tensors, p=plain: p.ours(*t), None),  # type: ignore[misc]
                "our PyTorch kernel": Contestant(
                    lambda t=tensors, p=problem: p.ours(*t, kernel="tiled"),  # type: ignore[misc]
                    close(dtype),
                ),
            }
            yield replace(case, peers=others | dict(case.peers))


def mla(settings: Settings) -> Iterator[Case]:
    """Absorbed latent attention: one kv head of 576, its values the first 512 columns."""
    heads = 16 if settings.quick else 128
    for dtype in settings.dtypes:
        for S in (1024,) if settings.quick else (1024, 4096):
            problem = Problem(heads, 1, 1, S, 576, dtype, causal=True, latent=512)
            yield _case(problem, f"{heads} heads, 576/512", S, [SDPA])


def backward(settings: Settings) -> Iterator[Case]:
    """Forward and all three gradients: seven matrix products instead of two."""
    lengths = (512,) if settings.quick else (1024, 2048, 4096)
    for dtype, D, causal, T in itertools.product(
        settings.dtypes, (64, 128), (False, True), lengths
    ):
        heads = max(2, min(8, 8192 // T))
        problem = Problem(heads, heads, T, T, D, dtype, causal=causal)
        group = f"heads × {D}, {'causal' if causal else 'full'}"
        yield _gradients(_case(problem, group, T, [SDPA], tensors := _leaves(problem)), tensors)


def growth(settings: Settings) -> Iterator[Case]:
    """How cost grows with heads and batch; prefill and decode grow T and S."""
    counts = (1, 4) if settings.quick else (1, 2, 4, 8)
    S = 1024 if settings.quick else 4096
    for dtype in settings.dtypes:
        for n in counts:
            yield _case(
                Problem(8 * n, 8, 1, S, 128, dtype, causal=True),
                f"decode, {S} keys, 8 kv heads, H:", 8 * n, [SDPA],
            )  # fmt: skip
        for n in counts:
            yield _case(
                Problem(32, 8, 1, S, 128, dtype, batch=n, causal=True),
                f"decode, {S} keys, 32/8 × 128, B:", n, [SDPA],
            )  # fmt: skip
        for n in counts:
            yield _case(
                Problem(2 * n, 2, 1024, 1024, 64, dtype, causal=True),
                "prefill, 1024 tokens, 2 kv heads, H:", 2 * n, [SDPA],
            )  # fmt: skip
        for n in counts:
            yield _case(
                Problem(4, 4, 1024, 1024, 64, dtype, batch=n, causal=True),
                "prefill, 1024 tokens, 4 heads, B:", n, [SDPA],
            )  # fmt: skip


# Below this many operations a byte, memory is what a call waits for; above, arithmetic.
_COMPUTE_BOUND = 64.0


def _case(
    problem: Problem,
    group: str,
    length: int,
    names: Iterable[str],
    tensors: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Case:
    q, k, v = problem.draw() if tensors is None else tensors
    arithmetic = problem.operations > _COMPUTE_BOUND * problem.bytes
    limits = [matrix_rate(problem.dtype, problem.operations)]
    if not arithmetic:  # one of both binds; bytes are what people count
        limits.append(read_rate(problem.bytes))
    return Case(
        group, length, problem.dtype, lambda: problem.ours(q, k, v),
        contestants(problem, (q, k, v), names), tuple(limits),
        *((problem.operations, "FLOP/s") if arithmetic else (problem.bytes, "B/s")),
    )  # fmt: skip


def _leaves(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = problem.draw()
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def _gradients(case: Case, tensors: tuple[Tensor, Tensor, Tensor]) -> Case:
    """The case with the gradients of everything it computes."""
    grad = torch.randn(tensors[0].shape).to(case.dtype)

    def of(run: Call) -> Call:
        def both() -> Tensor:
            with torch.enable_grad():
                out = run()
                return torch.cat([g.flatten() for g in torch.autograd.grad(out, tensors, grad)])

        return both

    return replace(
        case, ours=of(case.ours), work=3.5 * case.work,
        peers={name: Contestant(of(peer.run), peer.differs) for name, peer in case.peers.items()},
        limits=tuple(limit.times(3.5) for limit in case.limits),
    )  # fmt: skip
