"""Graphs of a decoding step: what may be recorded, and the one place that records it on CUDA.

A graph replays the launches of one step with the tensors of then, so it runs no Python and sees
nothing that changed since. It is recorded for exactly the modules listed here, without hooks, and
runs only while they hold the same parts and the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from polyhead.caches.sizes import Dense, Latent, Plain
from polyhead.caches.stored import StoredCache
from polyhead.kernels import KERNELS
from polyhead.kernels.triton.kernel import unsupported_reason as triton_unsupported_reason
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.exact import ExactType
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.latent_attention import MultiHeadLatentAttention
from polyhead.layers.norms import HeadNorm, LayerNorm, RMSNorm
from polyhead.layers.positions import LearnedPositions, SinusoidalPositions
from polyhead.layers.transformer_layer import TransformerLayer
from polyhead.models.embedding import Embedding
from polyhead.models.heads import Head, HeadTransform
from polyhead.models.transformer import Transformer
from polyhead.native import batch_invariant

if TYPE_CHECKING:
    from polyhead.caches import ModelCache

_ALLOWED: dict[type[nn.Module], ExactType[Any]] = {
    kind: ExactType(kind)
    for kind in (
        Transformer, TransformerLayer, MultiHeadAttention, MultiHeadLatentAttention, FeedForward,
        Embedding, LearnedPositions, SinusoidalPositions, LayerNorm, RMSNorm, HeadNorm, Head,
        HeadTransform, nn.Linear, nn.Embedding, nn.ModuleList, nn.Identity,
    )
}  # fmt: skip
_ATTENTION = MultiHeadAttention, MultiHeadLatentAttention
_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on how long the text has become."""


class Graph(Protocol):
    """A step that was recorded."""

    def replay(self) -> None:
        """Runs it on what its tensors hold now."""

    def is_valid(self) -> bool:
        """Whether the model is still as it was recorded."""


class Step(Protocol):
    """One decoding step, a function of tensors that stay where they are.

    Attributes:
        held: What the last call read beside weights, cache and these tensors.
    """

    held: list[Any]

    def __call__(self) -> None: ...


Maker: TypeAlias = Callable[[Step, nn.Module, "Sequence[torch.Generator]"], Graph]
"""Records a step of a model, which draws from generators, without running it."""


class Recorded:
    """What a graph of a model depends on.

    Args:
        model: Its modules are allowed (``unsupported_reason``).
    """

    def __init__(self, model: nn.Module) -> None:
        self._parts: list[tuple[dict[str, Any], str, Any]] = []
        self._addresses: list[tuple[Tensor, int]] = []
        self._empty: list[Any] = []
        self._modules = [module.__dict__ for module in model.modules()]
        for module in model.modules():
            fields = module.__dict__
            for name in ("_parameters", "_buffers", "_modules"):
                self._parts += [(fields[name], key, part) for key, part in fields[name].items()]
            tensors = (*fields["_parameters"].values(), *fields["_buffers"].values())
            self._addresses += [(x, x.data_ptr()) for x in tensors if x is not None]
            names = ("_forward_hooks", "_forward_pre_hooks", "_hooks", "_edits")
            self._empty += [fields[name] for name in names if name in fields]

    def is_valid(self) -> bool:
        """Whether parts, weights and their memory are the same, and nothing watches."""
        return (
            not any(self._empty)
            and all(held.get(name) is part for held, name, part in self._parts)
            and all(x.data_ptr() == address for x, address in self._addresses)
            and not any("forward" in fields or fields["training"] for fields in self._modules)
        )


class CudaGraph(Recorded):
    """A CUDA graph.

    Args:
        step: What it records.
        model: The model whose step is recorded.
        generators: What the step draws from; replays advance them.
    """

    def __init__(self, step: Step, model: nn.Module, generators: Sequence[torch.Generator]) -> None:
        super().__init__(model)
        device = next(model.parameters()).device
        self._graph = torch.cuda.CUDAGraph()
        for generator in generators:
            self._graph.register_generator_state(generator)
        with torch.cuda.device(device), torch.cuda.graph(self._graph):
            step()
        self._held = step.held

    def replay(self) -> None:
        self._graph.replay()


