"""A vocabulary made from the texts that a model learns from.

Tokens are numbered with the end of text first and padding last, as ``TransformerConfig.vanilla``
has them. Every text ends with ``</s>``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from polyhead._utils.checks import check_int, check_one_of, check_several
from polyhead.checkpoints import Tokenizer
from polyhead.errors import InputError

END, PAD, UNKNOWN = "</s>", "<pad>", "<unk>"

Kind = Literal["bytes", "characters", "words"]
KINDS = ("bytes", "characters", "words")


def make_tokenizer(texts: Iterable[str], kind: Kind = "bytes", size: int = 8_000) -> Tokenizer:
    """A tokenizer for texts like these.

    Args:
        texts: Training texts of the vocabulary.
        kind: ``"bytes"``: subwords, pairs of bytes merged by frequency (GPT-2), which spell any
            text; ``"characters"``; or ``"words"`` between spaces. The latter two read what the
            texts do not hold as ``<unk>``.
        size: Largest number of tokens; with ``"bytes"`` at least 258.

    Raises:
        InputError: There is no text, or one that is in no list.
        ValueError: An unknown kind, or a size out of range.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    check_several("texts", texts)
    check_one_of("kind", kind, KINDS)
    check_int("size", size, least=4)
    capacity = size - 1  # for padding
    backend: Any
    trainer: Any
    if kind == "bytes":
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=max(capacity, 257),
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    else:
        backend = tokenizers.Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        if kind == "words":
            backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        else:
            backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
            backend.decoder = decoders.Fuse()
        trainer = trainers.WordLevelTrainer(
            vocab_size=capacity, special_tokens=[END, UNKNOWN], show_progress=False
        )
    known = list(texts)
    if not any(text.strip() for text in known):
        raise InputError("there are no texts to make a vocabulary of")
    backend.train_from_iterator(known, trainer)
    backend.add_special_tokens([END, PAD])
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, backend.token_to_id(END))]
    )
    names = {"eos_token": END, "pad_token": PAD}
    return Tokenizer(backend, special_tokens=names)
