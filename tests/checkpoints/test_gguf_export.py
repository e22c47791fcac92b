"""A Hugging Face directory as a GGUF file: the same model, the same tokens, or a refusal by name.

That tensors are those of llama.cpp's converter is tested for every family in ``tests/families``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
import torch
from hf_tiny import DECODERS, GEMMAS, Tiny
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from polyhead.checkpoints import load_checkpoint
from polyhead.checkpoints.formats.gguf_file import GGUFFile
from polyhead.checkpoints.formats.gguf_writing import quantize_gguf
from polyhead.checkpoints.tokenizers.gguf_tokenizer import tokenizer_from_gguf
from polyhead.checkpoints.tokenizers.gguf_vocabulary import vocabulary
from polyhead.checkpoints.tokenizers.tokenizer import Tokenizer
from polyhead.errors import CheckpointError, ConfigError
from polyhead.models.quantized import unpacked_state
from polyhead.quantization import block_type

TEXT = "Hello there, the 1234 cats!\n\n  naïve 猫 🚀"
HERE = Path("here")


def byte_level(split: str = r"\p{N}") -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_end|>", *alphabet, "th", "the", "Ġt", "Ġthe", "er", "12"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "t"), ("Ġt", "he"), ("e", "r"), ("1", "2")]
    tokens[-1:-1] = ["he"]
    merges.insert(0, ("h", "e"))
    model = models.BPE({token: i for i, token in enumerate(tokens)}, merges)
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    made.add_tokens(["<tool>"])
    return made


def sentencepiece(*, prefix: bool = True) -> tokenizers.Tokenizer:
    """As Llama 2's: characters are tokens of the text or bytes, and words begin with "▁"."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += ["▁", *"Helothrcas,!123", "he", "▁t", "▁the", "th", "▁th", "er", "ere"]
    merges = [("h", "e"), ("▁", "t"), ("▁t", "he"), ("t", "h"), ("▁t", "h"), ("▁", "th")]
    merges += [("e", "r"), ("er", "e")]
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)},
        merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    made = tokenizers.Tokenizer(model)
    steps = [normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(steps)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 1)]
    )
    return made


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "sentencepiece, no prefix"])
def test_a_vocabulary_keeps_its_ids_and_special_tokens(kind: str) -> None:
    if kind == "bytes":
        special = {"eos_token": "<|endoftext|>"}
        tokenizer = Tokenizer(byte_level(), special_tokens=special, chat_template="{{ 1 }}")
    else:
        tokenizer = Tokenizer(sentencepiece(prefix=kind == "sentencepiece"), special_tokens=SPECIAL)
    keys = vocabulary(tokenizer, 300, HERE)
    again = tokenizer_from_gguf(keys, HERE)
    assert tokenizer.encode(TEXT) == again.encode(TEXT)
    assert again.decode(again.encode(TEXT)).strip() == TEXT
    assert again.special_tokens == tokenizer.special_tokens
    assert again.stop_ids == tokenizer.stop_ids
    assert again.chat_template == tokenizer.chat_template
    assert len(keys["tokenizer.ggml.tokens"]) == 300
    assert keys["tokenizer.ggml.token_type"][-1] == 5
    if kind == "bytes":
        assert keys["tokenizer.ggml.pre"] == "smollm"
        assert again.encode("a<tool>b") == tokenizer.encode("a<tool>b")
    else:
        assert keys["tokenizer.ggml.add_bos_token"] is True
        assert keys["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]


def test_tokenizers_that_the_format_cannot_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match="no name for how this tokenizer normalizes and splits"):
        vocabulary(Tokenizer(byte_level("[aeiou]")), 300, HERE)
    words = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(ConfigError, match="of type WordPiece; GGUF files are written with BPE"):
        vocabulary(Tokenizer(words), 10, HERE)
    lower = sentencepiece()
    lower.normalizer = normalizers.Lowercase()
    with pytest.raises(ConfigError, match=r"would not keep this tokenizer.*tokens"):
        vocabulary(Tokenizer(lower, special_tokens=SPECIAL), 300, HERE)


def saved(tiny: Tiny, folder: Path) -> Path:
    sizes = {"vocab_size": 300, "hidden_size": 96, "intermediate_size": 160}
    Tiny(tiny.family, {**sizes, **tiny.options}).save(folder)
    Tokenizer(byte_level(), special_tokens={"eos_token": "<|endoftext|>"}).save(folder)
    return folder


@torch.no_grad()
@pytest.mark.parametrize(
    ("tiny", "arch"),
    [
        (DECODERS["llama, llama3 rope"], "llama"),
        (DECODERS["mistral, no window"], "llama"),
        (DECODERS["mistral, window"], "phi3"),
        (DECODERS["qwen2, yarn rope"], "qwen2"),
        (GEMMAS["gemma3, MQA"], "gemma3"),
    ],
)
def test_a_directory_is_the_model_that_its_file_is(tiny: Tiny, arch: str, tmp_path: Path) -> None:
    options = dict(tiny.options)
    if arch == "gemma3":  # what a file says: every third layer sees everything, and its scale
        options |= {"query_pre_attn_scalar": 16, "head_dim": 16}
    source = saved(Tiny(tiny.family, options), tmp_path / "hf")
    types = quantize_gguf(source, tmp_path / "new.gguf", block_type("Q8_0"))
    assert set(types) == {"Q8_0", "F32"}
    wanted, found = load_checkpoint(source), load_checkpoint(tmp_path / "new.gguf", None)
    assert found.tokenizer.encode(TEXT) == wanted.tokenizer.encode(TEXT)
    assert found.config.max_positions == wanted.config.max_positions
    assert GGUFFile(tmp_path / "new.gguf").metadata["general.architecture"] == arch
    ids = torch.randint(3, 300, (1, 60))
    state, exact = unpacked_state(found.model), wanted.model.state_dict()
    for name, tensor in exact.items():
        assert (state[name] - tensor).abs().max() < 0.005 * tensor.abs().max(), name
        if tensor.ndim == 1:  # within the rounding of 1 added and taken
            assert (state[name] - tensor).abs().max() < 1e-6, name
    wanted.model.load_state_dict(state)
    assert (wanted.model(ids) - found.model(ids)).abs().max() < 1e-4


def test_a_model_without_an_architecture_is_refused_by_name(tmp_path: Path) -> None:
    target = tmp_path / "new.gguf"
    source = saved(DECODERS["qwen2, some windows"], tmp_path / "windows")
    with pytest.raises(ConfigError, match=r"'qwen2' cannot be written .*window=7"):
        quantize_gguf(source, target, block_type("Q8_0"))
    source = saved(DECODERS["llama, dynamic rope"], tmp_path / "dynamic")
    with pytest.raises(ConfigError, match="no rope type 'dynamic'"):
        quantize_gguf(source, target, block_type("Q8_0"))
    (source / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json"):
        quantize_gguf(source, target, block_type("Q8_0"))
    assert not target.exists()
