"""Text models inside multimodal checkpoints equal the whole model of transformers, given ids alone.

A case is a tiny random multimodal model, saved by transformers and read from its directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from harness import CHUNKS, SIZES, all_cases, rope
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.auto import modeling_auto

from polyhead.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from polyhead.errors import CheckpointError, ConfigError
from polyhead.families import families, find_family, read_config, texts
from polyhead.families.common.wrappers import SIZES as SIZES_OF_TEXTS
from polyhead.families.common.wrappers import WRAPPERS

Values = Mapping[str, Any]
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_heads": 2,
    "depth": 1,
    "embed_dim": 32,
    "patch_size": 4,
    "image_size": 8,
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "encoder_hidden_size": 8,
    "projection_dim": 32,
    "audio_hidden_size": 32,
    "blank_token_id": 39,
    "out_hidden_size": 32,
    "hidden_dim": 32,
    "num_layers": 1,
    "output_dim": 32,
    "output_channels": 8,
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "downsample_hidden_size": 8,
    "base_channels": 32,
    "channel_multiplier": [1],
    "num_res_blocks": 1,
    "num_embeddings": 8,
    "vocab_size": 40,
    "projector_input_dim": 8,
    "projector_output_dim": 8,
    "vision_output_dim": 8,
}
"""Sizes of everything but the text model, where its class has them."""


def _mrope(*sections: int, **options: Any) -> dict[str, Any]:
    return rope("default", mrope_section=[*sections], **options)


@dataclass(frozen=True)
class Multimodal:
    """A wrapper's entry.

    Attributes:
        text: What is added to the text model's tiny config.
        options: Further configs of the text model, each with keys of the wrapper under "top", under
            "auto" the class that builds both, and under "alone" another than ``alone``.
        top: Keys of the wrapper.
        unread: Numbers of the text model's tensors that no id reads.
        alone: The class of transformers for the text model alone; a body is compared without head.
    """

    text: Values = field(default_factory=dict)
    options: tuple[Values, ...] = ()
    top: Values = field(default_factory=dict)
    unread: int = 0
    alone: str = "AutoModelForCausalLM"


_SPARSE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "head_dim": 8,
    "mlp_only_layers": [],
}
_NEMOTRON = {"hidden_size": 32, "vocab_size": 61}
_GEMMA_4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 20,
}
_TIED = {"top": {"tie_word_embeddings": True}}
_UNTIED = {"top": {"tie_word_embeddings": False}}
_VL = _mrope(1, 1, 2)
_OTHER_TEXTS = (
    _TIED,
    {"model_type": "mistral", "sliding_window": 7},
    {"model_type": "qwen2", "tie_word_embeddings": True},
)
_GLM = {"head_dim": 8, **_VL}
_ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "adapter_out_dim": 32,
}
_DOTS = {
    "vision_config": {**_ENCODER, "mlp_layer_types": ["dense"], "adapter_in_dim": 32},
    "audio_config": {**_ENCODER, "adapter_input_size": 32, "downsample_hidden_size": 8},
}
_FOURTH = {"model_type": "mistral4", "alone": "Mistral4ForCausalLM", **_UNTIED}
_NAMES = {0: "good", 1: "bad", 2: "neither"}
_CLASSES = (
    {"auto": "AutoModelForSequenceClassification", "top": {"id2label": _NAMES}},
    {
        "auto": "AutoModelForSequenceClassification",
        "classifier_pooling": "cls",  # of the text model alone
        "top": {"classifier_pooling": "mean"},
    },
    {"auto": "AutoModelForTokenClassification"},
)

CASES: Mapping[str, Multimodal] = {
    "audioflamingo3": Multimodal(),
    "aria": Multimodal(),
    "aya_vision": Multimodal({"logit_scale": 0.25}, (_UNTIED, {"model_type": "cohere"})),
    "cohere_compass": Multimodal(options=(_TIED,)),
    "cohere2_vision": Multimodal(
        {"logit_scale": 0.25}, (_UNTIED,), {"alignment_intermediate_size": 16}
    ),
    "deepseek_vl": Multimodal(options=(_UNTIED,)),
    "deepseek_vl_hybrid": Multimodal(options=(_UNTIED,)),
    "dots3_note": Multimodal(options=(_TIED,), top=_DOTS),
    "emu3": Multimodal(options=(_TIED,), top={"vocabulary_map": {"<image>": 5}}),
    "exaone4_5": Multimodal(options=(_TIED,)),
    "fuyu": Multimodal(options=(_TIED,)),
    "gemma3": Multimodal(options=(_UNTIED, {"final_logit_softcapping": 0.7})),
    "gemma3n": Multimodal({"final_logit_softcapping": 0.7}, (_UNTIED,)),
    "gemma4": Multimodal(options=(_UNTIED, _GEMMA_4_EXPERTS)),
    "gemma4_unified": Multimodal(options=(_UNTIED,)),
    "glm4v": Multimodal(_GLM, (_TIED, _mrope(1, 1, 0, partial_rotary_factor=0.5))),
    "glm46v": Multimodal(_GLM),
    "glm4v_moe": Multimodal(
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "head_dim": 8,
            **_mrope(1, 0, 1, partial_rotary_factor=0.5),
        },
        (_TIED, {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5}),
    ),
    "glm5_next": Multimodal(options=(_TIED,), alone="Glm5NextTextModel"),
    "glmasr": Multimodal(options=(_UNTIED,)),
    "glmga": Multimodal(_GLM, (_TIED,)),
    "got_ocr2": Multimodal(options=(_UNTIED,)),
    "granite_speech": Multimodal({"logits_scaling": 4.0}, (_UNTIED,)),
    "granite_speech_plus": Multimodal({"logits_scaling": 4.0}),
    "hyperclovax_vision_v2": Multimodal(options=(_UNTIED,)),
    "idefics2": Multimodal(options=(_TIED, {"sliding_window": 7})),
    "idefics3": Multimodal(options=(_TIED,)),
    "inkling_mm_model": Multimodal(
        options=({"unpadded_vocab_size": 57, "mlp_layer_types": None, "dense_mlp_idx": 1},),
        # Fewer layers of the tower are planned by a library that is not here.
        top={
            "vision_config": {"patch_size": 4, "num_hidden_layers": 4, "hidden_size": 32},
            "mtp_config": {"num_nextn_predict_layers": 1, "local_layer_ids": [0]},
        },
    ),
    "internvl": Multimodal(options=(_UNTIED, {"model_type": "llama"})),
    "janus": Multimodal(options=(_UNTIED,)),
    "kimi_k25": Multimodal(options=(_UNTIED,)),
    "lfm2_vl": Multimodal(),
    "lfm3_vl": Multimodal(options=(_UNTIED,)),
    "lighton_ocr": Multimodal(options=(_UNTIED,)),
    "llama4": Multimodal(options=({"use_qk_norm": False},)),
    "llava": Multimodal(options=_OTHER_TEXTS),
    "llava_next": Multimodal(options=_OTHER_TEXTS),
    "llava_next_video": Multimodal(),
    "llava_onevision": Multimodal(options=(_TIED,)),
    "minicpm_ocr": Multimodal(options=(_UNTIED,)),
    "minicpmv4_7": Multimodal(options=(_TIED,)),
    "minicpmv4_6": Multimodal(options=(_TIED,)),
    "mistral3": Multimodal({"sliding_window": None}, (_UNTIED, _FOURTH)),
    "musicflamingo": Multimodal(),
    "nemo_speechlm": Multimodal(_NEMOTRON),
    "ovis2": Multimodal(options=(_UNTIED,), top={"hidden_size": 32, "vocab_size": 61}),
    "paddleocr_vl": Multimodal(
        {"head_dim": 8, **_VL}, (_UNTIED, {"use_bias": True, "head_dim": 12, **_mrope(2, 2, 2)})
    ),
    "paligemma": Multimodal(
        options=(_UNTIED, {"model_type": "gemma2", "final_logit_softcapping": 0.7})
    ),
    "phi4_multimodal": Multimodal(options=(_TIED, {"sliding_window": 7})),
    "pp_chart2table": Multimodal(options=(_UNTIED,)),
    "qianfan_ocr": Multimodal(options=(_TIED,)),
    "qwen2_5_omni_thinker": Multimodal(_VL, (_TIED,)),
    "qwen2_5_vl": Multimodal(
        _VL, (_TIED, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1})
    ),
    "qwen2_audio": Multimodal(),
    "qwen2_vl": Multimodal(_VL, (_TIED, {"num_key_value_heads": 4})),
    "qwen3_5": Multimodal(options=(_TIED,)),
    "qwen3_5_moe": Multimodal(options=(_TIED,)),
    "qwen4_exp": Multimodal({"vocab_size": 61}, (_TIED, {"ple_layer_ids": None})),
    "qwen3_asr": Multimodal(options=(_UNTIED,)),
    "qwen3_omni_moe_thinker": Multimodal(
        {**_SPARSE, **_VL}, (_TIED, {"norm_topk_prob": False, "mlp_only_layers": [0]})
    ),
    "qwen3_vl": Multimodal({"head_dim": 8, **_VL}, (_TIED, {"head_dim": 12, **_mrope(2, 2, 2)})),
    "qwen3_vl_moe": Multimodal({**_SPARSE, **_VL}, (_TIED, {"mlp_only_layers": [0]})),
    "smolvlm": Multimodal(options=(_TIED,)),
    "step3p7": Multimodal(options=(_TIED,), alone="Step3p7TextModel"),
    "ultravbert": Multimodal(
        {"sliding_window": 7, "prediction_head_size": 24},
        (_TIED, *_CLASSES),
        {"pixel_shuffle_factor": 2},
        alone="AutoModelForMaskedLM",
    ),
    "video_llama_3": Multimodal(options=(_TIED,)),
    "video_llava": Multimodal(),
    "vipllava": Multimodal(options=(_TIED,)),
    "mllama": Multimodal(
        {"num_hidden_layers": 4, "cross_attention_layers": [1], "head_dim": 8},
        ({"cross_attention_layers": [0, 3]}, {"cross_attention_layers": None}),
        unread=8 * 32,
    ),
    "modernvbert": Multimodal(
        options=(
            {"norm_bias": True, "mlp_bias": True, **_TIED},
            {"decoder_bias": False, "classifier_bias": True, "classifier_activation": "relu"},
            *_CLASSES,
        ),
        top={"pixel_shuffle_factor": 2},
        alone="AutoModelForMaskedLM",
    ),
    "moss_transcribe_diarize": Multimodal(options=(_UNTIED,)),
    "vibevoice_asr": Multimodal(options=(_TIED,)),
    "voxtral": Multimodal({"head_dim": 8}),
}
_EACH = [(name, option) for name, case in CASES.items() for option in ({}, *case.options)]
_BESIDE = ("top", "auto", "alone")
"""What an option says beside the text model's config."""
_WITHOUT = {
    "qwen2_5_omni": "qwen2_5_omni_thinker",
    "qwen3_omni_moe": "qwen3_omni_moe_thinker",
}
"""Wrappers of a wrapper, which are tested by their files' prefix."""


