from harness import TIED, Case, rope

_AXES = (
    TIED,
    ({}, {"attention_bias": False}, {"num_key_value_heads": 4}),
    ({}, rope("default", partial_rotary_factor=1.0)),
)

CASES = (Case("glm", {"head_dim": 16}, axes=_AXES), Case("glm4", {"head_dim": 16}, axes=_AXES))
