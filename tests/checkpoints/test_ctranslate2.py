"""CTranslate2 directories: its own converter wrote them, transformers' logits are what is right."""

from __future__ import annotations

import copy
import struct
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import pytest
import torch
from ctranslate2.specs.model_spec import OPTIONAL, visit_spec
from torch import Tensor

from fuzz.targets import ctranslate2 as tiny
from polyhead.checkpoints import load_checkpoint, save_checkpoint
from polyhead.checkpoints.formats.ctranslate2_file import CTranslate2File
from polyhead.errors import CheckpointError, ConfigError

SIZES = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
DECODER = {"vocab_size": 40, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 2}
T5 = {
    "vocab_size": 40,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
WHISPER = {
    "max_source_positions": 10,
    "max_target_positions": 12,
    "num_mel_bins": 8,
    "suppress_tokens": [5, 6],
    "begin_suppress_tokens": [7],
}
MARIAN = {"pad_token_id": 39, "eos_token_id": 0, "decoder_start_token_id": 39}
LLAMA = DECODER | {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
}
# What the converter asks configurations of transformers 5 for, and they no longer say.
PRE, POST = {"normalize_before": True}, {"normalize_before": False}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", SIZES, POST | {"normalize_embedding": True}),
    "mbart": (
        "MBartForConditionalGeneration",
        SIZES | {"scale_embedding": True},
        PRE | {"normalize_embedding": True},
    ),
    "pegasus": ("PegasusForConditionalGeneration", SIZES, PRE | {"normalize_embedding": False}),
    "marian": ("MarianMTModel", SIZES | MARIAN | {"activation_function": "swish"}, {}),
    "m2m_100": ("M2M100ForConditionalGeneration", SIZES | {"activation_function": "relu"}, {}),
    "t5": ("T5ForConditionalGeneration", T5, {}),
    "t5 gated": (
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        {"tie_word_embeddings": False},
    ),
    "umt5": ("UMT5ForConditionalGeneration", T5, {}),
    "whisper": ("WhisperForConditionalGeneration", SIZES | WHISPER, {}),
    "gpt2": ("GPT2LMHeadModel", DECODER | {"n_embd": 16, "n_head": 2}, {}),
    "gptj": ("GPTJForCausalLM", DECODER | {"n_embd": 16, "n_head": 2, "rotary_dim": 4}, {}),
    "bloom": ("BloomForCausalLM", DECODER | {"hidden_size": 16, "n_head": 2}, {}),
    "falcon": ("FalconForCausalLM", DECODER | {"hidden_size": 16, "num_attention_heads": 2}, {}),
    "gemma": ("GemmaForCausalLM", LLAMA | {"head_dim": 8}, {}),
    "mistral": ("MistralForCausalLM", LLAMA | {"sliding_window": 4}, {}),
    "qwen3": ("Qwen3ForCausalLM", LLAMA | {"head_dim": 8}, {}),
}


class Words:
    """A tokenizer as the converter needs one."""

    bos_token, eos_token, unk_token, pad_token = "t0", "t2", "t3", "<pad>"
    special_tokens_map: dict[str, str] = {}  # noqa: RUF012
    unk_token_id, num_madeup_words, additional_special_tokens = 3, 0, ()

    def __init__(self, size: int) -> None:
        self.size = size

    def get_vocab(self) -> dict[str, int]:
        return {self.convert_ids_to_tokens(i): i for i in range(self.size)}

    def convert_ids_to_tokens(self, number: int) -> str:
        return "<pad>" if number == 1 else f"t{number}"

    def convert_tokens_to_ids(self, token: str) -> int:
        return int(token[1:])


