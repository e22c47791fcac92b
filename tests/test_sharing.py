"""What docs/sharing.md says of threads and of bits: each line of its table, measured.

Sizes are such that native code shares its work between threads. Where the page says "no", results
are equal within rounding and may have other bits; that is all that is asked here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import polyhead as ph
from generation.tiny import byte_tokenizer, decoder
from polyhead.caches import ModelCache, Quantized
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import SharedCacheError
from polyhead.generation import LanguageModel
from polyhead.kernels import KERNELS

THREADS = (1, 2, 3, 5)
HAS_NATIVE = KERNELS["native"].unavailable() is None
needs_native = pytest.mark.skipif(not HAS_NATIVE, reason="no native code here")
NAMES = ("auto", "tiled", "sdpa", "reference")
SHAPES = [(2, 1, 1, 700, 32), (6, 2, 3, 900, 33), (4, 4, 130, 300, 32)]
"""H, G, T, S, D: a step, a few queries and many."""
PROMPT, STEPS = 300, 6
IDS = torch.randint(200, (3, PROMPT + STEPS), generator=torch.Generator().manual_seed(1))
ALL = [0, 1, 2]


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    threads = torch.get_num_threads()
    with torch.no_grad():
        yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def model(dtype: torch.dtype = torch.float32, window: int | None = None) -> ph.Transformer:
    torch.manual_seed(0)
    attention = AttentionConfig(4, 2, 16, rope=RopeConfig(), window=window)
    layer = LayerConfig(attention, FeedForwardConfig(200))
    config = TransformerConfig(
        kind="decoder", vocab_size=200, embed_dim=64, max_positions=1000, layers=(layer, layer)
    )
    return ph.Transformer(config).eval().to(dtype)


def problem(H: int, G: int, T: int, S: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = ((3, H, T, D), (3, G, S, D), (3, G, S, D))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def attend(tensors: Sequence[Tensor], kernel: str = "auto") -> Tensor:
    mask = None if kernel == "sdpa" else ph.Causal()
    return ph.attention(*tensors, mask=mask, kernel=kernel)


def through(net: ph.Transformer, rows: Sequence[int] = ALL, chunk: int = 43, **kind: Any) -> Tensor:
    """The prompt in chunks, then token by token, through a cache."""
    ids, cache = IDS[list(rows)], ModelCache.for_config(net.config, **kind)
    pieces = [*ids[:, :PROMPT].split(chunk, dim=1), *ids[:, PROMPT:].split(1, dim=1)]
    return torch.cat([net(piece, cache=cache) for piece in pieces], dim=1)


def same_bits(run: Callable[[], Tensor], threads: Sequence[int]) -> bool:
    found = []
    for count in threads:
        torch.set_num_threads(count)
        found.append(run())
    return all(torch.equal(each, found[0]) for each in found)


def assert_near(got: Tensor, wanted: Tensor) -> None:
    """Equal within what sums in another order may differ by."""
    error = (got.double() - wanted.double()).abs().max() / wanted.double().abs().max()
    assert error < 50 * torch.finfo(wanted.dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_same_call_has_the_same_bits(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensors = problem(*shape, dtype)
        for kernel in NAMES:
            assert same_bits(partial(attend, tensors, kernel), [3] * 5)
        with torch.enable_grad():
            leaves = [x.requires_grad_() for x in tensors]
            grads = [torch.autograd.grad(attend(leaves).sum(), leaves) for _ in range(5)]
        for again in grads[1:]:
            assert all(map(torch.equal, again, grads[0]))
    net = model(dtype)
    assert same_bits(lambda: net(IDS), [3] * 3)
    assert same_bits(lambda: through(net), [3] * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_number_of_threads(dtype: torch.dtype) -> None:
    problems = [problem(*shape, dtype) for shape in SHAPES]
    alone = [attend(tensors) for tensors in problems]
    for tensors, wanted in zip(problems, alone, strict=True):
        for count in THREADS:
            torch.set_num_threads(count)
            assert_near(attend(tensors), wanted)
    net = model(dtype)
    one = net(IDS)
    for count in THREADS:
        torch.set_num_threads(count)
        assert_near(net(IDS), one)
    torch.use_deterministic_algorithms(True)
    assert all(same_bits(partial(attend, tensors), THREADS) for tensors in problems)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_has_the_same_bits_for_any_number_of_threads_and_any_neighbours(dtype):
    net, long = model(dtype), 700  # keys that threads share
    ids = torch.randint(200, (3, long + STEPS), generator=torch.Generator().manual_seed(3))
    cache = net.new_cache()
    torch.set_num_threads(1)
    net(ids[:, :long], cache=cache)  # whose matrix products are torch's

    def decoded(rows: Sequence[int] = ALL) -> Tensor:
        fork, chosen = cache.fork(), [*rows]
        fork.reorder(chosen)
        steps = ids[chosen, long:].split(1, dim=1)
        return torch.cat([net(x, cache=fork) for x in steps], dim=1)

    together = decoded()
    for count in THREADS:
        torch.set_num_threads(count)
        for rows in (ALL, [0], [1], [2, 0], [1, 1, 2, 0, 2, 1, 0, 0]):
            assert torch.equal(decoded(rows), together[rows])
    torch.use_deterministic_algorithms(True)
    assert same_bits(decoded, THREADS)
    assert torch.equal(decoded(), together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_in_a_batch(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensors = problem(*shape, dtype)
        rows = [[x[i : i + 1] for x in tensors] for i in range(3)]
        for count in THREADS:
            torch.set_num_threads(count)
            assert_near(torch.cat([attend(row) for row in rows]), attend(tensors))
        if HAS_NATIVE:
            torch.set_num_threads(1)
            together = attend(tensors, "native")
            assert torch.equal(torch.cat([attend(row, "native") for row in rows]), together)
    net = model(dtype)
    together = through(net)
    for row in ALL:
        assert_near(through(net, [row])[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_and_kernels(dtype: torch.dtype) -> None:
    net = model(dtype)
    wanted = net(IDS)
    for chunk in (1, 43, PROMPT):
        assert_near(through(net, chunk=chunk), wanted)
    for kernel in NAMES:
        assert_near(net(IDS, kernel=kernel), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_kinds_of_cache(dtype: torch.dtype) -> None:
    net = model(dtype)
    wanted = through(net)
    assert torch.equal(through(net, capacity=900), wanted)
    paged = [through(net, kind="paged", page_size=size) for size in (4, 16)]
    if dtype != torch.float64 and HAS_NATIVE:
        assert all(torch.equal(each, wanted) for each in paged)
    for each in paged:
        assert_near(each, wanted)
    local = model(dtype, window=50)
    wanted = through(local, kind="dense")
    for spare in (0, 7):
        assert_near(through(local, spare=spare), wanted)


def in_threads(*runs: Callable[[], Any]) -> list[Any]:
    """What each returns, run side by side in threads of their own; raises what one of them does."""
    found: list[Any] = [None] * len(runs)
    begin = threading.Barrier(len(runs))

    def start(place: int) -> None:
        begin.wait()
        try:
            found[place] = runs[place]()
        except BaseException as error:
            found[place] = error

    threads = [threading.Thread(target=start, args=(place,)) for place in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def test_two_threads_run_one_model_side_by_side() -> None:
    net = model()

    def run(row: int) -> tuple[Tensor, list[Tensor]]:
        with torch.no_grad(), ph.probe(net) as seen:
            out = through(net, [row])
        with torch.no_grad(), ph.ablate(net, {0: [row]}):
            without = net(IDS[row : row + 1])
        return torch.cat((out[0], without[0])), [seen[i].entropy for i in range(2)]

    alone = [in_threads(lambda row=row: run(row))[0] for row in ALL]
    assert not torch.equal(alone[0][0], alone[1][0])
    for _ in range(3):
        together = in_threads(*(lambda row=row: run(row) for row in ALL))
        for got, wanted in zip(together, alone, strict=True):
            assert torch.equal(got[0], wanted[0])
            assert all(map(torch.equal, got[1], wanted[1]))


FORKS = {
    "pages": {"page_size": 1},
    "coded pages": {"page_size": 2, "quantized": Quantized(group=2, recent=2, sink_tokens=1)},
}
MORE = torch.randint(200, (4, 30), generator=torch.Generator().manual_seed(5))


def of_fork(net: ph.Transformer, cache: ModelCache, i: int, kernel: str) -> Tensor:
    """What fork i of a prompt gives in chunks and steps, rolled back and forked once more."""
    gaps = torch.arange(40, 70) * 2 if i == 3 else None  # positions are stored from then on

    def call(cache: ModelCache, first: int, stop: int) -> Tensor:
        at = None if gaps is None else gaps[first:stop]
        return net(MORE[i : i + 1, first:stop], cache=cache, positions=at, kernel=kernel)

    with torch.no_grad():
        found = [call(cache, 0, 5), *(call(cache, t, t + 1) for t in range(5, 20))]
        other = cache.fork()
        cache.rollback(2)
        found += [call(cache, 20, 23), call(other, 20, 25), call(cache, 23, 24)]
        other.reorder([0, 0])
        both = MORE[i : i + 1, 25:].expand(2, -1)
        at = None if gaps is None else gaps[25:]
        found.append(net(both, cache=other, positions=at, kernel=kernel)[:1])
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("times", [2, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernel", ["auto", "tiled"])
@pytest.mark.parametrize("kind", [*FORKS])
def test_forks_of_pages_on_several_threads_equal_one_thread(kind: str, kernel: str, times: int):
    net, interval = model(), sys.getswitchinterval()
    torch.set_num_threads(1)

    def forks() -> list[ModelCache]:
        cache = net.new_cache(kind="paged", **FORKS[kind])
        net(IDS[:1, :3], cache=cache)
        return [cache.fork() for _ in MORE]

    wanted = [of_fork(net, cache, i, kernel) for i, cache in enumerate(forks())]
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(times):
            runs = [partial(of_fork, net, cache, i, kernel) for i, cache in enumerate(forks())]
            for found, alone in zip(in_threads(*runs), wanted, strict=True):
                assert torch.equal(found, alone)
    finally:
        sys.setswitchinterval(interval)


def test_a_stream_that_another_thread_is_reading_is_refused() -> None:
    stream = LanguageModel(decoder(), byte_tokenizer()).stream("ab", max_new_tokens=4)
    refused: list[BaseException] = []
    tokens = stream._tokens

    def interrupted() -> Iterator[int]:
        for token in tokens():
            with pytest.raises(SharedCacheError, match="this stream is in use by another") as error:
                in_threads(lambda: next(stream))
            refused.append(error.value)
            yield token

    stream._tokens = interrupted
    assert len([*stream]) > 0
    assert len(refused) == 4
