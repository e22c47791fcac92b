"""A layer with keys and values, a state, a convolution and pooled entries, under one count."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import polyhead as ph
from polyhead.caches import LayerCache, ModelCache, Paged, Quantized, Ring
from polyhead.caches.sizes import BLOCK
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    Memory,
    PerToken,
    Pooled,
    State,
    Tail,
    TransformerConfig,
)
from polyhead.errors import CheckpointError, ConfigError
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.registry import register_builder
from polyhead.planning import layer_cache

E, TAPS, EVERY = 16, 3, 4
DECAY = 0.8


@dataclasses.dataclass(frozen=True)
class MixedConfig(AttentionConfig, kind="mixed in a test"):
    """Attention, a decayed sum of inputs, a short convolution and means of blocks."""

    @property
    def memories(self) -> tuple[Memory, ...]:
        return (
            *super().memories,
            State("sum", (E,), "float64"),
            Tail("conv", E, TAPS - 1),
            Tail("block", E, EVERY - 1),
            Pooled("means", E, EVERY),
        )


class Mixed(MultiHeadAttention):
    """The module of ``MixedConfig``: the sum of four outputs."""

    config_class = MixedConfig

    def forward(self, x: Tensor, *args: Any, cache: Any = None, **call: Any) -> Tensor:  # type: ignore[override]
        positions = call.get("positions")
        if cache is None:
            cache = LayerCache(self.config.memories)
        if not cache.even and positions is None:
            held = torch.tensor(cache.lengths)
            positions = held[:, None] + torch.arange(x.shape[1])
        return mixed(self, x, cache, positions)


register_builder(MixedConfig, Mixed.from_config)


def mixed(layer: MultiHeadAttention, x: Tensor, cache: LayerCache, positions: Any) -> Tensor:
    B, T, _ = x.shape
    q, k, v = (
        p(x).view(B, T, -1, 8).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    with cache.step(x, positions) as step:
        xs = step.pack(x)
        conv = step.tail("conv", xs)
        made = sum(conv[:, i : i + T] * (i + 1) for i in range(TAPS))
        sums = []
        for piece in step.pieces:
            state = step.state("sum")
            for t in range(piece.start, piece.stop):
                real = torch.ones(B, dtype=torch.bool) if step.real is None else step.real[:, t]
                state.copy_(torch.where(real[:, None], state * DECAY + xs[:, t], state))
                sums.append(state.clone())
        block = step.tail("block", xs)
        ends = [
            [p - n for p in range(n, n + c) if (p + 1) % EVERY == 0]
            for n, c in zip(step.before, step.counts, strict=True)
        ]
        entries = torch.zeros(B, max(map(len, ends)), E, dtype=x.dtype)
        for row, columns in enumerate(ends):
            for i, column in enumerate(columns):
                entries[row, i] = block[row, column : column + EVERY].mean(0)
        means = step.pooled("means", entries)
        pooled = torch.zeros_like(x)
        for row, (n, c) in enumerate(zip(step.before, step.counts, strict=True)):
            for t in range(c):
                pooled[row, t] = means[row, : (n + t + 1) // EVERY].sum(0)
        source = step.append("kv", k, v)
        where = positions if positions is not None else None
        out = ph.attention(q, source, mask=ph.Causal(), q_positions=where)
    rest = step.unpack(made + torch.stack(sums, 1).to(x.dtype) + pooled)
    return layer.o_proj(out.transpose(1, 2).reshape(B, T, -1)) + rest


def layer() -> Mixed:
    torch.manual_seed(0)
    return Mixed.from_config(E, MixedConfig(2, 1, 8)).double().eval()


def tokens(B: int, T: int) -> Tensor:
    return torch.randn(B, T, E, generator=torch.Generator().manual_seed(T), dtype=torch.float64)


def by_hand(x: Tensor) -> Tensor:
    """All but attention, of one row ``[T, E]``, by the formula."""
    T = len(x)
    rows = []
    for t in range(T):
        conv = sum((i + 1) * x[t - TAPS + 1 + i] for i in range(TAPS) if t - TAPS + 1 + i >= 0)
        total = sum(DECAY ** (t - s) * x[s] for s in range(t + 1))
        blocks = [x[b * EVERY : (b + 1) * EVERY].mean(0) for b in range((t + 1) // EVERY)]
        rows.append(conv + total + sum(blocks, torch.zeros(E, dtype=x.dtype)))
    return torch.stack(rows)


def cache(**options: Any) -> LayerCache:
    return LayerCache(MixedConfig(2, 1, 8).memories, **options)


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


def test_one_pass_is_the_formula() -> None:
    net, x = layer(), tokens(2, 14)
    q, k, v = (
        p(x).view(2, 14, -1, 8).transpose(1, 2) for p in (net.q_proj, net.k_proj, net.v_proj)
    )
    heads = ph.attention(q, k, v, mask=ph.Causal(), kernel="reference")
    wanted = net.o_proj(heads.transpose(1, 2).reshape(2, 14, -1))
    same(net(x), wanted + torch.stack([by_hand(row) for row in x]))


@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("page", [None, 4])
@pytest.mark.parametrize("chunks", [[14], [5, 1, 6, 2], [1] * 14])
def test_uneven_chunks_equal_one_pass(chunks: list[int], page: int | None, spare: int) -> None:
    net, x = layer(), tokens(2, 14)
    held = cache(layout=None if page is None else Paged(page), spare=spare)
    parts = [net(part, cache=held) for part in x.split(chunks, 1)]
    same(torch.cat(parts, 1), net(x))
    assert held.lengths == [14, 14]
    assert held.max_rollback >= spare


def test_ragged_rows_equal_each_row_alone() -> None:
    net, x, held = layer(), tokens(3, 9), cache(spare=1)
    real = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9, [1, 0, 1, 1, 0, 0, 1, 0, 0]]).bool()
    found = net(x, cache=held, positions=held.next_positions(real))
    assert held.lengths == [7, 9, 4]
    more = tokens(3, 5)
    after = net(more, cache=held)
    for row in range(3):
        solo = net(torch.cat((x[row, real[row]], more[row]))[None])[0]
        same(found[row, real[row]], solo[: held.lengths[row] - 5])
        same(after[row], solo[-5:])


def test_rollback_within_spare_is_exact_and_beyond_is_refused() -> None:
    net, x, held = layer(), tokens(2, 12), cache(spare=2)
    net(x[:, :10], cache=held)
    net(x[:, 10:11], cache=held)
    before = held.fork()
    assert held.max_rollback == 3
    with pytest.raises(ValueError, match="at most 3 tokens now, or all 11: got 4; memory 'sum'"):
        held.rollback(4)
    held.rollback([1, 3])
    assert held.lengths == [10, 8]
    again = tokens(2, 3)
    found = net(again, cache=held)
    for row, keep in enumerate([10, 8]):
        same(found[row], net(torch.cat((x[row, :keep], again[row]))[None])[0, -3:])
    # The fork has not changed.
    same(net(x[:, 11:], cache=before), net(x)[:, 11:])
    held.rollback(held.lengths)
    same(net(x, cache=held), net(x))


def test_rows_in_another_order_and_a_reset() -> None:
    net, x, held = layer(), tokens(2, 10), cache(spare=1)
    net(x[:, :8], cache=held)
    held.reorder([1, 1, 0])
    rows = x[[1, 1, 0]]
    same(net(rows[:, 8:], cache=held), net(rows)[:, 8:])
    held.reset()
    assert held.lengths == [0, 0, 0]
    same(net(rows, cache=held), net(rows))


@pytest.mark.parametrize("layout", [None, Paged(2), Ring(20)])
@pytest.mark.parametrize("fail", ["body", "left out"])
def test_a_step_that_fails_leaves_everything_as_it_was(layout: Any, fail: str) -> None:
    net, x, held = layer(), tokens(2, 9), cache(layout=layout, spare=1)
    net(x[:, :6], cache=held)
    kv = torch.zeros(2, 1, 2, 8, dtype=torch.float64)
    said = "on purpose" if fail == "body" else "'block' has not had"

    def call() -> None:
        with held.step(x[:, :2]) as step:
            step.append("kv", kv, kv)
            step.tail("conv", x[:, :2])
            step.pooled("means", torch.zeros(2, 1, E, dtype=torch.float64))
            for _ in step.pieces:
                step.state("sum").fill_(torch.nan)
            if fail == "body":
                raise ValueError("on purpose")

    with pytest.raises(ValueError, match=said):
        call()
    assert held.lengths == [6, 6]
    same(net(x[:, 6:], cache=held), net(x)[:, 6:])


def test_what_is_saved_goes_on_where_it_was(tmp_path: Any) -> None:
    net, x, held = layer(), tokens(2, 12), cache(spare=1)
    real = torch.ones(2, 7, dtype=torch.bool)
    real[0, :2] = False
    net(x[:, :7], cache=held, positions=held.next_positions(real))
    held.save(tmp_path / "a")
    other = cache(spare=1)
    other.load(tmp_path / "a")
    assert other.lengths == [5, 7]
    assert other.max_rollback == 0
    same(net(x[:, 7:], cache=other), net(x[:, 7:], cache=held))
    with pytest.raises(CheckpointError, match="of another kind: spare is 1 in the file, 0 here"):
        cache().load(tmp_path / "a")
    tensors, facts = held.state()
    (name,) = (name for name in tensors if name.startswith("sum"))
    narrow = tensors | {name: tensors[name].half()}
    with pytest.raises(ValueError, match=r"sum must be float64: got torch\.float16"):
        cache(spare=1).restore(narrow, facts, torch.device("cpu"))


def test_an_empty_cache_has_nothing_to_roll_back() -> None:
    with pytest.raises(ValueError, match="must be 0 to length=0 tokens: got 1"):
        cache().rollback(1)


def model() -> ph.Transformer:
    plain = LayerConfig(AttentionConfig(2, 1, 8), FeedForwardConfig(16))
    config = TransformerConfig(
        "decoder", 20, E, 64, (plain, LayerConfig(MixedConfig(2, 1, 8), FeedForwardConfig(16)))
    )
    torch.manual_seed(1)
    return ph.Transformer(config).eval()


@pytest.mark.parametrize("page", [None, 4])
def test_planned_bytes_of_mixed_layers_are_allocated_bytes(page: int | None) -> None:
    net, ids = model(), torch.randint(20, (3, 30))
    kind: Any = "auto" if page is None else "paged"
    held = ModelCache.for_config(net.config, kind=kind, page_size=page or 16)
    net(ids, cache=held)
    planned = ph.plan(
        net.config, tokens=30, batch_size=3, dtype="float32", kv_dtype="float32", page_size=page
    )
    assert planned.cache_bytes == held.bytes
    with pytest.raises(ConfigError, match=r"MixedConfig keeps State.*ranks must be 1: got 2"):
        layer_cache(net.config.layers[1].attention, "float32", ranks=2)


@dataclasses.dataclass(frozen=True)
class ManyConfig(AttentionConfig, kind="many in a test"):
    """Any memories."""

    @property
    def memories(self) -> tuple[Memory, ...]:
        few = (State("a", (2, 3), "bfloat16"), Tail("b", 5, 3), Pooled("c", 4, 3))
        more = PerToken(2, 4, 6, name="d"), PerToken(1, 9, 7, latent=True, name="e")
        return few[: self.num_heads % 4] + more[: self.num_heads // 4]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 9, 11])
@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
def test_planned_bytes_are_held_bytes_for_every_list_of_memories(heads: int, kv_dtype: str) -> None:
    config = ManyConfig(heads, 1, 8)
    dtype = torch.bfloat16 if kv_dtype == "int8" else torch.float16
    quantized = Quantized() if kv_dtype == "int8" else None
    held, T = LayerCache(config.memories, quantized=quantized), 100
    with held.step(torch.zeros(2, T, 4, dtype=dtype)) as step:
        for memory in config.memories:
            if (kv := memory.keys_and_values) is not None:
                k = torch.zeros(2, kv.num_kv_heads, T, kv.key_dim, dtype=dtype)
                v = k[..., : kv.value_dim] if kv.latent else k.new_zeros(*k.shape[:3], kv.value_dim)
                step.append(kv.name, k, v)
            elif memory.name == "a":
                step.state("a")
            elif memory.name == "b":
                step.tail("b", torch.zeros(2, T, 5, dtype=dtype))
            else:
                step.pooled("c", torch.zeros(2, T // 3, 4, dtype=dtype))
    assert layer_cache(config, kv_dtype).bytes(T, 2) == held.bytes


@dataclasses.dataclass(frozen=True)
class StateOnlyConfig(ManyConfig, kind="state only in a test"):
    """No keys and values, and no parameters."""

    def parameter_groups(self, embed_dim: int, context_dim: int | None = None) -> Any:
        return iter(())


def test_a_model_without_keys_of_each_token_is_planned() -> None:
    few = LayerConfig(StateOnlyConfig(3, 1, 8), FeedForwardConfig(16))
    config = TransformerConfig("decoder", 20, E, 64, (few,))
    planned = ph.plan(config, tokens=30, batch_size=2, dtype="float32")
    state, tail, pooled = 2 * 6 * 2, 4 * 5 * 4, BLOCK // 3 * 4 * 4  # room comes in blocks
    assert planned.cache_bytes == 2 * (state + tail + pooled)
    assert planned.cache_token_bytes == 4 * 4 / 3
    assert planned.layouts == ()


def test_a_model_of_mixed_layers_changes_all_of_them_together(tmp_path: Any) -> None:
    net, ids = model(), torch.randint(20, (2, 12))
    held = ModelCache.for_config(net.config, spare=2)
    whole = net(ids)
    net(ids[:, :9], cache=held)
    assert not held.reserve_slots()
    assert held.max_rollback == 2
    with pytest.raises(ValueError, match="at most 2 tokens now"):
        held.rollback(3)
    assert [each.length for each in held.layers] == [9, 9]
    held.rollback(2)
    held.save(tmp_path / "a")
    other = ModelCache.for_config(net.config, spare=2)
    other.load(tmp_path / "a")
    for each in (held.fork(), other, held):
        torch.testing.assert_close(net(ids[:, 7:], cache=each), whole[:, 7:], atol=1e-5, rtol=1e-5)
    held.reorder([1, 0])
    held.truncate(10)
    assert held.lengths == [10, 10] or held.lengths == [0, 0]


def test_a_gradient_is_refused() -> None:
    net, held = layer(), cache()
    with torch.enable_grad(), pytest.raises(ValueError, match="'conv' cannot carry a gradient"):
        net(tokens(1, 2).requires_grad_(), cache=held)
    assert held.lengths == []


def test_a_first_append_that_fails_says_why_and_leaves_the_cache_empty() -> None:
    net, x, held = layer(), tokens(2, 3), cache()
    with pytest.raises(ValueError, match="k must be"), held.step(x) as step:
        step.append("kv", x, x)
    assert held.lengths == []
    same(net(x, cache=held), net(x))
