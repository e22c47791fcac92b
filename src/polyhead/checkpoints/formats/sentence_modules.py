"""Files of the sentence-transformers library: what becomes of an encoder's hidden states.

    modules.json                       Transformer, then Pooling, Dense and Normalize in any order
    1_Pooling/config.json              one vector of a text: which tokens, how
    2_Dense/config.json, .safetensors  a linear map of that vector, or of each token's (ColBERT)
    config_sentence_transformers.json  prompts, similarity; lengths and markers of ColBERT (PyLate)
    sentence_bert_config.json          most tokens of a text, lower case

Cross-encoders name their activation in config.json. ColBERT's own directories have
artifact.metadata and ``linear.weight`` in place of modules.json. Modules of other names are
refused: nothing here runs code that a directory brings along.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from polyhead.checkpoints.formats.safetensors_files import WEIGHTS, read_tensor_file
from polyhead.checkpoints.json_file import parse_json, read_json, read_text
from polyhead.errors import CheckpointError, UnsupportedError, shortened

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
LIMITS = "sentence_bert_config.json"
METADATA = "artifact.metadata"
"""ColBERT's own file beside config.json."""
POOLING = "1_Pooling"
PROJECTION = "linear.weight"
"""ColBERT's projection, among the encoder's tensors where that file is."""

TOKENS = "tokens"
"""The pooling of late interaction: every token keeps its vector."""
SEPARATOR = "+"
MODES = {
    "cls": "first",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
KEYS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
}
POOLINGS = tuple(MODES.values())
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


@dataclass(frozen=True)
class Dense:
    """``activation(x Wᵀ + b)``, plus x or its projection where ``residual``.

    Attributes:
        weight: ``[out, in]``.
        bias: ``[out]``.
        activation: One of ``ACTIVATIONS``.
        residual: Whether the input is added.
        projection: ``[out, in]``, of the input that is added, where the sizes differ.
    """

    weight: Tensor
    bias: Tensor | None = None
    activation: str = "Tanh"
    residual: bool = False
    projection: Tensor | None = None


@dataclass(frozen=True)
class Normalize:
    """Every vector is divided by its length."""


@dataclass(frozen=True)
class LateInteraction:
    """How ColBERT turns texts into tokens (defaults are those of PyLate).

    Attributes:
        query_prefix: Token behind the first of a query; "" for none.
        document_prefix: Token behind the first of a document; "" for none.
        query_length: Tokens of a query; shorter ones are filled up with the mask token.
        document_length: Most tokens of a document.
        expand: Whether queries are filled up.
        attend: Whether other tokens see those that fill a query up.
        skipped: Tokens of documents without a vector.
    """

    query_prefix: str = "[Q] "
    document_prefix: str = "[D] "
    query_length: int = 32
    document_length: int = 180
    expand: bool = True
    attend: bool = False
    skipped: tuple[str, ...] = tuple(string.punctuation)


@dataclass(frozen=True)
class Sentences:
    """What files of sentence-transformers say beside the pooling; the defaults are without any.

    Attributes:
        steps: What a text's vector (each token's, in late interaction) passes through, in order.
        include_prompt: Whether tokens of the prompt are pooled too.
        max_length: Most tokens of a text; None: the model's context.
        lower_case: Whether texts are written in lower case first.
        prompts: What is put before a text, by names such as ``"query"``.
        default_prompt: Name of the one that every text gets.
        similarity: One of ``SIMILARITIES``.
        late: For late interaction.
        modules: Whether modules.json says it, or ColBERT's metadata: then the model is for vectors,
            whatever its kind.
        activation: One of ``ACTIVATIONS``, of a cross-encoder's scores; None: Sigmoid for one
            class.
    """

    steps: tuple[Dense | Normalize, ...] = (Normalize(),)
    include_prompt: bool = True
    max_length: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: str = "cosine"
    late: LateInteraction | None = None
    modules: bool = False
    activation: str | None = None


def read_pooling(directory: Path) -> str:
    """The pooling that ``1_Pooling/config.json`` sets, "mean" without one.

    Several are joined by "+", in the order in which their vectors stand side by side. One that is
    unknown comes back as the file calls it.
    """
    path = directory / POOLING / "config.json"
    if not path.is_file():
        return "mean"
    return _pooling(read_json(path))


