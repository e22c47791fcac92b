"""What a Transformer promises beside its numbers."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhead import Documents, KeyLengths, Window
from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    EmbeddingProjectionConfig,
    FeedForwardConfig,
    FirstRowConfig,
    InitialConfig,
    LatentAttentionConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    QKNormConfig,
    RopeConfig,
    TokenDropoutConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, ContextLengthError, InputError, UnsupportedError
from polyhead.layers.norms import build_norm
from polyhead.models import Transformer
from polyhead.models.parts import parse_heads

LOCAL = AttentionConfig(4, 1, 8, rope=RopeConfig(theta=100.0), window=5, qk_norm=QKNormConfig())
FULL = AttentionConfig(4, 2, 8, rope=RopeConfig(theta=1e4))
WIDE = FeedForwardConfig(40)


def config(kind: str = "decoder", **fields) -> TransformerConfig:
    """Local and full layers, a sandwich among them."""
    layers = (
        LayerConfig(LOCAL, WIDE, norm_placement="sandwich"),
        LayerConfig(FULL, WIDE),
        LayerConfig(LOCAL, WIDE),
    )
    return TransformerConfig(kind, 50, 24, 64, layers, **fields)


def model(kind: str = "decoder", **fields) -> Transformer:
    torch.manual_seed(0)
    built = Transformer(config(kind, **fields)).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    return built


def some_ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 50, shape)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 29)),
    embedding=st.sampled_from([None, "learned", "sinusoidal"]),
    kind=st.sampled_from(["auto", "dense", "paged"]),
)
def test_any_split_through_the_cache_equals_one_pass(cuts, embedding, kind):
    decoder = model(embedding=EmbeddingConfig(embedding))
    ids, cache, parts = some_ids(2, 30), decoder.new_cache(kind=kind), []
    with torch.set_grad_enabled(kind == "dense"):
        whole = decoder(ids)
        ends = [*sorted(cuts), 30]
        for start, stop in zip([0, *ends], ends, strict=False):
            parts.append(decoder(ids[:, start:stop], cache=cache))
    scale = max(1.0, whole.abs().max().item())
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-5 * scale)
    assert cache.length == 30


@pytest.mark.parametrize("options", [{"kind": "dense"}, {"kind": "paged"}, {"spare": 6}])
def test_a_rolled_back_cache_goes_on_as_if_nothing_had_been(options):
    decoder, ids = model(), some_ids(1, 20)
    with torch.no_grad():
        cache = decoder.new_cache(**options)
        decoder(ids[:, :12], cache=cache)
        decoder(some_ids(1, 7), cache=cache)
        cache.rollback(7)
        have = decoder(ids[:, 12:], cache=cache)
        torch.testing.assert_close(have, decoder(ids)[:, 12:])


def test_a_failed_call_leaves_the_cache_as_it_was():
    decoder, ids, cache = model(), some_ids(1, 20), None

    def interrupt(*args):
        raise KeyboardInterrupt

    with torch.no_grad():
        cache = decoder.new_cache(kind="dense")
        decoder(ids[:, :12], cache=cache)
        handle = decoder.layers[1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            decoder(ids[:, 12:], cache=cache)
        handle.remove()
        assert {layer.length for layer in cache.layers} == {12}
        torch.testing.assert_close(decoder(ids[:, 12:], cache=cache), decoder(ids)[:, 12:])


def test_a_failed_first_call_forgets_the_encoders_output():
    cross = AttentionConfig(4, 4, 6)
    both = Transformer(
        TransformerConfig(
            "encoder-decoder",
            50,
            24,
            64,
            (LayerConfig(FULL, WIDE, cross_attention=cross),) * 2,
            (LayerConfig(FULL, WIDE),),
        )
    ).eval()
    ids, one, other, cache = some_ids(1, 5), some_ids(1, 6), some_ids(1, 6), both.new_cache()
    handle = both.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
    with torch.no_grad():
        with pytest.raises(ZeroDivisionError):
            both(ids, cache=cache, encoder_ids=one)
        handle.remove()
        have = both(ids, cache=cache, encoder_ids=other)
        torch.testing.assert_close(have, both(ids, encoder_ids=other))
        with pytest.raises(ValueError, match="remembers the encoder's output"):
            both(ids, cache=cache, encoder_ids=one)


@pytest.mark.parametrize("embedding", [None, "learned", "sinusoidal"])
def test_padded_rows_go_on_as_they_would_alone(embedding):
    decoder = model(embedding=EmbeddingConfig(embedding))
    rows = [some_ids(1, 9), some_ids(1, 5)]
    ids = torch.zeros(2, 9, dtype=torch.int64)
    real = torch.ones(2, 9, dtype=torch.bool)
    ids[0], ids[1, 4:], real[1, :4] = rows[0], rows[1], False
    later = some_ids(2, 3)
    with torch.no_grad():
        cache = decoder.new_cache()
        first = decoder(ids, positions=cache.next_positions(real), cache=cache)
        then = decoder(later, cache=cache)
        for row, alone in enumerate(rows):
            want = decoder(torch.cat((alone, later[row : row + 1]), dim=1))[0]
            count = alone.shape[1]
            torch.testing.assert_close(first[row, -count:], want[:count])
            torch.testing.assert_close(then[row], want[count:])


def test_last_gives_the_last_rows_of_all():
    decoder, ids = model(), some_ids(2, 9)
    with torch.no_grad():
        whole = decoder(ids)
        for last in (1, 4, 9, 12):
            torch.testing.assert_close(decoder(ids, last=last), whole[:, -last:])
        with pytest.raises(ValueError, match="last must be at least 1"):
            decoder(ids, last=0)


def test_rows_take_numbers_of_tokens_of_their_own():
    decoder, ids, prompts = model(), some_ids(1, 9), some_ids(3, 4)
    with torch.no_grad():
        for counts in ([2, 6, 1], [3, 3, 3]):
            cache = decoder.new_cache()
            decoder(prompts, cache=cache)
            found = decoder(ids, cache=cache, counts=counts)
            assert cache.lengths == [4 + count for count in counts]
            for row, tokens in enumerate(ids.split(counts, dim=1)):
                whole = decoder(torch.cat((prompts[row : row + 1], tokens), dim=1))
                part = found.split(counts, dim=1)[row]
                torch.testing.assert_close(part, whole[:, 4:])
        fresh = decoder.new_cache()
        torch.testing.assert_close(decoder(ids, cache=fresh, counts=[9]), decoder(ids))


def test_numbers_of_tokens_that_cannot_be_are_refused_by_name():
    decoder, ids = model(), some_ids(1, 9)
    cache = decoder.new_cache()
    with torch.no_grad():
        decoder(some_ids(3, 4), cache=cache)
    for words, ids_, options in (
        ("2 counts, 9 in all, for 3 rows", ids, {"counts": [4, 5]}),
        ("3 counts, 8 in all", ids, {"counts": [4, 3, 1]}),
        (r"ids \[3, 3\]", some_ids(3, 3), {"counts": [3, 3, 3]}),
        ("counts must be a whole number of at least 1", ids, {"counts": [9, 0, 0]}),
        ("counts and last do not go together", ids, {"counts": [4, 4, 1], "last": 1}),
        ("counts are rows of a decoder's cache", ids, {"counts": [9], "cache": None}),
    ):
        with pytest.raises(ValueError, match=words):
            decoder(ids_, **{"cache": cache, **options})
    assert cache.lengths == [4, 4, 4]


def test_a_decoder_is_causal_and_an_encoder_is_not():
    ids = some_ids(1, 10)
    changed = ids.clone()
    changed[0, 6:] = (changed[0, 6:] + 1) % 50
    with torch.no_grad():
        decoder, encoder = model(), model("encoder")
        torch.testing.assert_close(decoder(ids)[:, :6], decoder(changed)[:, :6])
        assert not torch.allclose(encoder(ids)[:, :6], encoder(changed)[:, :6])


def test_a_mask_is_added_to_causal_order():
    decoder, ids = model(), some_ids(1, 10)
    with torch.no_grad():
        packed = decoder(ids, mask=Documents([4, 6]))
        torch.testing.assert_close(packed[:, :4], decoder(ids[:, :4]))
        torch.testing.assert_close(packed[:, 4:], decoder(ids[:, 4:]))
        torch.testing.assert_close(decoder(ids, mask=Window(64)), decoder(ids))


def test_padding_does_not_reach_an_encoder():
    encoder, ids = model("encoder"), some_ids(2, 10)
    with torch.no_grad():
        padded = encoder(ids, mask=KeyLengths([10, 6]))
        torch.testing.assert_close(padded[1, :6], encoder(ids[1:, :6])[0])


@pytest.mark.parametrize("embedding", [None, "learned", "sinusoidal"])
def test_explicit_positions_equal_those_that_follow_on(embedding):
    decoder, ids = model(embedding=EmbeddingConfig(embedding)), some_ids(2, 9)
    with torch.no_grad():
        want = decoder(ids)
        torch.testing.assert_close(decoder(ids, positions=torch.arange(9)), want)
        rows = torch.arange(9).expand(2, 9)
        cache = decoder.new_cache()
        parts = [
            decoder(ids[:, a:b], positions=rows[:, a:b], cache=cache) for a, b in ((0, 5), (5, 9))
        ]
        torch.testing.assert_close(torch.cat(parts, dim=1), want)
        shifted = decoder(ids, positions=torch.arange(9) + 3)
        if embedding is None:  # rotary positions count distances only
            torch.testing.assert_close(shifted, want)
        else:
            assert not torch.allclose(shifted, want)


def test_the_embedding_is_its_formula():
    norm = NormConfig("layernorm", bias=True)
    data = EmbeddingConfig("learned", num_segments=2, norm=norm, scale=3.0, dropout=0.5)
    embedding, ids = model(embedding=data).embedding, some_ids(2, 4)
    segments = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1]])
    want = embedding.norm(
        3.0 * embedding.tokens.weight[ids]
        + embedding.segments.weight[segments]
        + embedding.positions.weight[5:9]
    )
    torch.testing.assert_close(embedding(ids, 5, segments), want)
    embedding.train()
    assert (embedding(ids, 5, segments) == 0).any()


def test_every_text_is_of_the_first_task_type():
    rows = (FirstRowConfig(3), FirstRowConfig(5, times=2))
    embedding, ids = model(embedding=EmbeddingConfig(first_rows=rows)).embedding, some_ids(2, 4)
    tasks, edges = (table.weight for table in embedding.first_rows)
    want = embedding.tokens.weight[ids] + tasks[0] + 2 * edges[0]
    torch.testing.assert_close(embedding(ids), want)
    assert (len(tasks), len(edges)) == (3, 5)


def test_a_first_row_stands_beside_the_token_where_it_has_a_dim():
    rows = (FirstRowConfig(3, dim=5), FirstRowConfig(4), FirstRowConfig(2, dim=1))
    projection = EmbeddingProjectionConfig(24, "tokens")
    config = EmbeddingConfig(projection=projection, first_rows=rows)
    embedding, ids = model(embedding=config).embedding, some_ids(2, 4)
    shapes, tasks, sounds = (table.weight for table in embedding.first_rows)
    beside = torch.cat((shapes[0], sounds[0])).expand(2, 4, -1)
    read = torch.cat((embedding.tokens.weight[ids], beside), dim=-1)
    torch.testing.assert_close(embedding(ids), embedding.projection(read) + tasks[0])
    with pytest.raises(ConfigError, match="need a projection of 'tokens'"):
        EmbeddingConfig(first_rows=rows)
    with pytest.raises(ConfigError, match="a first row with a dim is not added: got times=2"):
        FirstRowConfig(3, times=2, dim=5)


def test_neighbours_are_projected_with_a_token_and_padding_is_zeros():
    config = EmbeddingConfig(projection=EmbeddingProjectionConfig(5, "tokens", neighbours=2))
    encoder = model(kind="encoder", head=None, embedding=config)
    ids = some_ids(2, 6)
    vectors = torch.nn.functional.pad(encoder.embedding.tokens.weight[ids], (0, 0, 2, 2))
    read = torch.cat([vectors[:, 2 + i : 8 + i] for i in (2, 1, 0, -1, -2)], dim=-1)
    torch.testing.assert_close(encoder.embedding(ids), encoder.embedding.projection(read))
    padded = encoder(ids, mask=KeyLengths(torch.tensor([6, 3])))
    torch.testing.assert_close(padded[1:, :3], encoder(ids[1:, :3]))
    with pytest.raises(UnsupportedError, match="neighbours understands no mask but KeyLengths"):
        encoder(ids, mask=Window(2))
    with pytest.raises(ConfigError, match="they belong to kind 'encoder', got kind='decoder'"):
        model(embedding=config)
    with pytest.raises(ConfigError, match="of an embedding projection of 'tokens': got of='sum'"):
        EmbeddingProjectionConfig(5, neighbours=1)


@pytest.mark.parametrize("head", ["tied", "untied"])
def test_a_head_has_columns_beside_those_of_a_narrower_matrix(head):
    config = EmbeddingConfig(projection=EmbeddingProjectionConfig(10))
    decoder, ids = model(head=head, head_beside=14, embedding=config), some_ids(1, 4)
    first = decoder.embedding.tokens.weight if head == "tied" else decoder.head.weight
    assert first.shape[1] == 10
    assert decoder.head.beside.std() > 0
    matrix = torch.cat((first, decoder.head.beside), dim=1)
    assert torch.equal(decoder.unembedding, matrix)
    with torch.no_grad():
        torch.testing.assert_close(decoder(ids), decoder.hidden_states(ids) @ matrix.T)
    for wrong in (13, 24):
        if head == "tied" or wrong == 24:
            with pytest.raises(ConfigError, match="head_beside"):
                model(head=head, head_beside=wrong, embedding=config)
    with pytest.raises(ConfigError, match="need a head: got head=None"):
        model(head=None, head_beside=3)


def test_an_affine_norm_only_scales_and_shifts():
    norm = build_norm(4, NormConfig("affine", bias=True))
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x = torch.randn(3, 4)
    torch.testing.assert_close(norm(x), x * norm.weight + norm.bias)
    assert NormConfig("affine").parameters(4) == 4
    with pytest.raises(ConfigError, match="affine norm has a weight"):
        NormConfig("affine", weight=False)


def test_masked_tokens_count_as_dropped():
    config = EmbeddingConfig(token_dropout=TokenDropoutConfig(7, share=0.2))
    encoder = model(kind="encoder", head=None, embedding=config)
    ids = torch.tensor([[7, 3, 7, 4], [3, 7, 2, 7]])
    vectors = encoder.embedding.tokens.weight[ids] * (ids != 7)[..., None]
    torch.testing.assert_close(encoder.embedding(ids), vectors * 0.8 / 0.5)
    padded = encoder(ids, mask=KeyLengths(torch.tensor([4, 2])))
    torch.testing.assert_close(padded[1:, :2], encoder(ids[1:, :2]))
    with pytest.raises(UnsupportedError, match="token_dropout understands no mask but KeyLengths"):
        encoder(ids, mask=Window(2))
    with pytest.raises(ConfigError, match="they belong to kind 'encoder', got kind='decoder'"):
        model(embedding=config)


def test_optional_segments_are_added_where_a_call_gives_them():
    first, none = (
        model(embedding=EmbeddingConfig(num_segments=2, segments_optional=optional)).embedding
        for optional in (False, True)
    )
    none.load_state_dict(first.state_dict())
    ids = some_ids(1, 4)
    zeros = torch.zeros_like(ids)
    torch.testing.assert_close(none(ids), none.tokens.weight[ids])
    torch.testing.assert_close(first(ids), none(ids, 0, zeros))
    with pytest.raises(ConfigError, match="segments_optional needs segments"):
        EmbeddingConfig(segments_optional=True)


def test_an_untied_head_and_its_softcap_are_used():
    decoder, ids = model(head="untied", head_bias=True, logit_softcap=3.0), some_ids(1, 4)
    with torch.no_grad():
        hidden = decoder.hidden_states(ids)
        raw = hidden @ decoder.head.weight.T + decoder.head.bias
        torch.testing.assert_close(decoder(ids), 3 * torch.tanh(raw / 3))
    bare = model(head=None)
    assert bare(ids).shape == (1, 4, 24)
    with pytest.raises(ValueError, match="no head"):
        bare.logits(hidden)


def test_layers_with_equal_rope_share_its_tables():
    decoder = model()
    ropes = [layer.attention.rope for layer in decoder.layers]
    assert ropes[0] is ropes[2] is not ropes[1]
    copied = copy.deepcopy(decoder)
    assert copied.layers[0].attention.rope is copied.layers[2].attention.rope
    assert copied.layers[0].attention.rope is not ropes[0]


def test_a_model_is_built_on_meta_and_filled_by_assignment():
    full = model()
    with torch.device("meta"):
        empty = Transformer(full.config)
    assert {t.device.type for t in (*empty.parameters(), *empty.buffers())} == {"meta"}
    empty.load_state_dict(full.state_dict(), assign=True)
    assert not list(empty.buffers())
    ids = some_ids(1, 9)
    with torch.no_grad():
        torch.testing.assert_close(empty.eval()(ids), full(ids))


def test_shapes_can_be_worked_out_on_meta():
    with torch.device("meta"):
        assert Transformer(config())(torch.zeros(2, 7, dtype=torch.int64)).shape == (2, 7, 50)


def test_a_configuration_survives_json():
    for data in (
        config(embedding=EmbeddingConfig("learned", 2, NormConfig()), eos_token_ids=(1, 2)),
        config(final_norm=None, head=None),
    ):
        assert TransformerConfig.from_json(data.to_json()) == data


def test_every_layer_is_observed():
    decoder, ids = model(), some_ids(2, 7)
    outputs = []
    for layer in decoder.layers:
        layer.register_forward_hook(lambda module, inputs, out: outputs.append(out))
    with torch.no_grad(), decoder.observe() as seen:
        decoder(ids)
    assert [entry.layer for entry in seen] == [0, 1, 2]
    for (_, shape, mean, std), out in zip(seen, outputs, strict=True):
        assert shape == (2, 7, 24)
        assert mean == pytest.approx(out.mean().item(), abs=1e-6)
        assert std == pytest.approx(out.std().item(), abs=1e-6)
    lines = str(seen).splitlines()
    first = f"mean={outputs[0].mean():.4f} std={outputs[0].std():.4f}"
    assert lines[0] == f"layer 1 output shape: torch.Size([2, 7, 24]) {first}"
    assert [line.split(" output")[0] for line in lines[:3]] == ["layer 1", "layer 2", "layer 3"]
    assert lines[-1] == "final output shape: torch.Size([2, 7, 50])"
    zh = seen.text("zh").splitlines()[0]
    want = f"均值={outputs[0].mean():.4f} std={outputs[0].std():.4f}"
    assert zh == f"第1层输出 shape: torch.Size([2, 7, 24]) {want}"
    with torch.no_grad():
        decoder(ids)
    assert len(seen) == 3


PARTS = {
    "norms and sinks": LayerConfig(replace(LOCAL, sinks=True), WIDE, NormConfig("rmsnorm")),
    "biases": LayerConfig(replace(FULL, qkv_bias=True, out_bias=True), WIDE, NormConfig()),
    "latent": LayerConfig(LatentAttentionConfig(4, 16, 8, 8, 8), WIDE),
    "experts": LayerConfig(FULL, MixtureConfig(FeedForwardConfig(8), 4, 2, router_bias=True)),
}


@pytest.mark.parametrize("rule", ["normal", "residual", "width"])
@pytest.mark.parametrize("part", PARTS)
def test_all_weights_are_drawn_anew(part, rule):
    table = EmbeddingConfig("learned", norm=NormConfig())
    data = TransformerConfig("decoder", 50, 24, 64, (PARTS[part],) * 2, embedding=table)
    built = Transformer(replace(data, initial=InitialConfig(rule)))
    fresh = {name: x.detach().clone() for name, x in built.named_parameters()}
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.fill_(torch.nan)
    built.reset_parameters()
    for name, parameter in built.named_parameters():
        assert parameter.isfinite().all(), name
        if parameter.ndim == 1:  # norms, biases and sinks are not random
            assert torch.equal(parameter, fresh[name]), name
        else:
            assert not torch.equal(parameter, fresh[name]), name


def test_heads_are_read_from_text_or_refused():
    assert parse_heads("3.1,7.4, 3.0") == {3: [1, 0], 7: [4]}
    for wrong in ("", "3", "3.", ".1", "3.1.2", "a.b", "3.1,", "-1.2", "3,1", "1." + "2" * 30):
        with pytest.raises(InputError, match=r"heads must look like 3\.1,7\.4"):
            parse_heads(wrong)


def test_parameters_are_counted_per_part():
    E, V, F, D = 24, 50, 40, 8
    decoder = model()
    counts = decoder.parameter_counts()
    local, full = E * D * 4 * 2 + 2 * E * D, E * D * 4 * 2 + 2 * E * 2 * D
    assert counts.embedding == V * E
    assert counts.attention == 2 * local + full
    assert counts.feed_forward == 3 * 3 * E * F
    assert counts.norms == (4 + 2 + 2 + 1) * E + 2 * 2 * D
    assert counts.head == 0
    assert counts.total == sum(p.numel() for p in decoder.parameters())
    assert "total" in str(counts)
    assert model(head="untied", head_bias=True).parameter_counts().head == V * E + V


def test_plain_attention_counts_four_square_matrices_per_layer():
    layer = LayerConfig(AttentionConfig(4, 4, 6), FeedForwardConfig(96, "relu", gated=False))
    plain = Transformer(TransformerConfig("encoder", 50, 24, 64, (layer,) * 3))
    assert plain.parameter_counts().attention == 3 * 4 * 24**2


def test_a_new_model_starts_near_uniform_logits():
    torch.manual_seed(0)
    logits = Transformer(config())(some_ids(2, 9))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), some_ids(18))
    assert abs(loss.item() - torch.tensor(50.0).log()) < 0.2


def test_more_tokens_than_the_context_are_refused():
    decoder = model()
    with pytest.raises(ContextLengthError, match="context is 64 tokens: got 65"):
        decoder(some_ids(1, 65))
    cache = decoder.new_cache()
    with torch.no_grad():
        decoder(some_ids(1, 64), cache=cache)
    with pytest.raises(ContextLengthError, match="got 1 after the 64 in the cache"):
        decoder(some_ids(1, 1), cache=cache)
    assert cache.length == 64
    with pytest.raises(ContextLengthError, match="got position 64"):
        decoder(some_ids(1, 2), positions=torch.tensor([3, 64]))


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        (torch.tensor([[1, 50]]), InputError, r"ids must be 0 to 49 \(vocab_size=50\): got 50"),
        (torch.tensor([[-1, 3]]), InputError, "got -1"),
        (torch.zeros(1, 0, dtype=torch.int64), InputError, "at least one token"),
        (torch.zeros(3, dtype=torch.int64), InputError, r"\[B, T\].*got shape \[3\]"),
        (torch.zeros(1, 3), TypeError, r"int64 or int32: got torch\.float32"),
        ([[1, 2]], TypeError, "got list"),
    ],
)
def test_ids_that_cannot_be_read_are_refused(ids, error, words):
    with pytest.raises(error, match=words):
        model()(ids)


def test_what_does_not_belong_to_the_kind_of_model_is_refused():
    decoder, encoder, ids = model(), model("encoder"), some_ids(1, 4)
    with pytest.raises(ValueError, match="takes no cache"):
        encoder.new_cache()
    with pytest.raises(ValueError, match="takes no cache"):
        encoder(ids, cache=decoder.new_cache())
    with pytest.raises(ValueError, match="belong to an encoder-decoder: this is kind='decoder'"):
        decoder(ids, encoder_ids=ids)
    with pytest.raises(ValueError, match="a decoder has no encoder"):
        decoder.encode(ids)
    with pytest.raises(ValueError, match="no segments"):
        decoder(ids, segments=ids)
    with pytest.raises(ValueError, match="positions must be at least 0"):
        decoder(ids, positions=torch.tensor([-1, 0, 1, 2]))
    with pytest.raises(ValueError, match=r"positions must be \[T\] = \[4\]"):
        decoder(ids, positions=torch.arange(5))
    with pytest.raises(TypeError, match="positions must be a tensor of whole numbers"):
        decoder(ids, positions=torch.zeros(4))
    other = Transformer(TransformerConfig("decoder", 50, 24, 64, (LayerConfig(FULL, WIDE),)))
    with pytest.raises(ValueError, match="made for 1 layers, the model has 3"):
        decoder(ids, cache=other.new_cache())


def test_segments_out_of_range_are_refused():
    typed, ids = model(embedding=EmbeddingConfig(num_segments=2)), some_ids(1, 4)
    with pytest.raises(ValueError, match="segments must be 0 to 1: got 0 to 2"):
        typed(ids, segments=torch.tensor([[0, 1, 2, 0]]))
    with pytest.raises(ValueError, match=r"segments must be \[B, T\] = \[1, 4\]"):
        typed(ids, segments=torch.zeros(1, 3, dtype=torch.int64))
