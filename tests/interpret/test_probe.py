"""A probe sees exact weights of any row, changes nothing, and keeps only q, k and lse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyhead as ph
from polyhead.caches import DenseCache, RingCache
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    TransformerConfig,
)
from polyhead.interpret.probe import Probe, probe
from polyhead.interpret.statistics import OF_ROWS
from polyhead.interpret.view import AttentionView
from polyhead.layers.attention import MultiHeadAttention

EMBED, HEADS, KV_HEADS, TOKENS, BATCH = 24, 6, 2, 11, 2


class Stack(nn.Module):
    """Attention layers on top of each other, and nothing else."""

    def __init__(self, count: int = 2, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"rope": ph.RoPE(theta=100.0)} | options
        self.layers = nn.ModuleList(
            MultiHeadAttention(EMBED, HEADS, KV_HEADS, **options) for _ in range(count)
        )

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, **call)
        return x


def _input(tokens: int = TOKENS) -> Tensor:
    return torch.randn(BATCH, tokens, EMBED, generator=torch.Generator().manual_seed(1))


def _see(model: nn.Module, x: Tensor, **call: Any) -> Probe:
    with probe(model) as seen, torch.no_grad():
        model(x, **({"mask": ph.Causal()} | call))
    return seen


def _exact(view: AttentionView, visible: Tensor, softcap: float | None = None) -> Tensor:
    """Weights ``[B, H, T, S]`` in float64 from the formula, K repeated per group the slow way."""
    q, k = view.q.double(), view.k.double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)


def _causal(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def test_rows_equal_the_formula_in_float64_with_grouped_heads() -> None:
    seen = _see(Stack(), _input())
    for layer in (0, 1):
        wanted = _exact(seen[layer], _causal(TOKENS, TOKENS))
        torch.testing.assert_close(seen[layer].rows().double(), wanted, atol=1e-6, rtol=0.0)


def test_heads_and_queries_are_cut_out_of_the_same_weights() -> None:
    view = _see(Stack(), _input())[1]
    whole = view.weights()
    for start, stop, step in ((0, 4, 1), (3, None, 1), (-2, None, 1), (1, 9, 3), (None, None, -1)):
        queries = slice(start, stop, step)
        index = list(range(*queries.indices(TOKENS)))
        torch.testing.assert_close(view.rows([4, 1], queries), whole[:, [4, 1]][:, :, index])
    assert view.rows(heads=[2], queries=slice(5, 5)).shape == (BATCH, 1, 0, TOKENS)


@pytest.mark.parametrize("layer", range(2))
def test_head_outputs_are_the_weights_times_the_values(layer: int) -> None:
    model, x, records = Stack(), _input(), []
    model.layers[layer].register_attention_hook(records.append)
    view = _see(model, x)[layer]
    v = records[0].v.repeat_interleave(HEADS // KV_HEADS, dim=1)
    torch.testing.assert_close(view.rows() @ v, records[0].out, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("gradients", [False, True])
def test_outputs_are_bit_identical_with_and_without(gradients: bool) -> None:
    model, x = Stack(), _input(200)
    with torch.set_grad_enabled(gradients):
        plain = model(x, mask=ph.Causal())
        with probe(model):
            probed = model(x, mask=ph.Causal())
        after = model(x, mask=ph.Causal())
    assert torch.equal(plain, probed)
    assert torch.equal(plain, after)


def test_softcap_window_and_padding_are_part_of_the_weights() -> None:
    lengths = [TOKENS, 6]
    seen = _see(Stack(softcap=2.0, window=4), _input(), mask=ph.Causal() & ph.KeyLengths(lengths))
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    window = (distance >= 0) & (distance < 4)
    padding = torch.arange(TOKENS) < torch.tensor(lengths)[:, None, None, None]
    wanted = _exact(seen[0], window & padding, softcap=2.0)
    torch.testing.assert_close(seen[0].rows().double(), wanted, atol=1e-6, rtol=0.0)


def test_query_that_sees_nothing_has_statistics_zero() -> None:
    visible = _causal(TOKENS, TOKENS)
    visible[3] = False
    view = _see(Stack(), _input(), mask=ph.Keep(visible))[0]
    for name in OF_ROWS:
        values = getattr(view, name)
        assert values.isfinite().all()
        assert (values[:, :, 3] == (-1 if name == "max_key" else 0)).all(), name


def test_positions_decide_who_sees_whom_and_how_far_away_it_is() -> None:
    positions = torch.tensor([4, 0, 9, 2, 7, 1, 3, 8, 20, 6, 30])
    view = _see(Stack(1), _input(), positions=positions)[0]
    visible = positions[:, None] >= positions
    weights = _exact(view, visible)
    torch.testing.assert_close(view.rows().double(), weights, atol=1e-6, rtol=0.0)
    apart = positions[:, None] - positions
    got = view.previous_token.double()
    torch.testing.assert_close(got, (weights * (apart == 1)).sum(-1), atol=1e-5, rtol=0.0)
    torch.testing.assert_close(view.first_token.double(), weights[..., 1], atol=1e-5, rtol=0.0)


def test_distance_counts_in_both_directions() -> None:
    view = _see(Stack(1), _input(), mask=None)[0]
    apart = (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).abs()
    wanted = (view.rows() * apart).sum(-1)
    torch.testing.assert_close(view.mean_distance, wanted, atol=1e-5, rtol=0.0)


def test_summary_is_the_mean_over_all_queries_but_the_first() -> None:
    view = _see(Stack(), _input())[0]
    summary = view.summary()
    torch.testing.assert_close(summary.entropy, view.entropy[:, :, 1:].mean((0, 2)))
    torch.testing.assert_close(summary.self, view.self[:, :, 1:].mean((0, 2)))
    torch.testing.assert_close(summary.mean_distance, view.mean_distance[:, :, 1:].mean((0, 2)))


def test_summary_of_a_single_query_counts_it() -> None:
    view = _see(Stack(), _input(1))[0]
    torch.testing.assert_close(view.summary().self, torch.ones(HEADS))


def test_sink_takes_its_share_of_the_weights() -> None:
    model = Stack(1)
    model.layers[0].sinks = nn.Parameter(torch.linspace(-1, 2, HEADS))
    view = _see(model, _input())[0]
    share = torch.exp(model.layers[0].sinks.detach()[:, None] - view.lse)
    torch.testing.assert_close(view.rows().sum(-1) + share, torch.ones(BATCH, HEADS, TOKENS))
    rows = view.rows()
    entropy = torch.special.entr(rows).sum(-1) + torch.special.entr(share)
    torch.testing.assert_close(view.entropy, entropy, atol=1e-5, rtol=0.0)


def test_sinks_of_each_query_take_their_share_of_the_weights() -> None:
    model, given = Stack(1), torch.linspace(-1, 2, HEADS * TOKENS).view(1, HEADS, TOKENS)
    layer = model.layers[0]
    plain = layer._attend
    layer._attend = lambda q, source, **options: plain(q, source, **{**options, "sinks": given})
    view = _see(model, _input())[0]
    share, rows = torch.exp(given - view.lse), view.rows()
    torch.testing.assert_close(rows.sum(-1) + share, torch.ones(BATCH, HEADS, TOKENS))
    entropy = torch.special.entr(rows).sum(-1) + torch.special.entr(share)
    torch.testing.assert_close(view.entropy, entropy, atol=1e-5, rtol=0.0)
    with probe(model, heads={0: [1]}) as seen, torch.no_grad():
        model(_input(), mask=ph.Causal())
    torch.testing.assert_close(seen[0].entropy, entropy[:, 1:2], atol=1e-5, rtol=0.0)


def test_latest_call_through_a_cache_sees_all_keys_and_survives_the_cache() -> None:
    model, x = Stack(1), _input()
    cache = DenseCache()
    whole = _see(model, x)[0].rows(queries=slice(8, TOKENS))
    with probe(model) as seen, torch.no_grad():
        model(x[:, :8], mask=ph.Causal(), cache=cache)
        model(x[:, 8:], mask=ph.Causal(), cache=cache)
    view = seen[0]
    assert (view.q.shape[2], view.k.shape[2]) == (3, TOKENS)
    torch.testing.assert_close(view.rows(), whole, atol=1e-6, rtol=0.0)
    previous = whole[:, :, torch.arange(3), torch.arange(7, 10)]
    torch.testing.assert_close(view.previous_token, previous, atol=1e-6, rtol=0.0)
    before = view.k.clone()
    cache.rollback(5)
    with torch.no_grad():
        model(x[:, :5] + 1, mask=ph.Causal(), cache=cache)
    assert torch.equal(view.k, before)


def test_a_ring_that_forgot_shows_the_weights_of_one_pass_at_their_positions() -> None:
    model, x = Stack(1, window=4), _input()
    whole = _see(model, x)[0].rows(queries=slice(9, TOKENS))
    cache, records = RingCache(4), []
    with probe(model) as seen, torch.no_grad():
        model.layers[0].register_attention_hook(records.append)
        for part in (x[:, :5], x[:, 5:9], x[:, 9:]):
            model(part, mask=ph.Causal(), cache=cache)
    # The ring's four, 5 to 8, in slots 1, 2, 3, 0, and the two new ones.
    assert records[-1].kv_tokens.places.low == 5
    torch.testing.assert_close(seen[0].rows(), whole[..., 5:], atol=1e-6, rtol=0.0)
    own = whole[:, :, torch.arange(2), torch.arange(9, 11)]
    torch.testing.assert_close(seen[0].self, own, atol=1e-6, rtol=0.0)
    first = _see(model, x)[0].first_token[:, :, 9:]
    torch.testing.assert_close(seen[0].first_token, first, atol=1e-6, rtol=0.0)


def test_rows_of_a_padded_batch_show_the_weights_of_their_solo_runs(tmp_path: Path) -> None:
    model, x, cache = Stack(1), _input(), DenseCache()
    real = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    real[1, :4] = False
    positions = cache.next_positions(real)
    with probe(model) as seen, torch.no_grad():
        # Not causal: nothing but the source's own mask hides the padding.
        model(x, mask=None, positions=positions, cache=cache)
    alone = _see(model, x[1:, 4:], mask=None)[0]
    rows = seen[0].rows(queries=slice(4, TOKENS))[1:]
    torch.testing.assert_close(rows.sum(-1), torch.ones(rows.shape[:-1]), atol=1e-5, rtol=0.0)
    mean = seen[0].mean_distance[1:, :, 4:]
    torch.testing.assert_close(mean, alone.mean_distance, atol=1e-5, rtol=1e-5)
    seen.save(tmp_path / "seen.safetensors")
    assert torch.equal(Probe.load(tmp_path / "seen.safetensors")[0].rows(), seen[0].rows())


@pytest.mark.parametrize("computation", ["absorbed", "expanded"])
def test_latent_attention_is_seen_as_it_was_computed(computation: Any) -> None:
    torch.manual_seed(0)
    layer = ph.MultiHeadLatentAttention(
        EMBED, HEADS, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
        rope=ph.RoPE(theta=100.0),
    )  # fmt: skip
    x = _input()
    with probe(layer) as seen, torch.no_grad():
        out = layer(x, mask=ph.Causal(), computation=computation)
    with torch.no_grad():
        assert torch.equal(out, layer(x, mask=ph.Causal(), computation=computation))
    rows = seen[0].rows()
    torch.testing.assert_close(rows.sum(-1), torch.ones(rows.shape[:-1]), atol=1e-5, rtol=0.0)
    other = "expanded" if computation == "absorbed" else "absorbed"
    with probe(layer) as beside, torch.no_grad():
        layer(x, mask=ph.Causal(), computation=other)
    assert beside[0].k.shape != seen[0].k.shape
    torch.testing.assert_close(rows, beside[0].rows(), atol=1e-5, rtol=1e-5)


def test_only_q_k_and_lse_are_kept_and_their_bytes_told() -> None:
    seen = _see(Stack(), _input())
    numbers = BATCH * TOKENS * (HEADS * 4 + KV_HEADS * 4 + HEADS)
    assert seen[0].nbytes == numbers * 4
    assert seen.nbytes == 2 * seen[0].nbytes
    assert f"{seen.nbytes:,} bytes" in repr(seen)
    view = seen[0]
    held = [x.untyped_storage().nbytes() for x in (view.q, view.k, view.lse)]
    assert sum(held) == view.nbytes
    assert not view.q.requires_grad


def test_only_the_chosen_layers_are_watched() -> None:
    model = Stack(3)
    with probe(model, layers=[2]) as seen, torch.no_grad():
        model(_input(), mask=ph.Causal())
    assert seen.layers == (2,)
    assert [view.layer for view in seen] == [2]
    with pytest.raises(LookupError, match=r"layer 0.*layers seen are 2"):
        seen[0]


def test_layers_can_be_named_by_their_module() -> None:
    seen = _see(Stack(), _input())
    assert seen.modules == ("layers.0", "layers.1")
    assert seen["layers.1"] is seen[1]


def test_hooks_are_gone_after_an_error() -> None:
    model = Stack()

    def fail() -> None:
        with probe(model):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert not any(layer._hooks for layer in model.layers)


def test_what_cannot_be_seen_is_refused_by_name() -> None:
    model = Stack()
    with pytest.raises(ValueError, match="counted from 0 to 1: got 5"), probe(model, layers=[5]):
        pass
    with pytest.raises(ValueError, match="Linear has no"), probe(nn.Linear(2, 2)):
        pass
    with probe(model) as seen, pytest.raises(LookupError, match="run the model inside"):
        seen[0]
    view = _see(model, _input())[0]
    with pytest.raises(ValueError, match="heads must be from 0 to 5: got 6"):
        view.rows(heads=[6])


@pytest.mark.parametrize("bias", [ph.ALiBi(HEADS), torch.linspace(-3, 3, TOKENS)])
def test_bias_is_part_of_the_weights(bias: ph.ALiBi | Tensor) -> None:
    model, records = Stack(1), []
    model.layers[0].register_attention_hook(records.append)
    view = _see(model, _input(), bias=bias)[0]
    v = records[0].v.repeat_interleave(HEADS // KV_HEADS, dim=1)
    torch.testing.assert_close(view.rows() @ v, records[0].out, atol=1e-5, rtol=0.0)


@torch.no_grad()
def test_the_layers_of_an_encoder_are_measured_on_the_encoders_tokens():
    attention = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8)
    feed_forward, norm = FeedForwardConfig(hidden_dim=16), NormConfig("rmsnorm")
    layer = LayerConfig(attention, feed_forward, norm)
    torch.manual_seed(0)
    model = ph.Transformer(
        TransformerConfig(
            kind="encoder-decoder", vocab_size=20, embed_dim=16, max_positions=32,
            layers=(replace(layer, cross_attention=attention),), encoder_layers=(layer,),
        )
    ).eval()  # fmt: skip
    ids, encoder_ids = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[7, 8, 7, 9, 7]])
    with probe(model) as seen:
        model(ids, encoder_ids=encoder_ids)
    own, encoders = seen[0], seen[1]
    assert not own.duplicate.any()  # no token of the decoder comes twice
    copies = (encoder_ids[0, :, None] == encoder_ids[0]).tril(-1)
    wanted = (encoders.rows() * copies).sum(-1)
    torch.testing.assert_close(encoders.duplicate, wanted, rtol=1e-5, atol=1e-6)
    assert encoders.duplicate[0, :, 4].gt(0).all()


def test_tokens_of_another_model_are_whole_numbers_and_features_are_none() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack, self.table = Stack(1), nn.Embedding(7, EMBED)

        def forward(self, given: Tensor) -> Tensor:
            return self.stack(given[None] if given.is_floating_point() else self.table(given))

    ids = torch.randint(7, (BATCH, TOKENS))
    for given, wanted in ((ids, ids), (_input(EMBED)[0], None)):
        model = Reads()
        with probe(model) as seen, torch.no_grad():
            model(given)
        kept = seen[0].call.ids
        assert (kept is None) == (wanted is None)
        assert kept is None or torch.equal(kept.keys, wanted)