def _pooling(values: dict[str, Any]) -> str:
    said = values.get("pooling_mode")
    if said is not None:
        modes = said if isinstance(said, list) and said else [said]
        return SEPARATOR.join(MODES.get(str(mode), str(mode)) for mode in modes)
    true = {
        key for key, value in values.items() if key.startswith("pooling_mode_") and value is True
    }
    known = {KEYS.get(mode, f"pooling_mode_{mode}"): ours for mode, ours in MODES.items()}
    found = [ours for key, ours in known.items() if key in true]
    return SEPARATOR.join([*found, *sorted(true - set(known))]) or "mean"


def read_sentences(directory: Path, values: Mapping[str, Any]) -> tuple[str, Sentences]:
    """The pooling of a directory, and what else the library's files say.

    Args:
        directory: A Hugging Face directory.
        values: Its config.json.

    Raises:
        CheckpointError: A file is corrupt, or lacks what it should hold.
        UnsupportedError: A module that is not built; says which and where.
    """
    settings, limits = (_optional(directory / name) for name in (SETTINGS, LIMITS))
    activation = _activation(values, settings, directory)
    if not (directory / MODULES).is_file():
        if (directory / METADATA).is_file():
            return TOKENS, _colbert(directory)
        return read_pooling(directory), Sentences(activation=activation)
    pooling: str | None = None
    steps: list[Dense | Normalize] = []
    include_prompt = True
    for number, (kind, folder) in enumerate(_modules(directory / MODULES)):
        said = _optional(directory / folder / "config.json") if number else {}
        if kind == "Pooling":
            if pooling is not None or steps:
                raise _refused(directory, kind, "built only once, behind Transformer")
            pooling, include_prompt = _pooling(said), said.get("include_prompt", True) is True
        elif kind == "Dense":
            steps.append(_dense(directory / folder, said))
        elif kind == "Normalize":
            steps.append(Normalize())
    if pooling is None and not steps:  # a cross-encoder: its head is in the model
        return "mean", Sentences(max_length=_length(directory, limits), activation=activation)
    similarity = settings.get("similarity_fn_name") or "cosine"
    if similarity not in (*SIMILARITIES, "MaxSim"):
        raise UnsupportedError(
            f"{directory / SETTINGS}: similarity_fn_name must be one of {', '.join(SIMILARITIES)}, "
            f"MaxSim: got {shortened(similarity)}"
        )
    return pooling or TOKENS, Sentences(
        tuple(steps),
        include_prompt,
        _length(directory, limits),
        limits.get("do_lower_case") is True,
        _prompts(settings, directory),
        settings.get("default_prompt_name"),
        "cosine" if similarity == "MaxSim" else similarity,
        None if pooling is not None else _late(settings, directory),
        True,
        activation,
    )


LATE_KEYS = {
    "query_prefix": "query_prefix",
    "document_prefix": "document_prefix",
    "query_length": "query_length",
    "document_length": "document_length",
    "do_query_expansion": "expand",
    "attend_to_expansion_tokens": "attend",
    "skiplist_words": "skipped",
}


def _late(settings: dict[str, Any], directory: Path) -> LateInteraction:
    """Keys of PyLate's configuration; a list of skipped words becomes a tuple."""
    said: dict[str, Any] = {}
    for theirs, ours in LATE_KEYS.items():
        value, default = settings.get(theirs), getattr(LateInteraction, ours)
        if value is None:
            continue
        value = tuple(value) if isinstance(value, list) else value
        words = not isinstance(value, tuple) or all(isinstance(each, str) for each in value)
        if type(value) is not type(default) or not words or (value == 0 and type(value) is int):
            raise CheckpointError(
                f"{directory / SETTINGS}: {theirs} must be a {type(default).__name__}: got "
                f"{shortened(settings[theirs])}"
            )
        said[ours] = value
    late = LateInteraction(**said)
    return late if late.expand or not late.attend else LateInteraction(**said | {"attend": False})


def _colbert(directory: Path) -> Sentences:
    """ColBERT's own directory: linear.weight among the encoder's tensors."""
    said = read_json(directory / METADATA)
    tensors = read_tensor_file(directory / WEIGHTS)
    if PROJECTION not in tensors:
        raise CheckpointError(f"{directory / WEIGHTS} lacks {PROJECTION}, ColBERT's projection")
    late = {
        "query_prefix": said.get("query_token_id") or "[unused0]",
        "document_prefix": said.get("doc_token_id") or "[unused1]",
        "query_length": said.get("query_maxlen"),
        "document_length": said.get("doc_maxlen"),
        "attend_to_expansion_tokens": said.get("attend_to_mask_tokens"),
    }
    step = Dense(tensors[PROJECTION], activation="Identity")
    return Sentences((step,), late=_late(late, directory), modules=True)


