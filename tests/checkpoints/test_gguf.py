"""GGUF files of every supported architecture and storage type equal the model they were made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_tiny import float16_is_exact, write_gguf
from hf_tiny import DECODERS, Tiny

from polyhead.checkpoints import load_checkpoint
from polyhead.checkpoints.formats.gguf_file import GGUFFile
from polyhead.config import RopeConfig
from polyhead.errors import CheckpointError, ConfigError
from polyhead.families import families, find_gguf, read_settings
from polyhead.families.common.config_json import read_config
from polyhead.families.common.gguf_states import Rates
from polyhead.families.common.steps import At, RotaryPairs

LLAMA = DECODERS["llama, GQA"]
_SCALES = {"embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 9.0}
Kind = gguf.GGMLQuantizationType


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        "llama, GQA",
        "llama, MQA",
        "llama, tied",
        "llama, biases",
        "llama, explicit head_dim",
        "qwen2",
        "qwen3",
    ],
)
def test_architectures_equal_their_source(name: str, tmp_path: Path) -> None:
    theirs = DECODERS[name].build()
    ours = load_checkpoint(write_gguf(tmp_path / "tiny.gguf", theirs))
    ids = DECODERS[name].ids()
    assert (ours.model(ids) - theirs(ids).logits).abs().max() < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16])
def test_half_precision_is_kept_exactly(kind: Kind, tmp_path: Path) -> None:
    theirs = LLAMA.build()
    float16_is_exact(theirs)
    ours = load_checkpoint(write_gguf(tmp_path / "tiny.gguf", theirs, kind=kind))
    ids = LLAMA.ids()
    assert (ours.model(ids) - theirs(ids).logits).abs().max() < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_quantised_tensors_equal_the_packages_own_reader(kind: Kind, tmp_path: Path) -> None:
    theirs = Tiny("Llama", {"hidden_size": 96, "intermediate_size": 160}).build()
    path = write_gguf(tmp_path / "tiny.gguf", theirs, kind=kind)
    file = GGUFFile(path)
    for wanted in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(wanted.data, wanted.tensor_type)
        assert np.array_equal(file.tensor(wanted.name).numpy(), values), wanted.name
    assert file.tensors["blk.0.attn_q.weight"].type_name == kind.name
    load_checkpoint(path)


def test_metadata_equals_the_packages_own_reader(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf", LLAMA.build(), some__list=[1, 2, 3], flag=True, share=1e-5
    )
    file = GGUFFile(path)
    fields = {
        key: field.contents()
        for key, field in gguf.GGUFReader(path).fields.items()
        if not key.startswith("GGUF.")
    }
    assert fields.keys() == file.metadata.keys()
    for key, wanted in fields.items():
        assert file.metadata[key] == (pytest.approx(wanted) if type(wanted) is float else wanted)
    assert file.metadata["llama.share"] == 1e-5  # as it was written, not the float32 beside it


@torch.no_grad()
def test_scaled_rotary_embedding_equals_transformers(tmp_path: Path) -> None:
    yarn = DECODERS["llama, yarn rope"]
    theirs = yarn.build()
    path = write_gguf(
        tmp_path / "yarn.gguf",
        theirs,
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=16,
        rope__scaling__finetuned=True,
    )
    assert (load_checkpoint(path).model(yarn.ids()) - theirs(yarn.ids()).logits).abs().max() < 1e-4

    linear = DECODERS["llama, linear rope"]
    theirs = linear.build()
    path = write_gguf(tmp_path / "linear.gguf", theirs, rope__scaling__factor=4.0)
    ours = load_checkpoint(path)
    assert (ours.model(linear.ids()) - theirs(linear.ids()).logits).abs().max() < 1e-4


@pytest.mark.parametrize("setting", ["attn_factor", "yarn_ext_factor", "yarn_attn_factor"])
def test_a_factor_of_yarn_that_is_not_read_may_be_1(setting: str, tmp_path: Path) -> None:
    stated = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    theirs = LLAMA.build()
    absent = load_checkpoint(write_gguf(tmp_path / "absent.gguf", theirs, **stated)).config
    for value in (1.0, 0.0, 2.0):
        stated[f"rope__scaling__{setting}"] = value
        path = write_gguf(tmp_path / f"{value}.gguf", theirs, **stated)
        if value == 1.0:
            assert load_checkpoint(path).config == absent
            continue
        with pytest.raises(ConfigError, match=rf"{setting} is {value}; supported is 1\.0"):
            load_checkpoint(path)


@torch.no_grad()
def test_llama3_scaling_worked_out_per_pair_equals_transformers(tmp_path: Path) -> None:
    tiny = DECODERS["llama, llama3 rope"]
    theirs = tiny.build()
    scaled = theirs.model.rotary_emb.inv_freq
    plain = 500.0 ** -(torch.arange(0, 8, 2) / 8)
    assert not torch.allclose(scaled, plain)
    path = write_gguf(tmp_path / "tiny.gguf", theirs, tensors={"rope_freqs.weight": plain / scaled})
    assert (load_checkpoint(path).model(tiny.ids()) - theirs(tiny.ids()).logits).abs().max() < 1e-4


@torch.no_grad()
def test_heads_may_differ_from_layer_to_layer(tmp_path: Path) -> None:
    """The last layer's kv heads are written out, one for every query head."""
    theirs, ids = LLAMA.build(), LLAMA.ids()
    wanted = theirs(ids).logits
    attention = theirs.model.layers[2].self_attn
    for module in (attention.k_proj, attention.v_proj):
        rows = module.weight.view(2, 8, -1)
        module.weight = torch.nn.Parameter(rows.repeat_interleave(3, dim=0).flatten(0, 1))
    order = [8 * head + i for head in range(6) for i in (0, 4, 1, 5, 2, 6, 3, 7)]
    path = write_gguf(
        tmp_path / "tiny.gguf",
        theirs,
        replaced={"blk.2.attn_k.weight": attention.k_proj.weight.detach()[order]},
        attention__head_count=[6] * 3,
        attention__head_count_kv=[2, 2, 6],
    )
    ours = load_checkpoint(path)
    assert [layer.attention.num_kv_heads for layer in ours.config.layers] == [2, 2, 6]
    assert (ours.model(ids) - wanted).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architecture": "novel"}, r"general\.architecture is 'novel'; supported are .*llama"),
        ({"architecture": "step35"}, r"'step35', which is not supported: the divisors of rotary"),
        ({"architecture": "baichuan"}, r"'baichuan', which is not supported: of all but 7B's 32"),
        ({"architecture": "xverse", "scale": 2}, r"key 'xverse\.scale' .* is not understood"),
        (
            {"architecture": "deci", "attention__head_count": [6, 0, 6]},
            r"deci\.attention\.head_count is 0; supported is a whole number from 1",
        ),
        (
            {"architecture": "minicpm", **_SCALES, "residual_scale": None},
            r"key 'minicpm\.residual_scale' is missing",
        ),
        (
            {"architecture": "bailingmoe", "expert_weights_norm": False},
            r"expert_weights_norm must be True, .* got False",
        ),
        ({"architecture": "minicpm", **_SCALES, "attention__head_count": 0}, r"head_count is 0"),
        ({"architecture": "bailingmoe"}, r"expert_weights_norm must be True, .* got None"),
        ({"attention__sliding_window": 512}, r"llama\.attention\.sliding_window.*not understood"),
        ({"rope__scaling__type": "longrope"}, r"rope\.scaling\.type is 'longrope'"),
        ({"rope__scaling__attn_factor": 2.0}, r"rope\.scaling\.attn_factor.*2\.0"),
        (
            {"rope__dimension_count": 10},
            r"dimension_count is 10; supported is an even number up to 8",
        ),
        ({"expert_weights_scale": 2.0}, r"llama\.expert_weights_scale.*not understood"),
        ({"attention__causal": False}, r"llama\.attention\.causal is False"),
        ({"context_length": None}, r"key 'llama\.context_length' is missing"),
        ({"attention__head_count": [6, 6]}, r"attention\.head_count is \[6, 6\]"),
        ({"attention__head_count": 5}, r"num_kv_heads must divide num_heads"),
        ({"embedding_length": "wide"}, r"embedding_length is 'wide'; supported is a number"),
        ({"block_count": 0}, r"llama\.block_count is 0; supported is 1 to 10000"),
        ({"block_count": "many"}, r"llama\.block_count must be a whole number: got 'many'"),
    ],
)
def test_settings_that_are_not_understood_are_errors_by_name(
    change: dict[str, object], words: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA.build(), **change)
    with pytest.raises(ConfigError, match=words):
        load_checkpoint(path)


