"""Tokenizers of directories without tokenizer.json: SentencePiece models as families keep them.

    source.spm target.spm vocab.json      Marian: pieces by the models, ids by vocab.json
    sentencepiece.bpe.model vocab.json    M2M-100, and tokens of languages behind the vocabulary
    spiece.model                          T5, mT5: the model's own ids, then sentinels
                                          Pegasus: 103 of its own first
    sentencepiece.bpe.model               mBART, NLLB: fairseq's order, then tokens of languages

The package ``sentencepiece`` splits texts into pieces; this file maps pieces to ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from polyhead._utils.checks import check_int
from polyhead._utils.paths import size_of
from polyhead.checkpoints.json_file import read_json
from polyhead.checkpoints.tokenizers.tokenizer import Tokenizer, declared_tokens, optional_json
from polyhead.errors import CheckpointError, InputError, shortened
from polyhead.families.common.reading import as_ids

if TYPE_CHECKING:
    import sentencepiece

_MOST_BYTES = 64 << 20
"""Most bytes of a model: ten times the largest published one."""
_SPACE = "▁"
_FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")

_M2M100 = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu "
    "ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr "
    "ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk "
    "ur uz vi wo xh yi yo zh zu"
)
_WMT21 = "en ha is ja cs ru zh de"
_MBART = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT "
    "lv_LV my_MM ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
)
_MBART50 = (
    "af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF "
    "pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
)
_OF_CLASS = {"MBart": _MBART, "MBart50": f"{_MBART} {_MBART50}", "Nllb": ""}
_OF_TYPE = {
    "mbart": "MBart",
    "m2m_100": "Nllb",
    "pegasus": "Pegasus",
    "t5": "T5",
    "mt5": "T5",
    "switch_transformers": "T5",
}


def from_sentencepiece(directory: Path) -> tuple[Tokenizer, Tokenizer] | None:
    """The tokenizers of the texts that are read and written, or None where there are none.

    Raises:
        CheckpointError: A file is missing or corrupt, or the package ``sentencepiece`` is.
    """
    files = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    if {"source.spm", "target.spm", "vocab.json"} <= files:
        return _marian(directory)
    if {"sentencepiece.bpe.model", "vocab.json"} <= files:
        made = _m2m_100(directory)
    elif "spiece.model" in files and _class_of(directory) in ("T5", "MT5", "Pegasus"):
        made = _t5_or_pegasus(directory)
    elif "sentencepiece.bpe.model" in files and _class_of(directory) in _OF_CLASS:
        made = _fairseq(directory)
    else:
        return None
    return made, made


class Pieces:
    """A SentencePiece model with ids of its pieces: what ``Tokenizer`` asks of its backend.

    Args:
        model: Cuts texts, and joins pieces again.
        ids: Ids of every piece and token.
        special: Tokens that are not text, and their ids; in a text they count as themselves.
        unknown: The token of pieces that have no id, one of ``special``.
        end: The token behind every text.
        tag: A pattern of tokens at the beginning of a text that the model must not cut.
    """

    decoder_kinds = frozenset({"Metaspace"})

    def __init__(
        self,
        model: sentencepiece.SentencePieceProcessor,
        ids: Mapping[str, int],
        special: Mapping[str, int],
        unknown: str,
        end: str,
        tag: re.Pattern[str] | None = None,
    ) -> None:
        self.model, self.ids, self.tag = model, ids, tag
        self.special = {index: token for token, index in special.items()}
        self.unknown, self.ends = ids[unknown], [ids[end]]
        self._tokens = {index: token for token, index in ids.items()}
        words = sorted(special, key=len, reverse=True)
        self._parts = re.compile(f"({'|'.join(map(re.escape, words))})")

    def no_truncation(self) -> None:
        """Truncation is never on."""

    no_padding = no_truncation

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {
            index: SimpleNamespace(content=token, special=True)
            for index, token in self.special.items()
        }

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        return dict(self.ids)

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        return max(self.ids.values()) + 1

    def id_to_token(self, index: int) -> str | None:
        return self._tokens.get(index)

    def token_to_id(self, token: str) -> int | None:
        return self.ids.get(token)

    def encode(self, text: str, other: str | None = None, add_special_tokens: bool = True) -> Any:
        if other is not None:
            raise InputError("a tokenizer of translation takes one text: got two")
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        start = 0
        if self.tag is not None and (tag := self.tag.match(text)):
            ids.append(self.ids.get(tag[0], self.unknown))
            offsets.append(tag.span())
            start = tag.end()
        # Every other part is a special token.
        for number, part in enumerate(self._parts.split(text[start:])):
            if number % 2:
                ids.append(self.ids[part])
                offsets.append((start, start + len(part)))
            elif part:
                found = self.model.encode(part, return_type="offset_mapping")
                ids += [self.ids.get(piece, self.unknown) for piece in found["pieces"]]
                offsets += [(start + first, start + last) for first, last in found["offsets"]]
            start += len(part)
        if add_special_tokens:
            ids += self.ends
            offsets += [(len(text), len(text))] * len(self.ends)
        return SimpleNamespace(ids=ids, offsets=offsets)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        parts: list[str] = []
        pieces: list[str] = []
        for index in ids:
            if index not in self.special:
                pieces.append(self._tokens.get(index, self.special[self.unknown]))
            elif not skip_special_tokens:
                parts += [self._joined(pieces), self.special[index]]
                pieces = []
        return " ".join(part for part in (*parts, self._joined(pieces)) if part)

    def _joined(self, pieces: Sequence[str]) -> str:
        joined: str = self.model.decode_pieces([*pieces])
        return joined.replace(_SPACE, " ").strip()


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer whose pieces are a SentencePiece model's.

    Args:
        backend: The model with its ids.
        directory: Where it was read from.
        files: What of the directory belongs to it, and is copied where it is saved.
        declared: What tokenizer_config.json says.
        special_tokens: Names to tokens.
    """

    def __init__(
        self,
        backend: Pieces,
        directory: Path,
        files: Iterable[str],
        declared: Mapping[str, Any],
        special_tokens: Mapping[str, str],
    ) -> None:
        stops = as_ids(optional_json(directory / "generation_config.json").get("eos_token_id"))
        super().__init__(backend, special_tokens=special_tokens, stop_ids=stops, declared=declared)
        self.files = {name: _content(directory / name) for name in files}

    def _save_vocabulary(self, directory: Path) -> dict[str, Any]:
        for name, content in self.files.items():
            (directory / name).write_bytes(content)
        return dict(self.declared)


