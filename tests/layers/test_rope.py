"""Rotary positions, judged by the rotary modules of transformers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from polyhead import native
from polyhead.config import RopeConfig
from polyhead.errors import ConfigError
from polyhead.layers import RoPE

POSITIONS = torch.tensor([0, 1, 1000, 2047, 2048, 4095, 4096, 8192, 60000])
THETA = 5e5
SHORT = tuple(1.0 + i / 64 for i in range(32))
LONG = tuple(1.0 + i / 4 for i in range(32))

# Our fields; transformers spells original_max_positions differently and takes lists.
SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.5, "original_max_positions": 4096},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_positions": 2048,
    },
    "yarn": {"factor": 4.0, "original_max_positions": 1024},
    "longrope": {
        "factor": 2.0,
        "original_max_positions": 2048,
        "short_factor": SHORT,
        "long_factor": LONG,
    },
}
CASES = [
    *SCALINGS.items(),
    ("yarn", SCALINGS["yarn"] | {"attention_factor": 0.7}),
    ("yarn", SCALINGS["yarn"] | {"mscale": 1.0, "mscale_all_dim": 0.5}),
    ("yarn", SCALINGS["yarn"] | {"truncate": False, "beta_fast": 24.0, "beta_slow": 2.0}),
    ("longrope", SCALINGS["longrope"] | {"attention_factor": 1.25}),
    ("proportional", {"rotated": 16}),
    ("proportional", {"rotated": 24, "factor": 4.0}),
]


def of_transformers(name: str, fields: dict, dtype: torch.dtype, partial: float = 1.0):
    """cos and sin of a fresh rotary module of transformers, as a function of positions."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = dict(fields)
    if "rotated" in fields:
        partial = fields.pop("rotated") / 64
    theirs = {
        "original_max_position_embeddings" if key == "original_max_positions" else key: (
            list(value) if isinstance(value, tuple) else value
        )
        for key, value in fields.items()
        if (key, name) != ("original_max_positions", "dynamic")
    }
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=8,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": name,
            "rope_theta": THETA,
            "partial_rotary_factor": partial,
            **theirs,
        },
    )

    def cos_sin(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        module = LlamaRotaryEmbedding(config)
        cos, sin = module(torch.zeros(1, dtype=dtype), positions[None])
        return cos[0], sin[0]

    return cos_sin


def half_split(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    return apply_rotary_pos_emb(x, x, cos[None], sin[None])[0]


@pytest.mark.parametrize("last", range(2, 10))
@pytest.mark.parametrize(("name", "fields"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cos_and_sin_equal_transformers(name, fields, last, dtype):
    # Which frequencies dynamic and longrope use depends on the greatest position of the call.
    positions = POSITIONS[:last]
    want = of_transformers(name, fields, dtype)(positions)
    have = RoPE(THETA, type=name, **fields).cos_sin(positions, 64, dtype)
    torch.testing.assert_close(have, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["linear", "dynamic", "llama3", "yarn"])
def test_partial_rotary_equals_transformers(name):
    fields = SCALINGS[name]
    want = of_transformers(name, fields, torch.float32, partial=0.5)(POSITIONS)
    have = RoPE(THETA, type=name, dim=32, **fields).cos_sin(POSITIONS, 64)
    torch.testing.assert_close(have, want, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "fields"), CASES)
@pytest.mark.parametrize("first", [0, 7, 4090])
def test_tokens_that_follow_on_equal_explicit_positions(name, fields, first):
    rope, x = RoPE(THETA, type=name, **fields), torch.randn(2, 3, 12, 64)
    cos, sin = of_transformers(name, fields, torch.float32)(torch.arange(first, first + 12))
    want = half_split(x, cos, sin)
    torch.testing.assert_close(rope.apply(x, first), want)
    torch.testing.assert_close(rope.apply(x, torch.arange(first, first + 12)), want)
    across = rope.apply(x.transpose(1, 2), first, head_axis=2)
    torch.testing.assert_close(across, want.transpose(1, 2))


def test_every_batch_row_has_positions_of_its_own():
    rope, x = RoPE(), torch.randn(2, 3, 5, 8)
    positions = torch.tensor([[0, 1, 2, 3, 4], [9, 9, 50, 3, 0]])
    for head_axis in (1, 2):
        have = rope.apply(
            x if head_axis == 1 else x.transpose(1, 2), positions, head_axis=head_axis
        )
        for row in range(2):
            want = rope.apply(x[row : row + 1], positions[row])[0]
            torch.testing.assert_close(
                have[row] if head_axis == 1 else have[row].transpose(0, 1), want
            )


def test_partial_rotary_leaves_the_other_features_alone():
    x = torch.randn(1, 2, 6, 16)
    turned = RoPE(dim=8).apply(x, 3)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    torch.testing.assert_close(turned[..., :8], RoPE().apply(x[..., :8], 3))


def test_products_depend_on_the_distance_alone():
    torch.manual_seed(0)
    rope, q, k = RoPE(), torch.randn(1, 1, 1, 64), torch.randn(1, 1, 1, 64)
    near = rope.apply(q, 5) @ rope.apply(k, 2).mT
    far = rope.apply(q, 105) @ rope.apply(k, 102).mT
    torch.testing.assert_close(near, far)


def test_a_call_rotates_queries_and_keys_alike():
    rope, q, k = RoPE(), torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    turned_q, turned_k = rope(q, k, 2)
    torch.testing.assert_close(turned_q, rope.apply(q, 2))
    torch.testing.assert_close(turned_k, rope.apply(k, torch.tensor([2, 3, 4])))


def test_decoding_builds_a_table_few_times(monkeypatch):
    import polyhead.layers.positions as module

    built = []
    original = module.inverse_frequencies
    monkeypatch.setattr(
        module, "inverse_frequencies", lambda *args: built.append(args) or original(*args)
    )
    rope, x = RoPE(), torch.randn(1, 1, 1, 8)
    for position in range(1500):
        rope.apply(x, position)
    assert len(built) == 4  # 256, 512, 1024, 2048


@pytest.mark.parametrize(("name", "trained"), [("dynamic", 4096), ("longrope", 2048)])
def test_results_do_not_depend_on_earlier_calls(name, trained):
    fields, x = SCALINGS[name], torch.randn(1, 1, 4, 64)
    used = RoPE(type=name, **fields)
    for first in (30_000, 5000, 0, trained - 4, trained - 3, trained - 4):
        fresh = RoPE(type=name, **fields).apply(x, torch.arange(first, first + 4))
        torch.testing.assert_close(used.apply(x, first), fresh, rtol=0, atol=0)


def test_tables_made_in_inference_mode_serve_training():
    rope, x = RoPE(), torch.randn(1, 1, 4, 8)
    with torch.inference_mode():
        rope.apply(x, 0)
    x.requires_grad_()
    rope.apply(x, 0).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_gradient_is_the_inverse_rotation():
    x = torch.randn(1, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: RoPE().apply(x, 4), x)


def test_a_copy_and_a_pickle_rotate_alike():
    rope, x = RoPE(THETA, type="yarn", **SCALINGS["yarn"]), torch.randn(1, 1, 4, 64)
    want = rope.apply(x, 3)
    for other in (copy.deepcopy(rope), pickle.loads(pickle.dumps(rope))):
        assert other.config == rope.config
        assert torch.equal(other.apply(x, 3), want)


def test_works_without_values_on_the_meta_device():
    assert RoPE().apply(torch.empty(1, 2, 3, 8, device="meta"), 4).shape == (1, 2, 3, 8)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"type": "linear"}, "'linear' needs factor"),
        ({"type": "yarn", "factor": 2.0}, "needs original_max_positions"),
        ({"factor": 2.0}, "'default' does not read factor"),
        ({"type": "linear", "factor": 2.0, "mscale": 1.0}, "does not read mscale"),
        ({"type": "su"}, "must be one of default, linear"),
        ({"dim": 7}, "even number"),
        ({"type": "dynamic", "dim": 2, "factor": 2.0, "original_max_positions": 8}, "at least 4"),
        ({"theta": 0.0}, "theta must be positive"),
        ({"type": "explicit"}, "needs frequencies"),
        ({"frequencies": (1.0,)}, "does not read frequencies"),
        ({"sections": (4,)}, "sections must be two or more whole numbers"),
        ({"sections": (4, -1)}, "sections must be two or more whole numbers"),
        ({"interleaved_sections": True}, "interleaved_sections needs sections"),
        (
            {
                "type": "longrope",
                "original_max_positions": 8,
                "short_factor": (1.0,),
                "long_factor": (1.0,),
            },
            "factor or attention_factor",
        ),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        RoPE(**fields)


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="beta_medium"):
        RoPE(type="yarn", factor=2.0, original_max_positions=8, beta_medium=3)


