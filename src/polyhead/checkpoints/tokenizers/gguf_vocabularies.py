"""The vocabularies of encoders inside GGUF files: BERT's WordPiece, and SentencePiece's unigrams.

llama.cpp stores WordPiece as SentencePiece would: ``▁word`` begins a word, ``part`` continues it,
where BERT has ``word`` and ``##part``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyhead.families.common.keys import Keys

if TYPE_CHECKING:
    import tokenizers

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Values of tokenizer.ggml.token_type."""
_LONGEST_WORD = 100  # characters; a longer one is unknown, as in BERT's own tokenizer


def wordpiece(keys: Keys) -> tokenizers.Tokenizer:
    """BERT's tokenizer, with [CLS] and [SEP] around a text or two.

    Text is lowercased if the vocabulary has no capital letter.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    spelt = keys.texts("tokens")
    kinds = keys.wholes("token_type") or [NORMAL] * len(spelt)
    tokens = [
        token if kind == CONTROL else token[1:] if token.startswith("▁") else "##" + token
        for token, kind in zip(spelt, kinds, strict=True)
    ]
    words = [token for token, kind in zip(tokens, kinds, strict=True) if kind == NORMAL]
    lowercase = keys.flag("normalizer.lowercase", not any(word != word.lower() for word in words))

    def special(key: str, default: str) -> str:
        found = keys.whole(key, None)
        if found is None:
            return default
        if not 0 <= found < len(tokens):
            raise keys.refused(key, found, f"an id of the {len(tokens)} tokens")
        return tokens[found]

    first, last = special("cls_token_id", "[CLS]"), special("seperator_token_id", "[SEP]")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(f"{len(tokens) - len(vocabulary)} tokens occur twice")
    absent = [token for token in (first, last) if token not in vocabulary]
    if absent:
        raise ValueError(f"there is no token {absent[0]}")
    backend = tokenizers.Tokenizer(
        models.WordPiece(
            vocab=vocabulary,
            unk_token=special("unknown_token_id", "[UNK]"),
            max_input_chars_per_word=_LONGEST_WORD,
        )
    )
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.post_processor = processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", last, "$B:1", f"{last}:1"],
        special_tokens=[(token, vocabulary[token]) for token in (first, last)],
    )
    return backend


def unigram(keys: Keys, sentinels: int = 0) -> tokenizers.Tokenizer:
    """T5's and XLM-RoBERTa's tokenizer: the likeliest pieces of a text.

    Unused ids at the end (``[PAD32000]``) are left out.

    Args:
        keys: Keys of the file.
        sentinels: So many of those are ``<extra_id_99>`` ... ``<extra_id_0>``, which the format
            does not say.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    tokens, scores = keys.texts("tokens"), keys.numbers("scores")
    kinds = keys.wholes("token_type") or [NORMAL] * len(tokens)
    pieces = [*zip(tokens, map(float, scores), kinds, strict=True)]
    while pieces and pieces[-1][2] == UNUSED:
        pieces.pop()
    backend = tokenizers.Tokenizer(
        models.Unigram(
            [(token, score) for token, score, _ in pieces],
            unk_id=keys.whole("unknown_token_id", 2),
            byte_fallback=False,
        )
    )
    characters = bytes(each % 256 for each in keys.wholes("precompiled_charsmap"))
    if characters:
        # It begins with the size of what follows, for which the library reserves memory.
        if int.from_bytes(characters[:4], "little") > len(characters) - 4:
            raise ValueError("precompiled_charsmap is cut short")
        backend.normalizer = normalizers.Precompiled(characters)
    prefixed = keys.flag("add_space_prefix", True)
    spaces: Any = {"prepend_scheme": "always" if prefixed else "never"}
    steps = [pre_tokenizers.WhitespaceSplit()] * keys.flag("remove_extra_whitespaces", False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.Metaspace(**spaces)])
    backend.decoder = decoders.Metaspace(**spaces)
    if len(tokens) - len(pieces) >= sentinels > 0:
        names = [f"<extra_id_{i}>" for i in reversed(range(sentinels))]
        backend.add_special_tokens(names)
    return backend
