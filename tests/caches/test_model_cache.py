"""The caches of all layers move together, whatever kind each of them is."""

from dataclasses import replace

import pytest
import torch

import polyhead as ph
from polyhead.caches import (
    Dense,
    DenseCache,
    ModelCache,
    Paged,
    Quantized,
    Ring,
    RingCache,
    cache_bytes,
)
from polyhead.caches.choice import layer_caches
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.semantics.masks import Mask

WINDOW = 6


def tiny_encoder_decoder():
    attention = AttentionConfig(4, 2, 8)
    crossed = LayerConfig(attention, FeedForwardConfig(32), cross_attention=attention)
    return ph.Transformer(
        TransformerConfig(
            kind="encoder-decoder",
            vocab_size=20,
            embed_dim=16,
            max_positions=50,
            layers=(crossed, crossed),
            encoder_layers=(LayerConfig(attention, FeedForwardConfig(32)),),
        )
    ).eval()


def config(windows=(WINDOW, WINDOW, None)):
    return TransformerConfig(
        kind="decoder",
        vocab_size=30,
        embed_dim=16,
        max_positions=100,
        layers=tuple(
            LayerConfig(
                AttentionConfig(4, 1, 8, rope=RopeConfig(theta=10_000.0), window=window),
                FeedForwardConfig(32),
            )
            for window in windows
        ),
    )


def model():
    torch.manual_seed(0)
    return ph.Transformer(config()).eval()


def test_windowed_layers_get_rings_and_the_others_grow():
    chosen = layer_caches(config((WINDOW, 100, None)), spare=2)
    assert [layer.layout for layer in chosen] == [Ring(WINDOW, 2), Ring(100, 2), Dense()]
    assert chosen[0][2:5] == (1, 8, 8)
    assert [c.layout for c in layer_caches(config(), kind="paged", page_size=4)] == [Paged(4)] * 3
    assert [c.layout for c in layer_caches(config(), kind="dense")] == [Dense()] * 3
    quantized = layer_caches(config(), quantized=Quantized(4, sink_tokens=3))
    assert [layer.storage.sink_tokens for layer in quantized] == [0, 0, 3]
    with pytest.raises(ValueError, match="kind must be 'auto', 'dense' or 'paged': got 'ring'"):
        layer_caches(config(), kind="ring")


@pytest.mark.parametrize(
    "options",
    [{}, {"spare": 3}, {"kind": "paged", "page_size": 4}, {"kind": "dense"}],
)
@pytest.mark.parametrize("chunk", [1, 4, 9, 30])
@torch.no_grad()
def test_a_model_with_local_and_global_layers_equals_one_pass(chunk, options):
    net, ids = model(), torch.randint(30, (2, 30), generator=torch.Generator().manual_seed(1))
    cache = ModelCache.for_config(config(), **options)
    pieces = [net(part, cache=cache) for part in ids.split(chunk, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), net(ids), atol=1e-5, rtol=1e-5)
    if not options:
        assert cache.layers[0].used_bytes == 2 * WINDOW * 16 * 4


@torch.no_grad()
def test_planned_bytes_of_all_layers_are_allocated_bytes():
    cache = ModelCache.for_config(config(), capacity=90)
    model()(torch.zeros(2, 30, dtype=torch.int64), cache=cache)
    planned = sum(
        cache_bytes(
            layer.layout,
            layer.storage,
            tokens=90,
            batch_size=2,
            num_kv_heads=layer.num_kv_heads,
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            dtype=torch.float32,
        )
        for layer in layer_caches(config())
    )
    assert cache.bytes == planned


@torch.no_grad()
@pytest.mark.parametrize("page", [None, 4, 16])
def test_planned_bytes_are_held_bytes_with_windows_and_pages(page):
    """Pages keep what a window has left, and a decoding step does not read it."""
    options = {} if page is None else {"kind": "paged", "page_size": page}
    ids = torch.zeros(2, 30, dtype=torch.int64)
    for net, more in ((model(), {}), (tiny_encoder_decoder(), {"encoder_ids": ids})):
        cache = net.new_cache(**options)
        net(ids, **more, cache=cache)
        planned = ph.plan(net.config, tokens=30, batch_size=2, dtype="float32", page_size=page)
        assert planned.cache_bytes == cache.bytes
    planned = ph.plan(config(), tokens=30, batch_size=2, dtype="float32", page_size=page)
    assert planned.decode_cache_bytes == 2 * (2 * WINDOW + 30) * 16 * 4


