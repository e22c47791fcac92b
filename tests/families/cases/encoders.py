from typing import Any

import torch
from gguf_files import GgufCase, paired
from harness import ENCODER_HEADS, LABELS, TIED, Case, heads, ropes

from cases.bert import encoder

_MHA = {"num_key_value_heads": None}
_FAIRSEQ = {**_MHA, "pad_token_id": 1, "bos_token_id": 0}
_RELU = ({}, {"hidden_act": "relu"})
_PLAIN = (ENCODER_HEADS, LABELS, TIED, _RELU)
# Without a kink: at one, a gradient in float32 may be another than in float64.
_SMOOTH = (*_PLAIN[:3], ({}, {"hidden_act": "silu"}))

_PRE_TRAINED = (*ENCODER_HEADS, {"auto": "AutoModelForPreTraining"})


def _both_ways(config: Any) -> dict[str, Any]:
    return {"attention.causal": False, "rope.scaling.type": "none", "pooling_type": 3}


def _jina(config: Any) -> dict[str, Any]:
    """Positions are counted from 0, of which transformers' begin behind the padding's."""
    length = config.max_position_embeddings - config.pad_token_id - 1
    return {"attention.causal": False, "pooling_type": 1, "context_length": length}


def _modern(config: Any) -> dict[str, Any]:
    ropes = config.rope_parameters
    return {
        **_both_ways(config),
        "attention.head_count_kv": None,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.sliding_window": config.local_attention,
        "attention.sliding_window_pattern": 3,
        "rope.freq_base": ropes["full_attention"]["rope_theta"],
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
    }


def _without_padding(model: Any, options: Any) -> None:
    """transformers sets the padding's vector to 0 whenever it loads a file."""
    torch.nn.init.zeros_(model.get_input_embeddings().weight[0])