def _inputs(model: Any, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What transformers is given, and polyhead."""
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 38, (2, 6), generator=draws)
    if not model.config.is_encoder_decoder:
        return {"input_ids": ids}, {"ids": ids}
    ids[:, 0] = getattr(model.config, "decoder_start_token_id", 0)
    source = torch.randint(3, 38, (2, 8), generator=draws)
    if name == "whisper":
        source = torch.randn(2, 8, 20, generator=draws)
    key = model.main_input_name
    return {key: source, "decoder_input_ids": ids}, {"ids": ids, "encoder_ids": source}


@torch.no_grad()
def _converted(name: str) -> tuple[Any, Tensor, dict[str, Tensor]]:
    """The converter's specification of a tiny model, its logits, and what they are of."""
    import transformers
    from ctranslate2.converters import transformers as converters

    class_name, sizes, asked = CASES[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes)).eval()
    fixed = name in ("marian", "pegasus", "m2m_100")
    for key, parameter in model.named_parameters():
        if not (fixed and "embed_positions" in key):
            parameter.normal_(std=0.3)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    if name == "marian":
        model.model.shared.weight[39] = 0  # as every trained one has it
    theirs, ours = _inputs(model, name)
    wanted = model(**theirs).logits
    for key, value in asked.items():
        setattr(model.config, key, value)
    loader = converters._MODEL_LOADERS[type(model.config).__name__]
    spec = loader(model, Words(39 if name == "marian" else 40))
    spec.validate()
    return spec, wanted, ours


def _saved(spec: Any, folder: Path, quantized: str | None = None) -> Path:
    spec = copy.deepcopy(spec)
    spec.optimize(quantized)
    folder.mkdir()
    spec.save(str(folder))
    return folder


@torch.no_grad()
@pytest.mark.parametrize("name", list(CASES))
def test_converted_models_have_transformers_logits(name: str, tmp_path: Path) -> None:
    spec, wanted, inputs = _converted(name)
    loaded = load_checkpoint(_saved(spec, tmp_path / "model"))
    words = 39 if name == "marian" else 40  # its start token is no word
    torch.testing.assert_close(
        loaded.model(**inputs)[..., :words], wanted[..., :words], atol=4e-6, rtol=1e-5
    )
    if name == "marian":
        assert loaded.generation.values["decoder_start_token_id"] == 39
        assert loaded.model(**inputs)[..., 39].eq(-torch.inf).all()
    if name == "bart":
        assert loaded.generation.values == {
            "bos_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 2,
        }
        assert loaded.config.eos_token_ids == (2,)
    if name == "whisper":
        assert loaded.generation.values["suppress_tokens"] == [5, 6]
        assert loaded.generation.values["begin_suppress_tokens"] == [7]


@torch.no_grad()
def test_every_type_of_number_is_read_as_it_was_rounded(tmp_path: Path) -> None:
    """Each weight is within half a step of what it was; a step is the type's, or its row's."""
    spec, _, _ = _converted("whisper")
    first, second = (spec.decoder.layer[i].ffn.linear_0 for i in (0, 1))
    second.weight = first.weight  # stored once, with an alias
    exact = load_checkpoint(_saved(spec, tmp_path / "float32")).model.state_dict()
    up = [exact[f"layers.{i}.feed_forward.up_proj.weight"] for i in (0, 1)]
    assert torch.equal(*up)
    assert up[0].data_ptr() != up[1].data_ptr()  # training one leaves the other
    for kind, within in (
        ("float16", lambda w: w.abs() * 2**-11 + 2**-25),
        ("bfloat16", lambda w: w.abs() * 2**-8),
        ("int8", lambda w: w.flatten(1).abs().amax(1).view(-1, *[1] * (w.ndim - 1)) / 127 / 2),
        ("int16", lambda w: torch.full_like(w, 2.0) * 2**-11),
    ):
        folder = _saved(spec, tmp_path / kind, kind)
        loaded = load_checkpoint(folder)
        if kind.startswith("int"):
            assert np.dtype(kind).name in {
                str(each.dtype)[6:]
                for each in CTranslate2File(folder / "model.bin").variables.values()
            }
        for name, tensor in loaded.model.state_dict().items():
            old = exact[name]
            if old.ndim < 2 and kind.startswith("int"):
                assert torch.equal(tensor, old), (kind, name)
                continue
            room = within(old) * 1.001 + 1e-7
            assert ((tensor - old).abs() <= room).all(), (kind, name)
        assert load_checkpoint(folder, "auto").model.embedding.table.dtype == (
            getattr(torch, kind) if "float" in kind else torch.float32
        )


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pre_norm": False, "layernorm_embedding": True},
        {"relative_attention_bias": True, "rms_norm": True, "ffn_glu": True},
    ],
    ids=str,
)
def test_scores_are_those_of_ctranslate2_itself(options: dict[str, Any], tmp_path: Path) -> None:
    """Without a table of positions, with a zero vector first: what transformers has no file of."""
    spec = tiny.spec("translation", **options)
    spec.decoder.start_from_zero_embedding = True
    spec.validate()
    folder = _saved(spec, tmp_path / "model")
    source, target = ["t3", "t9", "t1", "</s>"], ["t5", "t2", "t7"]
    translator = ctranslate2.Translator(str(folder), compute_type="float32")
    theirs = translator.score_batch([source], [target])[0].log_probs
    loaded = load_checkpoint(folder)
    start = loaded.generation.values["decoder_start_token_id"]
    ids = [tiny.TOKENS.index(token) for token in target]
    logits = loaded.model(
        torch.tensor([[start, *ids]]),
        encoder_ids=torch.tensor([[tiny.TOKENS.index(token) for token in source]]),
    )
    ours = logits.log_softmax(-1)[0].gather(1, torch.tensor([[*ids, 1]]).mT)[:, 0]
    torch.testing.assert_close(ours, torch.tensor(theirs), atol=2e-6, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["marian", "m2m_100", "t5", "whisper"])