@torch.no_grad()
def test_rollback_is_refused_before_any_layer_changes():
    net, cache = model(), ModelCache.for_config(config(), spare=1)
    net(torch.zeros(1, 20, dtype=torch.int64), cache=cache)
    assert cache.max_rollback == 2
    # A dense layer could give back more, and comes first.
    cache = ModelCache(cache.layers[::-1])
    for refused in (lambda: cache.rollback(3), lambda: cache.crop(10)):
        with pytest.raises(ValueError, match="at most 2 tokens now, or all 20"):
            refused()
        assert [layer.length for layer in cache.layers] == [20, 20, 20]
    cache.crop(18)
    assert [layer.length for layer in cache.layers] == [18, 18, 18]


@torch.no_grad()
def test_forks_and_beams_equal_runs_of_their_own():
    net = model()
    ids = torch.randint(30, (2, 15), generator=torch.Generator().manual_seed(2))
    for options in ({}, {"kind": "paged", "page_size": 4}):
        cache = ModelCache.for_config(config(), **options)
        net(ids[:, :12], cache=cache)
        fork = cache.fork()
        fork.reorder([1, 0, 1])
        out = net(ids[[1, 0, 1], 12:], cache=fork)
        torch.testing.assert_close(out, net(ids)[[1, 0, 1], 12:], atol=1e-5, rtol=1e-5)
        out = net(ids[:, 12:], cache=cache)
        torch.testing.assert_close(out, net(ids)[:, 12:], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_what_a_fork_takes_back_or_forgets_stays_where_it_came_from():
    k = torch.randn(1, 1, 10, 8)
    cache = ModelCache([DenseCache()], [DenseCache()])
    for layer in (*cache.layers, *cache.cross):
        layer.append(k, k)
    fork = cache.fork()
    fork.rollback(4)
    assert (fork.layers[0].lengths, cache.layers[0].lengths) == ([6], [10])
    fork.reset()
    assert (fork.cross[0].lengths, cache.cross[0].lengths) == ([0], [10])


@torch.no_grad()
def test_a_failed_call_leaves_layers_equal_or_empty():
    k = torch.randn(1, 1, 10, 8)
    cache = ModelCache([RingCache(4, spare=3), DenseCache(), DenseCache()])
    for layer in cache.layers:
        layer.append(k, k)
    cache.layers[0].append(k[:, :, :2], k[:, :, :2])
    cache.layers[1].append(k[:, :, :2], k[:, :, :2])
    cache.truncate(10)
    assert [layer.lengths for layer in cache.layers] == [[10]] * 3
    cache.layers[0].append(k, k)
    cache.truncate([10])
    assert [layer.lengths for layer in cache.layers] == [[0]] * 3
    cache = ModelCache([DenseCache(), DenseCache()])
    cache.layers[0].append(k, k)
    cache.truncate(0)
    assert cache.layers[0].length == 0


@torch.no_grad()
def test_save_and_load_of_a_model_with_an_encoders_output(tmp_path):
    k = torch.randn(2, 1, 5, 8)
    cache = ModelCache([DenseCache()], [DenseCache()])
    cache.layers[0].append(k, k)
    cache.cross[0].append(k[:, :, :3], k[:, :, :3])
    cache.context = torch.randn(2, 3, 16)
    cache.save(tmp_path / "file")
    loaded = ModelCache([DenseCache()], [DenseCache()])
    loaded.load(tmp_path / "file")
    assert torch.equal(loaded.context, cache.context)
    assert torch.equal(loaded.cross[0].source().gather()[0], k[:, :, :3])
    loaded.reorder([1])
    assert torch.equal(loaded.context, cache.context[1:])
    cache.context_mask = ph.KeyLengths([3, 2])
    with pytest.raises(ValueError, match="a cache with a context_mask cannot be saved"):
        cache.save(tmp_path / "file")


@torch.no_grad()
def test_rows_with_padded_encoder_tokens_are_reordered_with_their_masks():
    torch.manual_seed(0)
    model = tiny_encoder_decoder()
    encoder_ids, ids = torch.randint(20, (3, 6)), torch.randint(20, (3, 4))
    # Row 0 of every mask hides something, so that a mask left where it was would show.
    allowed = torch.ones(3, 1, 1, 6, dtype=torch.bool)
    allowed[0, ..., 4:] = allowed[2, ..., 1:] = False
    masks = [
        ph.KeyLengths([4, 6, 1]),
        ph.KeyLengths(torch.tensor([4, 6, 1])),
        ph.Keep(allowed),
        ph.Drop(~allowed),
        ph.Prefix([4, 6, 1]) & ~~ph.KeyLengths(6),
        ph.Documents([[4, 2], [6, 0], [1, 5]]) & ph.KeyLengths([4, 6, 1]) | ph.Prefix(0),
    ]
    rows = [2, 0, 0, 1]
    for mask in masks:
        cache = model.new_cache()
        model(ids, encoder_ids=encoder_ids, encoder_mask=mask, cache=cache)
        cache.reorder(rows)
        found = model(ids[rows, :1], cache=cache)
        for i, row in enumerate(rows):
            alone = model.new_cache()
            own = mask.of_rows([row])
            context = encoder_ids[row : row + 1]
            model(ids[row : row + 1], encoder_ids=context, encoder_mask=own, cache=alone)
            wanted = model(ids[row : row + 1, :1], cache=alone)
            torch.testing.assert_close(found[i : i + 1], wanted)


def test_a_mask_of_somebodys_own_says_what_it_needs_to_be_reordered():
    class Own(ph.KeyLengths):
        of_rows = Mask.of_rows

    cache = ModelCache([DenseCache()])
    k = torch.randn(2, 1, 5, 8)
    cache.layers[0].append(k, k)
    cache.context, cache.context_mask = torch.randn(2, 3, 16), Own([3, 2])
    with pytest.raises(ph.UnsupportedError, match=r"Own .* define of_rows"):
        cache.reorder([1, 0])
    assert cache.context_mask.length.values == [3, 2]


@torch.no_grad()
def test_rows_that_are_not_there_are_refused_before_any_layer_changes():
    cache = ModelCache([DenseCache(), DenseCache()])
    k = torch.randn(2, 1, 5, 8)
    for layer in cache.layers:
        layer.append(k, k)
    for rows in ([2], [0, -1], []):
        with pytest.raises(ValueError, match="rows must"):
            cache.reorder(rows)
        with pytest.raises(ValueError, match="rows must"):
            cache.layers[0].reorder(rows)
    assert cache.lengths == [5, 5]


@torch.no_grad()
def test_rows_are_any_sequence_or_tensor_of_numbers():
    k = torch.randn(4, 1, 5, 8)
    for rows in ([3, 1], (3, 1), range(3, 0, -2), torch.tensor([3, 1]), torch.tensor([3, 1]).int()):
        for context_rows in (None, [0], range(1)):
            cache = ModelCache([DenseCache()], [DenseCache()])
            cache.layers[0].append(k, k)
            cache.cross[0].append(k, k)
            cache.context = k[:, 0]
            cache.reorder(rows, context_rows)
            kept = [3, 1] if context_rows is None else [0]
            assert torch.equal(cache.layers[0].source().gather()[0], k[[3, 1]])
            assert torch.equal(cache.cross[0].source().gather()[0], k[kept])
            assert torch.equal(cache.context, k[kept, 0])


def test_a_models_cache_is_what_its_options_choose():
    codes = Quantized(4, sink_tokens=3, recent=16, group=16)
    for options in ({}, {"spare": 2}, {"kind": "paged"}, {"kind": "dense"}, {"quantized": codes}):
        wanted = [(c.layout, c.storage) for c in layer_caches(config(), **options)]
        for cache in (model().new_cache(**options), ModelCache.for_config(config(), **options)):
            assert [(c.layout, c.storage) for c in cache.layers] == wanted
    assert layer_caches(config(), kind="paged")[0].layout == Paged(16)


def test_a_cache_of_another_model_is_refused_by_the_field_that_differs():
    decoder, ids = model(), torch.arange(4)[None]
    for windows, words in (
        ((WINDOW, 4, None), r"config\.layers\[1\]\.attention\.window is 4 in the cache, 6 here"),
        ((WINDOW, WINDOW, 9), r"config\.layers\[2\]\.attention\.window is 9 in the cache, None"),
    ):
        other = ph.Transformer(config(windows)).new_cache()
        with pytest.raises(ValueError, match=f"cache was made for another model: {words}"):
            decoder(ids, cache=other)
        assert other.length == 0
    wider = replace(config(), vocab_size=31)
    with pytest.raises(ValueError, match=r"config\.vocab_size is 31 in the cache, 30 here"):
        decoder(ids, cache=ph.Transformer(wider).new_cache())
    unowned = ModelCache([DenseCache() for _ in range(3)])
    with torch.no_grad():
        assert torch.equal(decoder(ids, cache=unowned), decoder(ids, cache=decoder.new_cache()))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "paged", "page_size": 0}, "page_size must be a whole number from 1 to"),
        ({"spare": -1}, "spare must be a whole number of at least 0: got -1"),
        ({"kind": "latent"}, "kind must be 'auto', 'dense' or 'paged': got 'latent'"),
        ({"capacity": -1}, "capacity must be a whole number of at least 0: got -1"),
    ],
)
def test_caches_that_cannot_be_are_refused_by_name(options, words):
    for net in (model(), ph.Transformer(config((None,)))):  # with layers that use it, and without
        with pytest.raises(ValueError, match=words):
            net.new_cache(**options)