CASES = (
    *(
        Case(
            name,
            _FAIRSEQ,
            auto="AutoModel",
            axes=(*_PLAIN, ({"type_vocab_size": 1}, {"type_vocab_size": 2}, {"pad_token_id": 0})),
        )
        for name in ("roberta", "xlm-roberta", "camembert", "data2vec-text")
    ),
    *(
        Case(
            name,
            _FAIRSEQ,
            auto="AutoModel",
            axes=(*_SMOOTH, ({}, {"type_vocab_size": 2}, {"pad_token_id": 0})),
        )
        for name in ("roberta-prelayernorm", "xlm-roberta-xl")
    ),
    Case(
        "megatron-bert",
        _MHA,
        auto="AutoModel",
        axes=(_PRE_TRAINED, *_SMOOTH[1:], ({}, {"type_vocab_size": 1})),
    ),
    Case(
        "ernie",
        _MHA,
        auto="AutoModel",
        axes=(
            _PRE_TRAINED,
            *_SMOOTH[1:],
            ({}, {"type_vocab_size": 1}),
            ({}, {"use_task_id": True}, {"use_task_id": True, "task_type_vocab_size": 16}),
        ),
    ),
    Case(
        "bert-generation",
        _MHA,
        auto="AutoModel",
        axes=(heads("CausalLM"), ({}, {"is_decoder": True}), TIED, _SMOOTH[-1]),
    ),
    Case(
        "modernbert-decoder",
        {**_MHA, "num_hidden_layers": 4, "local_attention": 16},
        axes=(
            ({}, {"auto": "AutoModel"}, {"auto": "AutoModelForSequenceClassification"}),
            LABELS,
            TIED,
            (
                {},
                {"norm_bias": True},
                {"attention_bias": True, "mlp_bias": True},
                {"hidden_activation": "silu", "classifier_activation": "mish"},
            ),
            ({}, {"classifier_bias": True}, {"decoder_bias": False}),
            ({}, {"local_attention": 9}, {"global_attn_every_n_layers": 2}),
        ),
    ),
    Case(
        "ibert",
        _FAIRSEQ,
        auto="AutoModel",
        axes=(*_PLAIN[:3], ({}, {"type_vocab_size": 1}, {"pad_token_id": 0})),
    ),
    Case(
        "jina_embeddings_v3",
        _FAIRSEQ,
        auto="AutoModel",
        axes=(*_PLAIN, ({}, {"type_vocab_size": 2}), ropes(8)),
        gguf=GgufCase("jina-bert-v3", _jina, kind="t5"),
    ),
    Case(
        "big_bird",
        {**_MHA, "block_size": 2, "num_random_blocks": 1},
        auto="AutoModel",
        axes=(
            tuple(each for each in _PRE_TRAINED if "Question" not in each.get("auto", "")),
            *_SMOOTH[1:],
            ({}, {"attention_type": "original_full"}, {"block_size": 3}, {"block_size": 64}),
            ({}, {"num_random_blocks": 2}, {"num_random_blocks": 3}),
            ({}, {"use_bias": False}, {"rescale_embeddings": True}),
        ),
    ),
    Case(
        "squeezebert",
        {**_MHA, "embedding_size": 32},
        auto="AutoModel",
        axes=(
            *_SMOOTH,
            ({}, {"type_vocab_size": 1}),
            ({}, {"q_groups": 1, "k_groups": 2}, {"v_groups": 8, "post_attention_groups": 2}),
            ({}, {"intermediate_groups": 1}, {"output_groups": 1}),
        ),
    ),
    Case(
        "convbert",
        {**_FAIRSEQ, "embedding_size": 20, "conv_kernel_size": 3},
        auto="AutoModel",
        axes=(
            *_SMOOTH,
            ({}, {"embedding_size": 32, "type_vocab_size": 1}),
            ({}, {"head_ratio": 1}, {"head_ratio": 8}),
            ({}, {"conv_kernel_size": 5}, {"conv_kernel_size": 1}),
            ({}, {"num_groups": 2}, {"num_groups": 4}),
        ),
        alone=True,
    ),
    Case(
        "mobilebert",
        {**_MHA, "embedding_size": 20, "intra_bottleneck_size": 16, "intermediate_size": 24},
        auto="AutoModel",
        axes=(
            _PRE_TRAINED,
            *_SMOOTH[1:3],
            ({}, {"hidden_act": "silu"}),
            ({}, {"type_vocab_size": 1}, {"embedding_size": 32}),
            ({}, {"trigram_input": False}),
            ({}, {"use_bottleneck_attention": True}),
            ({}, {"num_feedforward_networks": 1}, {"num_feedforward_networks": 2}),
            ({}, {"classifier_activation": False}),
        ),
        alone=True,
    ),
    Case(
        "roc_bert",
        {
            **_MHA,
            "pad_token_id": 1,  # transformers trains no row of that number, in any table
            "pronunciation_embed_dim": 12,
            "pronunciation_vocab_size": 9,
            "shape_embed_dim": 20,
            "shape_vocab_size": 14,
        },
        auto="AutoModel",
        axes=(
            _PRE_TRAINED,
            *_SMOOTH[1:],
            ({}, {"type_vocab_size": 1}),
            ({}, {"shape_vocab_size": 5, "pronunciation_embed_dim": 32}),
            ({}, {"concat_input": False}),
        ),
    ),
    Case(
        "longformer",
        {**_FAIRSEQ, "attention_window": 8},
        auto="AutoModel",
        axes=(
            *_SMOOTH,
            ({}, {"attention_window": [4, 16]}, {"attention_window": 4}),
            ({}, {"type_vocab_size": 1}, {"pad_token_id": 0}),
        ),
        global_tokens=(0, 3, 17),
    ),
    Case(
        "layoutlm",
        {**_MHA, "max_2d_position_embeddings": 12},
        auto="AutoModel",
        axes=(
            heads(
                "MaskedLM",
                "SequenceClassification",
                "TokenClassification",
                "DocumentQuestionAnswering",
            ),
            *_SMOOTH[1:],
            ({}, {"type_vocab_size": 1}, {"max_2d_position_embeddings": 1}),
        ),
    ),
    Case(
        "tapas",
        {**_MHA, "type_vocab_sizes": [3, 7, 7, 2, 7, 7, 10]},
        auto="AutoModel",
        axes=(
            heads("MaskedLM", "SequenceClassification"),
            *_SMOOTH[1:],
            ({}, {"type_vocab_sizes": [2, 5, 3]}),
        ),
    ),
    Case(
        "luke",
        {**_FAIRSEQ, "entity_vocab_size": 9, "entity_emb_size": 6},
        auto="AutoModel",
        axes=(
            *_SMOOTH,
            ({}, {"type_vocab_size": 1}, {"pad_token_id": 0}),
            ({}, {"entity_emb_size": 32}, {"use_entity_aware_attention": False}),
        ),
    ),
    Case(
        "xmod",
        {
            **_FAIRSEQ,
            "languages": ["en_XX", "de_DE", "de_DE2"],
            "default_language": "de_DE",
            "adapter_reduction_factor": 3,
        },
        auto="AutoModel",
        axes=(
            *_SMOOTH,
            ({}, {"pre_norm": True}),
            ({}, {"adapter_layer_norm": True}, {"adapter_reuse_layer_norm": False}),
            ({}, {"ln_before_adapter": False}),
            ({}, {"languages": ["de_DE"]}, {"default_language": "en_XX"}),
        ),
    ),
    Case("mpnet", _FAIRSEQ, auto="AutoModel", axes=_PLAIN, tokens=40),
    Case(
        "distilbert",
        {
            "num_key_value_heads": None,
            "hidden_size": None,
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "intermediate_size": None,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 40,
        },
        auto="AutoModel",
        axes=(ENCODER_HEADS, LABELS, TIED, ({}, {"activation": "relu"})),
    ),
    Case(
        "electra",
        {**_MHA, "embedding_size": 20},
        auto="AutoModel",
        axes=(
            _PRE_TRAINED,
            *_PLAIN[1:],
            ({}, {"embedding_size": 32}, {"type_vocab_size": 1}),
        ),
    ),
    Case(
        "albert",
        {**_MHA, "embedding_size": 20, "num_hidden_layers": 2},
        auto="AutoModel",
        axes=(
            _PRE_TRAINED,
            *_PLAIN[1:],
            ({}, {"embedding_size": 32}),
            (
                {},
                {"num_hidden_groups": 2},
                {"num_hidden_groups": 2, "inner_group_num": 2, "num_hidden_layers": 3},
                {"num_hidden_groups": 3, "num_hidden_layers": 4},
            ),
        ),
    ),
    Case(
        "rembert",
        {**_MHA, "input_embedding_size": 20, "output_embedding_size": 44},
        auto="AutoModel",
        axes=(*_SMOOTH, ({}, {"output_embedding_size": 20}, {"type_vocab_size": 1})),
    ),
    Case(
        "modernbert",
        {**_MHA, "num_hidden_layers": 4, "local_attention": 8},
        auto="AutoModel",
        axes=(
            ENCODER_HEADS,
            LABELS,
            TIED,
            (
                {},
                {"norm_bias": True},
                {"attention_bias": True, "mlp_bias": True},
                {"hidden_activation": "silu", "classifier_activation": "relu"},
            ),
            (
                {},
                {"classifier_pooling": "mean"},
                {"classifier_bias": True},
                {"decoder_bias": False},
            ),
            ({}, {"local_attention": 5}, {"global_attn_every_n_layers": 2}),
        ),
        gguf=GgufCase("modern-bert", _modern),
        more_gguf=(
            GgufCase(
                "modern-bert",
                lambda config: {**_modern(config), "hidden_act": config.hidden_activation},
                options={"hidden_activation": "silu", "local_attention": 5},
            ),
        ),
    ),
    Case(
        "eurobert",
        {"head_dim": 12},
        auto="AutoModel",
        axes=(
            heads("MaskedLM", "SequenceClassification", "TokenClassification"),
            LABELS,
            TIED,
            ({}, {"classifier_pooling": "mean"}, {"classifier_pooling": "bos"}),
            ({}, {"num_key_value_heads": 4}),
            ({}, {"attention_bias": True}, {"mlp_bias": True}),
            ropes(12),
        ),
        gguf=GgufCase("eurobert", _both_ways),
        more_gguf=(
            GgufCase("llama-embed", change=paired, options={"num_key_value_heads": 2}),
            GgufCase("llama-embed", _both_ways, paired, {"attention_bias": True}),
        ),
    ),
    Case(
        "ultrabert",
        {"head_dim": 12, "num_hidden_layers": 4, "sliding_window": 7, "prediction_head_size": 20},
        auto="AutoModel",
        axes=(
            ENCODER_HEADS,
            LABELS,
            TIED,
            ({}, {"classifier_pooling": "mean"}),
            ({}, {"num_key_value_heads": None}),
            ({}, {"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"}),
            (
                {},
                {"attention_windows": [0, 3, 3, None], "rope_theta": [500.0, 20.0, 20.0, 500.0]},
                {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
            ),
        ),
    ),
    Case(
        "neomme",
        {"head_dim": 16, "num_hidden_layers": 6, "embedding_rank": 12, "sliding_window": 5},
        auto="AutoModel",
        axes=(
            heads("MaskedLM"),
            TIED,
            ({}, {"num_key_value_heads": 4}, {"embedding_rank": 32}),
            ({}, {"attention_bias": True}, {"mlp_bias": True}, {"residual_multiplier": 0.7}),
            (
                {},
                {"num_hidden_layers": 7},
                {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
                {
                    "num_hidden_layers": 3,
                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                    "per_layer_config": {
                        "0": {"sliding_window": 7},
                        "1": {"sliding_window": None},
                    },
                },
            ),
            (
                {},
                {
                    "rope_parameters": {
                        "full_attention": {"rope_type": "linear", "factor": 4.0},
                        "sliding_attention": {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
                    }
                },
            ),
        ),
    ),
    Case(
        "nomic_bert",
        _MHA,
        auto="AutoModel",
        axes=(
            heads("MaskedLM", "SequenceClassification", "TokenClassification"),
            LABELS,
            TIED,
            ({}, {"hidden_act": "gelu"}, {"type_vocab_size": 1}),
            ropes(8),
        ),
        gguf=GgufCase("nomic-bert", encoder, kind="bert"),
    ),
    Case(
        "esmc",
        {**_FAIRSEQ, "num_hidden_layers": 3},
        auto="AutoModel",
        axes=(
            heads("MaskedLM", "SequenceClassification", "TokenClassification"),
            LABELS,
            ({}, {"hidden_act": "gelu"}),
            ({}, {"attention_bias": True}, {"mlp_bias": True}),
            ({}, {"num_hidden_layers": 2}),
            ropes(8),
        ),
    ),
    Case(
        "gte",
        _FAIRSEQ,
        auto="AutoModel",
        axes=(
            heads("MaskedLM", "SequenceClassification", "TokenClassification"),
            *_PLAIN[1:],
            ({}, {"type_vocab_size": 2}, {"type_vocab_size": 0}),
            ropes(8),
        ),
    ),
    Case(
        "roformer",
        {**_MHA, "embedding_size": 20},
        auto="AutoModel",
        axes=(
            (
                *ENCODER_HEADS,
                {"is_decoder": True},
                {"is_decoder": True, "auto": "AutoModelForCausalLM"},
            ),
            *_PLAIN[1:],
            ({}, {"embedding_size": None}, {"type_vocab_size": 1}),
        ),
    ),
    Case(
        "deberta-v2",
        {
            **_MHA,
            "relative_attention": True,
            "position_buckets": 4,
            "max_relative_positions": 14,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
        },
        auto="AutoModel",
        axes=(
            *_SMOOTH,
            ({}, {"legacy": False}, {"embedding_size": 20}),
            (
                {},
                {"share_att_key": False},
                {"norm_rel_ebd": "none"},
                {"relative_attention": False, "norm_rel_ebd": "none"},
            ),
            ({}, {"pos_att_type": ["c2p"]}, {"pos_att_type": ["p2c"]}),
            ({}, {"position_buckets": -1}, {"position_buckets": 6, "max_relative_positions": -1}),
            ({}, {"position_biased_input": True, "type_vocab_size": 2}),
            (
                {},
                {"conv_kernel_size": 3},
                {"conv_kernel_size": 3, "conv_act": "gelu"},
                {"conv_kernel_size": 5, "conv_groups": 4},
                {"conv_kernel_size": 1},
            ),
        ),
    ),
    Case(
        "deberta",
        {**_MHA, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        auto="AutoModel",
        axes=(
            *_SMOOTH,
            ({}, {"legacy": False}, {"embedding_size": 20}),
            ({}, {"max_relative_positions": 9}, {"relative_attention": False}),
            ({}, {"pos_att_type": "p2c|c2p"}, {"pos_att_type": ["c2p"]}, {"pos_att_type": ["p2c"]}),
            ({}, {"position_biased_input": False, "type_vocab_size": 2}),
        ),
    ),
    *(
        Case(
            name,
            {**_MHA, "intermediate_size": None},
            auto="AutoModel",
            axes=(
                (
                    *ENCODER_HEADS,
                    {"causal": True},
                    {"causal": True, "auto": "AutoModelForMaskedLM"},
                ),
                *_PLAIN[1:3],
                ({}, {"gelu_activation": False}),
                ({}, {"n_langs": 3}, {"n_langs": 3, "use_lang_emb": False}),
                ({}, {"sinusoidal_embeddings": True}),
            ),
        )
        for name in ("xlm", "flaubert")
    ),
    Case(
        "xlnet",
        {
            **_MHA,
            "hidden_size": None,
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "intermediate_size": None,
            "max_position_embeddings": None,
            "d_model": 32,
            "n_layer": 2,
            "n_head": 4,
            "d_inner": 40,
        },
        auto="AutoModel",
        axes=(
            heads("CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"),
            LABELS,
            TIED,
            ({}, {"clamp_len": 5}, {"clamp_len": 40}),
            ({}, {"ff_activation": "gelu_new"}, {"d_head": 8}),
        ),
        segments=True,
        pads_left=True,
    ),
    Case(
        "funnel",
        {
            **_MHA,
            "hidden_size": None,
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "intermediate_size": None,
            "max_position_embeddings": None,
            "d_model": 32,
            "n_head": 4,
            "d_head": 6,
            "d_inner": 40,
            "block_sizes": [1, 2, 1],
            "num_decoder_layers": 1,
        },
        auto="FunnelModel",
        axes=(
            ENCODER_HEADS,
            LABELS,
            TIED,
            ({}, {"pooling_type": "max"}, {"hidden_act": "relu"}),
            ({}, {"attention_type": "factorized"}),
            ({}, {"truncate_seq": False}, {"separate_cls": False}),
            ({}, {"pool_q_only": False}),
            (
                {},
                {"block_sizes": [1, 1], "num_decoder_layers": 0},
                {"block_repeats": [1, 1, 1]},
                {"block_sizes": [2, 1, 1]},
            ),
        ),
        segments=True,
        alone=True,
        shortest=7,
        alter=_without_padding,
    ),
    Case(
        "clip_text_model",
        {**_MHA, "eos_token_id": 60, "projection_dim": 12},
        auto="CLIPTextModel",
        axes=(
            ({}, {"auto": "CLIPTextModelWithProjection"}),
            ({}, {"hidden_act": "gelu"}, {"projection_dim": 32}, {"eos_token_id": 2}),
        ),
    ),
    Case(
        "vit",
        {
            **_MHA,
            "vocab_size": None,
            "max_position_embeddings": None,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "image_size": 12,
            "patch_size": 4,
            "num_channels": 2,
        },
        auto="AutoModel",
        pixels=(2, 12, 12),
        axes=(heads("ImageClassification"), LABELS, ({}, {"qkv_bias": False}), _RELU),
    ),
)