def test_models_whose_positions_a_family_has_are_saved_as_that_family(
    name: str, tmp_path: Path
) -> None:
    spec, wanted, inputs = _converted(name)
    loaded = load_checkpoint(_saved(spec, tmp_path / "model", "float16"))
    save_checkpoint(loaded, tmp_path / "again")
    again = load_checkpoint(tmp_path / "again")
    assert again.family == name
    torch.testing.assert_close(again.model(**inputs)[..., :39], wanted[..., :39], atol=3e-3, rtol=0)
    assert torch.equal(again.model(**inputs), loaded.model(**inputs))


def _bytes() -> bytes:
    return tiny.written("translation", "int8")["model.bin"]


def _with_option(name: str, content: bytes) -> bytes:
    """Another value for a variable without dimensions."""
    found = _bytes()
    at = found.index(name.encode() + b"\0") + len(name) + 7
    return found[:at] + content + found[at + len(content) :]


def _renamed(old: bytes, new: bytes) -> bytes:
    return _bytes().replace(old, new, 1)


DAMAGED = {
    "too short": (b"CT2", "empty or too short"),
    "version": (struct.pack("<I", 7) + _bytes()[4:], "binary version 7; versions 4, 5, 6"),
    "cut": (_bytes()[:-30], "ends early|truncated"),
    "tail": (_bytes() + b"\0", "1 bytes after its end"),
    "specification": (_renamed(b"TransformerSpec", b"TransformerSpek"), "'TransformerSpek', rev"),
    "utf-8": (_renamed(b"decoder/act", b"\xff\xfe\xfdoder/act"), "not UTF-8"),
    "no end": (_renamed(b"decoder/activation\0", b"decoder/activation!"), "has no end"),
    "heads": (_with_option("decoder/num_heads", b"\5\0"), "24 rows .* 5 query heads"),
    "no heads": (_with_option("decoder/num_heads", b"\0\0"), "among 0 query heads"),
    "activation": (_with_option("encoder/activation", b"\6"), "encoder/activation is 6"),
    "unknown": (_renamed(b"decoder/num_heads", b"decoder/nun_heads"), "num_heads"),
    "no scale": (
        _renamed(b"decoder/embeddings/weight_scale", b"decoder/embeddings/weight_scald"),
        "int8 numbers without a scale",
    ),
    "alias": (
        _bytes()[::-1].replace(b"\0thgiew/sgniddebme/redoced", b"\0thgiew/sgniddebme/redoceb", 1)[
            ::-1
        ],
        "which is not there",
    ),
}


@pytest.mark.parametrize("name", list(DAMAGED))
def test_damaged_files_are_named_in_a_sentence(name: str, tmp_path: Path) -> None:
    content, words = DAMAGED[name]
    for file, good in tiny.written("translation", "int8").items():
        (tmp_path / file).write_bytes(content if file == "model.bin" else good)
    with pytest.raises((CheckpointError, ConfigError), match=words):
        load_checkpoint(tmp_path)


