"""Text to token ids and back, chat templates, and decoding while tokens still arrive.

A thin wrapper around ``tokenizers.Tokenizer``: one class whether the vocabulary came from
``tokenizer.json`` or out of a GGUF file, with the special tokens and the chat template beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from polyhead.checkpoints.json_file import read_json, read_text, write_json
from polyhead.checkpoints.rust import no_backtrace, refusing, try_out
from polyhead.checkpoints.tokenizers.chat_template import render_chat
from polyhead.checkpoints.tokenizers.pieces import pieces_of
from polyhead.checkpoints.tokenizers.stream import ByteStream, StreamDecoder, TextStream
from polyhead.errors import CheckpointError, InputError, UnsupportedError, shortened
from polyhead.families.common.reading import as_ids

if TYPE_CHECKING:
    import tokenizers

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)

_DECLARED = ("tokenizer_class", "src_lang", "tgt_lang", "legacy_behaviour")

_ID_END = 2**32  # the library's ids have 32 bits
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")

# Control tokens that end a document or a turn in every family that has them: generation stops there
# even where a file declares only one of several as its eos token.
_END_TOKENS = frozenset(
    ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
)


class Tokenizer:
    """Token ids of a text, and the text of token ids.

    Args:
        backend: the ``tokenizers.Tokenizer`` that does the work, or a duck-typed equivalent; its
            truncation and padding are switched off, since nothing may be cut in silence.
        special_tokens: names (``"bos_token"``, ...) to tokens.
        stop_ids: ids that end a generation, beside eos and the well-known end-of-turn tokens.
        chat_template: Jinja source, if the model was trained on conversations.
        declared: what tokenizer_config.json says about languages: the name of transformers' class,
            the source's and the target's.
    """

    def __init__(
        self,
        backend: Any,
        *,
        special_tokens: Mapping[str, str] | None = None,
        stop_ids: Iterable[int] = (),
        chat_template: str | None = None,
        declared: Mapping[str, Any] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.declared = dict(declared or {})
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: str(token.content) for token_id, token in added.items()}
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        ends = {i for i in self._special_ids if self._added[i] in _END_TOKENS}
        eos = self.eos_token_id
        self.stop_ids = frozenset(stop_ids) | ends | (frozenset() if eos is None else {eos})
        self._decoder_kinds = _decoder_kinds(backend)

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """Reads ``tokenizer.json`` and, where they exist, the small files that go with it.

        Raises:
            CheckpointError: there is no tokenizer.json, or a file is corrupt.
        """
        import tokenizers

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{directory} holds no tokenizer.json, so text cannot be turned into tokens"
            )
        with (
            refusing(lambda why: CheckpointError(f"{path} is not a valid tokenizer file: {why}")),
            no_backtrace(),
        ):
            backend = tokenizers.Tokenizer.from_file(str(path))
        config, tokens = declared_tokens(directory)
        generation = optional_json(directory / "generation_config.json")
        with (
            refusing(lambda why: CheckpointError(f"{path} is not a valid tokenizer file: {why}")),
            no_backtrace(),
        ):
            made = cls(
                backend,
                special_tokens=tokens,
                stop_ids=as_ids(generation.get("eos_token_id")),
                chat_template=_chat_template(directory, config),
                declared={key: config[key] for key in _DECLARED if key in config},
            )
            try_out(backend)
            return made

    def save(self, directory: Path) -> None:
        """Writes files that ``from_directory`` and transformers read."""
        config = self._save_vocabulary(directory)
        config |= self.special_tokens
        config["clean_up_tokenization_spaces"] = False
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        write_json(directory / "tokenizer_config.json", config)
        if self.stop_ids:
            generation = {"bos_token_id": self.bos_token_id, "eos_token_id": sorted(self.stop_ids)}
            write_json(directory / "generation_config.json", generation)

    def _save_vocabulary(self, directory: Path) -> dict[str, Any]:
        """Writes the vocabulary; returns the keys that tokenizer_config.json needs."""
        self.backend.save(str(directory / "tokenizer.json"), pretty=False)
        if "src_lang" in self.declared:  # a class of its own puts tokens of languages in place
            return dict(self.declared)
        return {"tokenizer_class": "PreTrainedTokenizerFast"}

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._special_id("pad_token")

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def added_tokens(self) -> dict[str, int]:
        """Special tokens and others beside the vocabulary proper, and their ids."""
        return {token: token_id for token_id, token in self._added.items()}

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text: ``decode`` leaves them out."""
        return self._special_ids

    @property
    def vocabulary(self) -> dict[str, int]:
        """All tokens and their ids."""
        return dict(self.backend.get_vocab(with_added_tokens=True))

    def encode(
        self, text: str, add_special: bool = True, *, release_gil: bool = False
    ) -> list[int]:
        """The text's token ids.

        Args:
            text: any text; special tokens written out in it (``<|im_start|>``) become their ids.
            add_special: also add what the model expects around a text ([CLS] and [SEP], or bos). A
                rendered chat template has them already: pass False.
            release_gil: let other threads run meanwhile; a text of 1 MB takes half a second. The
                library warns at a later fork unless TOKENIZERS_PARALLELISM is set.

        Raises:
            InputError: the text holds half a surrogate pair, which is not a character, or the
                tokenizer fails on it.
        """
        return list(self._encoding(text, add_special, release_gil=release_gil).ids)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """For each token of ``encode(text)``, where its characters are in the text: start, end."""
        return list(self._encoding(text, True).offsets)

    def encoding(self, text: str, other: str | None = None) -> tokenizers.Encoding:
        """The library's own object for a text, or for two of which one stands behind the other.

        It has ``ids``, ``type_ids``, ``offsets``, and which token is of which word and text.

        Raises:
            InputError: as ``encode``.
        """
        made: tokenizers.Encoding = self._encoding(text, True, other)
        return made

    def shortened(self, most: int, text: str, other: str | None = None) -> tokenizers.Encoding:
        """As ``encoding``, with tokens cut off the ends where there are more than ``most``.

        What the model expects around a text stays. Of two texts the longer is cut first, as the
        library does ("longest_first").

        Raises:
            InputError: as ``encode``, or what stands around a text is longer than ``most``.
            UnsupportedError: the tokenizer is not one of the library's.
        """
        added = getattr(self.backend, "num_special_tokens_to_add", None)
        if added is None:
            raise UnsupportedError("this tokenizer cannot cut texts: shorten them")
        room = most - added(other is not None)
        if room < 1:
            raise InputError(f"max_length must be more than {most - room}: got {most}")
        parts = [self._encoding(each, False) for each in (text, other) if each is not None]
        lengths = [len(part.ids) for part in parts]
        if sum(lengths) > room:
            least = min(lengths)
            most_of_other = max(least, room - least) if least <= room else least
            cut = [least, most_of_other] if len(parts) == 2 else [room]
            if sum(cut) > room:
                cut = [room // 2, room - room // 2]
            if len(parts) == 2 and lengths[0] > lengths[1]:
                cut.reverse()
            for part, length in zip(parts, cut, strict=True):
                part.truncate(length)
        made: tokenizers.Encoding = self.backend.post_process(*parts)
        return made

    def _encoding(
        self, text: str, add_special: bool, other: str | None = None, *, release_gil: bool = False
    ) -> Any:
        for each in (text,) if other is None else (text, other):
            if not isinstance(each, str):
                raise TypeError(f"text must be a str: got {type(each).__name__}")
            try:
                each.encode("utf-8")
            except UnicodeEncodeError as error:
                raise InputError(
                    f"text must be valid Unicode: character {error.start} is half a surrogate pair"
                ) from error
        with refusing(lambda why: InputError(f"the tokenizer fails on this text: {why}")):
            if release_gil and hasattr(self.backend, "encode_batch"):
                return self.backend.encode_batch([text], add_special_tokens=add_special)[0]
            return self.backend.encode(text, other, add_special_tokens=add_special)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD."""
        known = [token_id for token_id in ids if 0 <= token_id < _ID_END]
        with refusing(lambda why: InputError(f"the tokenizer fails on these ids: {why}")):
            return str(self.backend.decode(known, skip_special_tokens=skip_special))

    def stream(self, skip_special: bool = True) -> StreamDecoder:
        """A decoder for ids that arrive one at a time; see ``StreamDecoder``."""
        skipped = self._special_ids if skip_special else frozenset()
        if "ByteLevel" in self._decoder_kinds:
            return ByteStream(self.token_bytes, skipped)
        return TextStream(lambda ids: self.decode(ids, skip_special), skipped)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each token of a text as a readable string, spaces kept.

        A token that is part of a character shows the character and which part it is (``猫₂``), or
        its bytes (``\\xe7``) where the others are missing; a WordPiece that continues a word keeps
        its ``##``; an id without a token shows as ``[id]``.
        """
        return pieces_of([self.token_bytes(int(i)) or f"[{int(i)}]".encode() for i in ids])

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token stands for (empty for an id without a token)."""
        if token_id in self._added:
            return self._added[token_id].encode("utf-8")
        token = self.backend.id_to_token(token_id) if 0 <= token_id < _ID_END else None
        if token is None:
            return b""
        if "ByteLevel" in self._decoder_kinds:
            try:
                return bytes(_BYTE_OF[character] for character in token)
            except KeyError:
                return str(token).encode("utf-8")
        if "ByteFallback" in self._decoder_kinds and _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(token[3:5])
        if self._decoder_kinds & {"Metaspace", "ByteFallback"}:
            token = token.replace("▁", " ")
        return str(token).encode("utf-8")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The conversation as the text that the model was trained on.

        Args:
            messages: dicts with ``role`` ("system", "user", "assistant") and ``content``.
            add_generation_prompt: end with the words that open the assistant's turn.
            tools: functions that the model may call, as OpenAI's API describes them; a template
                that knows none leaves them out.

        Raises:
            CheckpointError: the model has no chat template.
            InputError: no messages, or the template refuses them.
        """
        if self.chat_template is None:
            raise CheckpointError("this model has no chat template: give it plain text instead")
        return render_chat(
            self.chat_template,
            messages,
            self.special_tokens,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
        )

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        if token is None:
            return None
        with refusing(lambda why: CheckpointError(f"{name} is no token: {why}")):
            found = self.backend.token_to_id(token)
        return None if found is None else int(found)


def _decoder_kinds(backend: tokenizers.Tokenizer) -> frozenset[str]:
    """The names of the decoder's parts, which say how the vocabulary spells its tokens."""
    if hasattr(backend, "decoder_kinds"):
        return frozenset(backend.decoder_kinds)
    if backend.decoder is None:
        return frozenset()
    state = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return frozenset(part["type"] for part in parts)


def _content(token: Any, where: str) -> str:
    """A special token, which files write as its text or as an object that holds it."""
    content = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(content, str):
        raise CheckpointError(f"{where} must be a token's text: got {shortened(token)}")
    return content


def declared_tokens(directory: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """tokenizer_config.json's object, and the special tokens that it and its companion name.

    Raises:
        CheckpointError: a file is corrupt.
    """
    config = optional_json(directory / "tokenizer_config.json")
    special = optional_json(directory / "special_tokens_map.json") | config
    names = (name for name in SPECIAL_NAMES if special.get(name))
    return config, {name: _content(special[name], f"{directory}: {name}") for name in names}


def optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own, or a key of tokenizer_config.json (a string, or a list of named ones)."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        default = [entry for entry in template if entry.get("name") == "default"]
        template = default[0].get("template") if default else None
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{directory}: chat_template must be a text, or a list of texts with names: got "
            f"{shortened(template)}"
        )
    return template


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the rest from U+0100 upwards."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
