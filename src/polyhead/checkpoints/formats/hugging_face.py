"""Hugging Face directories: config.json, safetensors, tokenizer.json.

The families interpret keys and tensors (``polyhead.families``).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyhead.checkpoints import adapters
from polyhead.checkpoints.formats.coded import Coded, Codes
from polyhead.checkpoints.formats.hqq_codes import Numbers
from polyhead.checkpoints.formats.parts import Blocks, Parts
from polyhead.checkpoints.formats.safetensors_files import read_tensors
from polyhead.checkpoints.formats.sentence_modules import METADATA, PROJECTION, read_sentences
from polyhead.checkpoints.formats.table_codes import TableCoded
from polyhead.checkpoints.generation_config import GenerationConfig
from polyhead.checkpoints.json_file import read_json
from polyhead.checkpoints.nearest import unknown_type
from polyhead.checkpoints.tokenizers.sentencepiece_tokenizer import from_sentencepiece
from polyhead.checkpoints.tokenizers.tokenizer import Tokenizer
from polyhead.config import TransformerConfig
from polyhead.errors import CheckpointError
from polyhead.families import find_family, is_known, read_config, text_of
from polyhead.families.common.quantization import read_scheme
from polyhead.families.common.tensors import Tensors
from polyhead.native import code
from polyhead.quantization import of_rows, readable, scaled

OWN = "polyhead"
"""The model_type of directories whose config.json is a ``TransformerConfig`` as it is."""


def own_config(config: TransformerConfig) -> dict[str, Any]:
    """config.json's object in polyhead's own form."""
    return {"model_type": OWN, "transformer": config.to_dict()}


def read_tokenizers(directory: Path) -> tuple[Tokenizer | None, Tokenizer | None]:
    """Tokenizers of source and target texts; None where there are none.

    Raises:
        CheckpointError: a file is corrupt.
    """
    if (directory / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_directory(directory)
        return tokenizer, tokenizer
    return from_sentencepiece(directory) or (None, None)


def read_directory(
    directory: Path,
    adapter: Path | None = None,
    *,
    keep: bool = False,
    dtype: torch.dtype | None = None,
    family: str | None = None,
) -> Parts:
    """Reads a Hugging Face directory; its tensors stay memory-mapped.

    Args:
        directory: Hugging Face directory that holds config.json.
        adapter: the directory of a LoRA adapter to merge into the weights.
        keep: leave weights that are codes of few bits in blocks that native code reads in place,
            and matrices of 16 bits beside them too. Others, or without native code, are numbers.
        dtype: of the numbers that codes become; default bfloat16 for 8-bit floats, as DeepSeek's
            own conversion does, and otherwise that of their scales.
        family: read as this, whatever ``model_type`` says; of a multimodal file its text model.

    Raises:
        CheckpointError: a file is missing, truncated or corrupt, or a tied head differs.
        ConfigError: config.json says something that is not understood or not supported.
    """
    path = directory / "config.json"
    values = read_json(path)
    tensors = read_tensors(directory)
    tokenizer, target_tokenizer = read_tokenizers(directory)
    generation = GenerationConfig.from_directory(directory, values)
    pooling, sentences = read_sentences(directory, values)
    if sentences.late is not None and (directory / METADATA).is_file():  # ColBERT's own class
        tensors.pop(PROJECTION, None)
        values = {**values, "architectures": ["BertModel"]}
    if values.get("model_type") == OWN:
        if adapter is not None:
            raise CheckpointError(f"{directory}: adapters are not merged into polyhead's own form")
        if family is not None:
            raise CheckpointError(f"{directory}: polyhead's own form is of no family: got {family}")
        config = TransformerConfig.from_dict(values.get("transformer", {}))
        return Parts(
            config,
            tensors,
            tokenizer,
            generation=generation,
            target_tokenizer=target_tokenizer,
            pooling=pooling,
            sentences=sentences,
        )
    text = text_of(values, path)
    if family is not None:
        text = replace(text, values={**text.values, "model_type": family})
    elif not is_known(kind := text.values.get("model_type")) and isinstance(kind, str):
        raise unknown_type(text.values, text.found(tensors, directory).tensors, text.where)
    known = find_family(text.values.get("model_type"), text.where)
    found = text.found(tensors, directory)
    tensors = dict(found.tensors)
    values = {**found.values, **known.observed(found.values, tensors)}
    config = text.read(read_config(values, text.where))
    scheme, table = read_scheme(values, text.where), known.tensors_of(values)
    blocks: dict[str, Blocks] = {}
    kept_names: dict[str, str] = {}
    dropped: list[str] = []
    if scheme is not None:
        codes = Codes(tensors, scheme, directory)
        blocks, kept_names, dropped = put_numbers(
            codes, tensors, table, config, directory, keep=keep and adapter is None, dtype=dtype
        )
    if adapter is not None:
        tensors = adapters.merged(tensors, adapter, table.prefix, text.bare)
    state, file_names = table.to_ours(tensors, config, directory)
    if config.head == "tied":
        _drop_tied_copy(state, file_names, directory)
    if blocks:
        blocks |= halves(state)
    return Parts(
        config,
        state,
        tokenizer,
        ignored=(
            *found.left_out,
            *(found.names.get(name, name) for name in dropped),
            *(found.names.get(name, name) for name in tensors if table.is_dropped(name)),
        ),
        file_names={
            ours: found.names.get(theirs, theirs)
            for ours, theirs in (file_names | kept_names).items()
        },
        family=known.written_as or known.model_type,
        left_out=(*text.left_out(found.left_out), *table.modules_left_out(tensors)),
        generation=generation,
        pooling=pooling,
        sentences=sentences,
        target_tokenizer=target_tokenizer,
        blocks=blocks,
    )


def put_numbers(
    codes: Codes,
    tensors: dict[str, Tensor],
    table: Tensors,
    config: TransformerConfig,
    where: Path,
    *,
    keep: bool,
    dtype: torch.dtype | None,
) -> tuple[dict[str, Blocks], dict[str, str], list[str]]:
    """Puts the numbers of codes among a file's tensors.

    Args:
        codes: Of these tensors.
        tensors: By the file's names.
        table: Of the family.
        config: Configuration of the model.
        where: The directory, for messages.
        keep: As of ``read_directory``, and so ``dtype``.
        dtype: Of the numbers.

    Returns:
        What stays in blocks, what the file calls it, and the names of codes that no output depends
        on.
    """
    blocks: dict[str, Blocks] = {}
    names: dict[str, str] = {}
    dropped: list[str] = []
    numbers: dict[str, Tensor] = {}
    for name, each in codes:
        if table.is_dropped(name):
            dropped.append(name)
        elif keep and not isinstance(each, Numbers) and _stays(name, each, table, config):
            made, called = _placed(name, each, table, config, where)
            blocks |= made
            names |= called
        else:
            numbers[name] = each.numbers(dtype or each.dtype)
    tensors |= numbers
    return blocks, names, dropped


def _stays(
    name: str, weight: Coded | TableCoded, table: Tensors, config: TransformerConfig
) -> bool:
    """Whether codes can be read in place, and are of no head that repeats the embedding."""
    native = code()
    if isinstance(weight, TableCoded):
        stacked = weight.gguf_type if table.moves_rows(name, transposed=True) else None
        return native is not None and stacked is not None and readable(native, stacked)
    return (
        native is not None
        and weight.in_runs
        and table.moves_rows(name)
        and not (config.head == "tied" and table.our_name(name) == "head.weight")
        and readable(native, weight.kind)
    )


def _placed(
    name: str, weight: Coded | TableCoded, table: Tensors, config: TransformerConfig, where: Path
) -> tuple[dict[str, Blocks], dict[str, str]]:
    """polyhead's matrices of one of the file's, whose rows may move, and what the file calls each.

    Rows that lie next to each other stay in the file, with their scales if those are theirs alone.
    """
    if isinstance(weight, TableCoded):
        octets, kind = weight.gguf_blocks()
        numbered = torch.arange(len(octets), device="cpu").view(weight.shape[0], 1, -1)
        rows_of, called = table.to_ours({name: numbered}, config, where)
        return {ours: Blocks(octets[row.flatten()], kind) for ours, row in rows_of.items()}, called
    places, called = table.to_ours(
        {name: torch.arange(weight.shape[0], device="cpu")[:, None]}, config, where
    )
    made = {}
    for ours, rows in places.items():
        chosen, by = rows.flatten(), weight.scales
        first, last = int(chosen[0]), int(chosen[0]) + len(chosen)
        if not torch.equal(chosen, torch.arange(first, last, device="cpu")):
            made[ours] = Blocks(weight.blocks[chosen], weight.kind, of_rows(by, chosen))
            continue
        if first % by.rows:
            by = of_rows(by, chosen)
        else:
            groups = slice(first // by.rows, -(-last // by.rows))
            zeros = None if by.zeros is None else by.zeros[groups]
            by = by._replace(scales=by.scales[groups], zeros=zeros)
        made[ours] = Blocks(weight.blocks[first:last], weight.kind, by)
    return made, called


def halves(state: dict[str, Tensor]) -> dict[str, Blocks]:
    """Matrices of 16 bits, taken out of a state: they stay beside codes, as the file holds them."""
    kinds = {torch.float16: scaled.F16, torch.bfloat16: scaled.BF16}
    found = {
        name: tensor
        for name, tensor in state.items()
        if tensor.ndim == 2 and tensor.dtype in kinds and not tensor.shape[1] % 32
    }
    for name in found:
        del state[name]
    return {
        name: Blocks(tensor.contiguous().view(torch.uint8), kinds[tensor.dtype])
        for name, tensor in found.items()
    }


def _drop_tied_copy(state: dict[str, Tensor], file_names: dict[str, str], directory: Path) -> None:
    """Some files store a tied head a second time; it has to be the embedding."""
    copy, embedding = state.pop("head.weight", None), state.get("embedding.tokens.weight")
    if copy is not None and embedding is not None and not torch.equal(copy, embedding):
        raise CheckpointError(
            f"{directory}: {file_names['head.weight']} differs from the embedding, though "
            f"config.json says tie_word_embeddings; one of the two is wrong"
        )