def _default(spec: Any) -> Any:
    """A part's config, also where its class has no type."""
    return spec.default_config if spec.model_type else spec.config_class(**spec.init_kwargs)


def _shrunk(config: Any) -> dict[str, Any]:
    """A part's object with small sizes; parts of it too."""
    values: dict[str, Any] = {"model_type": config.model_type} if config.model_type else {}
    for key, small in _SMALL.items():
        if hasattr(config, key) and not hasattr(getattr(type(config), key, None), "fget"):
            old = getattr(config, key)
            pair = isinstance(old, list | tuple) and not isinstance(small, list)
            values[key] = [small] * len(old) if pair else small
    for key, spec in type(config).sub_configs_defaults.items():
        values[key] = _shrunk(_default(spec))
    return values


def _config(name: str, option: Values) -> Any:
    case, kind = CASES[name], transformers.CONFIG_MAPPING[name]
    text = {**case.text, **{key: value for key, value in option.items() if key not in _BESIDE}}
    model_type = text.get("model_type", WRAPPERS[name].text_type)
    family = find_family(model_type, name)
    sizes = {**SIZES, **all_cases()[family.written_as or model_type].sizes, **text}
    if "num_experts" in text:
        sizes.pop("num_local_experts", None)  # another spelling
    parts = {
        key: _shrunk(_default(spec))
        for key, spec in kind.sub_configs_defaults.items()
        if key != "text_config"
    }
    known = {key: value for key, value in sizes.items() if value is not None or key in text}
    inside = "text_config" in kind.sub_configs_defaults
    return kind(
        **({"text_config": {"model_type": model_type, **known}} if inside else known),
        **{**parts, **case.top, **option.get("top", {})},
    )


