"""The Transformer that a configuration describes: encoder, decoder or encoder-decoder.

    embedding → layers → final norm → logits          (an encoder-decoder has an encoder beside it)

A decoder is causal by position and remembers keys and values in a cache; an encoder sees
everything. Names of parameters are part of the contract: checkpoints are mapped onto them.

Shape letters: B batch, T tokens, S tokens of the encoder, E embed size, W vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property

import torch
from torch import Tensor, nn

from polyhead.caches import Evicting, ModelCache, Quantized
from polyhead.caches.choice import Kind
from polyhead.caches.in_use import alone_with_cache
from polyhead.config import RopeConfig, TransformerConfig
from polyhead.config.disentangled import DISTANCES
from polyhead.config.layout import EMBEDDED, EMBEDDING, SEGMENTS, TOKENS
from polyhead.layers.decode_plan import DecodePlan, plan_for
from polyhead.layers.disentangled_attention import RelativeEmbedding
from polyhead.layers.fixed import Fixed
from polyhead.layers.handed import Handed
from polyhead.layers.linear import product
from polyhead.layers.norms import build_norm
from polyhead.layers.packed import PackedRows
from polyhead.layers.per_layer import PerLayerEmbedding
from polyhead.layers.positions import RoPE
from polyhead.layers.quantized import QuantizedMatrix
from polyhead.layers.streams import build_ends
from polyhead.models.counts import ParameterCounts, count_parameters
from polyhead.models.embedding import Embedding
from polyhead.models.funnel import run_funnel
from polyhead.models.heads import Head, TaskHead, lengths_of, transformed
from polyhead.models.initial import draw_weights
from polyhead.models.inputs import (
    check_cache,
    check_caching,
    check_call,
    check_encoder_call,
    global_tokens_of_call,
    segments_of_call,
    sent,
)
from polyhead.models.observation import Observation, observe
from polyhead.models.places import places_of_call, undo
from polyhead.models.stack import biases, relative_table, run_layers, stack
from polyhead.semantics import Causal, KeyLengths, Mask


class Transformer(Fixed):
    """A Transformer that a ``TransformerConfig`` describes.

    Args:
        config: All that its arithmetic depends on.

    Attributes:
        config: As given.
        embedding: Token ids to vectors.
        layers: The decoder's layers (the encoder's, for an encoder).
        encoder_layers: The encoder's, of an encoder-decoder; empty elsewhere.
        final_norm, encoder_final_norm: Over the last layer's output, or None.
        encoder_embedding: The encoder's own, where ``config.encoder.embedding`` asks for one.
        per_layer_embedding: Vectors of every token for each layer, or None.
        relative_embedding: Vectors of distances for all layers, or None.
        streams: Makes several residual streams of the embedding and joins them, or None.
        relative_bias, encoder_relative_bias: Tables of T5's bias, or None.
        head: Holds ``weight`` where the head is untied, ``bias`` and ``transform`` where there
            are any.
        task: In place of a head, or None.
        recompute: Whether layers are computed again for their gradients, where that saves memory
            (gradient checkpointing, Chen et al. 2016); False after construction.

    Raises:
        ConfigError: Sizes or numbers that do not go together.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        E = config.embed_dim
        self.embedding = Embedding(config.vocab_size, E, config.max_positions, config.embedding)
        per_layer = config.per_layer_embedding
        self.per_layer_embedding = (
            None if per_layer is None else PerLayerEmbedding(E, len(config.layers), per_layer)
        )
        distances = config.relative_embedding
        self.relative_embedding = None if distances is None else RelativeEmbedding(E, distances)
        self.streams = None if config.streams is None else build_ends(E, config.streams)
        ropes: dict[tuple[RopeConfig, int], RoPE] = {}
        encoder = config.encoder
        self._encoder_dim = encoder.embed_dim or E
        self.layers = stack(
            E, config.layers, ropes, weights_of=config.weights_of, context_dim=self._encoder_dim
        )
        self.encoder_layers = stack(
            self._encoder_dim, config.encoder_layers, ropes, weights_of=encoder.weights_of
        )
        if encoder.embedding is not None:
            self.encoder_embedding = Embedding(
                encoder.vocab_size or config.vocab_size,
                self._encoder_dim,
                encoder.max_positions or config.max_positions,
                encoder.embedding,
                None if encoder.own_tokens else self.embedding.tokens,
            )
        two_ways = config.kind == "encoder"
        self.relative_bias = relative_table(
            config.relative_bias,
            config.layers,
            bidirectional=two_ways,
            prompt=config.embedding.soft_prompt,
        )
        self.encoder_relative_bias = relative_table(
            encoder.relative_bias, config.encoder_layers, bidirectional=True
        )
        norm = config.final_norm
        self.final_norm = None if norm is None else build_norm(config.hidden_dim, norm)
        self.encoder_final_norm = (
            build_norm(self._encoder_dim, norm)
            if norm is not None and config.encoder_layers
            else None
        )
        self.head = None if config.head is None else Head(config, self.embedding)
        task = config.task
        self.task = (
            None if task is None else TaskHead(config.hidden_dim, task, config.eos_token_ids)
        )
        self._causal = Causal()
        self._scores_segments = any(SEGMENTS in each.attention.reads for each in config.layers)
        self.recompute = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new weights, as ``config.initial`` says."""
        draw_weights(self, self.config)

    def forward(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        mask: Mask | None = None,
        cache: ModelCache | None = None,
        encoder_ids: Tensor | None = None,
        encoder_hidden: Tensor | None = None,
        encoder_mask: Mask | None = None,
        last: int | None = None,
        counts: Sequence[int] | None = None,
        kernel: str = "auto",
        global_tokens: Tensor | None = None,
    ) -> Tensor:
        """Logits of every token, the output of ``config.task``, or without either hidden states.

        An encoder-decoder reads ``encoder_ids``, or ``encoder_hidden`` that ``encode`` returned;
        with a cache only the first call needs them, and their mask.

        Args:
            ids: ``[B, T]`` int64 or int32, or what the embedding's frontend reads.
            positions: ``[T]`` or ``[B, T]``; default: they follow on from the cache, from 0
                without one. With a cache, tokens below 0 are padding and not remembered. Or
                ``[C, B, T]`` of C coordinates (M-RoPE), where every rope has that many
                ``sections``: they rotate queries and keys, while causal order, masks, windows and
                caches go by the order of tokens, as in transformers. A cache that holds such tokens
                needs ``[C, B, T]`` in all later calls: behind a picture, text goes on at the
                greatest coordinate + 1, whatever the number of tokens.
            segments: ``[B, T]`` token types, or languages, for models that have them; default all
                0, or none where they are optional or scored.
            mask: Who may look at whom; a decoder adds ``Causal()``. Padding on the right:
                ``KeyLengths(lengths)``.
            cache: From ``new_cache``; a decoder appends to it. A call that fails leaves it as it
                was, or empty where a window has already forgotten what was.
            encoder_ids: ``[B, S]``.
            encoder_hidden: ``[B, S, E]``.
            encoder_mask: Which of the encoder's tokens may be looked at, by the encoder too.
            last: Logits for the last so many tokens only; default all.
            counts: Tokens of each row of the cache, at least 1, where ``ids [1, N]`` are those of
                one row after the other. Up to 64 of them are one native step, in which a row has
                the bits that it has alone. Default: T of each.
            kernel: ``"auto"`` or the name of a kernel.
            global_tokens: ``[B, T]`` bool, of an encoder-decoder ``[B, S]``: the encoder's tokens
                that see all others and are seen by all, in models whose windows have such.

        Returns:
            ``[B, T or last, W]``, or ``[B, T or last, E]`` without a head.

        Raises:
            InputError: No tokens, or an id outside the vocabulary.
            ContextLengthError: More tokens than the model's context holds.
            ValueError: Arguments that do not belong to this kind of model or to each other.
        """
        x = self.hidden_states(
            ids,
            positions=positions,
            segments=segments,
            mask=mask,
            cache=cache,
            encoder_ids=encoder_ids,
            encoder_hidden=encoder_hidden,
            encoder_mask=encoder_mask,
            last=last,
            counts=counts,
            kernel=kernel,
            global_tokens=global_tokens,
        )
        if self.task is not None:
            classes: Tensor = self.task(x, ids, mask)
            return classes
        return x if self.head is None else self.logits(x)

    @alone_with_cache
    def hidden_states(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        mask: Mask | None = None,
        cache: ModelCache | None = None,
        encoder_ids: Tensor | None = None,
        encoder_hidden: Tensor | None = None,
        encoder_mask: Mask | None = None,
        last: int | None = None,
        counts: Sequence[int] | None = None,
        kernel: str = "auto",
        global_tokens: Tensor | None = None,
    ) -> Tensor:
        """What ``logits`` needs, ``[B, T or last, E]``; takes the arguments of a call."""
        given = positions
        start, before, positions, rows = places_of_call(
            self.config,
            ids,
            self.embedding.like.device,
            cache=cache,
            counts=counts,
            positions=positions,
            beside=(segments, mask, last),
        )
        check_call(self.config, ids, positions, start, cache, last)
        ids = sent(ids, self.embedding.like.device)
        positions = None if positions is None else sent(positions, ids.device)
        if cache is not None:
            cache.check_owner(self._config_json)
        context, context_mask = self._context(
            ids, cache, encoder_ids, encoder_hidden, encoder_mask, kernel, global_tokens
        )
        if self.config.kind != "encoder":
            mask = self._causal if mask is None else self._causal & mask
        count = len(self.config.layers)
        nothing = (None,) * count
        planned = cache is not None and not torch.compiler.is_compiling()
        counted: tuple[Tensor, ...] = ()
        if (embedding := self.config.embedding).reads_lengths:
            reader = "token_dropout" if embedding.token_dropout else "an embedding of neighbours"
            counted = (lengths_of(mask, ids, reader),)
        prompt = embedding.soft_prompt
        if prompt is not None and mask is not None:
            mask = KeyLengths(lengths_of(mask, ids, "a soft prompt") + prompt.length)
        at = start if positions is None or positions.ndim == 3 else positions
        scored, added = (segments, None) if self._scores_segments else (None, segments)
        entered = [self.embedding(ids, at, added, *counted)]
        of_layers = None if self.config.kind == "encoder-decoder" else global_tokens
        handed = self._handed(ids, entered[0], rows, of_layers, scored)
        if self.streams is not None:
            entered = [self.streams.enter(entered.pop())]
        if self.config.funnel is not None and handed is not None:
            x = run_funnel(
                self.config.funnel,
                self.layers,
                entered.pop(),
                mask=mask,
                positions=given,
                handed=handed,
                kernel=kernel,
                recompute=self.recompute,
            )
            x = x if last is None else x[:, -last:]
            return x if self.final_norm is None else self.final_norm(x)
        try:
            x = run_layers(
                self.layers,
                entered.pop(),  # no name of ours keeps it while layers compute
                context,
                mask=mask,
                context_mask=context_mask,
                biases=biases(self.relative_bias, count),
                positions=given,  # else they follow on from each layer's cache
                caches=nothing if cache is None else cache.layers,
                context_caches=nothing if cache is None or context is None else cache.cross,
                kernel=kernel,
                recompute=self.recompute,
                plan=plan_for(cache, self.layers) if cache is not None and planned else None,
                handed=handed,
                rows=rows,
            )
        except BaseException:
            undo(cache, before)
            raise
        several = 0 if given is None or given.ndim != 3 else len(given)
        if cache is not None and (several or not start):
            cache.coordinates = several
        if cache is not None and context is not None:
            cache.context, cache.context_mask = context, context_mask
        if prompt is not None:
            x = x[:, prompt.length :]
        if last is not None:
            x = x[:, -last:]
        if self.streams is not None:
            x = self.streams.leave(x)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x

    def _handed(
        self,
        ids: Tensor,
        x: Tensor,
        rows: PackedRows | None,
        global_tokens: Tensor | None,
        segments: Tensor | None,
    ) -> Handed | None:
        """What the embedding and the call hand on to the layers, or None."""
        if global_tokens is not None:
            return global_tokens_of_call(self.config.layers, global_tokens, ids)
        if self._scores_segments:
            return segments_of_call(segments, ids)
        if self.relative_embedding is not None:
            return Handed(0, {(EMBEDDING, DISTANCES): self.relative_embedding()})
        values: dict[tuple[int, str], Tensor] = {}
        if self.per_layer_embedding is not None:
            values[EMBEDDING, "per_layer_input"] = self.per_layer_embedding(ids, x)
        if self.config.reads_embedded:
            values[EMBEDDING, EMBEDDED] = x
        if self.config.reads_tokens:
            values[EMBEDDING, TOKENS] = ids
        if rows is not None:
            values = {key: rows.padded(each) for key, each in values.items()}
        return Handed(0, values) if values else None

    def logits(self, hidden: Tensor) -> Tensor:
        """``[B, T, E]`` hidden states to ``[B, T, W]`` logits.

        Raises:
            ValueError: The model has no head.
        """
        if self.head is None:
            raise ValueError("this model has no head: its output are hidden states")
        weight = self.embedding.matrix if self.head.weight is None else self.head.weight
        if self.head.beside is not None:
            weight = self.unembedding
        logits = product(transformed(hidden, self.head.transforms), weight, self.head.bias)
        logits = logits[..., : self.config.num_logits]
        scale, cap = self.config.logit_scale, self.config.logit_softcap
        if scale != 1.0:
            logits = logits * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @property
    def unembedding(self) -> Tensor:
        """``[W, E]`` that ``logits`` multiplies by; unpacked anew each time where it is quantized.

        Raises:
            ValueError: The model has no head.
        """
        if self.head is None:
            raise ValueError("this model has no head: its output are hidden states")
        weight, beside = self.head.weight, self.head.beside
        made = self.embedding.table if weight is None else weight
        made = made.weight if isinstance(made, QuantizedMatrix) else made
        made = made[: self.config.num_logits]
        return made if beside is None else torch.cat((made, beside), dim=1)

    def __dir__(self) -> list[str]:
        """Without what raises: ``torch.jit.trace`` reads every name that is listed."""
        absent = ("unembedding",) if self.head is None else ()
        return [name for name in nn.Module.__dir__(self) if name not in absent]  # type: ignore[no-untyped-call]

    def encode(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        mask: Mask | None = None,
        kernel: str = "auto",
        global_tokens: Tensor | None = None,
    ) -> Tensor:
        """The encoder's output ``[B, S, E]``, of an encoder-decoder or an encoder.

        Args:
            ids: ``[B, S]`` int64 or int32.
            positions: ``[S]`` or ``[B, S]``; default 0 … S − 1.
            segments: ``[B, S]`` token types, for models that have them.
            mask: Padding and the like, ``KeyLengths(lengths)``.
            kernel: ``"auto"`` or the name of a kernel.
            global_tokens: ``[B, S]`` bool, as in a call.

        Raises:
            ValueError: A decoder, or what a call raises.
        """
        if self.config.kind == "encoder":
            return self.hidden_states(
                ids,
                positions=positions,
                segments=segments,
                mask=mask,
                kernel=kernel,
                global_tokens=global_tokens,
            )
        if not self.encoder_layers:
            raise ValueError("a decoder has no encoder: encode needs an encoder or encoder-decoder")
        own = self.config.encoder.embedding is not None
        embedding = self.encoder_embedding if own else self.embedding
        check_encoder_call(self.config, ids, positions)
        nothing = (None,) * len(self.encoder_layers)
        x = run_layers(
            self.encoder_layers,
            embedding(ids, 0 if positions is None else positions, segments),
            mask=mask,
            biases=biases(self.encoder_relative_bias, len(nothing)),
            positions=positions,
            caches=nothing,
            context_caches=nothing,
            kernel=kernel,
            recompute=self.recompute,
            handed=(
                None
                if global_tokens is None
                else global_tokens_of_call(self.config.encoder_layers, global_tokens, ids)
            ),
        )
        x = x[:, embedding.config.prefix :]
        if self.encoder_final_norm is not None:
            x = self.encoder_final_norm(x)
        return x

    def new_cache(
        self,
        capacity: int = 0,
        *,
        kind: Kind = "auto",
        page_size: int = 16,
        quantized: Quantized | None = None,
        spare: int = 0,
        evicting: Evicting | None = None,
    ) -> ModelCache:
        """An empty cache for one batch of sequences.

        Args:
            capacity: Tokens to make room for at once; it grows when more come.
            kind: ``"auto"``: a layer with a window keeps no more than the window; ``"dense"`` and
                ``"paged"``: every layer keeps every token, so that any number can be rolled back.
            page_size: Page size of ``"paged"``.
            quantized: Quantize old tokens so.
            spare: Tokens kept beyond a window, to roll back that many and one.
            evicting: Layers without a window evict keys so: ``H2O(budget)``, ``SnapKV(budget)`` or
                ``StreamingLLM(budget)``. What is evicted is lost, and results differ.

        Raises:
            ValueError: An encoder, which has nothing to remember, a number that cannot be, or a
                layer whose keys cannot be evicted.
        """
        check_caching(self.config, quantized, evicting)
        return ModelCache.for_config(
            self.config,
            capacity=capacity,
            kind=kind,
            page_size=page_size,
            quantized=quantized,
            spare=spare,
            evicting=evicting,
        )

    @cached_property
    def _config_json(self) -> str:
        return self.config.to_json()

    def decode_plan(self, cache: ModelCache) -> DecodePlan:
        """How the layers take the next token of a cache: by native code or not, and why.

        The plan is made when the first few tokens are decoded, lives as long as the cache, and
        notices every change of the model; ``print(model.decode_plan(cache).explain())``.

        Args:
            cache: A cache that ``new_cache`` of this model returned.
        """
        check_cache(cache)
        return plan_for(cache, self.layers)

    def observe(self) -> AbstractContextManager[Observation]:
        """``with model.observe() as seen:`` describes every layer's output in ``seen``."""
        return observe(self, self.layers, self.encoder_layers)

    def parameter_counts(self) -> ParameterCounts:
        """Parameters per part and in all; a tied head counts once, as embedding."""
        return count_parameters(self)

    def _context(
        self,
        ids: Tensor,
        cache: ModelCache | None,
        encoder_ids: Tensor | None,
        encoder_hidden: Tensor | None,
        encoder_mask: Mask | None,
        kernel: str,
        global_tokens: Tensor | None,
    ) -> tuple[Tensor | None, Mask | None]:
        """The encoder's output and its mask, given, computed or remembered."""
        given = encoder_ids is not None or encoder_hidden is not None
        if self.config.kind != "encoder-decoder":
            if given or encoder_mask is not None:
                raise ValueError(
                    f"encoder_ids, encoder_hidden and encoder_mask belong to an encoder-decoder: "
                    f"this is kind={self.config.kind!r}"
                )
            return None, None
        if global_tokens is not None and encoder_ids is None:
            raise ValueError("global_tokens are among encoder_ids: got none of these")
        if encoder_ids is not None and encoder_hidden is not None:
            raise ValueError("give encoder_ids or encoder_hidden: got both")
        if cache is not None and cache.context is not None:
            same = encoder_ids is None and (
                encoder_hidden is None or encoder_hidden is cache.context
            )
            if not same or (encoder_mask is not None and encoder_mask is not cache.context_mask):
                raise ValueError(
                    "the cache remembers the encoder's output and mask already: reset it for others"
                )
            return cache.context, cache.context_mask
        if encoder_ids is not None:
            encoder_hidden = self.encode(
                encoder_ids, mask=encoder_mask, kernel=kernel, global_tokens=global_tokens
            )
        if encoder_hidden is None:
            raise ValueError("an encoder-decoder needs encoder_ids or encoder_hidden: got neither")
        shape = (ids.shape[0], self._encoder_dim)
        if encoder_hidden.ndim != 3 or (encoder_hidden.shape[0], encoder_hidden.shape[2]) != shape:
            raise ValueError(
                f"encoder_hidden must be [B={shape[0]}, S, E={shape[1]}]: got "
                f"{list(encoder_hidden.shape)}"
            )
        return encoder_hidden, encoder_mask
