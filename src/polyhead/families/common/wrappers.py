"""Text models inside multimodal checkpoints: one table of where they stand.

A wrapper's config.json keeps the text model's keys in an object of their own, and its tensors stand
under a module of their own, which has had several names:

    model.language_model.layers.0...     lm_head                    transformers from 4.52 on
    language_model.model.layers.0...     language_model.lm_head     before
    model.layers.0...     visual...      lm_head                    Qwen2-VL before

All are read (``texts.py``). Modules that ids do not pass through (vision and audio towers,
projectors) are left out. Ids alone are read as transformers' wrapper reads them: most heads neither
scale logits nor cap them, whatever the text model does alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

_VISION = ("vision_tower", "multi_modal_projector")
_AUDIO = ("audio_tower", "multi_modal_projector")
_OMNI = ("audio_tower", "visual", "talker", "token2wav", "code2wav")


@dataclass(frozen=True)
class Wrapper:
    """A multimodal ``model_type``.

    Attributes:
        text_type: ``model_type`` of its text model where the file does not say.
        left_out: Modules that ids do not pass through.
        module: The module of the text model.
        keys: Under which keys the text model's object stands.
        outer: A module around all of that.
        tied: Whether the head is the embedding where the file does not say.
        flat: Whether older files have the text model's keys at the top.
        own_head: Whether its head scales and caps logits as the text model's own does.
        first: Position of the first id.
        unused: Keys of the text model that do not matter to ids alone.
        respelt: Beginnings of the text model's names as some versions write them.
        renamed: Other names that files have for text types.
        defaults: What absent keys of the text model mean, if not what its type says.
        of_top: Keys that the wrapper's own object says of the text model, whatever that one says.
        head: The matrix of its logits, by its name in files of the text model alone.
        embedding: Likewise the end of the embedding's name.
    """

    text_type: str
    left_out: tuple[str, ...] = _VISION
    module: str = "language_model"
    keys: tuple[str, ...] = ("text_config",)
    outer: str = ""
    tied: bool = False
    flat: bool = False
    own_head: bool = False
    first: int = 0
    unused: tuple[str, ...] = ()
    respelt: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    of_top: tuple[str, ...] = ()
    head: str = "lm_head.weight"
    embedding: str = "embed_tokens.weight"

    @cached_property
    def around(self) -> re.Pattern[str]:
        """The beginning of names that tells nothing."""
        return re.compile(rf"(?:{self.outer}\.)?" if self.outer else "")

    @cached_property
    def inside(self) -> re.Pattern[str]:
        """The beginning of names of the text model."""
        return re.compile(rf"{self.around.pattern}(?:model\.)?{self.module}\.")

    @cached_property
    def omitted(self) -> re.Pattern[str]:
        """The beginning of names of what is left out."""
        return re.compile(rf"{self.around.pattern}(?:model\.)?({'|'.join(self.left_out)})(?:\.|$)")


_VISUAL = ("visual",)
_NEWLINE = (*_VISION, "image_newline")
_DEEPSEEK_VL = (
    "vision_model",
    "aligner",
    "high_res_vision_alpha",
    "high_res_vision_model",
    "high_res_vision_neck",
    "high_res_vision_proj",
)
_JANUS = (
    *_DEEPSEEK_VL,
    "vqmodel",
    "generation_embeddings",
    "generation_aligner",
    "generation_head",
)
_GEMMA_4 = ("vision_tower", "vision_embedder", "audio_tower", "embed_vision", "embed_audio")
_DOTS = ("audio_encoder", "vision_encoder", "audio_tower", "vision_tower")
_IDEFICS = ("vision_model", "connector")
_SPEECH = ("encoder", "projector")
_OF_ENCODERS = ("tie_word_embeddings", "classifier_pooling", "id2label", "num_labels")

WRAPPERS: Mapping[str, Wrapper] = {
    "audioflamingo3": Wrapper("qwen2", _AUDIO),
    "aria": Wrapper("aria_text"),
    "aya_vision": Wrapper("cohere2", tied=True),
    "cohere_compass": Wrapper("cohere_compass_text", _VISUAL),
    "cohere2_vision": Wrapper("cohere2", tied=True),
    "deepseek_vl": Wrapper("llama", _DEEPSEEK_VL, tied=True),
    "deepseek_vl_hybrid": Wrapper("llama", _DEEPSEEK_VL, tied=True),
    "dots3_note": Wrapper("dots3_note_text", _DOTS, flat=True),
    # Pictures are tokens of its vocabulary; the codec alone makes them of pixels.
    "emu3": Wrapper("emu3_text_model", ("vqmodel",), module="text_model"),
    "exaone4_5": Wrapper("exaone4", _VISUAL, renamed={"exaone4_5_text": "exaone4"}),
    "fuyu": Wrapper("persimmon", ("vision_embed_tokens",), flat=True),
    "gemma3": Wrapper("gemma3_text", tied=True),
    # Ids from the vision tower's first one on are soft tokens, which are no text.
    "gemma3n": Wrapper("gemma3n_text", _GEMMA_4, tied=True, own_head=True),
    "gemma4": Wrapper("gemma4_text", _GEMMA_4, tied=True),
    "gemma4_unified": Wrapper("gemma4_unified_text", _GEMMA_4, tied=True),
    "glm4v": Wrapper("glm4v_text", _VISUAL, flat=True),
    "glm46v": Wrapper("glm4v_text", _VISUAL),
    "glm4v_moe": Wrapper("glm4v_moe_text", _VISUAL),
    "glm5_next": Wrapper("glm5_next_text", _VISUAL, flat=True),
    "glmasr": Wrapper("llama", _AUDIO, tied=True),
    "glmga": Wrapper("glm4v_text", _VISUAL),
    "got_ocr2": Wrapper("qwen2", tied=True),
    "granite_speech": Wrapper("granite", _SPEECH, tied=True),
    "granite_speech_plus": Wrapper("granite", _SPEECH, tied=True),
    "hyperclovax_vision_v2": Wrapper(
        "hyperclovax",
        ("vision_model", "projector", "vision_projector"),
        tied=True,
        own_head=True,
    ),
    "idefics2": Wrapper("mistral", _IDEFICS, module="text_model"),
    "idefics3": Wrapper("llama", _IDEFICS, module="text_model"),
    "inkling_mm_model": Wrapper(
        "inkling_text",
        ("audio_tower", "vision_tower", "audio", "visual", "mtp"),
        own_head=True,
        respelt={"model.llm.": "model."},
    ),
    "internvl": Wrapper("qwen2", tied=True),
    "janus": Wrapper("llama", _JANUS, tied=True),
    "kimi_k25": Wrapper(
        "deepseek_v3",
        ("vision_tower", "mm_projector"),
        tied=True,
        renamed={"kimi_k2": "deepseek_v3"},
        respelt={"model.blocks.": "model.layers."},
    ),
    "lfm2_vl": Wrapper("lfm2", tied=True),
    "lfm3_vl": Wrapper("lfm3", tied=True),
    "lighton_ocr": Wrapper("qwen3", ("vision_encoder", "vision_projection"), tied=True),
    "llama4": Wrapper("llama4_text", ("vision_model", "multi_modal_projector")),
    "llava": Wrapper("llama"),
    "llava_next": Wrapper("llama", _NEWLINE),
    "llava_next_video": Wrapper("llama", _NEWLINE),
    "llava_onevision": Wrapper("qwen2", _NEWLINE),
    "minicpm_ocr": Wrapper("qwen3_5_text", ("vision_tower", "merger"), tied=True),
    "minicpmv4_7": Wrapper("qwen3_5_text", ("vision_tower", "merger")),
    "minicpmv4_6": Wrapper("qwen3_5_text", ("vision_tower", "merger")),
    "mistral3": Wrapper("mistral", tied=True),
    "musicflamingo": Wrapper("qwen2", _AUDIO),
    "nemo_speechlm": Wrapper(
        "nemotron_h",
        ("perception", "ctc_timestamp"),
        module="llm",
        respelt={
            "model.layers.": "backbone.layers.",
            "model.embed_tokens.": "backbone.embeddings.",
            "model.norm.": "backbone.norm_f.",
        },
    ),
    "ovis2": Wrapper("qwen2", ("vision_tower", "visual_embeddings_table"), tied=True),
    "paddleocr_vl": Wrapper(
        "paddleocr_vl_text", ("visual", "projector", "mlp_AR"), tied=True, flat=True
    ),
    "paligemma": Wrapper(
        # Only prompts with token types, which come with an image, are read in both directions.
        "gemma",
        tied=True,
        own_head=True,
        first=1,
        unused=("use_bidirectional_attention",),
    ),
    "phi4_multimodal": Wrapper(
        # The text model's LoRA weights for images and sound are files of their own.
        "phi3",
        ("embed_tokens_extend",),
        flat=True,
        defaults={
            "vocab_size": 200_064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "bos_token_id": 199_999,
            "eos_token_id": [199_999, 200_020],
            "pad_token_id": 199_999,
        },
    ),
    "pp_chart2table": Wrapper("qwen2", tied=True),
    "qianfan_ocr": Wrapper(
        "qwen3",
        (*_VISION, "vision_model", "mlp1"),
        respelt={"model.encoder.layers.": "model.layers."},
    ),
    "qwen2_5_omni": Wrapper(
        "qwen2_5_omni_text", _OMNI, keys=("thinker_config", "text_config"), outer="thinker"
    ),
    "qwen2_5_omni_thinker": Wrapper("qwen2_5_omni_text", _OMNI, outer="thinker"),
    "qwen2_5_vl": Wrapper("qwen2_5_vl_text", _VISUAL, flat=True),
    "mllama": Wrapper("mllama_text_model", ("vision_model", "multi_modal_projector")),
    "modernvbert": Wrapper(
        "modernbert",
        _IDEFICS,
        module="text_model",
        respelt={"projection_head.": "head.", "lm_head.": "decoder."},
        of_top=_OF_ENCODERS,
        head="decoder.weight",
        embedding="tok_embeddings.weight",
    ),
    "moss_transcribe_diarize": Wrapper("qwen3", _AUDIO, tied=True),
    "qwen2_audio": Wrapper("qwen2", _AUDIO),
    "qwen2_vl": Wrapper("qwen2_vl_text", _VISUAL, flat=True),
    "qwen3_5": Wrapper("qwen3_5_text", _VISUAL),
    "qwen3_5_moe": Wrapper("qwen3_5_moe_text", _VISUAL),
    "qwen3_asr": Wrapper("qwen3", _AUDIO, tied=True),
    "qwen4_exp": Wrapper("qwen4_exp_text", _VISUAL),
    "qwen3_omni_moe": Wrapper(
        "qwen3_omni_moe_text", _OMNI, keys=("thinker_config", "text_config"), outer="thinker"
    ),
    "qwen3_omni_moe_thinker": Wrapper("qwen3_omni_moe_text", _OMNI, outer="thinker"),
    "qwen3_vl": Wrapper("qwen3_vl_text", _VISUAL),
    "qwen3_vl_moe": Wrapper("qwen3_vl_moe_text", _VISUAL),
    "smolvlm": Wrapper("llama", _IDEFICS, module="text_model"),
    "step3p7": Wrapper("step3p5", ("vision_model", "multi_modal_projector", "vit_large_projector")),
    "ultravbert": Wrapper(
        "ultrabert",
        _IDEFICS,
        module="text_model",
        respelt={"head.decoder.": "cls.", "projection_head.": "head.", "lm_head.": "cls."},
        of_top=_OF_ENCODERS,
        head="cls.weight",
    ),
    "video_llama_3": Wrapper("qwen2", ("vision_model", "projector")),
    "video_llava": Wrapper("llama", ("video_tower", "image_tower", "multi_modal_projector")),
    "vipllava": Wrapper("llama"),
    "vibevoice_asr": Wrapper(
        "qwen2",
        ("acoustic_tokenizer_encoder", "semantic_tokenizer_encoder", "multi_modal_projector"),
    ),
    "voxtral": Wrapper(
        "llama",
        _AUDIO,
        defaults={
            "vocab_size": 131_072,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 30,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e8,
            "head_dim": 128,
        },
    ),
}

_SIZE_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
SIZES: Mapping[str, tuple[int, ...]] = {
    "cohere": (256_000, 8192, 22_528, 40, 64, 8192),
    "cohere2": (256_000, 8192, 22_528, 40, 64, 8192),
    "gemma": (256_000, 3072, 24_576, 28, 16, 8192),
    "gemma2": (256_000, 2304, 9216, 26, 8, 8192),
    "gemma3_text": (262_208, 2304, 9216, 26, 8, 131_072),
    "granite": (32_000, 4096, 11_008, 32, 32, 2048),
    "llama": (32_000, 4096, 11_008, 32, 32, 2048),
    "llama4_text": (202_048, 5120, 8192, 48, 40, 131_072),
    "mistral": (32_000, 4096, 14_336, 32, 32, 131_072),
    "modernbert": (50_368, 768, 1152, 22, 12, 8192),
    "persimmon": (262_144, 4096, 16_384, 36, 64, 16_384),
    "qwen2": (151_936, 4096, 22_016, 32, 32, 32_768),
    "qwen3": (151_936, 4096, 22_016, 32, 32, 32_768),
    "qwen2_vl_text": (152_064, 8192, 29_568, 80, 64, 32_768),
    "qwen2_5_vl_text": (152_064, 8192, 29_568, 80, 64, 32_768),
    "qwen2_5_omni_text": (152_064, 3584, 18_944, 28, 28, 32_768),
    "qwen3_vl_text": (151_936, 4096, 22_016, 32, 32, 128_000),
    "qwen3_vl_moe_text": (151_936, 2048, 5632, 24, 16, 128_000),
    "qwen3_omni_moe_text": (3584, 2048, 18_944, 28, 28, 32_768),
    "mllama_text_model": (128_256, 4096, 14_336, 40, 32, 131_072),
    "emu3_text_model": (184_622, 4096, 14_336, 32, 32, 9216),
    "qwen3_5_text": (248_320, 4096, 12_288, 32, 16, 32_768),
    "glm4v_text": (151_552, 4096, 13_696, 40, 32, 32_768),
    "glm4v_moe_text": (151_424, 4096, 10_944, 46, 96, 65_536),
    "paddleocr_vl_text": (103_424, 1024, 3072, 18, 16, 131_072),
    "ultrabert": (32_000, 4096, 11_008, 32, 32, 32_768),
}
"""Sizes that wrappers' files leave out where they are those of transformers' classes."""


def sizes_of(text_type: object) -> dict[str, int]:
    """``SIZES`` of a text model, by config.json's keys."""
    sizes = SIZES.get(text_type) if isinstance(text_type, str) else None
    return dict(zip(_SIZE_KEYS, sizes, strict=True)) if sizes else {}