def _activation(
    values: Mapping[str, Any], settings: Mapping[str, Any], directory: Path
) -> str | None:
    """Of a cross-encoder's scores, in three places by the library's version."""
    nested = values.get("sentence_transformers")
    name = (nested if isinstance(nested, dict) else settings).get("activation_fn")
    name = name or values.get("sbert_ce_default_activation_function")
    return None if name is None else _torch_activation(name, directory, "activation_fn")


def _torch_activation(name: object, where: Path, key: str) -> str:
    kind = str(name).rpartition(".")[2]
    if kind not in ACTIVATIONS or not str(name).startswith("torch.nn."):
        raise UnsupportedError(
            f"{where}: {key} must be one of torch.nn's {', '.join(ACTIVATIONS)}: got "
            f"{shortened(name)}"
        )
    return kind


def _modules(path: Path) -> Iterator[tuple[str, str]]:
    """The class and the folder of each module."""
    try:
        said = parse_json(read_text(path))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    known = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout")
    if not isinstance(said, list) or not said:
        raise CheckpointError(f"{path} must hold a list of modules: got {shortened(said)}")
    for number, each in enumerate(said):
        kind, folder = (
            each.get(key) if isinstance(each, dict) else None for key in ("type", "path")
        )
        if not isinstance(kind, str) or not isinstance(folder, str):
            raise CheckpointError(f"{path}: module {number} must have a type and a path, as texts")
        if ".." in Path(folder).parts or Path(folder).anchor:
            raise CheckpointError(f"{path}: path of module {number} leads out of the directory")
        package, name = kind.partition(".")[0], kind.rpartition(".")[2]
        if package not in ("sentence_transformers", "pylate") or name not in known:
            raise _refused(path.parent, kind, f"not built: only {', '.join(known)}")
        if (name == "Transformer") != (number == 0):
            raise _refused(path.parent, kind, "built only as the first module, and no other there")
        if number == 0 and folder:
            raise _refused(
                path.parent, kind, f"built only in the directory itself: load {folder} alone for "
                "its encoder, or save the directory again with sentence-transformers"
            )  # fmt: skip
        yield name, folder


def _refused(directory: Path, kind: str, why: str) -> UnsupportedError:
    return UnsupportedError(f"{directory / MODULES}: module {shortened(kind)} is {why}")


def _dense(folder: Path, values: dict[str, Any]) -> Dense:
    name = values.get("activation_function", "torch.nn.modules.activation.Tanh")
    kind = _torch_activation(name, folder / "config.json", "activation_function")
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(
            f"{folder} holds no {WEIGHTS}: save the model again with sentence-transformers, with "
            "safe_serialization=True (pickled weights are not read)"
        )
    tensors = read_tensor_file(folder / WEIGHTS)
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    sizes = values.get("out_features"), values.get("in_features")
    wrong = {*tensors} - {"linear.weight", "linear.bias", "residual.weight"}
    if weight is None or weight.shape != sizes or wrong:
        got = {name: tuple(each.shape) for name, each in tensors.items()}
        raise CheckpointError(
            f"{folder / WEIGHTS} must hold linear.weight {sizes}, and linear.bias if any: got {got}"
        )
    residual = values.get("use_residual", False) is True
    return Dense(weight, bias, kind, residual, tensors.get("residual.weight"))


def _length(directory: Path, limits: dict[str, Any]) -> int | None:
    """The library's own file, or the tokenizer's, where its later versions write it."""
    said = limits.get("max_seq_length")
    if said is None:
        said = _optional(directory / "tokenizer_config.json").get("model_max_length")
        return said if isinstance(said, int) and 0 < said < 1 << 31 else None
    if not isinstance(said, int) or isinstance(said, bool) or said < 1:
        raise CheckpointError(
            f"{directory / LIMITS}: max_seq_length must be a whole number of at least 1: got "
            f"{shortened(said)}"
        )
    return said


def _prompts(settings: dict[str, Any], directory: Path) -> dict[str, str]:
    said = settings.get("prompts") or {}
    default = settings.get("default_prompt_name")
    if not isinstance(said, dict) or not all(isinstance(each, str) for each in said.values()):
        raise CheckpointError(f"{directory / SETTINGS}: prompts must be texts by name")
    if default is not None and default not in said:
        raise CheckpointError(
            f"{directory / SETTINGS}: default_prompt_name must be one of prompts "
            f"({', '.join(said)}): got {shortened(default)}"
        )
    return said


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
