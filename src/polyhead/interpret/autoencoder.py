"""Sparse autoencoders of an activation, read from SAELens's files.

    features = act((x − b_dec) W_enc + b_enc)       act: relu, jumprelu (x · [x > θ]), top k
    x̂        = features W_dec + b_dec

Cunningham et al. 2023; jumprelu: Rajamanoharan et al. 2024; top k: Gao et al. 2024. A directory has
``cfg.json`` and ``sae_weights.safetensors``.

Letters: E size of the activation, F features.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from polyhead._utils.checks import check_int
from polyhead.errors import CheckpointError, InputError, UnsupportedError
from polyhead.interpret.activations.lens import run_names
from polyhead.interpret.activations.tracing import trace

_ARCHITECTURES = ("standard", "jumprelu", "topk")
_NORMALIZED = ("none", "expected_average_only_in", "constant_norm_rescale", "layer_norm")


class SparseAutoencoder:
    """Features of an activation; ``load`` reads one.

    Args:
        config: As ``cfg.json`` has it.
        weights: ``W_enc [E, F]``, ``b_enc [F]``, ``W_dec [F, E]``, ``b_dec [E]``, and for jumprelu
            ``threshold [F]``.

    Attributes:
        hook_name: The activation that it was trained on, in TransformerLens's words, or None.
        architecture: ``"standard"``, ``"jumprelu"`` or ``"topk"``.

    Raises:
        CheckpointError: Weights that are missing, or of other sizes than the configuration says.
        UnsupportedError: Another architecture or normalization.
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        self.architecture = config.get("architecture", "standard")
        if config.get("activation_fn_str") == "topk" or "topk" in str(config.get("activation_fn")):
            self.architecture = "topk"
        if self.architecture not in _ARCHITECTURES:
            raise UnsupportedError(
                f"architecture must be one of {', '.join(_ARCHITECTURES)}: got "
                f"{self.architecture!r}"
            )
        self._normalize = config.get("normalize_activations") or "none"
        if self._normalize not in _NORMALIZED or config.get("finetuning_scaling_factor"):
            raise UnsupportedError(
                f"normalize_activations must be one of {', '.join(_NORMALIZED)}, without "
                f"finetuning_scaling_factor: got {self._normalize!r}"
            )
        E, F = (check_int(name, config.get(name), least=1, error=CheckpointError)
                for name in ("d_in", "d_sae"))  # fmt: skip
        shapes = {"W_enc": (E, F), "b_enc": (F,), "W_dec": (F, E), "b_dec": (E,)}
        if self.architecture == "jumprelu":
            shapes["threshold"] = (F,)
        for name, shape in shapes.items():
            if name not in weights or tuple(weights[name].shape) != shape:
                got = list(weights[name].shape) if name in weights else "nothing"
                raise CheckpointError(f"{name} must be {list(shape)}: got {got}")
        self._weights = {name: weights[name].float() for name in shapes}
        self._subtracts = bool(config.get("apply_b_dec_to_input", True))
        options = config.get("activation_fn_kwargs") or {}
        self._k = config.get("k", options.get("k"))
        if self.architecture == "topk" and not (isinstance(self._k, int) and 0 < self._k <= F):
            raise CheckpointError(f"topk needs k from 1 to {F}: got {self._k!r}")
        about = config.get("metadata") or config.get("meta") or config
        self.hook_name: str | None = about.get("hook_name")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """The autoencoder of a directory.

        Args:
            path: With ``cfg.json`` and ``sae_weights.safetensors``.

        Raises:
            CheckpointError: A file that is missing or damaged.
            UnsupportedError: What it says is not built.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = Path(path)
        try:
            config = json.loads((folder / "cfg.json").read_text(encoding="utf-8"))
            weights = load_file(folder / "sae_weights.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"{folder} holds no sparse autoencoder: {error}") from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{folder / 'cfg.json'} must hold an object")
        return cls(config, weights)

    def encode(self, x: Tensor) -> Tensor:
        """``[..., E]`` to features ``[..., F]`` in float32."""
        return self._encoded(self._scaled(x.float())[0])

    def decode(self, features: Tensor) -> Tensor:
        """Features ``[..., F]`` to ``[..., E]`` in float32, of a normalized activation.

        Where activations are normalized one by one, ``reconstruct`` undoes that.
        """
        weights = {name: tensor.to(features.device) for name, tensor in self._weights.items()}
        return features @ weights["W_dec"] + weights["b_dec"]

    def reconstruct(self, x: Tensor, features: Tensor | None = None) -> Tensor:
        """``[..., E]`` to the same in its dtype, through the features.

        Args:
            x: The activation.
            features: In the place of those of ``x``.
        """
        scaled, scale, shift = self._scaled(x.float())
        decoded = self.decode(self._encoded(scaled) if features is None else features)
        return (decoded * scale + shift).to(x.dtype)

    @contextmanager
    def spliced(
        self,
        model: nn.Module,
        name: str | None = None,
        *,
        error_term: bool = True,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> Iterator[list[Tensor]]:
        """While the block runs, the activation is its reconstruction.

        Args:
            model: A Transformer, or what holds one.
            name: The activation, in polyhead's or TransformerLens's words; None: ``hook_name``.
            error_term: Whether what is not reconstructed is added, so that only ``change`` matters.
            change: ``change(features)`` puts others in their place; None: they stay.

        Yields:
            The features ``[B, T, F]`` of each call, as they come.

        Raises:
            InputError: No name, or none that the model has.
        """
        found: list[Tensor] = []
        name = self.hook_name if name is None else name
        if name is None:
            raise InputError("cfg.json names no activation: pass name=")

        def splice(x: Tensor) -> Tensor:
            flat = x.transpose(1, 2).flatten(2) if x.ndim == 4 else x
            features = self.encode(flat)
            changed = features if change is None else change(features)
            found.append(changed)
            if error_term:
                made = flat + (self.reconstruct(flat, changed) - self.reconstruct(flat, features))
            else:
                made = self.reconstruct(flat, changed)
            if x.ndim == 4:
                made = made.view(*flat.shape[:2], x.shape[1], x.shape[3]).transpose(1, 2)
            return made

        with trace(model) as t:
            t[run_names(t).get(name, name)].edit(splice)
            yield found

    def _encoded(self, scaled: Tensor) -> Tensor:
        w = {name: tensor.to(scaled.device) for name, tensor in self._weights.items()}
        hidden = (scaled - w["b_dec"] if self._subtracts else scaled) @ w["W_enc"] + w["b_enc"]
        if self.architecture == "topk":
            kept = torch.topk(hidden, self._k, dim=-1)
            return torch.zeros_like(hidden).scatter(-1, kept.indices, kept.values.relu())
        features = hidden.relu()
        return features * (hidden > w["threshold"]) if "threshold" in w else features

    def _scaled(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The activation as it was normalized in training, and the scale and shift that undo it."""
        if self._normalize == "constant_norm_rescale":
            scale = x.norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5
            return x / scale, scale, torch.zeros_like(scale)
        if self._normalize == "layer_norm":
            mean = x.mean(dim=-1, keepdim=True)
            spread = (x - mean).std(dim=-1, keepdim=True)
            return (x - mean) / (spread + 1e-5), spread, mean
        return x, x.new_ones(()), x.new_zeros(())