def test_tensors_that_do_not_fit_are_errors_by_name(tmp_path: Path) -> None:
    theirs = LLAMA.build()
    extra = write_gguf(
        tmp_path / "a.gguf", theirs, tensors={"rope_factors_long.weight": torch.ones(4)}
    )
    with pytest.raises(CheckpointError, match=r"'rope_factors_long\.weight' is one that"):
        load_checkpoint(extra)
    fewer = write_gguf(tmp_path / "b.gguf", theirs, block_count=2)
    with pytest.raises(
        CheckpointError, match=r"'blk\.2\.\S+' \(layers\.2\.\S+\) is one that.*more"
    ):
        load_checkpoint(fewer)
    more = write_gguf(tmp_path / "c.gguf", theirs, block_count=4)
    with pytest.raises(CheckpointError, match="the tensors of layer 3 are missing"):
        load_checkpoint(more)
    wide = write_gguf(tmp_path / "d.gguf", theirs, feed_forward_length=96)
    with pytest.raises(CheckpointError, match=r"must have shape \[\d+, \d+\]: got \[\d+, \d+\]"):
        load_checkpoint(wide)


def test_only_rotated_rows_change_their_order(tmp_path: Path) -> None:
    theirs = LLAMA.build()
    with torch.no_grad():
        for i, row in enumerate(theirs.model.layers[0].self_attn.k_proj.weight):
            row.fill_(i)
    whole = write_gguf(tmp_path / "whole.gguf", theirs)
    stored = GGUFFile(whole).tensor("blk.0.attn_k.weight")[:, 0]
    assert stored[:8].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    loaded = load_checkpoint(whole)
    ours = loaded.model.layers[0].attention.k_proj.weight[:, 0]
    assert ours.tolist() == list(range(16))
    attention = replace(loaded.config.layers[0].attention, rope=RopeConfig(dim=4))
    layers = (replace(loaded.config.layers[0], attention=attention),)
    at = At(replace(loaded.config, layers=layers), "layers.0.attention.k_proj.weight")
    (ours,) = RotaryPairs().to_ours(stored, at)
    assert ours[:8].tolist() == [0, 1, 4, 5, 2, 6, 3, 7]
    assert torch.equal(RotaryPairs().to_theirs([ours], at), stored)


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.int32, np.int64])
def test_whole_numbers_are_read_as_they_are(kind: type[np.signedinteger], tmp_path: Path) -> None:
    wanted = np.arange(-6, 6, dtype=kind).reshape(3, 4) * np.iinfo(kind).max // 8
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("numbers", wanted)
    _write(writer)
    assert np.array_equal(GGUFFile(tmp_path / "x.gguf").tensor("numbers").numpy(), wanted)


