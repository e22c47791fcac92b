"""The module of multi-token prediction (DeepSeek-V3, 2024, §2.2, equations 21 to 23).

    x_i = W [norm(embed(t_{i+1})) | norm(h_i)]        y = layer(x)        logits = head(norm(y_i))

From the model's hidden state of a token and the token after it, it predicts the token after that.
Embedding and head are the model's.

Shape letters: B batch, T tokens, N tokens of all rows, E embed size, W vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from polyhead.caches import ModelCache
from polyhead.caches.choice import Kind
from polyhead.caches.in_use import alone_with_cache
from polyhead.config import TransformerConfig
from polyhead.errors import ConfigError
from polyhead.layers.decode_plan import plan_for
from polyhead.layers.fixed import Fixed
from polyhead.layers.norms import build_norm
from polyhead.models.initial import draw_weights
from polyhead.models.inputs import check_caching, check_call, sent
from polyhead.models.places import places_of_call, undo
from polyhead.models.stack import run_layers, stack
from polyhead.models.transformer import Transformer
from polyhead.semantics import Causal

_OF_A_MODEL = ("per_layer_embedding", "relative_bias", "relative_embedding", "streams")
"""Parts of a model that hand something to its layers."""


class MultiTokenPredictor(Fixed):
    """One layer behind a model, which predicts the token after the next.

        predictor = ph.load_predictor(directory, model)
        hidden = model.transformer.hidden_states(ids)
        guessed = predictor.hidden_states(ids[:, 1:], hidden[:, :-1])
        scores = predictor.logits(guessed)      # of the tokens two behind ids[:, :-1]

    Applied to its own output and to the token that it predicted, it predicts a further one.

    Args:
        config: The model's, with the predictor's layer as the only one.
        model: Whose embedding and head it shares. It is no submodule: parameters and state dict
            are the predictor's own.

    Attributes:
        config: As given.
        model: As given.
        embedding_norm: Over the next token's embedding.
        hidden_norm: Over the model's hidden state.
        projection: ``[E, 2 E]``: features of the embedding first.
        layers: The one layer.
        final_norm: Over its output.

    Raises:
        ConfigError: Not one layer of a decoder, without a norm or a head, of other sizes than the
            model's, or with what such a layer has no part in.
    """

    model: Transformer

    def __init__(self, config: TransformerConfig, model: Transformer) -> None:
        super().__init__()
        self.config = config
        self.__dict__["model"] = model  # not a submodule: its weights are the model's
        E, norm = config.embed_dim, config.final_norm
        sizes = E, config.vocab_size
        if sizes != (model.config.embed_dim, model.config.vocab_size):
            raise ConfigError(
                f"embed_dim and vocab_size must be the model's, {model.config.embed_dim} and "
                f"{model.config.vocab_size}: got {E} and {config.vocab_size}"
            )
        if config.kind != "decoder" or len(config.layers) != 1 or norm is None or not config.head:
            raise ConfigError(
                f"a multi-token predictor is one layer of a decoder with a final norm and a head: "
                f"got kind={config.kind!r}, {len(config.layers)} layers, final_norm={norm}, "
                f"head={config.head!r}"
            )
        beside = [name for name in _OF_A_MODEL if getattr(config, name) is not None]
        embedding = config.embedding
        if beside or embedding.soft_prompt or embedding.frontend or config.reads_tokens:
            what = ", ".join(beside) or "an embedding of its own kind"
            raise ConfigError(f"a multi-token predictor takes no part in {what}")
        self.embedding_norm = build_norm(E, norm)
        self.hidden_norm = build_norm(E, norm)
        self.projection = nn.Linear(2 * E, E, bias=False)
        self.layers = stack(E, config.layers, {})
        self.final_norm = build_norm(E, norm)
        self._causal = Causal()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new weights, as ``config.initial`` says."""
        draw_weights(self, self.config)

    @alone_with_cache
    def hidden_states(
        self,
        ids: Tensor,
        hidden: Tensor,
        *,
        cache: ModelCache | None = None,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        """What ``logits`` needs, ``[B, T, E]``, after the predictor's own norm.

        Tokens see those before them in the call and in the cache, at positions that follow on from
        the cache's.

        Args:
            ids: ``[B, T]`` int64 or int32, of each place the token after it.
            hidden: ``[B, T, E]``, of each place what the model's ``hidden_states`` returned, or
                this method for a further token.
            cache: From the predictor's ``new_cache``. A call that fails leaves it as it was, or
                empty where a window has already forgotten what was.
            counts: Tokens of each row of the cache, at least 1, where ``ids [1, N]`` and
                ``hidden [1, N, E]`` are those of one row after the other. Default: T of each.

        Raises:
            InputError: No tokens, or an id outside the vocabulary.
            ContextLengthError: More tokens than the model's context holds.
            TypeError: ``ids`` or ``hidden`` of another kind.
            ValueError: Arguments that do not belong to each other, or a model's cache.
        """
        embedding = self.model.embedding
        device = embedding.like.device
        start, before, positions, rows = places_of_call(
            self.config, ids, device, cache=cache, counts=counts
        )
        check_call(self.config, ids, positions, start, cache, None)
        if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
            got = hidden.dtype if isinstance(hidden, Tensor) else type(hidden).__name__
            raise TypeError(f"hidden must be a tensor of floating-point numbers: got {got}")
        shape = (*ids.shape, self.config.embed_dim)
        if hidden.shape != shape:
            raise ValueError(
                f"hidden must be [B, T, E] = {list(shape)}, one vector for each of ids: got "
                f"{list(hidden.shape)}"
            )
        if cache is not None:
            cache.check_owner(self._owner)
        ids, at = sent(ids, device), start if positions is None else sent(positions, device)
        entered = self.embedding_norm(embedding(ids, at)), self.hidden_norm(sent(hidden, device))
        x = self.projection(torch.cat(entered, dim=-1))
        planned = cache is not None and not torch.compiler.is_compiling()
        try:
            x = run_layers(
                self.layers,
                x,
                mask=self._causal,
                biases=(None,),
                positions=None,  # they follow on from the cache
                caches=(None,) if cache is None else cache.layers,
                context_caches=(None,),
                kernel="auto",
                plan=plan_for(cache, self.layers) if cache is not None and planned else None,
                rows=rows,
            )
        except BaseException:
            undo(cache, before)
            raise
        normed: Tensor = self.final_norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """``[B, T, E]`` hidden states of the predictor to ``[B, T, W]``, by the model's head."""
        return self.model.logits(hidden)

    def new_cache(
        self, capacity: int = 0, *, kind: Kind = "auto", page_size: int = 16
    ) -> ModelCache:
        """An empty cache for one batch of sequences.

        Args:
            capacity: Tokens to make room for at once; it grows when more come.
            kind: As of ``Transformer.new_cache``.
            page_size: Page size of ``"paged"``.

        Raises:
            ValueError: A number that cannot be.
        """
        check_caching(self.config, None)
        return ModelCache.for_config(self.config, capacity=capacity, kind=kind, page_size=page_size)

    @cached_property
    def _owner(self) -> str:
        return self.config.to_json()
