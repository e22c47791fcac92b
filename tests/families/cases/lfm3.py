from harness import TIED, Case

_KINDS = ["conv", "full_attention", "sliding_attention", "conv"]


def _ropes(part: float, **scaling: object) -> dict[str, object]:
    full = {"rope_type": "proportional", "rope_theta": 900.0, "partial_rotary_factor": part}
    near = {"rope_type": "default", "rope_theta": 40.0}
    return {"rope_parameters": {"full_attention": full | scaling, "sliding_attention": near}}


CASES = (
    Case(
        "lfm3",
        {"num_hidden_layers": 4, "head_dim": 8, "layer_types": _KINDS, "sliding_window": 7},
        axes=(
            TIED,
            ({}, {"use_attention_gate": False}, {"use_sandwich_norm": False}),
            ({}, {"attention_bias": True}, {"conv_bias": True}, {"conv_L_cache": 3}),
            ({}, {"layer_types": None}, {"layer_types": ["full_attention", *3 * ["conv"]]}),
            ({}, _ropes(0.25), _ropes(0.5, factor=4.0), _ropes(0.0)),
        ),
    ),
)
