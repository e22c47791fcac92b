"""attn_implementation="polyhead" against transformers' eager attention, in float32.

Outputs and gradients at tokens that are not padding equal eager's to 1e-5 (relative and absolute;
gradients relative to the largest of their tensor).
"""

import copy

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import masking_utils

import polyhead as ph
from families import ALL, DECODERS, ENCODER_DECODERS, build, inputs, real_tokens
from polyhead import UnsupportedError, native
from polyhead.integrations import transformers as integration
from polyhead.integrations._transformers_masks import (
    TypedMask,
    tensor_mask,
    translates,
    typed_mask,
)
from polyhead.semantics import Tokens

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def pair(family):
    """The same model twice: eager, and polyhead."""
    eager = build(family)
    eager.set_attn_implementation("eager")
    return eager, integration.use(copy.deepcopy(eager))


def output(model, batch, counts):
    result = model(**batch, use_cache=False) if "input_ids" in batch else model(**batch)
    main = result.logits if "logits" in result else result.last_hidden_state
    return main if counts is None else main[counts]


def gradients(model, loss):
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", ALL)
def test_outputs_and_gradients_equal_eagers(family, side):
    eager, ours = pair(family)
    batch, counts = inputs(family, side)
    want, got = output(eager, batch, counts), output(ours, batch, counts)
    torch.testing.assert_close(got, want, **CLOSE)
    pull = torch.randn_like(want)
    wanted = gradients(eager, (want * pull).mean())
    mine = gradients(ours, (got * pull).mean())
    assert mine.keys() == wanted.keys()
    for name, w in wanted.items():
        band = 1e-5 * max(float(w.abs().max()), 1e-3)
        torch.testing.assert_close(mine[name], w, rtol=1e-4, atol=band, msg=name)


@pytest.mark.parametrize("family", ALL)
def test_without_padding_outputs_equal_eagers(family):
    eager, ours = pair(family)
    batch, _ = inputs(family)
    batch = {name: x for name, x in batch.items() if "attention_mask" not in name}
    torch.testing.assert_close(output(ours, batch, None), output(eager, batch, None), **CLOSE)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", [*DECODERS, *ENCODER_DECODERS])