def _without_timm(config: Any, build: Any = transformers.AutoModel.from_config, **how: Any) -> Any:
    """A part of a model; anything in the place of an encoder of images that timm would build."""
    return torch.nn.Linear(1, 1) if config.model_type == "gemma3n_vision" else build(config, **how)


def _model(name: str, option: Values) -> Any:
    config, named = _config(name, option), option.get("auto", CASES[name].alone)
    torch.manual_seed(len(str(option)))
    if named.startswith("AutoModelFor") and named != "AutoModelForCausalLM":
        made = getattr(transformers, named)._model_mapping[type(config)]
    else:
        kind = dict(modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES).get(name)
        kind = kind or dict(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)[name]
        made = getattr(transformers, kind)
    with patch.object(transformers.AutoModel, "from_config", _without_timm):
        model = made._from_config(config, attn_implementation="eager").eval()
    for key, tensor in model.named_parameters():
        norm = tensor.ndim == 1 and key.endswith("weight")
        std = 0.4 if tensor.ndim < 2 else 0.15
        torch.nn.init.normal_(tensor, mean=float(norm), std=std)
    return model


def _ids() -> Tensor:
    return torch.randint(3, 61, (2, 24), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def _same(ours: Checkpoint, wanted: Tensor) -> None:
    ids, made = _ids(), [ours.model(_ids())]
    if ours.config.kind == "decoder":
        cache = ours.model.new_cache()
        chunks = ids.split([*CHUNKS, 24 - sum(CHUNKS)], dim=1)
        made.append(torch.cat([ours.model(chunk, cache=cache) for chunk in chunks], dim=1))
    assert wanted.std() > 0.02
    for got in made:
        assert got.shape == wanted.shape
        assert (got - wanted).abs().max() < all_cases()[ours.family].error * wanted.std()


@torch.no_grad()
def _wanted(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=_ids()).logits
    return logits


_SLOW = pytest.mark.slow
_OFTEN = frozenset(
    (
        "llava",
        "gemma3",
        "llama4",
        "mistral3",
        "modernvbert",
        "qwen2_vl",
        "qwen3_vl_moe",
        "qwen3_5",
        "voxtral",
    )
)
"""Of those that are alike; transformers' modules of all take half a minute to import."""


@pytest.mark.parametrize(
    ("name", "option"),
    [
        pytest.param(name, option, marks=() if name in _OFTEN else pytest.mark.slow)
        for name, option in _EACH
    ],
    ids=[f"{n}-{i}" for i, (n, _) in enumerate(_EACH)],
)
def test_text_model_equals_the_whole_on_ids(name: str, option: Values, tmp_path: Path) -> None:
    theirs = _model(name, option)
    theirs.save_pretrained(tmp_path / "theirs")
    wanted = _wanted(theirs)
    ours = load_checkpoint(tmp_path / "theirs")
    _same(ours, wanted)
    # Nothing is lost: what is left out is every tensor that is not the text model's.
    written = load_file(tmp_path / "theirs" / "model.safetensors")
    text = sum(tensor.numel() for key, tensor in written.items() if key not in ours.ignored)
    assert ours.model.parameter_counts().total == text - CASES[name].unread
    assert ours.left_out
    assert {*ours.left_out} <= {*WRAPPERS[name].left_out}
    # Saved, it is the text model alone.
    save_checkpoint(ours, tmp_path / "ours")
    alone = option.get("alone") or option.get("auto") or CASES[name].alone
    again, report = getattr(transformers, alone).from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert again.config.model_type == ours.family
    assert {*report["unexpected_keys"]} <= {"lm_head.weight"}
    assert not report["missing_keys"]
    if alone.endswith("TextModel"):
        with torch.no_grad():
            states = again.eval()(input_ids=_ids()).last_hidden_state
            assert (theirs.lm_head(states) - wanted).abs().max() < 5e-5 * wanted.std()
        return
    assert not report["unexpected_keys"]
    assert (_wanted(again.eval()) - wanted).abs().max() < 5e-5 * wanted.std()


_WINDOWED = CASES["qwen2_5_vl"].options[-1]
_BY_SECTIONS = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1]}
_SLIDING = {"sliding_attention": _BY_SECTIONS, "full_attention": None}
_SECTIONS: Mapping[str, tuple[str, Values, bool]] = {
    "qwen2_vl": ("qwen2_vl", {}, False),
    "qwen2_5_vl": ("qwen2_5_vl", _WINDOWED, False),
    "qwen2_5_omni": ("qwen2_5_omni_thinker", {}, False),
    "glm4v": ("glm4v", CASES["glm4v"].options[-1], False),
    "glm4v_moe": ("glm4v_moe", {}, False),
    "paddleocr_vl": ("paddleocr_vl", {}, False),
    "qwen3_vl": ("qwen3_vl", CASES["qwen3_vl"].options[-1], True),
    "qwen3_vl_moe": ("qwen3_vl_moe", {}, True),
    "qwen3_omni_moe": ("qwen3_omni_moe_thinker", {}, True),
    "qwen3_5": ("qwen3_5", _mrope(1, 1, 0, partial_rotary_factor=0.5), True),
    "cohere_compass": ("cohere_compass", {"rope_parameters": _SLIDING}, True),
}
"""Types whose text models rotate by sections: a case, and whether these are interleaved."""