def test_lengths_are_checked_before_anything_is_made(tmp_path: Path) -> None:
    """A table that claims 16 GB of numbers, and one of four billion variables."""
    head = struct.pack("<IH16sI", 6, 16, b"TransformerSpec\0", 7)
    name = struct.pack("<H2s", 2, b"a\0")
    huge = struct.pack("<IB2IBI", 1, 2, 2**16, 2**14, 0, 2**32 - 1)
    path = tmp_path / "model.bin"
    for rest, words in (
        (struct.pack("<I", 1) + name + huge[4:], "of shape .* has 4,294,967,295 bytes"),
        (
            struct.pack("<I", 1) + name + struct.pack("<B2IBI", 2, 2**15, 2**14, 0, 2**31),
            "truncated: variable 'a' ends at byte 2,147,",
        ),
        (struct.pack("<I", 2**32 - 1), "claims 4,294,967,295 variables"),
        (struct.pack("<I", 1) + name + b"\x09", "9 dimensions"),
        (struct.pack("<I", 1) + name + struct.pack("<BBI", 0, 6, 1), "type number 6"),
        (
            struct.pack("<I", 2) + (name + struct.pack("<BBIb", 0, 1, 1, 3)) * 2,
            "'a' stands twice",
        ),
    ):
        path.write_bytes(head + rest)
        with pytest.raises(CheckpointError, match=words):
            CTranslate2File(path)


def test_many_names_of_one_variable_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file could otherwise ask for any amount of memory."""
    made = tiny.spec("translation")
    for stack in (made.encoder, made.decoder):
        stack.layer[1].ffn.linear_1.weight = made.decoder.layer[0].ffn.linear_1.weight
    made.validate()
    folder = _saved(made, tmp_path / "model")
    read: list[str] = []
    plain = CTranslate2File.tensor

    def counted(file: CTranslate2File, name: str) -> Tensor:
        read.append(name)
        return plain(file, name)

    monkeypatch.setattr(CTranslate2File, "tensor", counted)
    load_checkpoint(folder)
    shared = {f"{side}/layer_1/ffn/linear_1/weight" for side in ("encoder", "decoder")}
    shared.add("decoder/layer_0/ffn/linear_1/weight")
    assert sum(name in shared for name in read) == 1


def test_what_is_not_built_is_refused_by_name(tmp_path: Path) -> None:
    def changed(number: int, change: Any, kind: str = "translation", **options: Any) -> Path:
        made = tiny.spec(kind, **options)
        change(made)
        made.validate()
        return _saved(made, tmp_path / str(number))

    def relative(part: Any, name: str, value: Any) -> None:
        if "relative_position" in name:
            setattr(part, name.rsplit("/", 1)[-1], np.ones((9, 4), np.float32))

    def without_k_norm(made: Any) -> None:
        made.decoder.layer[0].self_attention.k_norm.gamma = OPTIONAL

    for number, (change, options, words) in enumerate(
        (
            (
                lambda made: visit_spec(made, relative),
                {"with_relative_position": True},
                "relative_position_.*no place",
            ),
            (lambda made: made.config.add_attribute("new", 3), {}, "key 'new'"),
            (without_k_norm, {"kind": "decoder", "qk_norm": True}, "queries and keys of 'decoder"),
            (
                lambda made: made.config.add_attribute("quantization_type", 1),
                {},
                "quantization_type is 1",
            ),
        )
    ):
        with pytest.raises((CheckpointError, ConfigError), match=words):
            load_checkpoint(changed(number, change, **options))


def test_vocabularies_have_a_token_for_every_row(tmp_path: Path) -> None:
    files = dict(tiny.written("translation", None))
    text = "\n".join(tiny.TOKENS) + "\n"
    files.pop("shared_vocabulary.json")
    for name, content, words in (
        ("shared_vocabulary.txt", text, None),
        ("target_vocabulary.txt", "\n".join(tiny.TOKENS[:-1]), "19 tokens, the model's .* 20"),
        ("vocabulary.json", "[1]", "JSON list of texts"),
        ("vocabulary.json", "[", "not valid JSON"),
    ):
        folder = tmp_path / str(abs(hash((name, content))))
        folder.mkdir()
        for file, good in files.items():
            (folder / file).write_bytes(good)
        (folder / name).write_text(content)
        if words is None:
            assert load_checkpoint(folder).config.eos_token_ids == (1,)
        else:
            with pytest.raises(CheckpointError, match=words):
                load_checkpoint(folder)