def test_sizes_that_do_not_fit_the_head_are_refused():
    with pytest.raises(ConfigError, match="head_dim=8"):
        RoPE.from_config(RopeConfig(dim=10), head_dim=8)
    with pytest.raises(ConfigError, match="one number per rotated pair, 4"):
        RoPE.from_config(RopeConfig(type="longrope", **SCALINGS["longrope"]), head_dim=8)
    with pytest.raises(ConfigError, match="frequencies need one number per rotated pair, 4: got 2"):
        RoPE.from_config(RopeConfig(type="explicit", frequencies=(1.0, 0.5)), head_dim=8)
    with pytest.raises(ConfigError, match="even number"):
        RoPE().apply(torch.randn(1, 1, 2, 7))
    for interleaved in (False, True):
        rope = RopeConfig(sections=(2, 1), interleaved_sections=interleaved)
        with pytest.raises(ConfigError, match=r"each rotated pair once, 4 in all: got \(2, 1\)"):
            RoPE.from_config(rope, head_dim=8)


# Which coordinate turns each pair, written out. Of (3, 1, 4) interleaved, the second coordinate
# ends behind pair 1, and pairs behind 3 · 1 that would be its belong to the first.
SECTIONS = [
    ((3, 1, 4), False, [0, 0, 0, 1, 2, 2, 2, 2]),
    ((3, 1, 4), True, [0, 1, 2, 0, 0, 2, 0, 0]),
    ((4, 2, 2), True, [0, 1, 2, 0, 1, 2, 0, 0]),
    ((2, 2, 2, 2), False, [0, 0, 1, 1, 2, 2, 3, 3]),
    ((5, 3), True, [0, 1, 0, 1, 0, 1, 0, 0]),
]


