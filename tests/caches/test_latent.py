"""A latent cache keeps one row per token, and its value is a slice of that row."""

import pytest
import torch

import polyhead as ph
from polyhead.caches import LatentCache, Paged, Ring
from polyhead.errors import ConfigError


def test_the_value_is_the_first_columns_of_the_same_memory():
    cache = LatentCache(6, 2)
    rows = torch.randn(2, 1, 5, 8)
    k, v = cache.append(rows, rows[..., :6]).gather()
    assert v.data_ptr() == k.data_ptr()
    assert k.shape == (2, 1, 5, 8)
    assert v.shape == (2, 1, 5, 6)
    assert torch.equal(k, rows)


@pytest.mark.parametrize("layout", [None, Ring(100), Paged(16)])
@torch.no_grad()
def test_it_grows_by_rank_and_rotary_size_per_token(layout):
    cache = LatentCache(6, 2, layout=layout)
    rows = torch.randn(3, 1, 64, 8)
    cache.append(rows, rows[..., :6])
    assert cache.used_bytes == 3 * 64 * (6 + 2) * 4


def test_gradients_flow_through_it():
    cache = LatentCache(6, 2)
    first, second = (torch.randn(1, 1, 3, 8, requires_grad=True) for _ in range(2))
    cache.append(first, first[..., :6])
    source = cache.append(second, second[..., :6])
    ph.attention(torch.randn(1, 4, 3, 8), source, mask=ph.Causal()).sum().backward()
    assert first.grad.abs().sum() > 0
    assert second.grad.abs().sum() > 0


def test_a_value_that_is_no_slice_of_the_key_is_refused():
    rows = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match="v must be the first 6 columns of k"):
        LatentCache(6, 2).append(rows, torch.randn(1, 1, 4, 6))
    LatentCache(6, 2).append(rows, rows[..., :6].clone())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LatentCache(0, 2), "kv_lora_rank must be a whole number of at least 1: got 0"),
        (lambda: LatentCache(4, -1), "qk_rope_head_dim must be a whole number of at least 0"),
        (
            lambda: LatentCache(6, 2).append(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 6)),
            "holds kv heads, key size and value size (1, 8, 6): got (2, 8, 6)",
        ),
    ],
)
def test_wrong_sizes_are_refused_by_name(make, words):
    with pytest.raises(ValueError) as error:
        make()
    assert words in str(error.value)


def test_a_refused_latent_leaves_the_memory_of_an_empty_cache():
    cache = LatentCache(8, 4)
    latent = torch.randn(2, 1, 5, 12)
    cache.append(latent, latent[..., :8])
    cache.reset()
    held = cache.bytes
    with pytest.raises(ConfigError, match="latent cache of kv_lora_rank=8"):
        cache.append(latent[..., 1:], latent[..., 1:9])
    assert cache.bytes == held > 0