def _content(path: Path) -> bytes:
    if (size := size_of(path)) > _MOST_BYTES:
        raise CheckpointError(f"{path} has {size:,} bytes: at most {_MOST_BYTES:,} are read")
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def read_model(path: Path) -> sentencepiece.SentencePieceProcessor:
    """The model of a file.

    Raises:
        CheckpointError: It is corrupt, or the package ``sentencepiece`` is missing.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise CheckpointError(
            f"{path} is a SentencePiece model: reading it needs pip install sentencepiece"
        ) from error
    content = _content(path)
    try:
        found = sentencepiece.SentencePieceProcessor.from_proto(content)
        found.id_to_piece([*range(found.get_piece_size())])  # raises where one is no text
    except (RuntimeError, ValueError, MemoryError) as error:
        raise CheckpointError(f"{path} is not a valid SentencePiece model: {error}") from error
    return found


def _vocabulary(path: Path) -> dict[str, int]:
    values = read_json(path)
    for token, index in values.items():
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < 2**31:
            raise CheckpointError(
                f"{path}: {shortened(token)} must have an id of at least 0: got {shortened(index)}"
            )
    if len({*values.values()}) < len(values):
        raise CheckpointError(f"{path}: two tokens have the same id")
    return values


def _class_of(directory: Path) -> str:
    """The name of transformers' class, without ``Tokenizer``."""
    name = optional_json(directory / "tokenizer_config.json").get("tokenizer_class")
    config = optional_json(directory / "config.json")
    name = name or config.get("tokenizer_class")
    if not isinstance(name, str):
        return _OF_TYPE.get(str(config.get("model_type")), "")
    return name.removesuffix("Fast").removesuffix("Tokenizer")