@pytest.mark.parametrize("head_axis", [1, 2])
@pytest.mark.parametrize(("sections", "interleaved", "turned_by"), SECTIONS)
def test_each_pair_turns_by_its_coordinate(sections, interleaved, turned_by, head_axis):
    """Against complex numbers in float64, with two features of a head that do not turn."""
    rope = RoPE(50.0, dim=16, sections=sections, interleaved_sections=interleaved)
    x = torch.randn(2, 3, 5, 18, requires_grad=True)
    positions = torch.randint(0, 40, (len(sections), 2, 5))
    of_pair = positions.double()[turned_by].permute(1, 2, 0)  # [B, T, pairs]
    angles = of_pair * 50.0 ** (-torch.arange(8).double() / 8)
    turned = torch.complex(x[..., :8].double(), x[..., 8:16].double())
    turned = turned * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    wanted = torch.cat((turned.real, turned.imag, x[..., 16:].double()), dim=-1)
    given = x if head_axis == 1 else x.transpose(1, 2).contiguous()
    got = rope.apply(given, positions, head_axis=head_axis)
    got = got if head_axis == 1 else got.transpose(1, 2)
    torch.testing.assert_close(got.double(), wanted, atol=2e-5, rtol=0)
    seed = torch.randn_like(wanted)
    ours, theirs = (torch.autograd.grad((y * seed).sum(), x)[0] for y in (got.double(), wanted))
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


