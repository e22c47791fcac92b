from harness import Case

_SIZES = {
    "num_key_value_heads": None,
    "intermediate_size": None,
    "num_hidden_layers": 3,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 24,
}
_TIED = ({}, {"tie_word_embeddings": False})
_AXES = (_TIED, ({}, {"scale_embedding": True}, {"scale_embedding": False}))
_ACTIVATIONS = ({}, {"activation_function": "relu"}, {"activation_function": "swish"})
_SEQ2SEQ = "AutoModelForSeq2SeqLM"

CASES = (
    *(
        Case(name, _SIZES, axes=(*_AXES, _ACTIVATIONS), auto=_SEQ2SEQ)
        for name in ("bart", "mvp", "plbart", "mbart", "blenderbot", "blenderbot-small", "pegasus")
    ),
    Case(
        "led",
        {
            **_SIZES,
            "max_position_embeddings": None,
            "max_encoder_position_embeddings": 48,
            "max_decoder_position_embeddings": 64,
            "attention_window": 8,
        },
        axes=(
            _TIED,
            _ACTIVATIONS,
            ({}, {"attention_window": [4, 6, 12]}, {"attention_window": 4}),
        ),
        auto=_SEQ2SEQ,
        global_tokens=(0, 2, 7),
    ),
    Case(
        "bigbird_pegasus",
        _SIZES | {"block_size": 1, "num_random_blocks": 1},
        axes=(
            *_AXES,
            _ACTIVATIONS,
            ({}, {"attention_type": "original_full"}, {"block_size": 2}),
            ({}, {"num_random_blocks": 2}, {"num_random_blocks": 3}),
            ({}, {"use_bias": True}),
        ),
        auto=_SEQ2SEQ,
    ),
    Case(
        "pegasus_x",
        _SIZES | {"block_size": 4, "num_global_tokens": 3},
        axes=(
            *_AXES,
            _ACTIVATIONS,
            ({}, {"block_size": 2}, {"block_size": 6}, {"block_size": 64}),
            ({}, {"stagger_local_blocks": False}, {"num_global_tokens": 1}),
        ),
        auto=_SEQ2SEQ,
    ),
    Case("m2m_100", _SIZES | {"pad_token_id": 1}, axes=(*_AXES, _ACTIVATIONS), auto=_SEQ2SEQ),
    Case(
        "fsmt",
        _SIZES | {"pad_token_id": 1, "src_vocab_size": 71},
        axes=(
            ({}, {"tie_word_embeddings": True, "src_vocab_size": 61}),
            _AXES[1],
            _ACTIVATIONS,
            ({}, {"pad_token_id": 0}),
        ),
        auto=_SEQ2SEQ,
    ),
    Case(
        "marian",
        _SIZES,
        axes=(
            *_AXES,
            ({}, {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 71}),
        ),
        auto=_SEQ2SEQ,
    ),
)
