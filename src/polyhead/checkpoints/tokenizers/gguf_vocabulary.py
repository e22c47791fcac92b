"""A tokenizer as the metadata of a GGUF file: the inverse of ``gguf_tokenizer``.

The format has the *name* of how text is split before merging, so the name is found whose split cuts
a text of many scripts as the tokenizer does. A SentencePiece vocabulary has scores in place of
merges: the order of its merges. What is made is read back and has to give the same ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyhead.checkpoints.tokenizers.gguf_splits import SPLITS
from polyhead.checkpoints.tokenizers.gguf_tokenizer import SPECIAL_KEYS, tokenizer_from_gguf
from polyhead.checkpoints.tokenizers.gguf_vocabularies import CONTROL, NORMAL, UNUSED, USER_DEFINED
from polyhead.checkpoints.tokenizers.tokenizer import Tokenizer
from polyhead.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import tokenizers

_UNKNOWN, _BYTE = 2, 6  # further values of tokenizer.ggml.token_type
_STOPS = ("eot_token_id", "eom_token_id")
_PROBE = (
    "Hello, world! It's 3 o'clock — they'LL've\u00a0paid $1234567.89 (50%) for  'it'.\n\n\n"
    "def f(x_1):\n\t\treturn x_1 ** 2  # =>\r\n   HTTPServer camelCase www.a-b.org/c?d=e&f \n \n"
    "Größe, naïve ÉCOLE e\u0301te\u0301, Ελλάδα, Привет мир; עברית العربية ١٢٣ हिन्दी ไทย "
    "日本語ひらがなカタカナ 中文，。 한국어 tiếng Việt 🚀👩🏽‍💻 ½²  <|x|> [y] {z} ``` ...\t…    "
)


def vocabulary(tokenizer: Tokenizer, size: int, where: Path) -> dict[str, Any]:
    """The keys of a GGUF file's tokenizer.

    Args:
        tokenizer: Byte-level or SentencePiece BPE.
        size: Tokens of the model; ids without a token get one that no text has.
        where: The model's path, for messages.

    Raises:
        ConfigError: The format has no name for this tokenizer, or reads it back differently.
    """
    state = json.loads(tokenizer.backend.to_str())
    model = state["model"]
    if model["type"] != "BPE":
        raise ConfigError(
            f"{where}: the tokenizer is of type {model['type']}; GGUF files are written with BPE"
        )
    ids = {token_id: token for token, token_id in tokenizer.vocabulary.items()}
    added = {token_id: kind for kind, token_id in _added(tokenizer.backend)}
    tokens = [ids.get(i, f"[PAD{i}]") for i in range(size)]
    spelt = "llama" if model["byte_fallback"] else "gpt2"
    types = [added.get(i, NORMAL if i in ids else UNUSED) for i in range(size)]
    keys: dict[str, Any] = {"model": spelt, "tokens": tokens, "token_type": types}
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    if spelt == "gpt2":
        keys["pre"] = _pre(tokenizer.backend, state, where)
        keys["merges"] = [" ".join(pair) for pair in merges]
    else:
        rank = {left + right: at for at, (left, right) in reversed([*enumerate(merges)])}
        keys["pre"] = "default"
        keys["scores"] = [-float(rank.get(token, len(merges))) for token in tokens]
        for i, token in enumerate(tokens):
            if types[i] == NORMAL and len(token) == 6 and token.startswith("<0x"):
                types[i] = _BYTE
        unknown = tokenizer.vocabulary.get(model.get("unk_token") or "")
        if unknown is not None:
            types[unknown] = _UNKNOWN
        first = tokenizer.backend.encode("a", add_special_tokens=False).tokens
        keys["add_space_prefix"] = bool(first) and first[0].startswith("▁")
    keys |= _special(tokenizer)
    # The package writes no empty lists.
    found = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value != []}
    if tokenizer.chat_template is not None:
        found["tokenizer.chat_template"] = tokenizer.chat_template
    _prove(tokenizer, found, where)
    return found


def _added(backend: tokenizers.Tokenizer) -> list[tuple[int, int]]:
    """Types and ids of special tokens and others that are never split."""
    added = backend.get_added_tokens_decoder()
    return [(CONTROL if token.special else USER_DEFINED, i) for i, token in added.items()]


def _pre(backend: tokenizers.Tokenizer, state: dict[str, Any], where: Path) -> str:
    """The name of the split that cuts texts as a byte-level tokenizer does."""
    normalizer = (state["normalizer"] or {"type": None})["type"]
    own = backend.pre_tokenizer
    if normalizer in (None, "NFC") and own is not None:
        flags = bool(state["model"]["ignore_merges"]), normalizer == "NFC"
        wanted = [piece for piece, _ in own.pre_tokenize_str(_PROBE)]
        for name, split in SPLITS.items():
            if (split.ignore_merges, split.nfc) == flags and wanted == [
                piece for piece, _ in split.pre_tokenizer().pre_tokenize_str(_PROBE)
            ]:
                return name
    raise ConfigError(
        f"{where}: GGUF files have no name for how this tokenizer normalizes and splits text; "
        f"known are {', '.join(sorted(SPLITS))}"
    )


def _special(tokenizer: Tokenizer) -> dict[str, Any]:
    """Ids of special tokens, and which stand around a text."""
    known = tokenizer.vocabulary
    keys: dict[str, Any] = {
        SPECIAL_KEYS[name]: known[token]
        for name, token in tokenizer.special_tokens.items()
        if token in known
    }
    bare, ids = tokenizer.encode("a", add_special=False), tokenizer.encode("a")
    keys["add_bos_token"] = ids[:1] == [tokenizer.bos_token_id] and bare[:1] != ids[:1]
    keys["add_eos_token"] = ids[-1:] == [tokenizer.eos_token_id] and bare[-1:] != ids[-1:]
    further = sorted(tokenizer.stop_ids - {tokenizer.eos_token_id})
    return keys | dict(zip(_STOPS, further, strict=False))


def _prove(tokenizer: Tokenizer, metadata: dict[str, Any], where: Path) -> None:
    try:
        again = tokenizer_from_gguf(metadata, where)
    except CheckpointError as error:
        raise ConfigError(f"{where}: GGUF files cannot hold this tokenizer: {error}") from error
    for text in (_PROBE, "a", ""):
        wanted, found = tokenizer.encode(text), again.encode(text)
        if wanted != found:
            at = next(
                (i for i, pair in enumerate(zip(wanted, found, strict=False)) if len({*pair}) > 1),
                min(len(wanted), len(found)),
            )
            raise ConfigError(
                f"{where}: a GGUF file would not keep this tokenizer: of a text in many scripts "
                f"tokens {wanted[at : at + 3]} would be {found[at : at + 3]}"
            )
