"""Every file that cannot be right is one clear sentence that names it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf_tiny import damaged, write_gguf
from hf_tiny import BERTS, DECODERS
from safetensors.torch import load_file, save_file

from polyhead.checkpoints import load_checkpoint
from polyhead.errors import CheckpointError, ConfigError, PolyheadError, shortened


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(folder / "tiny.gguf", DECODERS["llama, GQA"].build())


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    DECODERS["llama, GQA"].save(tmp_path)
    return tmp_path


def _refused(source: Path, words: str, path: Path | None = None) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        load_checkpoint(source)
    message = str(caught.value)
    assert str(path or source) in message
    assert "\n" not in message


# GGUF


def test_empty_gguf(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()
    _refused(path, "is empty or too short to be a GGUF file")


def test_text_named_gguf(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("This is a note about a model and not a model at all.")
    _refused(path, "is not a GGUF file: it begins with b'This'")


def test_other_versions_and_byte_orders(gguf_file: Path, tmp_path: Path) -> None:
    _refused(damaged(tmp_path / "1.gguf", gguf_file, at=4, value=b"\1\0\0\0"), "GGUF version 1;")
    big = damaged(tmp_path / "2.gguf", gguf_file, at=4, value=b"\0\0\0\3")
    _refused(big, "is a big-endian GGUF file")


@pytest.mark.parametrize("kept", [24, 60, 500, 2000, 5000, 9000])
def test_gguf_cut_in_its_header(kept: int, gguf_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(gguf_file.read_bytes()[:kept])
    _refused(path, "truncated")


def test_gguf_cut_in_its_tensors(gguf_file: Path, tmp_path: Path) -> None:
    data = gguf_file.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[:-1000])
    _refused(path, r"is truncated: tensor '\S+' ends at byte [\d,]+, the file at [\d,]+")


@pytest.mark.parametrize("at", [8, 16, 24])
def test_gguf_with_impossible_counts(at: int, gguf_file: Path, tmp_path: Path) -> None:
    path = damaged(tmp_path / "bad.gguf", gguf_file, at=at, value=b"\xff" * 8)
    _refused(path, "truncated or corrupt")


def test_gguf_with_a_header_that_is_not_utf8(gguf_file: Path, tmp_path: Path) -> None:
    at = gguf_file.read_bytes().index(b"general.architecture")
    path = damaged(tmp_path / "bad.gguf", gguf_file, at=at, value=b"\xff\xfe")
    _refused(path, "a string of its header is not UTF-8")


def test_gguf_with_unknown_types(gguf_file: Path, tmp_path: Path) -> None:
    data = gguf_file.read_bytes()
    at = data.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    path = damaged(tmp_path / "a.gguf", gguf_file, at=at, value=b"\xee\0\0\0")
    _refused(path, "tensor 'output_norm.weight' has type number 238, which is not known")
    at = data.index(b"general.architecture") + len(b"general.architecture")
    path = damaged(tmp_path / "b.gguf", gguf_file, at=at, value=b"\x63\0\0\0")
    _refused(path, "metadata of unknown type 99")


@pytest.mark.parametrize("seed", range(60))
def test_random_damage_is_never_a_crash(seed: int, gguf_file: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(seed)
    at = int(torch.randint(0, 9000, (), generator=generator))
    value = bytes(torch.randint(0, 256, (4,), generator=generator, dtype=torch.uint8).tolist())
    path = damaged(tmp_path / "bad.gguf", gguf_file, at=at, value=value)
    with contextlib.suppress(PolyheadError):
        load_checkpoint(path)


HEAD_SIZES = ("attention__key_length", "attention__value_length", "rope__dimension_count")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"embedding_length": 2**31}, ""),
        ({"attention__key_length": 10**8}, "value_length is 8"),
        (dict.fromkeys(HEAD_SIZES, 10**8), "heads of 100,000,000 features, more than any tensor"),
        ({"attention__head_count": 2**31 - 1}, ""),
        ({"block_count": 10_000}, "the tensors of layer"),
    ],
)
def test_gguf_sizes_that_its_tensors_have_not_are_refused_at_once(
    settings: dict[str, int], words: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "big.gguf", DECODERS["llama, GQA"].build(), **settings)
    began = time.process_time()
    with pytest.raises(PolyheadError, match=rf"big\.gguf.*{words}"):
        load_checkpoint(path)
    assert time.process_time() - began < 2


# Hugging Face directories


def test_directory_without_config(tmp_path: Path) -> None:
    _refused(tmp_path, r"is a directory without config\.json")


def test_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("notes")
    _refused(path, "is not a GGUF file; give a .gguf file or the directory that holds config.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"{'model_type': 'llama'}", "is not valid JSON"),
        (b'{"model_type": "llama"', "is not valid JSON"),
        (b"[1, 2]", "must hold a JSON object: got list"),
        ('{"model_type": "llåma"}'.encode("latin-1"), "is not UTF-8 text: byte 18 is not valid"),
        (b'{"vocab_size": ' + b"9" * 5_000 + b"}", "a whole number has 5,000 digits"),
        (b'{"a": ' + b"[" * 100_000, "is not valid JSON: it is nested too deep"),
        (b'{"vocab_size": 3, "vocab_size": 4}', "key 'vocab_size' stands twice in one object"),
    ],
)
def test_config_that_is_no_json_object(content: bytes, words: str, llama: Path) -> None:
    (llama / "config.json").write_bytes(content)
    _refused(llama, words, llama / "config.json")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:5],
        lambda data: data[:200],
        lambda data: data[:-100],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:20] + b"\xff\xff" + data[22:],
        lambda data: b"not safetensors at all, but long enough to have a header of some kind",
    ],
)
def test_damaged_safetensors(damage: Callable[[bytes], bytes], llama: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    _refused(llama, "is (empty|truncated or not a safetensors file)", path)


def test_weights_only_as_a_pickle_are_never_opened(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "pytorch_model.bin").write_bytes(b"\x80\x04cposix\nsystem\n")
    _refused(llama, r"only as a pickle \(pytorch_model\.bin\), and unpickling runs whatever code")


def test_directory_without_weights(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    _refused(llama, r"holds no model\.safetensors")


def test_missing_shard_and_bad_index(tmp_path: Path) -> None:
    DECODERS["llama, GQA"].build().save_pretrained(tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    _refused(tmp_path, "is missing, though model.safetensors.index.json names it", shard)
    index = tmp_path / "model.safetensors.index.json"
    for name in ("../../etc/passwd", "x" * 5_000, "a\0.safetensors", [], {}, None, 3):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        _refused(tmp_path, "which is no file of its directory", index)
    index.write_text("{}")
    _refused(tmp_path, "has no weight_map", index)


def _change(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def test_missing_extra_and_misshapen_tensors_are_named(llama: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    whole = (llama / "model.safetensors").read_bytes()
    _change(llama, lambda tensors: tensors.pop(name))
    _refused(llama, r"tensor 'layers\.1\.attention\.k_proj\.weight' is missing")
    (llama / "model.safetensors").write_bytes(whole)
    _change(llama, lambda tensors: tensors.update({name: tensors[name][:-1]}))
    _refused(
        llama,
        r"tensor 'model\.layers\.1\.self_attn\.k_proj\.weight' \(layers\.1\.attention\.k_proj\."
        r"weight\) must have shape \[16, 48\]: got \[15, 48\]",
    )
    (llama / "model.safetensors").write_bytes(whole)
    _change(llama, lambda tensors: tensors.update({"model.layers.0.gate.weight": torch.ones(3)}))
    _refused(llama, r"tensor 'model\.layers\.0\.gate\.weight' is one that the configuration has no")
    (llama / "model.safetensors").write_bytes(whole)
    _change(llama, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    _refused(llama, r"k_proj.* has dtype int8; only float32, bfloat16")


def test_bias_that_the_configuration_does_not_announce(tmp_path: Path) -> None:
    DECODERS["llama, biases"].save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["attention_bias"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    _refused(
        tmp_path, r"_proj\.bias' \(layers\.0\.attention\.\w_proj\.bias\) is one that .*11 more\)"
    )


def test_tied_head_may_be_stored_twice_but_not_differ(tmp_path: Path) -> None:
    DECODERS["llama, tied"].save(tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    _change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    load_checkpoint(tmp_path)
    _change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    _refused(tmp_path, r"lm_head\.weight differs from the embedding")


def test_task_head_is_one_tensor_too_many(tmp_path: Path) -> None:
    BERTS["bert"].save(tmp_path)
    _change(tmp_path, lambda tensors: tensors.update({"classifier.weight": torch.ones(2, 48)}))
    _refused(tmp_path, r"'classifier\.weight' .*is one that the configuration has no place for")


def test_broken_and_missing_tokenizers(llama: Path) -> None:
    loaded = load_checkpoint(llama)
    assert not loaded.has_tokenizer
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json .*so text cannot"):
        loaded.tokenizer.encode("text")
    (llama / "tokenizer.json").write_text('{"model": 3}')
    _refused(llama, "is not a valid tokenizer file", llama / "tokenizer.json")


def test_tokenizer_larger_than_the_vocabulary(llama: Path) -> None:
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(132)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(llama / "tokenizer.json"))
    _refused(llama, "the tokenizer has 132 tokens, the model's vocabulary 131")


def test_unreadable_file(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    _refused(llama, "cannot be read: Permission denied", llama / "config.json")


def test_json_of_any_length_is_not_read(llama: Path) -> None:
    with (llama / "config.json").open("wb") as file:
        file.truncate(33 << 20)
    _refused(llama, "at most 33,554,432 are read", llama / "config.json")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("hidden_act", [], r"hidden_act is \[\]; supported is silu"),
        ("intermediate_size", 10**40, "intermediate_size must be a whole number of 64 bits"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps must be a number up to 1e"),
        ("rope_scaling", {"rope_type": {}}, "rope type must be one of default"),
        ("rope_theta", 1e308, "rope_theta must be a number up to 1e"),
        ("attention_bias", "y" * 9_999, r"attention_bias must be true or false: got '\S{,200}$"),
        ("z" * 9_999, 1, r"key '\S{,200} \(value 1\) is not understood"),
    ],
)
def test_settings_that_no_model_has(name: str, value: object, words: str, llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    config.pop("rope_parameters")
    (llama / "config.json").write_text(json.dumps(config | {name: value}))
    with pytest.raises(ConfigError, match=words):
        load_checkpoint(llama)


def test_sizes_beyond_all_bounds(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"vocab_size": 2**62}))
    with pytest.raises(ConfigError, match="sizes that no tensor can have"):
        load_checkpoint(llama)


def test_unknown_precision(llama: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype must be one of torch\.float32.*got torch\.int8"):
        load_checkpoint(llama, dtype=torch.int8)


def test_long_names_and_values_are_cut_in_messages() -> None:
    assert len(shortened("x" * 30_000)) == len(shortened(["x"] * 9_999)) == 200
    assert shortened(10**9_999) == "a number of 33,216 bits"
    for quoted in (repr("a b" * 9_999), '"' + "a b" * 9_999 + '"', "x" * 30_000):
        said = str(CheckpointError(f"tensor {quoted} is missing"))
        assert said.startswith("tensor ")
        assert said.endswith("... is missing")
        assert len(said) == len("tensor  is missing") + 200
    assert len(str(CheckpointError("one word " * 9_999))) == 2_000
    assert str(CheckpointError("a path /" + "x" * 1_000)).endswith("x" * 1_000)