def test_q8_1_is_scale_times_code(tmp_path: Path) -> None:
    codes = np.arange(-64, 64, dtype=np.int8).reshape(4, 32)
    scales = np.array([[0.5], [2.0], [-1.0], [0.25]], np.float32)
    sums = scales * codes.sum(1, keepdims=True, dtype=np.float32)
    rows = np.concatenate([part.view(np.uint8) for part in (scales, sums, codes)], axis=1)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("w", rows.reshape(2, 80), raw_dtype=Kind.Q8_1)
    _write(writer)
    got = GGUFFile(tmp_path / "x.gguf").tensor("w")
    assert np.array_equal(got.numpy(), (scales * codes).reshape(2, 64))


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_what_a_scaling_lacks_is_named_as_in_the_file(tmp_path: Path) -> None:
    stated = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA.build(), **stated)
    file = GGUFFile(path)
    family = find_gguf(file.metadata, path)
    metadata = {**file.metadata, "llama.rope.scaling.original_context_length": -1}
    found = read_settings(family.gguf, metadata, file.tensors, path, list)
    words = r"llama\.rope\.scaling: original_max_position_embeddings is -1"
    with pytest.raises(ConfigError, match=words):
        found.read(lambda values: read_config(family, values, path, shown=found.shown))


def test_a_vocabulary_that_is_no_list_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA.build())
    file = GGUFFile(path)
    metadata = {**file.metadata, "tokenizer.ggml.tokens": 5}
    family = find_gguf(metadata, path)
    with pytest.raises(ConfigError, match=r"ggml\.tokens must be a list of texts: got 5"):
        read_settings(family.gguf, metadata, file.tensors, path, list)