def _of_pictures() -> Tensor:
    """``[3, 2, 24]``: time, height and width of six tokens of text, a picture of 3 · 4 and text
    again, from the greatest coordinate + 1; and of a row of any numbers, which go back too."""
    text, picture = torch.arange(6).expand(3, 6), torch.arange(12)
    grid = torch.stack((torch.zeros_like(picture), picture // 4, picture % 4))
    row = torch.cat((text, 6 + grid, 10 + text), dim=1)
    other = torch.randint(0, 30, (3, 24), generator=torch.Generator().manual_seed(3))
    return torch.stack((row, other), dim=1)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("qwen2_vl", "qwen3_vl", "qwen3_5") else _SLOW)
        for name in _SECTIONS
    ],
)
@torch.no_grad()
def test_coordinates_of_pictures_turn_tokens_as_in_the_whole(name: str, tmp_path: Path) -> None:
    case, option, interleaved = _SECTIONS[name]
    theirs, at, ids = _model(case, option), _of_pictures(), _ids()
    theirs.save_pretrained(tmp_path / "theirs")
    wanted = theirs(input_ids=ids, position_ids=at).logits
    assert (wanted - _wanted(theirs)).abs().max() > 0.5 * wanted.std()
    ours = load_checkpoint(tmp_path / "theirs")
    cache, chunks = ours.model.new_cache(), [*CHUNKS, 24 - sum(CHUNKS)]
    pairs = zip(ids.split(chunks, dim=1), at.split(chunks, dim=2), strict=True)
    parts = [ours.model(part, positions=where, cache=cache) for part, where in pairs]
    for got in (ours.model(ids, positions=at), torch.cat(parts, dim=1)):
        assert (got - wanted).abs().max() < all_cases()[ours.family].error * wanted.std()
    # Sections are kept, here and in the saved file, which says whether they take turns.
    ropes = [each.attention.rope for each in ours.config.layers if each.attention.rope]
    assert {rope.interleaved_sections for rope in ropes} == {interleaved}
    save_checkpoint(ours, tmp_path / "ours")
    again = load_checkpoint(tmp_path / "ours")
    assert again.config.layers == ours.config.layers
    assert torch.equal(again.model(ids, positions=at), ours.model(ids, positions=at))