def test_generate_equals_eagers(family, cache):
    """Left padding, nine steps: past every window of five, in dynamic and static caches."""
    eager, ours = pair(family)
    batch, _ = inputs(family, "left" if family in DECODERS else "right")
    prompt = {k: v for k, v in batch.items() if not k.startswith("decoder")}
    results = [
        model.generate(
            **prompt, max_new_tokens=9, min_new_tokens=9, do_sample=False,
            cache_implementation=cache, output_scores=True, return_dict_in_generate=True,
        )
        for model in (eager, ours)
    ]  # fmt: skip
    assert torch.equal(results[0].sequences, results[1].sequences)
    for want, got in zip(results[0].scores, results[1].scores, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_sliding_caches_in_chunks_equal_one_pass(family, kind):
    _, ours = pair(family)
    ids = torch.randint(3, 99, (2, 17))
    with torch.no_grad():
        want = ours(input_ids=ids, use_cache=False).logits
        if kind == "static":
            cache = hf.StaticCache(config=ours.config, max_cache_len=24)
        else:
            cache = hf.DynamicCache(config=ours.config)
        parts = [
            ours(input_ids=chunk, past_key_values=cache).logits
            for chunk in ids.split([6, 1, 4, 1, 1, 4], dim=1)
        ]
    torch.testing.assert_close(torch.cat(parts, dim=1), want, rtol=1e-4, atol=1e-5)


def test_every_layer_goes_through_polyhead_and_explain_sees_it():
    _, ours = pair("gemma3")
    batch, _ = inputs("gemma3", "left")
    seen = integration.explain(ours, **batch)
    assert [name for name, _ in seen] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    text = str(seen)
    assert "Window(5)" in text.splitlines()[0]
    assert "Window" not in text.splitlines()[1]
    assert "KeyLengths" in text
    assert "tiled" in text
    plain = integration.explain(ours, input_ids=batch["input_ids"])
    compiled = native.unavailable() is None
    assert plain.layers[1][1].kernel == ("native" if compiled else "sdpa")
    assert "mask Causal()" in plain.layers[1][1].call


@pytest.mark.parametrize("family", ALL)
def test_all_attention_modules_of_a_family_are_seen(family):
    _, ours = pair(family)
    batch, _ = inputs(family)
    layers = {"albert": 2, "vit": 2, "bert": 2}.get(family, 6 if family in ENCODER_DECODERS else 2)
    assert len(integration.explain(ours, **batch)) == layers


def test_no_t_by_s_tensor_travels(monkeypatch):
    _, ours = pair("mistral")
    seen = []
    original = integration.attention_forward
    monkeypatch.setattr(
        integration, "attention_forward",
        lambda m, q, k, v, mask, **kw: seen.append(mask) or original(m, q, k, v, mask, **kw),
    )  # fmt: skip
    batch, _ = inputs("mistral", "left")
    ours(**batch)
    assert translates()
    assert all(isinstance(mask, TypedMask) for mask in seen)
    assert "Keep" not in repr(seen[0].mask)
    with pytest.raises(UnsupportedError, match="typed_masks=False"):
        torch.zeros(3) + seen[0]
    with pytest.raises(UnsupportedError, match="typed_masks=False"):
        seen[0][:, 0]
    with pytest.raises(UnsupportedError, match="masked_fill"):
        torch.zeros(3).masked_fill(seen[0], 0.0)


PREDICATES = {
    "causal": masking_utils.causal_mask_function,
    "all": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "both_sides": masking_utils.sliding_window_bidirectional_mask_function(2),
    "chunks": masking_utils.chunked_causal_mask_function(3, torch.zeros(3, dtype=torch.long)),
}


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(PREDICATES)), st.integers(1, 5), st.integers(1, 8), st.integers(0, 6),
    st.integers(0, 3), st.sampled_from(["none", "left", "right", "both", "holes"]),
    st.integers(0, 3), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_typed_masks_say_what_transformers_draws(
    kind, T, S, first, start, pads, short, as_tensor, seed
):
    """Any lengths, offsets (a static cache has them as tensors) and padding, full rows too."""
    torch.manual_seed(seed)
    total = max(1, start + S - short)
    columns, ends = torch.arange(total), torch.randint(0, total + 1, (3, 2)).sort(dim=1).values
    real = {
        "none": None,
        "left": columns >= ends[:, :1],
        "right": columns < ends[:, 1:],
        "both": (columns >= ends[:, :1]) & (columns < ends[:, 1:]),
        "holes": torch.rand(3, total) < 0.6,
    }[pads]
    arguments = {
        "batch_size": 3, "q_length": T, "kv_length": S, "kv_offset": start,
        "mask_function": PREDICATES[kind], "attention_mask": real,
    }  # fmt: skip
    want = tensor_mask(**arguments, q_offset=start + first)
    offset = torch.tensor(start + first) if as_tensor else start + first
    got = typed_mask(**arguments, q_offset=offset)
    rows = Tokens.of(T, shift=got.keys - T, positions=got.q_positions)
    seen = torch.ones(1, dtype=torch.bool)
    if got.mask is not None:
        seen = got.mask.visible(rows, Tokens.of(got.keys), torch.device("cpu"))
    seen = nn.functional.pad(seen.expand(3, 1, T, got.keys), (0, S - got.keys))
    assert torch.equal(seen, want)


def test_bool_tensor_masks_are_equal_too():
    eager, ours = pair("gemma2")
    batch, counts = inputs("gemma2", "left")
    want = output(eager, batch, counts)
    try:
        integration.register(typed_masks=False)
        torch.testing.assert_close(output(ours, batch, counts), want, **CLOSE)
    finally:
        integration.register()


