"""Options of generation, with the names of Hugging Face's ``generation_config.json``."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

from polyhead._utils.checks import check_bool, check_int, check_number, shown
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.generation.decoding.sampling import Sampling

_LIST = ("suppress_tokens", "begin_suppress_tokens", "eos_token_ids", "forced_eos_token_ids")
_WHOLE = ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens")
_TOKEN = ("forced_bos_token_id", "decoder_start_token_id", "pad_token_id")
_FACTOR = ("repetition_penalty", "encoder_repetition_penalty")

# Keys of generation_config.json without effect on the text, or read elsewhere.
_HARMLESS = frozenset(
    (
        "_from_model_config", "transformers_version", "bos_token_id", "use_cache",
        "output_attentions", "output_hidden_states", "output_scores", "output_logits",
        "return_dict_in_generate", "cache_implementation", "max_time", "low_memory",
        "return_timestamps", "is_multilingual", "lang_to_id", "task_to_id", "language", "task",
        "prev_sot_token_id", "alignment_heads", "max_initial_timestamp_index", "forced_decoder_ids",
        "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
        "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "is_assistant",
        "prompt_lookup_num_tokens", "max_matching_ngram_size", "prefill_chunk_size",
        "compile_config", "cache_config", "trust_remote_code", "disable_compile",
        "no_timestamps_token_id",
    )
)  # fmt: skip

_OTHER_NAMES = {
    "do_sample": "temperature (None or 0: greedy)",
    "eos_token_id": "eos_token_ids",
    "forced_eos_token_id": "forced_eos_token_ids",
    "max_tokens": "max_new_tokens",
    "n": "num_return_sequences",
}
"""Names of options in other libraries."""

_MOST_ROWS = 1 << 16
"""Most beams or texts of one prompt."""

_THEIRS = {"eos_token_id": "eos_token_ids", "forced_eos_token_id": "forced_eos_token_ids"}
"""Keys of generation_config.json that have another name here."""

_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0.0),
    "penalty_alpha": (None,),
    "guidance_scale": (None, 1.0),
    "force_words_ids": (None,),
    "constraints": (None,),
    "sequence_bias": (None,),
    "watermarking_config": (None,),
    "dola_layers": (None,),
    "top_h": (None,),
    "assistant_model": (None,),
    "stop_strings": (None,),
    "token_healing": (None, False),
}
"""Options that are not supported, with the values that have no effect."""


@dataclass(frozen=True)
class GenerationOptions:
    """How texts are generated.

    Attributes:
        max_new_tokens: New tokens at most.
        max_length: Tokens of prompt and text at most, where ``max_new_tokens`` is None.
        min_length: No stop token before a row (its prompt included) has so many tokens; not read
            beside ``min_new_tokens``.
        min_new_tokens: No stop token before so many new ones.
        num_beams: 1: one token after the other; more: beam search.
        num_return_sequences: Texts per prompt, the best first.
        length_penalty: Beam search ranks texts by the sum of log-probabilities / lengthᵖ.
        early_stopping: True: stop as soon as there are ``num_beams`` texts; False: as soon as no
            beam of the present length could be better; ``"never"``: no beam of any length.
        temperature: None or 0 is greedy; see ``Sampling`` for it and the next three.
        top_k: Draw from the k likeliest.
        top_p: Draw from the likeliest that together reach p.
        seed: Seed of the draws.
        min_p: Draw only tokens at least this share as likely as the likeliest.
        typical_p: Draw from the most typical tokens of this mass (Meister et al. 2022).
        epsilon_cutoff: Draw only tokens at least this likely (Hewitt et al. 2022).
        eta_cutoff: The same with a bound that follows the entropy (Hewitt et al. 2022).
        repetition_penalty: Scores of tokens that are there already are divided by it.
        encoder_repetition_penalty: Scores of tokens of the source are multiplied by it.
        no_repeat_ngram_size: No n-gram of this size twice; 0: off.
        encoder_no_repeat_ngram_size: None of the source's.
        bad_words_ids: Sequences of tokens that never appear.
        suppress_tokens: Tokens that never appear.
        begin_suppress_tokens: Tokens that never come first.
        exponential_decay_length_penalty: (start, factor): stops become likelier from there on.
        remove_invalid_values: NaN scores count as 0.
        renormalize_logits: Beam search adds log-probabilities of what the rules leave, which sum to
            1 again (Marian's files ask for it).
        eos_token_ids: Tokens that end a text.
        pad_token_id: Token that fills the shorter rows of a batch.
        decoder_start_token_id: First token of an encoder-decoder's text.
        forced_bos_token_id: The token after it (the target language of mBART, M2M-100).
        forced_eos_token_ids: The last token that there is room for.

    Raises:
        ValueError: A value out of its range, by name.
    """

    max_new_tokens: int | None = None
    max_length: int | None = None
    min_length: int = 0
    min_new_tokens: int = 0
    num_beams: int = 1
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    repetition_penalty: float = 1.0
    encoder_repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    exponential_decay_length_penalty: tuple[int, float] | None = None
    remove_invalid_values: bool = False
    renormalize_logits: bool = False
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_length", *_WHOLE, *_TOKEN):
            value = getattr(self, name)
            if value is not None:
                check_int(name, value, least=0, error=ValueError)
        for name in ("num_beams", "num_return_sequences"):
            check_int(name, getattr(self, name), least=1, most=_MOST_ROWS, error=ValueError)
        for name in _FACTOR:
            check_number(name, getattr(self, name), above=0, error=ValueError)
        # A context's length to this power is finite.
        check_number("length_penalty", self.length_penalty, least=-32, most=32, error=ValueError)
        for name in ("remove_invalid_values", "renormalize_logits"):
            check_bool(name, getattr(self, name), error=ValueError)
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(
                f"early_stopping must be True, False or 'never': got {shown(self.early_stopping)}"
            )
        for name in _LIST:
            for token in _sequence(name, getattr(self, name)):
                check_int(name, token, least=0, error=ValueError)
        for word in _sequence("bad_words_ids", self.bad_words_ids):
            if not _sequence("bad_words_ids", word):
                raise ValueError("bad_words_ids must hold sequences of at least one token: got []")
            for token in word:
                check_int("bad_words_ids", token, least=0, error=ValueError)
        if self.exponential_decay_length_penalty is not None:
            name = "exponential_decay_length_penalty"
            pair = self.exponential_decay_length_penalty
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise ValueError(f"{name} must be (start, factor): got {shown(pair)}")
            check_int(name, pair[0], least=0, error=ValueError)
            check_number(name, pair[1], error=ValueError)
        sampled = not self.sampling.greedy  # which checks the values of sampling
        if self.num_return_sequences > self.num_beams and (self.num_beams > 1 or not sampled):
            raise ValueError(
                f"num_return_sequences must be at most num_beams={self.num_beams}, or tokens be "
                f"drawn one by one (temperature): got {self.num_return_sequences}"
            )

    @property
    def sampling(self) -> Sampling:
        """The rule by which tokens are drawn."""
        names = [field.name for field in fields(Sampling)]
        return Sampling(**{name: getattr(self, name) for name in names})

    def seeded(self) -> Self:
        """These options with a seed of their own where tokens are drawn and none is named."""
        if self.sampling.greedy:
            return replace(self, seed=None)
        # 32 bits: enough variety, and short enough to type again.
        return self if self.seed is not None else replace(self, seed=secrets.randbits(32))

    def check_stream(self) -> None:
        """Raises ValueError where these options make several texts, or beams, which end at once."""
        if self.num_beams > 1 or self.num_return_sequences > 1:
            raise ValueError(
                f"a stream is one text, token by token: got num_beams={self.num_beams}, "
                f"num_return_sequences={self.num_return_sequences}; use generate"
            )

    def with_(self, **changes: Any) -> Self:
        """These options with some changed.

        Raises:
            TypeError: An option of another name; lists the nearest.
            UnsupportedError: An option of transformers that is not built.
        """
        known = {field.name for field in fields(self)}
        if changes.get("max_length") is not None and "max_new_tokens" not in changes:
            changes["max_new_tokens"] = None  # it would take precedence
        for name, value in changes.items():
            if name in _REFUSED:
                refuse(name, value, _REFUSED[name])
        changes = {name: value for name, value in changes.items() if name not in _REFUSED}
        unknown = sorted(changes.keys() - known)
        if unknown:
            said = f"no option of generation is called {shown(unknown[0])}"
            if unknown[0] in _OTHER_NAMES:
                raise TypeError(f"{said}; in polyhead that is {_OTHER_NAMES[unknown[0]]}")
            raise TypeError(f"{said}: {sorted(known)}")
        return replace(self, **changes)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: object) -> Self:
        """What a generation_config.json asks for: ``read`` over the defaults.

        Raises what ``read`` does.
        """
        try:
            return cls(**cls.read(values, where))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{where}: {error}") from error

    @classmethod
    def read(cls, values: Mapping[str, Any], where: object) -> dict[str, Any]:
        """The fields that a generation_config.json sets.

        As in transformers, ``do_sample`` false or absent leaves ``temperature`` and its companions
        out, and true means temperature 1 and ``top_k`` 50 where they are absent.

        Raises:
            ConfigError: A key that is not understood, or a value that is impossible.
            UnsupportedError: A key that asks for what is not built.
        """
        found = {key: value for key, value in values.items() if value is not None}
        for key, nothing in _REFUSED.items():
            refuse(key, found.pop(key, None), nothing, where)
        sampled = found.pop("do_sample", False)
        if sampled:
            found = {"temperature": 1.0, "top_k": 50} | found
            if found["top_k"] == 0:
                del found["top_k"]
        else:
            for drawn in fields(Sampling):
                found.pop(drawn.name, None)
        for theirs, ours in _THEIRS.items():
            if theirs in found:
                value = found.pop(theirs)
                found[ours] = tuple(value) if isinstance(value, list) else (value,)
        for key in sorted(cls.not_understood(found)):
            raise ConfigError(f"{where}: key {shown(key)} is not understood, so texts might differ")
        known = {field.name for field in fields(cls)}
        return {key: _frozen(value) for key, value in found.items() if key in known}

    @classmethod
    def not_understood(cls, values: Mapping[str, Any]) -> set[str]:
        """The keys of a generation_config.json that are not known here."""
        known = {field.name for field in fields(cls)} | {"do_sample", *_THEIRS}
        return values.keys() - known - _HARMLESS - _REFUSED.keys()


def refuse(name: str, value: Any, nothing: Sequence[Any], where: object = "") -> None:
    """Raises unless an unsupported option has a value without effect."""
    if value not in nothing:
        before = f"{where}: " if where else ""
        raise UnsupportedError(f"{before}{name} is not supported: got {shown(value)}")


def _frozen(value: Any) -> Any:
    return tuple(_frozen(entry) for entry in value) if isinstance(value, list) else value


def _sequence(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a sequence of tokens: got {shown(value)}")
    return value


def room(
    options: GenerationOptions, prompt: int, context: int, *, endless: bool = False
) -> tuple[int, str]:
    """New tokens that a prompt leaves room for, and what sets that limit.

    Args:
        options: With ``max_new_tokens`` or ``max_length``, or neither.
        prompt: Tokens of the prompt.
        context: Positions of the model.
        endless: Whether the cache lets a text grow beyond them, as far as the options say.
    """
    wanted = math.inf
    if options.max_new_tokens is not None:
        wanted = options.max_new_tokens
    elif options.max_length is not None:
        wanted = max(0, options.max_length - prompt)
    left = context - prompt
    fits = wanted <= left or (endless and wanted < math.inf)
    return (int(wanted), "max_new_tokens") if fits else (left, "context")