@pytest.mark.parametrize(("name", "stated"), [("qwen2_vl", True), ("qwen3_vl", False)])
def test_sections_that_the_types_code_takes_otherwise_are_refused(name: str, stated: bool) -> None:
    text = _mrope(16, 24, 24)["rope_parameters"] | {"mrope_interleaved": stated}
    values = {"model_type": name, "text_config": {"rope_parameters": text}}
    with pytest.raises(
        ConfigError, match=f"mrope_interleaved is {stated}; supported is {not stated}"
    ):
        read_config(values, "config.json")


def test_every_wrapper_has_its_case() -> None:
    assert {*CASES, *_WITHOUT} == {*WRAPPERS}
    assert not {*WRAPPERS} & {*families()}


@pytest.mark.slow
def test_wrappers_know_transformers_defaults() -> None:
    for name, wrapper in WRAPPERS.items():
        kind = transformers.CONFIG_MAPPING[name]
        inner = kind().thinker_config if wrapper.keys[0] == "thinker_config" else kind()
        assert bool(getattr(type(inner), "tie_word_embeddings", False)) == wrapper.tied, name
        if not hasattr(inner, "text_config"):  # the keys stand at the top
            continue
        assert inner.text_config.model_type == wrapper.text_type, name


@pytest.mark.parametrize("model_type", SIZES_OF_TEXTS)
def test_sizes_that_files_leave_out_are_transformers(model_type: str) -> None:
    kind = transformers.CONFIG_MAPPING[model_type]()
    assert SIZES_OF_TEXTS[model_type] == (
        kind.vocab_size,
        kind.hidden_size,
        kind.intermediate_size,
        kind.num_hidden_layers,
        kind.num_attention_heads,
        kind.max_position_embeddings,
    )


