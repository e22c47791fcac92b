"""Converted models as directories, in the form of a Hugging Face family if one can express them.

Latent attention without a norm is none that DeepSeek's files know, but a norm of numbers that are
far smaller than its ε only multiplies: n(c) = c / √(mean(c²) + ε) → c / √ε. So latents
are written 10⁸ times smaller, their norm's weight makes up for it, and DeepSeek's code computes the
same. Frequencies given one by one are the type "longrope" with the same factors for short and long.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from polyhead.checkpoints import Checkpoint, save_checkpoint
from polyhead.config import FeedForwardConfig, LatentAttentionConfig, NormConfig, RopeConfig
from polyhead.conversion.draft import Draft
from polyhead.errors import ConfigError
from polyhead.generation import TextEncoder
from polyhead.models import Transformer

Form = Literal["auto", "hugging-face", "polyhead"]

_EPS = 1e-6
"""The ε of DeepSeek's norms of latents; config.json does not change it."""

_SMALLER = 1e-8


def save(model: nn.Module, directory: str | os.PathLike[str], *, form: Form = "auto") -> str:
    """Writes a model as a directory that ``load`` reads, whole or not at all.

    Args:
        model: What ``load``, ``convert`` or ``prune`` returned, or a ``Transformer``.
        directory: Made if need be; files of the same names in it are replaced.
        form: ``"auto"``: Hugging Face's where a family can express the configuration (all layers
            alike; Llama's for kv heads, DeepSeek's for latents), else polyhead's own.

    Returns:
        The form that was written, ``"hugging-face"`` or ``"polyhead"``.

    Raises:
        ConfigError: ``"hugging-face"`` for a configuration that no family can express, or another
            tokenizer for target texts than for source texts.
        CheckpointError: The directory cannot be written, or the disk is full.
        TypeError: A module that holds no ``Transformer``.
        ValueError: An unknown form.
    """
    if form not in ("auto", "hugging-face", "polyhead"):
        raise ValueError(f"form must be 'auto', 'hugging-face' or 'polyhead': got {form!r}")
    transformer = next((each for each in model.modules() if isinstance(each, Transformer)), None)
    if transformer is None:
        raise TypeError(f"model must be a Transformer or hold one: got {type(model).__name__}")
    tokenizer = getattr(model, "tokenizer", None)
    if getattr(model, "source_tokenizer", tokenizer) is not tokenizer:
        raise ConfigError("a model with a tokenizer of its own for target texts cannot be saved")
    pooling, sentences = (
        (model.pooling, model.sentences) if isinstance(model, TextEncoder) else ("mean", None)
    )

    def checkpoint(saved: Transformer) -> Checkpoint:
        origin = getattr(model, "origin", "")
        return Checkpoint(
            saved.config, saved, tokenizer, origin, pooling=pooling, sentences=sentences
        )

    if form != "polyhead":
        try:
            save_checkpoint(checkpoint(normed_latents(transformer)), directory)
        except ConfigError:
            if form == "hugging-face":
                raise
        else:
            return "hugging-face"
    save_checkpoint(checkpoint(transformer), directory, form="polyhead")
    return "polyhead"


def normed_latents(model: Transformer) -> Transformer:
    """The same function with norms over its latents, as DeepSeek's files have them; a model without
    bare latents is returned as it is.

    Raises:
        ConfigError: Layers whose rotated pairs have different frequencies, or biases of queries.
    """
    found = [layer.attention for layer in model.config.layers]
    if not any(isinstance(each, LatentAttentionConfig) and each.norm is None for each in found):
        return model
    if any(each != found[0] for each in found):
        raise ConfigError("layers differ in their latents or frequencies: no family supports that")
    draft = Draft.of(model)
    for layer in draft.layers:
        config = draft.latent(layer, "a family's form")
        if (
            config.q_bias
            or config.latent_scale != 1.0
            or config.query_temperature is not None
            or config.latent_heads > 1
        ):
            raise ConfigError(
                "queries of latent attention have a bias or a temperature, or latents a factor or "
                "heads: no family supports that"
            )
        R = config.kv_lora_rank
        for leaf in ("weight", "bias"):
            key = f"layers.{layer}.attention.kv_a_proj_with_mqa.{leaf}"
            if key in draft.state:
                small = draft.state[key].clone()
                small[:R] *= _SMALLER
                draft.state[key] = small
        weight = torch.full((R,), math.sqrt(_EPS) / _SMALLER, dtype=torch.float64, device="cpu")
        scale = config.score_scale * math.sqrt(config.qk_head_dim)
        draft.put(layer, kv_a_norm=weight, q_proj=draft.get(layer, "q_proj.weight") * scale)
        rope = config.rope
        if rope is not None and rope.frequencies is not None:
            rope = _as_factors(rope, model.config.max_positions)
        draft.set_attention(
            layer, replace(config, norm=NormConfig(eps=_EPS), rope=rope, scale=None)
        )
        network = draft.layer(layer).feed_forward
        if type(network) is not FeedForwardConfig:
            raise ConfigError(
                "latents: only plain feed-forward networks can be written in a family's form"
            )
    like = next(model.parameters())
    return draft.build(like.dtype, like.device)


def _as_factors(rope: RopeConfig, max_positions: int) -> RopeConfig:
    """Explicit frequencies as the type "longrope": 1 / (factor · θ^(2i/d)), with θ = 10,000."""
    assert rope.frequencies is not None
    count = len(rope.frequencies)
    bases = 10_000.0 ** (torch.arange(count, dtype=torch.float32, device="cpu") / count)
    factors = [1.0 / (f * b) for f, b in zip(rope.frequencies, bases.tolist(), strict=True)]
    return RopeConfig(
        type="longrope",
        original_max_positions=max_positions,
        short_factor=tuple(factors),
        long_factor=tuple(factors),
        attention_factor=1.0 if rope.attention_factor is None else rope.attention_factor,
    )
