"""A model with the interface that Hugging Face's Trainer, accelerate and Lightning expect.

    trainer = transformers.Trainer(ph.Trainable(model), arguments, train_dataset=data)

They call a model with keyword arguments of fixed names, take the loss from what it returns, and
write to its ``config``. polyhead's models have other names and a configuration that cannot change.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polyhead.errors import ConfigError, InputError
from polyhead.layers.quantized import refuse_quantized
from polyhead.models import Transformer
from polyhead.semantics import Documents, Keep, KeyLengths, Mask
from polyhead.training.losses import IGNORED, cross_entropy

if TYPE_CHECKING:
    from collections.abc import Mapping


class _Config(SimpleNamespace):
    """A configuration that tools read and write; it does not change the model."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str) + "\n"


class Trainable(nn.Module):
    """A model with the calling convention of Hugging Face's trainers.

    Its parameters are the model's own: what is trained is the model. Weights that a trainer saves
    carry the names of the model it was given, so that the trainer resumes from them.

    Args:
        model: A ``Transformer``, or what ``polyhead.load`` makes of a decoder or encoder-decoder.
        label_smoothing: Probability of each label that is spread over all tokens.

    Attributes:
        model: The model given.
        config: Settings that trainers read and write, such as ``use_cache``.

    Raises:
        ConfigError: The model holds no Transformer, or one without a head over its vocabulary.
        UnsupportedError: The weights are quantized blocks.
    """

    main_input_name = "input_ids"
    accepts_loss_kwargs = True  # num_items_in_batch

    def __init__(self, model: nn.Module, *, label_smoothing: float = 0.0) -> None:
        super().__init__()
        found = next((part for part in model.modules() if isinstance(part, Transformer)), None)
        if found is None or found.head is None:
            raise ConfigError(
                f"{type(model).__name__} holds no Transformer with a head over its vocabulary"
            )
        refuse_quantized(found, "training")
        self.model = model
        self.label_smoothing = label_smoothing
        self._transformer = [found]  # a list: it is registered once, as a part of ``model``
        settings = found.config
        # Used by trainers to count labels: the first of each row is not predicted.
        self.loss_type = "ForCausalLM" if settings.kind == "decoder" else None
        self.config = _Config(
            model_type="polyhead",
            use_cache=False,
            is_encoder_decoder=settings.kind == "encoder-decoder",
            vocab_size=settings.vocab_size,
            hidden_size=settings.embed_dim,
            eos_token_id=list(settings.eos_token_ids),
            decoder_start_token_id=getattr(
                getattr(model, "options", None), "decoder_start_token_id", None
            ),
        )

    @property
    def transformer(self) -> Transformer:
        return self._transformer[0]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        document_lengths: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The loss, and in evaluation the logits.

        Args:
            input_ids: ``[B, T]`` tokens; of an encoder-decoder its source.
            attention_mask: ``[B, T]`` 1 for tokens, 0 for padding on either side.
            labels: ``[B, T]``, −100 is ignored. Of a decoder its ``input_ids``, shifted here; of an
                encoder-decoder the target tokens.
            position_ids: ``[T]`` or ``[B, T]``; default 0, 1, ….
            decoder_input_ids: Decoder inputs; default: the labels shifted behind the start token.
            decoder_attention_mask: Padding mask of ``decoder_input_ids``, 1 for tokens.
            document_lengths: ``[D]`` or ``[B, D]`` of the documents that rows of packed tokens
                consist of, in order; zeros fill rows with fewer.
            num_items_in_batch: The loss is the sum over tokens divided by it, as trainers ask that
                accumulate gradients; default: the mean over the labels of this call.

        Returns:
            ``loss`` where there are labels; ``logits`` in evaluation or without labels.

        Raises:
            InputError: Masks of another shape, or arguments that do not belong to the model.
        """
        model = self.transformer
        mask = _mask_of(attention_mask, input_ids, "attention_mask")
        if document_lengths is not None:
            packed = Documents(_lengths_of(document_lengths))
            mask = packed if mask is None else mask & packed
        if self.config.is_encoder_decoder:
            read = self._read(decoder_input_ids, labels)
            hidden = model.hidden_states(
                read,
                positions=position_ids,
                mask=_mask_of(decoder_attention_mask, read, "decoder_attention_mask"),
                encoder_ids=input_ids,
                encoder_mask=mask,
            )
        else:
            if decoder_input_ids is not None or decoder_attention_mask is not None:
                raise InputError(
                    "decoder_input_ids and decoder_attention_mask belong to an encoder-decoder: "
                    f"this model is kind={model.config.kind!r}"
                )
            hidden = model.hidden_states(input_ids, positions=position_ids, mask=mask)
        made: dict[str, Tensor] = {}
        if labels is not None:
            made["loss"] = self._loss(hidden, labels, num_items_in_batch)
        if labels is None or not self.training:
            made["logits"] = model.logits(hidden)
        return made

    def _loss(self, hidden: Tensor, labels: Tensor, count: int | Tensor | None) -> Tensor:
        if labels.shape != hidden.shape[:2]:
            raise InputError(
                f"labels must have the shape of the inputs, {list(hidden.shape[:2])}: got "
                f"{list(labels.shape)}"
            )
        if self.transformer.config.kind == "decoder":
            hidden, labels = hidden[:, :-1], labels[:, 1:]
        found = cross_entropy(
            self.transformer,
            hidden,
            labels,
            label_smoothing=self.label_smoothing,
            reduction="mean" if count is None else "sum",
        )
        return found if count is None else found / count

    def _read(self, given: Tensor | None, labels: Tensor | None) -> Tensor:
        """What the decoder reads: as given, or the labels behind its start token."""
        if given is not None:
            return given
        if labels is None:
            raise InputError("an encoder-decoder needs labels or decoder_input_ids: got neither")
        return self.prepare_decoder_input_ids_from_labels(labels)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """``labels`` behind the start token, as collators of encoder-decoders ask for them.

        Raises:
            InputError: No decoder start token is configured.
        """
        start = self.config.decoder_start_token_id
        if start is None:
            start = self.transformer.config.bos_token_id
        if start is None:
            raise InputError(
                "the model has no decoder start token: set config.decoder_start_token_id"
            )
        padding = self.transformer.config.pad_token_id or 0
        shifted = torch.cat((labels.new_full((len(labels), 1), start), labels[:, :-1]), dim=1)
        return shifted.masked_fill(shifted == IGNORED, padding)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Layers are computed again for their gradients instead of being stored.

        Args:
            gradient_checkpointing_kwargs: Ignored, accepted for compatibility: ``use_reentrant`` is
                always False.
            options: Ignored, accepted for compatibility.
        """
        self.transformer.recompute = True

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """``gradient_checkpointing_enable`` by its newer name."""
        self.gradient_checkpointing_enable(activation_checkpointing_kwargs, **options)

    def gradient_checkpointing_disable(self) -> None:
        """Layers are stored for their gradients."""
        self.transformer.recompute = False


def _mask_of(given: Tensor | None, ids: Tensor, name: str) -> Mask | None:
    """What a mask of ones and zeros leaves visible; None where that is all."""
    if given is None:
        return None
    if given.shape != ids.shape:
        raise InputError(
            f"{name} must be {list(ids.shape)}, like its tokens: got {list(given.shape)}"
        )
    real = given.bool()
    if bool(real.all()):
        return None
    if bool((real[:, :-1] >= real[:, 1:]).all()):
        return KeyLengths(real.sum(dim=1))
    return Keep(real[:, None, None, :])


def _lengths_of(given: Tensor) -> list[list[int]]:
    """The lengths of a row's documents, for each row."""
    rows = given.tolist() if given.ndim == 2 else [given.flatten().tolist()]
    return [[int(n) for n in row if n] for row in rows]
