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