@pytest.mark.parametrize("model_type", texts())
def test_absent_keys_of_text_models_mean_what_transformers_means(model_type: str) -> None:
    family, kind = texts()[model_type], transformers.CONFIG_MAPPING[model_type]
    for key, value in family.defaults.items():
        theirs = family.aliases.get(key, key)
        assert value == getattr(kind, theirs, value), f"{model_type}.{key}"
    sizes = {
        "vocab_size": 61,
        "model_type": model_type,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    read: Any = read_config(sizes, "config.json").layers[0].attention
    assert read.rope.theta == kind.default_theta


def _renamed(folder: Path, rename: Callable[[str], str], **extra: Tensor) -> None:
    path = folder / "model.safetensors"
    save_file({rename(name): each for name, each in load_file(path).items()} | extra, path)


def _changed(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def _bare(name: str) -> str:
    """A name without what the versions of transformers put before it."""
    name = name.removeprefix("model.")
    return name.replace("language_model.model.", "language_model.").removeprefix("model.")


def _new(name: str) -> str:
    bare = _bare(name)
    head = "lm_head" in bare
    return bare.removeprefix("language_model.") if head else f"model.{bare}"


def _old(name: str) -> str:
    bare = _bare(name)
    if bare.startswith("lm_head"):
        return f"language_model.{bare}"
    return (
        bare.replace("language_model.", "language_model.model.") if "lm_head" not in bare else bare
    )


def _oldest(name: str) -> str:
    bare = _bare(name)
    return bare.replace("language_model.", "model.") if "lm_head" not in bare else bare


@pytest.mark.parametrize("rename", [_new, _old, _oldest])
@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        "qwen2_vl",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("llava", "qwen2_5_vl", "internvl")
        ),
    ],
)
def test_names_of_all_versions_are_read(
    name: str, rename: Callable[[str], str], tmp_path: Path
) -> None:
    theirs = _model(name, _UNTIED)
    theirs.save_pretrained(tmp_path)
    _renamed(tmp_path, rename)
    _same(load_checkpoint(tmp_path), _wanted(theirs))


