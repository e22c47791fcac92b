"""The tokenizer inside a GGUF file, rebuilt as a ``tokenizers.Tokenizer``.

A byte-level vocabulary comes with its merges, but not with how text is split before merging
(``gguf_splits``). A SentencePiece vocabulary splits nothing, and its merges follow from the tokens'
scores. Encoders have other kinds (``gguf_vocabularies``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyhead.checkpoints.rust import no_backtrace, refusing, try_out
from polyhead.checkpoints.tokenizers.gguf_splits import SPLITS, Split
from polyhead.checkpoints.tokenizers.gguf_vocabularies import (
    CONTROL,
    USER_DEFINED,
    unigram,
    wordpiece,
)
from polyhead.checkpoints.tokenizers.tokenizer import Tokenizer
from polyhead.errors import CheckpointError, shortened
from polyhead.families.common.keys import Keys

if TYPE_CHECKING:
    import tokenizers

_LONGEST_TOKEN = 1024

SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # the format's own spelling
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
"""Special tokens and the keys of their ids."""
_KINDS = {
    "gpt2": "byte-level BPE",
    "llama": "SentencePiece BPE",
    "gemma4": "SentencePiece BPE with merges",
    "bert": "WordPiece",
    "t5": "SentencePiece unigrams",
}
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def tokenizer_from_gguf(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """Builds the tokenizer that a GGUF file's metadata describes.

    Raises:
        ConfigError: the vocabulary's kind or its pre-tokenizer is not supported (named).
        CheckpointError: the vocabulary contradicts itself.
    """
    keys = Keys(metadata, path, prefix="tokenizer.ggml.")
    kind, pre = keys.take("model", None), keys.take("pre", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        known = ", ".join(f"{name!r} ({what})" for name, what in _KINDS.items())
        raise keys.refused("model", kind, known)
    if kind == "gpt2" and (not isinstance(pre, str) or pre not in SPLITS):
        raise keys.refused("pre", pre, ", ".join(sorted(SPLITS)))
    template = Keys(metadata, path, prefix="tokenizer.").text("chat_template", None)
    with (
        refusing(lambda why: CheckpointError(f"{path}: the vocabulary is corrupt: {why}")),
        no_backtrace(),
    ):
        if kind == "bert":
            return _complete(wordpiece(keys), keys, template, None)
        if kind == "t5":
            sentinels = 100 if metadata.get("general.architecture") == "t5" else 0
            return _complete(unigram(keys, sentinels), keys, template, (False, True))
        if kind == "llama":
            return _complete(_sentencepiece(keys), keys, template, (True, False))
        if kind == "gemma4":
            return _complete(_with_merges(keys), keys, template, (True, False))
        split = SPLITS[pre]
        ends = split.adds_bos, split.adds_eos
        return _complete(_byte_level(keys, split), keys, template, ends)


def _byte_level(keys: Keys, split: Split) -> tokenizers.Tokenizer:
    from tokenizers import decoders, normalizers

    backend = _bpe(
        keys.texts("tokens"),
        [_pair(merge) for merge in keys.texts("merges")],
        ignore_merges=split.ignore_merges,
    )
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = split.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(keys: Keys) -> tokenizers.Tokenizer:
    """Llama 2's kind: words begin with "▁", unknown characters fall back to byte tokens."""
    from tokenizers import decoders, pre_tokenizers

    tokens, scores = keys.texts("tokens"), keys.numbers("scores")
    backend = _bpe(tokens, _merges_by_score(tokens, scores), fuse_unk=True, byte_fallback=True)
    prefixed = keys.flag("add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first" if prefixed else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefixed)
    return backend


def _with_merges(keys: Keys) -> tokenizers.Tokenizer:
    """Gemma 4's kind: the same with merges of its own, and nothing put before a text."""
    from tokenizers import decoders, normalizers

    keys.expect("add_space_prefix", False)
    merges = [_pair(merge) for merge in keys.texts("merges")]
    backend = _bpe(keys.texts("tokens"), merges, fuse_unk=True, byte_fallback=True)
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Merges, which SentencePiece does not store: pairs of tokens that are a token, best first."""
    rank = {token: i for i, token in enumerate(tokens)}
    if len(longest := max(tokens, key=len, default="")) > _LONGEST_TOKEN:  # quadratic
        raise ValueError(
            f"a token has {len(longest):,} characters, at most {_LONGEST_TOKEN:,} are read"
        )
    found = []
    for token, score in zip(tokens, scores, strict=True):
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in rank and right in rank:
                found.append((-score, -len(left), -len(right), rank[left], rank[right]))
    found.sort()
    return [(tokens[left], tokens[right]) for *_, left, right in found]


def _bpe(tokens: list[str], merges: list[tuple[str, str]], **options: bool) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import models

    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(f"{len(tokens) - len(vocabulary)} tokens occur twice")
    for left, right in merges:
        if not {left, right, left + right} <= vocabulary.keys():
            raise ValueError(f"merge {shortened(f'{left} {right}')} is not of tokens to a token")
    return tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))


def _complete(
    backend: tokenizers.Tokenizer,
    keys: Keys,
    template: str | None,
    adds: tuple[bool, bool] | None,
) -> Tokenizer:
    """Adds what every kind of vocabulary has: special tokens and a chat template.

    Args:
        backend: The tokenizer so far.
        keys: Keys of the file.
        template: Template of conversations.
        adds: Whether texts begin with bos and end with eos where the file does not say; None: the
            tokenizer knows what stands around a text.
    """
    count = len(keys.texts("tokens"))
    tokens = [backend.id_to_token(i) or "" for i in range(count)]

    def known(key: str) -> int | None:
        found = keys.whole(key, None)
        if found is not None and not 0 <= found < count:
            raise keys.refused(key, found, f"an id of the {count} tokens")
        return found

    _add_tokens(backend, tokens, keys.wholes("token_type"))
    ids = {name: known(key) for name, key in SPECIAL_KEYS.items()}
    special = {name: tokens[i] for name, i in ids.items() if i is not None}
    if adds is not None:
        ends = {}
        for side, default in zip(("bos", "eos"), adds, strict=True):
            if keys.flag(f"add_{side}_token", default):
                if f"{side}_token" not in special:
                    raise ValueError(f"texts take a {side} token and there is none")
                ends[side] = special[f"{side}_token"]
        _surround(backend, ends.get("bos"), ends.get("eos"))
    stops = (known(key) for key in _STOP_KEYS)
    made = Tokenizer(
        backend,
        special_tokens=special,
        stop_ids=[i for i in stops if i is not None],
        chat_template=template,
    )
    try_out(backend)
    return made


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special; user-defined ones are ordinary text that is never split."""
    from tokenizers import AddedToken

    def of(wanted: int, *, special: bool) -> list[AddedToken]:
        return [
            AddedToken(token, normalized=False, special=special)
            for token, kind in zip(tokens, types, strict=True)
            if kind == wanted
        ]

    if types:
        backend.add_special_tokens(of(CONTROL, special=True))
        backend.add_tokens(of(USER_DEFINED, special=False))


def _surround(backend: tokenizers.Tokenizer, before: str | None, after: str | None) -> None:
    """Makes a tokenizer put special tokens before and after every text."""
    from tokenizers import processors

    around = [token for token in (before, after) if token is not None]
    template = [token for token in (before, "$A", after) if token is not None]
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys(around)]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ValueError(f"merge {shortened(merge)} is not two tokens")
    return left, right