# Keys of wrappers, and of their text models, about inputs that are no ids.
OF_OTHERS = frozenset(
    (
        "acoustic_tokenizer_chunk_size", "acoustic_tokenizer_encoder_config",
        "adapter_layer_norm_eps", "alignment_intermediate_size", "assistant_token_id",
        "audio_bos_token_id", "audio_chunk_size", "audio_config", "audio_end_token_id",
        "audio_eos_token_id", "audio_frame_step", "audio_merge_size",
        "audio_soft_tokens_per_image", "audio_start_token_id", "audio_token_id",
        "audio_token_index", "boa_token_id", "boi_token_id", "boi_token_index",
        "code2wav_config", "downsample_factor", "downsample_mode", "downsample_rate",
        "downsample_ratio", "drop_vision_last_layer", "enable_audio_output", "encoder_config",
        "eoa_token_id", "eoa_token_index", "eoi_token_id", "eoi_token_index", "has_lora_adapter",
        "high_res_vision_config", "im_end_token_id", "im_start_token_id", "image_bos_token_id",
        "image_end_id", "image_end_token_id", "image_grid_pinpoints", "image_seq_length",
        "image_size", "image_start_id", "image_start_token_id", "image_token_id",
        "image_token_index", "insert_layer_id", "max_value_projector_patch_to_query_dict",
        "merge_kernel_size", "merger_times", "mm_tokens_per_image", "mtp_config",
        "multimodal_projector_bias", "newline_id", "num_channels", "num_image_tokens", "patch_size",
        "perceiver_config", "pixel_shuffle_factor", "position_id_per_seconds", "projection_dim",
        "projection_hidden_size",
        "projection_layer_norm_eps", "projector_bias", "projector_config", "projector_hidden_act",
        "projector_hidden_size", "projector_layernorm_eps", "projector_patch_to_query_dict",
        "projector_use_layernorm", "scale_factor", "seconds_per_chunk",
        "semantic_tokenizer_encoder_config", "slice_end_id", "slice_start_id", "spatial_merge_size",
        "spatial_pool_mode", "spatial_pool_stride", "system_token_id", "talker_config",
        "timestamp_token_id", "token2wav_config", "token_classification_bias", "tts_bos_token_id",
        "tts_eos_token_id", "tts_pad_token_id", "user_token_id", "video_end_token_id",
        "video_seq_length", "video_start_token_id", "video_token_id", "video_token_index",
        "vision_aspect_ratio", "vision_config", "vision_end_token_id", "vision_feature_layer",
        "vision_feature_layers", "vision_feature_select_strategy",
        "vision_soft_tokens_per_image", "vision_start_token_id",
        "vision_token_id", "visual_indicator_token_ids", "vocabulary_map", "vq_config",
        "window_size", "word_timestamp_config",
    )
)  # fmt: skip
# Keys that a wrapper repeats of its text model.
REPEATED = frozenset(
    (
        "hidden_size",
        "head_dim",
        "vocab_size",
        "rope_parameters",
        "max_position_embeddings",
        "_pad_token_id",
        "classifier_bias",
        "initializer_cutoff_factor",
    )
)
