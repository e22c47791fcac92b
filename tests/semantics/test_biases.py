"""Biases follow the device and the dtype of a call, and their rules say what their tiles do."""

import pickle

import pytest
import torch

import polyhead as ph
from polyhead.semantics import SoftPromptBias, TensorBias, Tokens
from polyhead.semantics.pairs import ScalarPair, Tile


def test_a_bias_of_the_host_is_sent_to_the_device_of_a_call_once():
    slopes = torch.rand(4)
    bias, there = ph.ALiBi(slopes), torch.device("meta")
    assert bias.on(torch.device("cpu")) is bias
    sent = bias.on(there)
    assert sent.slopes.is_meta
    assert bias.on(there) is sent
    slopes.mul_(2.0)
    assert bias.on(there) is not sent
    assert type(pickle.loads(pickle.dumps(bias))) is ph.ALiBi
    learned = ph.ALiBi(slopes.requires_grad_())
    assert learned.on(there).slopes.requires_grad
    assert learned.on(there) is not learned.on(there)
    q = torch.empty(1, 4, 3, 8, device="meta")
    assert ph.attention(q, q, q, bias=learned).is_meta


BIASES = {
    "ALiBi": lambda: ph.ALiBi(4),
    "T5": lambda: ph.RelativeBias(torch.randn(32, 4)),
    "one-sided": lambda: ph.RelativeBias(torch.randn(12, 4), bidirectional=False, max_distance=9),
    "a number for each pair": lambda: TensorBias(torch.randn(1, 4, 7, 9)),
    "content": lambda: ph.RelativeContentBias(
        torch.randn(1, 4, 7, 8), torch.randn(1, 1, 9, 8), max_distance=5
    ),
    "content behind": lambda: ph.RelativeContentBias(torch.randn(1, 4, 7, 6), nearest=0),
    "content of keys": lambda: ph.RelativeContentBias(of_key=torch.randn(1, 4, 9, 5)),
    "soft prompt": lambda: SoftPromptBias(
        torch.randn(12, 4), torch.randn(2, 4), length=5, max_distance=4
    ),
}
TOKENS = Tokens.of(7, shift=2), Tokens.of(9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", BIASES)
def test_the_rule_of_a_bias_says_its_tile_in_the_dtype_of_the_scores(name, dtype):
    bias = BIASES[name]()
    drawn = bias.tile(*TOKENS, torch.empty(0, dtype=dtype))
    wanted = drawn.expand(1, 4, 7, 9)
    by_tile = bias.rule(Tile(*TOKENS, torch.device("cpu"), dtype))(())
    rule = bias.rule(ScalarPair(*TOKENS, torch.device("cpu"), dtype))
    pairs = torch.cartesian_prod(*(torch.arange(n) for n in (1, 4, 7, 9)))
    one_by_one = rule(pairs.unbind(-1)).view(1, 4, 7, 9)
    for found in (by_tile.expand_as(wanted), one_by_one):
        assert found.dtype == (torch.float32 if name.startswith("a number") else dtype)
        torch.testing.assert_close(found.to(dtype), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [ScalarPair, Tile])
def test_a_rule_reads_numbers_of_the_host_on_the_device_of_the_call(kind):
    there = torch.device("meta")
    of = kind(*TOKENS, there, torch.float32)
    pair = (
        ()
        if kind is Tile
        else tuple(torch.zeros(3, dtype=torch.int64, device=there) for _ in "BHTS")
    )
    biases = (BIASES[name]() for name in BIASES if name not in ("ALiBi", "one-sided"))
    for part in (ph.Keep(torch.ones(7, 9, dtype=torch.bool)), *biases):
        assert part.rule(of)(pair).is_meta
    assert ph.KeyLengths([5]).rule(of)(pair).is_meta
