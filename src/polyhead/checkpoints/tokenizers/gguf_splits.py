"""How text is split before byte-level merges, by the name in ``tokenizer.ggml.pre``.

A GGUF file has the *name* only. The table has the split of each name, taken from the original
models' tokenizer.json files and llama.cpp; an unknown name is an error, because a wrong split loads
without error and gives wrong ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_DIGIT = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENGLISH_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_THREE_DIGITS = (
    _ENGLISH_ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
)
_ONE_DIGIT = _THREE_DIGITS.replace("{1,3}", "")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BY_CASE = "|".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?{word}%s" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
)
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|"
_SENTENCES = r" ?[^(\s|.,!?…。，、।۔،)]+"
_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


@dataclass(frozen=True)
class Split:
    """How text is split before merging.

    Attributes:
        patterns: Regular expressions, each of which cuts what the ones before it left.
        ignore_merges: A piece that is a token is taken whole.
        nfc: Text is normalized to NFC.
        adds_bos: A text begins with bos unless the file says otherwise.
        adds_eos: A text ends with eos, likewise.
    """

    patterns: tuple[str, ...] = ()
    ignore_merges: bool = False
    nfc: bool = False
    adds_bos: bool = False
    adds_eos: bool = False

    def pre_tokenizer(self) -> tokenizers.pre_tokenizers.PreTokenizer:
        """The split, then bytes as characters; without patterns GPT-2's, which the library has."""
        from tokenizers import Regex, pre_tokenizers

        steps: list[Any] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not steps))
        return pre_tokenizers.Sequence(steps)


_LLAMA3 = Split((_THREE_DIGITS,), ignore_merges=True, adds_bos=True)
_DEEPSEEK3 = Split(
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        _PUNCTUATION
        + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
        + _SPACES,
    )
)
_GPT4O = Split((_BY_CASE % ((_ENGLISH_ENDINGS + "?",) * 2) + r"|\p{N}{1,3}|" + _MARKS + _SPACES,))


def _named(split: Split, *names: str) -> dict[str, Split]:
    return dict.fromkeys(names, split)


SPLITS: Mapping[str, Split] = {
    **_named(Split(), "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"),
    **_named(Split(), "gigachat", "a.x-4.0", "mellum", "modern-bert", "exaone4"),
    **_named(Split(), "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"),
    **_named(Split(adds_bos=True, adds_eos=True), "roberta-bpe", "jina-v1-en", "jina-v2-code"),
    **_named(Split((_DIGIT, _GPT2)), "smollm", "starcoder", "refact", "command-r", "codeshell"),
    **_named(Split((_DIGIT, _GPT2)), "exaone", "minerva-7b"),
    **_named(_LLAMA3, "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral"),
    **_named(_LLAMA3, "midm-2.0", "lfm2", "jina-v5-nano"),
    **_named(Split((_THREE_DIGITS,)), "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
    "qwen2": Split((_ONE_DIGIT,), nfc=True),
    **_named(
        Split((_ONE_DIGIT,)),
        "deepseek-r1-qwen",
        "kormo",
        "megrez",
        "stablelm2",
        "hunyuan",
        "f2llmv2",
        "solar-open",
        "bailingmoe",
        "bailingmoe2",
    ),
    "seed-coder": Split((_ONE_DIGIT.replace(r"\p{N}]+[\r\n]*|", r"\p{N}\r\n]+|"),)),
    "tekken": Split(
        (_BY_CASE % ("", "") + r"|\p{N}|" + _MARKS + _SPACES,), ignore_merges=True, adds_bos=True
    ),
    **_named(_GPT4O, "gpt-4o", "llama4", "minimax-m2", "kanana2", "talkie"),
    **_named(_DEEPSEEK3, "deepseek-v3", "hunyuan-dense"),
    "deepseek-coder": Split(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", _DIGIT)
    ),
    "falcon": Split((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    **_named(Split((_SENTENCES,)), "bloom", "poro-chat", "gpt3-finnish"),
    "viking": Split((_SENTENCES, _DIGIT)),
}
