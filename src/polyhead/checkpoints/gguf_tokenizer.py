"""The tokenizer inside a GGUF file, rebuilt as a ``tokenizers.Tokenizer``.

A byte-level vocabulary comes with its merges, but not with how text is split before merging: the
file only *names* that (``tokenizer.ggml.pre``). The table below gives each name its split, as the
original models' tokenizer.json files and llama.cpp have it; a name that is not in it is an error,
because a wrong split loads cleanly and gives other ids. A SentencePiece vocabulary splits nothing,
and its merges follow from the tokens' scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyhead.checkpoints.rust import refusing
from polyhead.checkpoints.tokenizer import Tokenizer
from polyhead.errors import CheckpointError, shortened
from polyhead.families.common.keys import Keys

if TYPE_CHECKING:
    import tokenizers

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_LONGEST_TOKEN = 1024

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class _Split:
    """How text is cut before merging.

    ``pattern``: a regular expression of its own, or None for GPT-2's. ``digits``: every digit is
    cut out first. ``ignore_merges``: a piece that is a token is taken whole. ``nfc``: text is
    normalised to NFC. ``adds_bos``: a text begins with bos unless the file says otherwise.
    """

    pattern: str | None = None
    digits: bool = False
    ignore_merges: bool = False
    nfc: bool = False
    adds_bos: bool = False


_GPT2 = _Split()
_DIGITS_FIRST = _Split(digits=True)
_LLAMA3 = _Split(_LLAMA3_SPLIT, ignore_merges=True, adds_bos=True)

SPLITS: Mapping[str, _Split] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "roberta-bpe": _GPT2,
    "smollm": _DIGITS_FIRST,
    "starcoder": _DIGITS_FIRST,
    "refact": _DIGITS_FIRST,
    "command-r": _DIGITS_FIRST,
    "codeshell": _DIGITS_FIRST,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Split(_QWEN2_SPLIT, nfc=True),
}

_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # spelled so by the format
    "mask_token": "mask_token_id",
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
    if kind not in ("gpt2", "llama"):
        raise keys.refused("model", kind, "'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE)")
    if kind == "gpt2" and (not isinstance(pre, str) or pre not in SPLITS):
        raise keys.refused("pre", pre, ", ".join(sorted(SPLITS)))
    template = Keys(metadata, path, prefix="tokenizer.").text("chat_template", None)
    with refusing(lambda why: CheckpointError(f"{path}: the vocabulary is corrupt: {why}")):
        if kind == "llama":
            return _complete(_sentencepiece(keys), keys, template, adds_bos=True)
        split = SPLITS[pre]
        return _complete(_byte_level(keys, split), keys, template, adds_bos=split.adds_bos)


def _byte_level(keys: Keys, split: _Split) -> tokenizers.Tokenizer:
    from tokenizers import decoders, normalizers

    backend = _bpe(
        keys.texts("tokens"),
        [_pair(merge) for merge in keys.texts("merges")],
        ignore_merges=split.ignore_merges,
    )
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(split)
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


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece stores none: two tokens merge where they join to a third, best score first."""
    rank = {token: i for i, token in enumerate(tokens)}
    if len(longest := max(tokens, key=len, default="")) > _LONGEST_TOKEN:  # takes its square
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
    backend: tokenizers.Tokenizer, keys: Keys, template: str | None, *, adds_bos: bool
) -> Tokenizer:
    """Adds what every kind of vocabulary has: special tokens and a chat template."""
    tokens = keys.texts("tokens")

    def known(key: str) -> int | None:
        found = keys.whole(key, None)
        if found is not None and not 0 <= found < len(tokens):
            raise keys.refused(key, found, f"an id of the {len(tokens)} tokens")
        return found

    _add_tokens(backend, tokens, keys.numbers("token_type", []))
    ids = {name: known(key) for name, key in _SPECIAL_KEYS.items()}
    special = {name: tokens[i] for name, i in ids.items() if i is not None}
    ends = {}
    for side, default in (("bos", adds_bos), ("eos", False)):
        if keys.flag(f"add_{side}_token", default):
            if f"{side}_token" not in special:
                raise ValueError(f"texts take a {side} token and there is none")
            ends[side] = special[f"{side}_token"]
    _surround(backend, ends.get("bos"), ends.get("eos"))
    stops = (known(key) for key in _STOP_KEYS)
    return Tokenizer(
        backend,
        special_tokens=special,
        stop_ids=[i for i in stops if i is not None],
        chat_template=template,
    )


def _pre_tokenizer(split: _Split) -> tokenizers.pre_tokenizers.PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = []
    if split.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    return pre_tokenizers.Sequence(steps)


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
        backend.add_special_tokens(of(_CONTROL, special=True))
        backend.add_tokens(of(_USER_DEFINED, special=False))


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