def _made(
    directory: Path,
    name: str,
    files: Iterable[str],
    ids: Mapping[str, int],
    special: Iterable[str],
    *,
    model: str,
    tag: re.Pattern[str] | None = None,
) -> SentencePieceTokenizer:
    """The tokenizer of a directory.

    Args:
        directory: With the files.
        name: Name of transformers' class, without ``Tokenizer``.
        files: That belong to it.
        ids: Ids of pieces and tokens.
        special: Tokens that are not text, beside those that the files name.
        model: The file of the SentencePiece model.
        tag: As in ``Pieces``.

    Raises:
        CheckpointError: There is no unknown or no end token.
    """
    config, tokens = declared_tokens(directory)
    tokens = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"} | tokens
    tokens = {key: token for key, token in tokens.items() if token in ids}
    for key in ("eos_token", "unk_token"):
        if key not in tokens:
            raise CheckpointError(f"{directory}: the vocabulary has no {key}")
    pieces = Pieces(
        read_model(directory / model),
        ids,
        {token: ids[token] for token in (*tokens.values(), *special) if token in ids},
        tokens["unk_token"],
        tokens["eos_token"],
        tag,
    )
    declared = {"src_lang": None, "tgt_lang": None, **config, "tokenizer_class": f"{name}Tokenizer"}
    declared = {key: value for key, value in declared.items() if value is not None}
    return SentencePieceTokenizer(pieces, directory, files, declared, tokens)


def _marian(directory: Path) -> tuple[Tokenizer, Tokenizer]:
    ids = _vocabulary(directory / "vocab.json")
    files = ["source.spm", "target.spm", "vocab.json"]
    written = ids
    if optional_json(directory / "tokenizer_config.json").get("separate_vocabs"):
        written = _vocabulary(directory / "target_vocab.json")
        files.append("target_vocab.json")
    source, target = (
        _made(
            directory, "Marian", files, each, (), model=f"{side}.spm",
            tag=re.compile(">>.*?<<", re.DOTALL),
        )
        for side, each in (("source", ids), ("target", written))
    )  # fmt: skip
    return source, target


def _m2m_100(directory: Path) -> Tokenizer:
    ids = _vocabulary(directory / "vocab.json")
    config, _ = declared_tokens(directory)
    codes = _M2M100 if config.get("language_codes", "m2m100") == "m2m100" else _WMT21
    languages = [f"__{code}__" for code in codes.split()]
    first = len(ids)
    ids |= {token: first + number for number, token in enumerate(languages)}
    files = ("sentencepiece.bpe.model", "vocab.json")
    return _made(directory, "M2M100", files, ids, languages, model=files[0])


def _count(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    if value is None:
        return default
    return check_int(key, value, least=0, most=1 << 16, error=CheckpointError)


def _own_pieces(directory: Path, model: str) -> list[str]:
    found = read_model(directory / model)
    pieces: list[str] = found.id_to_piece([*range(found.get_piece_size())])
    return pieces


def _t5_or_pegasus(directory: Path) -> Tokenizer:
    model = "spiece.model"
    pieces = _own_pieces(directory, model)
    config = optional_json(directory / "tokenizer_config.json")
    if _class_of(directory) == "Pegasus":
        name, offset = "Pegasus", _count(config, "offset", 103)
        masks = [config.get("mask_token_sent", "<mask_1>"), config.get("mask_token", "<mask_2>")]
        first = [str(each) for each in masks if each is not None]
        extra = [*first, *(f"<unk_{n}>" for n in range(2, offset + 2 - len(first)))]
        tokens = [*pieces[:2], *extra, *pieces[2:]]
    else:
        name, count = "T5", _count(config, "extra_ids", 100)
        extra = [f"<extra_id_{n}>" for n in reversed(range(count))]
        tokens = [*pieces, *extra]
    ids = {token: index for index, token in enumerate(tokens)}
    return _made(directory, name, (model,), ids, extra, model=model)


def _fairseq(directory: Path) -> Tokenizer:
    """fairseq's four tokens, the model's pieces but its first three, languages, the mask."""
    model, name = "sentencepiece.bpe.model", _class_of(directory)
    config, _ = declared_tokens(directory)
    said = config.get("additional_special_tokens") or _OF_CLASS[name].split()
    if not isinstance(said, list) or not all(isinstance(each, str) for each in said):
        raise CheckpointError(
            f"{directory}: additional_special_tokens must be a list of texts: got {shortened(said)}"
        )
    tokens = [*_FAIRSEQ, *_own_pieces(directory, model)[3:], *said, "<mask>"]
    ids = {token: index for index, token in enumerate(tokens)}
    return _made(directory, name, (model,), ids, [*said, "<mask>"], model=model)