KERNEL = "triton"
"""The kernel of attention in a graph: it takes its ranges of keys from the device."""
MAKERS: dict[str, Maker] = {"cuda": CudaGraph}
"""By type of device."""


LOGPROBS = "log-probabilities are told of each token"
"""Why the steps of a text are not replayed where ``logprobs`` are asked for."""

_LONG = 8192
"""Tokens of a text beyond which a layer with a window keeps no more than the window by default."""


def why_not(
    model: Transformer,
    cache: ModelCache | None,
    *,
    wanted: bool | None,
    rules: bool,
    tokens: int,
) -> str | None:
    """Why the steps of some texts are not replayed, or None.

    Args:
        model: Decoder whose steps are captured.
        cache: The caller's, or None where a dense one can be made.
        wanted: ``graph`` as the caller gave it.
        rules: Whether options change scores by the tokens that are there.
        tokens: Tokens of the longest text, its prompt included.
    """
    if wanted is False:
        return "graph=False"
    if rules:
        return "options change scores by the tokens that are there"
    windows = any(layer.attention.visible_window for layer in model.config.layers)
    if wanted is None and cache is None and tokens > _LONG and windows:
        return (
            f"windows forget what a dense cache of {tokens:,} tokens would keep; graph=True "
            "accepts that"
        )
    return unsupported_reason(model, cache)


def unsupported_reason(model: Transformer, cache: ModelCache | None) -> str | None:
    """Why decoding with a model is not recorded, or None.

    Args:
        model: Decoder whose steps are captured.
        cache: The caller's, or None where a dense one can be made.
    """
    like = model.embedding.like
    if like.device.type not in MAKERS:
        return f"the model is on {like.device.type}, and graphs are CUDA's"
    if model.config.kind != "decoder":
        return f"the model is of kind {model.config.kind!r}, and graphs are of decoders"
    if model.head is None:
        return "the model has no head"
    if batch_invariant.is_enabled():
        return "batch_invariant() is asked for, which native code computes"
    if torch.is_autocast_enabled(like.device.type):
        return "autocast is on"
    if any(nn.modules.module.__dict__[name] for name in _EVERYWHERE):
        return "hooks are registered on all modules"
    for name, module in model.named_modules():
        if (why := _of_module(module)) is not None:
            return f"{name or 'the model'} {why}"
    for held in () if cache is None else cache.layers:
        if not isinstance(held, StoredCache) or type(held.layout) is not Dense:
            return "the cache is not dense"
        if type(held.storage) not in (Plain, Latent):
            return "the cache holds codes"
    return _of_kernel(model)


_EVERYWHERE = "_global_forward_hooks", "_global_forward_pre_hooks"


def _of_module(module: nn.Module) -> str | None:
    known = _ALLOWED.get(type(module))
    if known is None:
        return f"is a {type(module).__name__}, which is not known to repeat"
    if not known.is_exact_and_unhooked(module):
        return "has hooks, or methods of its own"
    if isinstance(module, _ATTENTION):
        if module._hooks or module._edits:
            return "is watched or edited"
        rope = module.config.rope
        if rope is not None and rope.type not in _ROPES:
            return f"has rope type {rope.type!r}, which changes with the length"
    if any(type(x) not in (Tensor, nn.Parameter) for x in module.parameters(recurse=False)):
        return "has weights of another kind than plain tensors"
    return None


def _of_kernel(model: Transformer) -> str | None:
    """Why the one kernel that may be recorded cannot be, or None."""
    if (why := KERNELS[KERNEL].unavailable()) is not None:
        return f"kernel {KERNEL!r} is not available: {why}"
    like = model.embedding.like
    memories = (memory for layer in model.config.layers for memory in layer.attention.memories)
    shapes = (memory.keys_and_values for memory in memories)
    sizes = {(shape.key_dim, shape.value_dim) for shape in shapes if shape is not None}
    for key_dim, value_dim in sorted(sizes):
        why = triton_unsupported_reason(like.device, like.dtype, key_dim, value_dim)
        if why is not None:
            return f"kernel 'triton' is not taken: {why}"
    return None