def test_padding_with_holes_and_masks_of_the_caller():
    eager, ours = pair("llama")
    ids = torch.randint(3, 99, (2, 8))
    holes = torch.tensor([[1, 1, 0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])
    own_float = torch.randn(2, 1, 8, 8)
    own_float = own_float.masked_fill(
        torch.ones(8, 8).triu(1).bool(), torch.finfo(torch.float32).min
    )
    own_bool = torch.rand(2, 1, 8, 8) < 0.6
    own_bool |= torch.eye(8, dtype=torch.bool)
    for mask in (holes, own_float):
        batch = {"input_ids": ids, "attention_mask": mask}
        torch.testing.assert_close(output(ours, batch, None), output(eager, batch, None), **CLOSE)
    as_float = torch.where(own_bool, 0.0, torch.finfo(torch.float32).min)
    want = output(eager, {"input_ids": ids, "attention_mask": as_float}, None)
    got = output(ours, {"input_ids": ids, "attention_mask": own_bool}, None)
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_packed_documents_do_not_leak(family):
    eager, ours = pair(family)
    ids = torch.randint(3, 99, (1, 15))
    positions = torch.cat([torch.arange(n) for n in (4, 9, 2)])[None]
    batch = {"input_ids": ids, "position_ids": positions}
    got = output(ours, batch, None)
    torch.testing.assert_close(got, output(eager, batch, None), **CLOSE)
    pieces = [output(ours, {"input_ids": piece}, None) for piece in ids.split([4, 9, 2], dim=1)]
    torch.testing.assert_close(got, torch.cat(pieces, dim=1), **CLOSE)
    assert "Documents([4, 9, 2])" in str(integration.explain(ours, **batch, use_cache=False))

    ends = torch.tensor([0, 4, 13, 15], dtype=torch.int32)
    flattened = {**batch, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    torch.testing.assert_close(output(ours, flattened, None), got, **CLOSE)
    # With a cache transformers no longer looks at the positions; the boundaries still count.
    torch.testing.assert_close(ours(**flattened).logits, got, **CLOSE)
    with pytest.raises(UnsupportedError, match="cu_seq_lens_q and cu_seq_lens_k must be equal"):
        ours(**batch, cu_seq_lens_q=ends)


@pytest.mark.parametrize("family", ["bert", "llama", "gpt_oss", "gemma2", "t5"])
def test_weights_on_request_equal_eagers(family):
    eager, ours = pair(family)
    batch, counts = inputs(family)
    eager_out = eager(**batch, output_attentions=True)
    out = ours(**batch, output_attentions=True)
    names = [name for name in eager_out if name.endswith("attentions")]
    assert names
    for name in names:
        for want, got in zip(eager_out[name], out[name], strict=True):
            assert got is not None, name
            real = want.new_ones(want.shape[0], want.shape[2]).bool()
            if counts is not None and counts.shape[1] == want.shape[2]:
                real = counts
            rows = real[:, None].expand(want.shape[:3])
            torch.testing.assert_close(got[rows], want[rows], **CLOSE)


def test_weights_over_a_static_cache_cover_all_of_its_slots():
    eager, ours = pair("llama")
    ids = torch.randint(3, 99, (2, 5))
    results = []
    for model in (eager, ours):
        cache = hf.StaticCache(config=model.config, max_cache_len=9)
        with torch.no_grad():
            results.append(model(ids, past_key_values=cache, output_attentions=True).attentions)
    assert results[1][0].shape == (2, 4, 5, 9)
    torch.testing.assert_close(results[1], results[0], **CLOSE)


def test_dropout_is_on_in_training_only():
    model = hf.BertModel(
        hf.BertConfig(
            vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
            intermediate_size=48, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5,
        )
    )  # fmt: skip
    integration.use(model)
    ids = torch.randint(3, 99, (2, 9))
    model.train()
    torch.manual_seed(3)
    first = model(ids).last_hidden_state
    assert not torch.allclose(model(ids).last_hidden_state, first)
    torch.manual_seed(3)
    assert torch.equal(model(ids).last_hidden_state, first)
    mean = torch.stack([model(ids).last_hidden_state for _ in range(64)]).mean(0)
    model.eval()
    still = model(ids).last_hidden_state
    assert torch.equal(model(ids).last_hidden_state, still)
    assert (mean - still).abs().mean() < 0.25 * (first - still).abs().max()
    q = torch.randn(1, 2, 5, 8)
    outs = [integration.attention_forward(model, q, q, q, None, dropout=p)[0] for p in (0.0, 0.5)]
    assert torch.equal(*outs)  # a class that hands its dropout over in evaluation too


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
def test_gradient_checkpointing():
    eager, ours = pair("gemma3")
    batch, counts = inputs("gemma3")
    for model in (eager, ours):
        model.gradient_checkpointing_enable()
        model.train()
    want = gradients(eager, output(eager, batch, counts).square().mean())
    got = gradients(ours, output(ours, batch, counts).square().mean())
    for name, w in want.items():
        torch.testing.assert_close(got[name], w, rtol=1e-4, atol=1e-6, msg=name)


SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
REFUSED = {
    "MptAttention": (
        hf.MptForCausalLM, hf.MptConfig(vocab_size=50, d_model=16, n_heads=2, n_layers=1)
    ),
    "MPNetSelfAttention": (hf.MPNetModel, hf.MPNetConfig(**SMALL, intermediate_size=16)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_would_ignore_it_are_refused(name):
    model_class, config = REFUSED[name]
    model = model_class(copy.deepcopy(config)).eval()
    for what in (model, model_class, config):
        with pytest.raises(UnsupportedError, match=rf"computes attention itself in .*{name}"):
            integration.check(what)
    with pytest.raises(UnsupportedError, match=name):
        integration.use(model)
    integration.register()
    forced = model_class._from_config(copy.deepcopy(config), attn_implementation="polyhead")
    with pytest.raises(UnsupportedError, match="would ignore"):
        forced(torch.randint(3, 50, (1, 4)))


VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
LOOKED_UP = {
    "FALCON": (hf.FalconForCausalLM, hf.FalconConfig(**SMALL), "sdpa"),
    "GPT_NEO": (
        hf.GPTNeoModel, hf.GPTNeoConfig(num_layers=1, attention_types=[[["global"], 1]]), "eager"
    ),
    "GPTJ": (hf.GPTJModel, hf.GPTJConfig(n_embd=64, n_layer=1, n_head=1), "eager"),
    "GIT": (hf.GitModel, hf.GitConfig(**SMALL, vision_config=VISION), "eager"),
    "BARK": (hf.BarkCausalModel, hf.BarkSemanticConfig(num_layers=1), "eager"),
    "SAM": (hf.SamModel, hf.SamConfig(vision_config=VISION), "sdpa"),
    "DATA2VEC": (hf.Data2VecVisionModel, hf.Data2VecVisionConfig(**VISION), "sdpa"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKED_UP)
def test_models_that_look_classes_up_by_name_are_refused_with_what_works(name):
    model_class, config, instead = LOOKED_UP[name]
    integration.register()
    sentence = rf"by name in {name}\w*_ATTENTION_CLASSES .*attn_implementation='{instead}'"
    for _ in range(2):
        with torch.device("meta"), pytest.raises(UnsupportedError, match=sentence):
            model_class._from_config(copy.deepcopy(config), attn_implementation="polyhead")
    for what in (model_class, config):
        with pytest.raises(UnsupportedError, match=sentence):
            integration.check(what)
    with torch.device("meta"):
        model = model_class._from_config(copy.deepcopy(config), attn_implementation=instead)
    with pytest.raises(UnsupportedError, match="computes attention itself"):
        integration.use(model)


def test_a_part_that_looks_classes_up_by_name_leaves_the_rest_to_polyhead():
    integration.register()
    config = copy.deepcopy(LOOKED_UP["SAM"][1])
    parts = {"": "polyhead", "vision_config": "sdpa"}
    with torch.device("meta"):
        model = hf.SamModel._from_config(config, attn_implementation=parts)
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert model.config.mask_decoder_config._attn_implementation == "polyhead"


@pytest.mark.parametrize("family", ALL)
def test_models_that_ask_the_interface_pass_the_check(family):
    model = build(family)
    for what in (model, type(model), model.config):
        integration.check(what)


def test_unknown_arguments_are_refused_by_name():
    _, ours = pair("llama")
    ids = torch.randint(3, 99, (1, 4))
    with pytest.raises(UnsupportedError, match="'block_indices'"):
        ours(input_ids=ids, block_indices=torch.zeros(1))
    try:
        integration.register(ignore=("block_indices",))
        ours(input_ids=ids, block_indices=torch.zeros(1))
    finally:
        integration.register()


def test_explain_of_a_model_that_is_not_switched():
    model = build("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(UnsupportedError, match="attn_implementation is 'eager'"):
        integration.explain(model, input_ids=torch.ones(1, 3, dtype=torch.long))


def test_a_mask_made_for_other_lengths_is_refused():
    layer = nn.Module()
    q = torch.randn(1, 2, 3, 4)
    mask = TypedMask(ph.Causal(), None, 5, (1, 1, 3, 5))
    with pytest.raises(UnsupportedError, match="3 queries and 5 keys"):
        integration.attention_forward(layer, q, q, q, mask)


def test_real_tokens_pads_both_sides():
    assert real_tokens("left")[1].tolist() == [0] * 7 + [1] * 5
    assert real_tokens("right")[1].tolist() == [1] * 5 + [0] * 7