def test_names_of_ultravberts_modules_are_read_as_those_of_its_files(tmp_path: Path) -> None:
    theirs = _model("ultravbert", {})
    theirs.save_pretrained(tmp_path)
    _renamed(tmp_path, lambda name: name.replace("head.decoder.", "lm_head."))
    _renamed(tmp_path, lambda name: name.replace("head.linear", "projection_head.linear"))
    _same(load_checkpoint(tmp_path), _wanted(theirs))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_keys_at_the_top_are_the_text_models(name: str, tmp_path: Path) -> None:
    """As the first files of Qwen2-VL have it, with the name that the rotary type had."""
    theirs = _model(name, {})
    theirs.save_pretrained(tmp_path)

    def flat(values: dict[str, Any]) -> dict[str, Any]:
        text = values.pop("text_config")
        theta = text["rope_parameters"].pop("rope_theta")
        scaling = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
        return {**text, **values, "rope_theta": theta, "rope_scaling": scaling}

    _changed(tmp_path, flat)
    _renamed(tmp_path, _oldest)
    _same(load_checkpoint(tmp_path), _wanted(theirs))


@pytest.mark.parametrize("name", _WITHOUT)
def test_thinkers_of_a_whole_are_read(name: str, tmp_path: Path) -> None:
    theirs = _model(_WITHOUT[name], {})
    theirs.save_pretrained(tmp_path)
    _renamed(
        tmp_path, lambda each: f"thinker.{each}", **{"talker.model.norm.weight": torch.ones(3)}
    )
    _changed(
        tmp_path,
        lambda values: {
            "model_type": name,
            "architectures": [f"{name}ForConditionalGeneration"],
            "enable_audio_output": True,
            "thinker_config": values,
            "talker_config": {},
        },
    )
    ours = load_checkpoint(tmp_path)
    _same(ours, _wanted(theirs))
    assert "talker" in ours.left_out


def test_experts_stacked_the_other_way_round_are_read(tmp_path: Path) -> None:
    theirs = _model("qwen3_vl_moe", {})
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    turned = {
        name: each.mT.contiguous() if ".experts." in name else each
        for name, each in load_file(path).items()
    }
    save_file(turned, path)
    _same(load_checkpoint(tmp_path), _wanted(theirs))


def test_bare_body_gives_hidden_states(tmp_path: Path) -> None:
    body = _model("llava", {}).model
    body.save_pretrained(tmp_path)
    ours = load_checkpoint(tmp_path)
    with torch.no_grad():
        wanted = body(input_ids=_ids()).last_hidden_state
    _same(ours, wanted)
    assert ours.config.head is None


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("mistral3", "language_model.lm_head.weight"),
        ("modernvbert", "lm_head.weight"),
        ("ultravbert", "head.decoder.weight"),
    ],
)
def test_head_that_differs_is_one_of_its_own_and_one_that_is_absent_the_embedding(
    name: str, head: str, tmp_path: Path
) -> None:
    """Files do not always say what their tensors are; transformers goes by the tensors too."""
    theirs = _model(name, _UNTIED)
    theirs.save_pretrained(tmp_path)
    _changed(tmp_path, lambda values: {**values, "tie_word_embeddings": True})
    _same(load_checkpoint(tmp_path), _wanted(theirs))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors[next(key for key in tensors if key.endswith(WRAPPERS[name].embedding))]
    save_file({**tensors, head: embedding.clone()}, path)
    assert load_checkpoint(tmp_path).config.head == "tied"
    save_file({k: v for k, v in tensors.items() if k != head}, path)
    assert load_checkpoint(tmp_path).config.head == "tied"


def test_sizes_that_the_file_leaves_out_are_those_of_the_type() -> None:
    values = {
        "model_type": "llava",
        "text_config": {"model_type": "llama", "vocab_size": 32_064},
        "vision_config": {},
    }
    config = read_config(values, "config.json")
    assert (config.embed_dim, len(config.layers), config.vocab_size) == (4096, 32, 32_064)


def test_encoders_head_is_what_the_keys_of_the_whole_say() -> None:
    text = {"tie_word_embeddings": True, "classifier_pooling": "mean", "id2label": _NAMES}
    values = {"model_type": "modernvbert", "text_config": text}
    for top, head in (({}, "untied"), ({"tie_word_embeddings": True}, "tied")):
        masked = {**values, "architectures": ["ModernVBertForMaskedLM"], **top}
        assert read_config(masked, "config.json").head == head
    classes = {**values, "architectures": ["ModernVBertForSequenceClassification"]}
    task = read_config(classes, "config.json").task
    assert task is not None
    assert (task.pooling, task.num_labels, task.labels) == ("first", 2, ())
    task = read_config({**classes, "num_labels": 4}, "config.json").task
    assert task is not None
    assert task.num_labels == 4