def test_files_of_bamba_are_told_from_those_of_granite() -> None:
    settings = {"block_count": 2, "context_length": 64, "embedding_length": 32}
    settings |= {"attention.head_count": 4, "rope.scaling.finetuned": True}
    metadata = {f"granitehybrid.{key}": value for key, value in settings.items()}
    metadata["general.architecture"] = "granitehybrid"
    family = find_gguf(metadata, "a.gguf")
    assert family.gguf is not None
    with pytest.raises(ConfigError, match=r"a\.gguf: rope\.scaling\.finetuned is True.*Bamba"):
        read_settings(family.gguf, metadata, {}, "a.gguf", lambda name: [])


def test_states_that_would_grow_are_refused() -> None:
    at: Any = None  # nothing of the configuration matters
    with pytest.raises(ValueError, match="decay by must not be above 0"):
        Rates().changed(torch.tensor([-1.0, 0.5]), at)


def test_a_missing_part_of_a_tensor_is_named() -> None:
    gguf = families()["kimi_linear"].gguf
    assert gguf is not None
    with pytest.raises(CheckpointError, match=r"'blk\.0\.ssm_conv1d_k\.weight' is missing beside"):
        [*gguf.whole(["blk.0.ssm_conv1d_q.weight"], torch.ones)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"xielu.alpha_p": None}, r"xielu\.alpha_p must be a list of 2 numbers: got None"),
        ({"xielu.alpha_n": [0.1]}, r"xielu\.alpha_n must be a list of 2 numbers: got \[0\.1\]"),
        ({"xielu.beta": [0.5, 0.6]}, r"xielu\.beta is \[0\.5, 0\.6\]; supported is 0\.5"),
    ],
)
def test_numbers_of_an_activation_are_one_for_each_layer(
    change: dict[str, object], words: str
) -> None:
    stated = {"xielu.alpha_p": [0.1, 0.2], "xielu.alpha_n": [0.3, 0.4]}
    stated |= {"xielu.beta": [0.5, 0.5], "xielu.eps": [-1e-6, -1e-6]}
    gguf = families()["apertus"].gguf
    assert gguf is not None
    held = gguf.tensors_held(stated, 2, "a.gguf")
    assert held["layers.1.feed_forward.xielu.alpha_n"].tolist() == pytest.approx([0.4])
    with pytest.raises(ConfigError, match=words):
        gguf.tensors_held({**stated, **change}, 2, "a.gguf")