def test_equal_coordinates_rotate_as_one_position_and_as_without_sections():
    x, positions = torch.randn(2, 3, 5, 16), torch.randint(0, 40, (2, 5))
    rope = RoPE(50.0, sections=(3, 1, 4), interleaved_sections=True)
    for at in (positions, positions.expand(3, 2, 5)):
        assert torch.equal(rope.apply(x, at), RoPE(50.0).apply(x, positions))
    assert torch.equal(rope.apply(x, 7), RoPE(50.0).apply(x, 7))
    tokens = x.transpose(1, 2).contiguous()
    for shared in (positions[:1], positions[:1].expand(3, 1, 5)):  # by all rows of the batch
        assert torch.equal(rope.apply(x, shared), RoPE(50.0).apply(x, positions[0]))
        got = rope.apply(tokens, shared, head_axis=2)
        assert torch.equal(got, rope.apply(tokens, positions[0], head_axis=2))


@pytest.mark.parametrize(
    ("fields", "count"), [({}, "no sections"), ({"sections": (4, 4)}, "2 sec")]
)
def test_coordinates_that_the_rope_does_not_have_are_refused(fields, count):
    with pytest.raises(ValueError, match=f"need rope sections.* got C=3 and {count}"):
        RoPE(**fields).apply(torch.randn(2, 3, 5, 16), torch.zeros(3, 2, 5, dtype=torch.long))


@pytest.mark.parametrize("code", native.all_codes(), ids=lambda code: code.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "rotated"), [(64, None), (20, None), (32, 12)])
def test_native_rotation_equals_torchs(code, dtype, dim, rotated):
    rope = RoPE(dim=rotated)
    x = torch.randn(2, 5, 9, dim)[:, :, 1:7].to(dtype)
    wanted = rope.apply(x.double(), 11, head_axis=2)
    with torch.no_grad(), native.using(code):
        found = rope.apply(x, 11, head_axis=2)
    close = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(found.double(), wanted, atol=close, rtol=close)


def test_a_configuration_cannot_be_assigned_to_tables_made_of_another():
    rope, x = RoPE(theta=100.0), torch.randn(1, 2, 3, 8)
    before = rope.apply(x)
    with pytest.raises(AttributeError, match=r"build another with RoPE\.from_config"):
        rope.config = RopeConfig(theta=7.0)
    assert rope.config == RopeConfig(theta=100.0)
    assert torch.equal(rope.apply(x), before)


@pytest.mark.parametrize("type", ["default", "dynamic"])
@pytest.mark.parametrize("start", [0, 5, 77, 300])
def test_rows_of_different_lengths_are_rotated_as_rows_of_equal_length(
    type: str, start: int
) -> None:
    scaling = {} if type == "default" else {"factor": 2.0, "original_max_positions": 64}
    rope = RoPE(type=type, **scaling)
    x = torch.zeros(2, 1, 4, 48)
    several = rope.tables_at(x, [start, 300], 1, 48)
    packed = rope.tables_at(x, [start, 300], [1, 1], 48)
    for a, b, alone in zip(several, packed, rope.tables_at(x, 300, 1, 48), strict=True):
        assert torch.equal(a[1].flatten(), alone.flatten())
        assert torch.equal(a.flatten(), b.flatten())
    if type == "default":  # else the longest row's frequencies are everyone's
        for a, alone in zip(several, RoPE().tables_at(x, start, 1, 48), strict=True):
            assert torch.equal(a[0].flatten(), alone.flatten())