def test_directory_without_the_text_model_is_one_sentence(tmp_path: Path) -> None:
    _model("llava", {}).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    kept = {k: v for k, v in load_file(path).items() if "language_model" not in k}
    save_file(kept, path)
    with pytest.raises(
        CheckpointError,
        match=r"the text model's tensors \(language_model\.\.\.\) are missing: the files hold only "
        "multi_modal_projector, vision_tower",
    ):
        load_checkpoint(tmp_path)


def test_config_without_the_text_model_is_refused_by_the_key(tmp_path: Path) -> None:
    for values, words in (
        ({}, "text_config is missing: it holds the text model's keys in files of type 'llava'"),
        ({"text_config": 3}, "text_config must be the object of the text model's keys: got 3"),
        ({"text_config": {}, "window": 3}, r"key 'window' \(value 3\) is not understood"),
        ({"text_config": {"model_type": "rwkv"}}, "text_config: model_type is 'rwkv', which"),
        ({"text_config": {"windows": 3}}, "text_config: key 'windows'"),
        ({"text_config": {}, "tie_word_embeddings": "no"}, ".*tie_word_embeddings must be true or"),
    ):
        with pytest.raises(ConfigError, match=f"config.json: {words}"):
            read_config({"model_type": "llava", **values}, "config.json")


def test_tensor_that_belongs_to_nothing_is_refused_by_its_name(tmp_path: Path) -> None:
    _model("llava", {}).save_pretrained(tmp_path)
    _renamed(tmp_path, lambda name: name.replace("vision_tower", "vision_towers"))
    with pytest.raises(CheckpointError, match=r"tensor 'vision_towers\..* has no place"):
        load_checkpoint(tmp_path)


def test_one_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    _model("llava", {}).save_pretrained(tmp_path)
    extra = {"model.language_model.model.norm.weight": torch.ones(32)}
    _renamed(tmp_path, _old, **extra)
    with pytest.raises(CheckpointError, match="are the same one of the text model"):
        load_checkpoint(tmp_path)


def test_rotary_embedding_by_length_is_refused_where_positions_begin_at_one() -> None:
    text = {"model_type": "gemma", **rope("dynamic", factor=2.0)}
    values = {"model_type": "paligemma", "text_config": text}
    with pytest.raises(ConfigError, match=r"rope_type is 'dynamic'.* begin at 1 here"):
        read_config(values, "config.json")


@pytest.mark.parametrize("sections", [[1, 2], [1, -1, 4], "8"])
def test_sections_of_coordinates_are_three_numbers(sections: object) -> None:
    values = {
        "model_type": "qwen2_vl",
        "text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": sections}},
    }
    with pytest.raises(ConfigError, match=r"mrope_section is .*; supported is three whole numbers"):
        read_config(values, "config.json")


def test_adapter_of_the_whole_is_merged_into_the_text_model(tmp_path: Path) -> None:
    theirs = _model("llava", {})
    theirs.save_pretrained(tmp_path / "base")
    module = "model.language_model.layers.1.self_attn.q_proj"
    down, up = torch.randn(3, 32), torch.randn(48, 3)
    (tmp_path / "lora").mkdir()
    save_file(
        {
            f"base_model.model.{module}.lora_A.weight": down,
            f"base_model.model.{module}.lora_B.weight": up,
        },
        tmp_path / "lora" / "adapter_model.safetensors",
    )
    (tmp_path / "lora" / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj"]})
    )
    with torch.no_grad():
        theirs.get_submodule(module).weight += 2 * up @ down
    _same(load_checkpoint(tmp_path / "base", adapter=tmp_path / "lora"), _wanted(theirs))


@pytest.mark.parametrize("between", ["1", [1.0], [0, 1]])
def test_layers_of_pictures_are_numbers_that_leave_others(between: object) -> None:
    text = {**SIZES, "cross_attention_layers": between}
    with pytest.raises(ConfigError, match=r"cross_attention_layers is .*; supported is a list"):
        read_config({"model_type": "mllama", "text_config": text}, "config.json")
