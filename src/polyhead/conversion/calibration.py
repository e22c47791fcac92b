"""What a lossy step needs to know: second moments of a model's inputs, and of its gradients.

For each layer, over some windows of calibration text:

    C = E[x xᵀ]     x: the input of the projections, and a 1 for their biases
    M = E[g gᵀ]     g: gradients of log p(y) in keys before rotation, keys without rotation and
                    values, of all kv heads side by side; y drawn from the model itself

With y drawn from the model, ½ tr(M R C Rᵀ) is what an error R x of keys and values costs in KL
divergence, to second order and as if positions were independent (the Fisher information in
Kronecker factors; Martens & Grosse 2015). The gradient of a key is a sum of queries, each with the
weight that its score has in the result, and the gradient of a value has passed through the output
projection: both errors are in one unit.

Shape letters: G kv heads, D head size, V value size, E embed size, T tokens of a window.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyhead._utils.checks import check_int
from polyhead.conversion.draft import source_of
from polyhead.errors import InputError
from polyhead.layers import MultiHeadAttention, TransformerLayer
from polyhead.models import Transformer
from polyhead.semantics import DenseSource, KeyValueSource
from polyhead.training.evaluation import Progress, Texts, token_rows

WINDOW = 512
TOKENS = 8192
EVALUATION_TOKENS = 4096

_RUN = 32
"""Tokens in a row that two texts may not share."""


@dataclass(frozen=True)
class Moments:
    """Moments of one layer.

    Attributes:
        inputs: C, ``[E + 1, E + 1]`` float64.
        gradients: M, ``[2GD + GV, 2GD + GV]`` float64: keys, keys as if nothing were rotated,
            values.
    """

    inputs: Tensor
    gradients: Tensor


@dataclass(frozen=True)
class Calibration:
    """The result of calibration.

    Attributes:
        hash: Hash of the tokens, in order: the first 16 digits of their SHA-256.
        rows: The windows ``[T]``.
    """

    tokens: int
    hash: str
    layers: tuple[Moments, ...]
    rows: tuple[Tensor, ...]


def windows_of(model: nn.Module, texts: Texts, tokens: int, window: int = WINDOW) -> list[Tensor]:
    """Windows that do not overlap, spread evenly over all texts, ``tokens`` in all at most.

    Raises:
        InputError: Texts without as much as two tokens.
    """
    rows, _ = token_rows(model, texts)
    window = min(window, decoder_context(model))
    pieces = [piece for row in rows for piece in torch.split(row, window) if len(piece) > 1]
    if not pieces:
        raise InputError("texts must hold at least two tokens")
    wanted = max(1, tokens // window)
    if len(pieces) <= wanted:
        return pieces
    return [pieces[i * len(pieces) // wanted] for i in range(wanted)]


def domains_of(
    model: nn.Module,
    evaluation: Mapping[str, Texts] | None,
    unseen: Mapping[str, Texts] | None,
    tokens: int,
) -> dict[str, tuple[bool, list[Tensor]]]:
    """Windows of each domain, and whether it was calibrated on.

    Args:
        unseen: Texts by domain that were not calibrated on.
        tokens: Largest number of tokens per domain.

    Raises:
        InputError: A name in both, or texts without two tokens.
    """
    check_int("evaluation_tokens", tokens, least=2, error=InputError)
    found: dict[str, tuple[bool, list[Tensor]]] = {}
    for calibrated, given in ((True, evaluation), (False, unseen)):
        for name, texts in (given or {}).items():
            if name in found:
                raise InputError(f"domain {name!r} is in evaluation and in unseen")
            found[name] = calibrated, windows_of(model, texts, tokens)
    return found


def decoder_context(model: nn.Module) -> int:
    return source_of(model).config.max_positions


def tokens_hash(rows: Sequence[Tensor]) -> str:
    """The first 16 digits of the SHA-256 of all tokens as little-endian 64-bit numbers."""
    found = hashlib.sha256()
    for row in rows:
        found.update(row.to(torch.int64).numpy().astype("<i8").tobytes())
    return found.hexdigest()[:16]


def refuse_overlap(named: Sequence[tuple[str, Sequence[Tensor]]]) -> None:
    """Raises InputError where two sets of texts share 32 tokens in a row.

    Args:
        named: What each set is for, and its rows of tokens.
    """
    seen: list[tuple[str, set[tuple[int, ...]]]] = []
    for name, rows in named:
        runs = {
            tuple(tokens[i : i + _RUN])
            for tokens in (row.tolist() for row in rows)
            for i in range(len(tokens) - _RUN + 1)
        }
        for other, theirs in seen:
            if not runs.isdisjoint(theirs):
                raise InputError(
                    f"the texts of {other} and of {name} overlap: they share {_RUN} tokens in a "
                    "row, so results would be optimistic; give texts that differ"
                )
        seen.append((name, runs))


def calibrate(
    model: nn.Module, rows: Sequence[Tensor], *, progress: Progress | None = None
) -> Calibration:
    """Reads windows, forward and back.

    Args:
        model: A decoder, in evaluation mode, all of whose layers have kv heads.
        rows: Windows ``[T]`` of tokens.
        progress: Called as ``progress("calibration", windows read, windows in all)``.
    """
    transformer = source_of(model)
    device = next(transformer.parameters()).device
    drawn = torch.Generator(device).manual_seed(0)
    attentions = [cast(TransformerLayer, layer).attention for layer in transformer.layers]
    sums = [_Sums(cast(MultiHeadAttention, attention)) for attention in attentions]
    with _watched(transformer, sums), torch.enable_grad():
        for done, row in enumerate(rows):
            logits = transformer(row[None].to(device))[0].float()
            with torch.no_grad():
                y = torch.multinomial(logits.softmax(-1), 1, generator=drawn)[:, 0]
            F.cross_entropy(logits, y, reduction="sum").backward()  # type: ignore[no-untyped-call]
            for each in sums:
                each.add()
            if progress is not None:
                progress("calibration", done + 1, len(rows))
    tokens = sum(len(row) for row in rows)
    return Calibration(
        tokens, tokens_hash(rows), tuple(each.moments(tokens) for each in sums), tuple(rows)
    )


class _Sums:
    """Sums over the tokens of one layer."""

    def __init__(self, module: MultiHeadAttention) -> None:
        self.module = module
        G, D, V = module.num_kv_heads, module.head_dim, module.v_head_dim
        self.inputs = torch.zeros((module.embed_dim + 1,) * 2, dtype=torch.float64, device="cpu")
        self.gradients = torch.zeros((2 * G * D + G * V,) * 2, dtype=torch.float64, device="cpu")
        self.x: Tensor | None = None
        self.made: dict[str, Tensor] = {}

    def saw(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            if name == "k":
                self.x = args[0].detach()
            if name != "q":
                out.retain_grad()
            self.made[name] = out

        return hook

    def attend(self, q: Tensor, source: KeyValueSource, **call: Any) -> Tensor:
        """Attention with features beside the rotated ones: queries without rotation, and keys of 0,
        whose gradients say what keys without rotation would do."""
        k, v = source.gather()
        raw = self.made["q"].view(*q.shape[:1], q.shape[2], q.shape[1], -1).transpose(1, 2)
        still = torch.zeros_like(k).requires_grad_()
        self.made["still"] = still
        wide = DenseSource.made_from(source, torch.cat((k, still), -1), v)
        return type(self.module)._attend(self.module, torch.cat((q, raw), -1), wide, **call)

    def add(self) -> None:
        x = self.x
        assert x is not None
        with torch.no_grad():
            k, v = (_gradient(self.made[name]) for name in ("k", "v"))
            still = k
            if "still" in self.made:
                still = _gradient(self.made["still"]).transpose(1, 2).flatten(2)
            g = torch.cat((k, still, v), dim=-1).flatten(0, 1).float()
            self.gradients += (g.T @ g).to("cpu", torch.float64)
            x = x.flatten(0, 1).float()
            x = torch.cat((x, torch.ones_like(x[:, :1])), dim=-1)
            # Tokens that matter more count more; those that do not still count.
            weight = g.square().sum(-1)
            weight = 0.5 + 0.5 * weight / weight.mean().clamp_min(1e-30)
            self.inputs += ((x * weight[:, None]).T @ x).to("cpu", torch.float64)
        self.x = None
        self.made.clear()

    def moments(self, tokens: int) -> Moments:
        return Moments(self.inputs / tokens, self.gradients / tokens)


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


@contextmanager
def _watched(model: Transformer, sums: Sequence[_Sums]) -> Iterator[None]:
    """Records projections so that gradients reach them; parameters collect no gradients."""
    needed = [(p, p.requires_grad) for p in model.parameters()]
    with ExitStack() as stack:
        for parameter, before in needed:
            parameter.requires_grad_(False)
            stack.callback(parameter.requires_grad_, before)
        begin = model.embedding.register_forward_hook(
            lambda module, args, out: out.detach().requires_grad_()
        )
        stack.callback(begin.remove)
        for each in sums:
            for name in ("q", "k", "v"):
                projection = getattr(each.module, f"{name}_proj")
                stack.callback(projection.register_forward_hook(each.saw(name)).remove)
            if each.module.rope is not None and each.module.qk_norm_place is None:
                each.module.__dict__["_attend"] = each.attend
                stack.callback(each.module.__dict__.pop, "_attend")
        yield
