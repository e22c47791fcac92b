"""Random histories: whatever is appended, taken back, forked and reordered, attention is right.

Every step is checked against ``recall``, which keeps tokens as lists. After every step the pages
that nothing points to are filled with NaN, and the pool's counts are compared with the tables.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from recall import H, Row, attend

import polyhead as ph
from polyhead.caches import Dense, Latent, Paged, Plain, Quantized, Ring, StoredCache
from polyhead.caches.pages import Pages

D = 8
LATENT = Latent(6, 2)


def tokens(seed: int, batch: int, count: int, storage) -> tuple[torch.Tensor, ...]:
    """q, k, v of ``count`` tokens; a latent's value is a slice of its key."""
    generator = torch.Generator().manual_seed(seed)
    latent = storage if isinstance(storage, Latent) else getattr(storage, "latent", None)
    G = 1 if latent else 2
    q = torch.randn(batch, H, count, D, generator=generator)
    k = torch.randn(batch, G, count, D, generator=generator)
    if latent:
        return q, k, k[..., : latent.kv_lora_rank]
    return q, k, torch.randn(batch, G, count, 4, generator=generator)


class History(RuleBasedStateMachine):
    """Up to three caches of one family, each beside its lists."""

    layout: object = Dense()
    storage: object = Plain()
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.seed = 0
        self.family: list[tuple[StoredCache, list[Row]]] = [
            (StoredCache(self.layout, self.storage), [Row(), Row()])
        ]

    def pick(self, which: int) -> tuple[StoredCache, list[Row]]:
        type(self).steps += 1
        return self.family[which % len(self.family)]

    @rule(which=st.integers(0, 2), count=st.integers(1, 13), padding=st.integers(0, 3))
    def append(self, which: int, count: int, padding: int) -> None:
        cache, rows = self.pick(which)
        self.seed += 1
        batch, storage = len(rows), self.storage
        q, k, v = tokens(self.seed, batch, count, storage)
        real = torch.ones(batch, count, dtype=torch.bool)
        if padding:
            real = torch.rand(real.shape, generator=torch.Generator().manual_seed(self.seed)) < 0.8
        held = {(len(r.keys), r.encoded, r.forgotten(self.layout, storage)) for r in rows}
        uneven = len(held) > 1
        positions = cache.next_positions(real) if padding or uneven else None
        window = self.layout.window if isinstance(self.layout, Ring) else None
        before = [row.copy() for row in rows]
        source = cache.append(k, v, positions)
        mask = ph.Causal() if window is None else ph.Causal() & ph.Window(window)
        out = ph.attention(q, source, mask=mask, q_positions=positions, kernel="tiled")
        by_reference = ph.attention(q, source, mask=mask, q_positions=positions, kernel="reference")
        torch.testing.assert_close(out, by_reference, atol=1e-5, rtol=1e-5)
        for b, row in enumerate(rows):
            kept = real[b].nonzero()[:, 0]
            if not len(kept):
                continue
            places = list(range(len(row.keys), len(row.keys) + len(kept)))
            row.append(k[b][:, kept], v[b][:, kept], storage)
            seen_k, seen_v = row.seen(storage)
            pushes = window is not None and len(kept) > self.layout.spare + 1
            pushes = pushes and len(row.keys) > window + self.layout.spare
            if pushes and isinstance(storage, Quantized):
                # The chunk itself is seen exactly, and what came before as it was.
                seen_k, seen_v = torch.stack(row.keys, 1), torch.stack(row.values, 1)
                if before[b].keys:
                    held = before[b].seen(storage)
                    seen_k[:, : held[0].shape[1]], seen_v[:, : held[1].shape[1]] = held
            expected = attend(q[b][:, kept], seen_k, seen_v, places, window)
            torch.testing.assert_close(out[b][:, kept].double(), expected, atol=1e-5, rtol=1e-5)

    @rule(which=st.integers(0, 2), share=st.floats(0, 1), per_row=st.booleans())
    def rollback(self, which: int, share: float, per_row: bool) -> None:
        cache, rows = self.pick(which)
        if not cache.lengths:
            return
        most = [row.most_rollback(self.layout, self.storage) for row in rows]
        assert cache.max_rollback == min(most)
        counts = [int(share * n) for n in most] if per_row else [int(share * min(most))] * len(most)
        cache.rollback(counts if per_row else counts[0])
        for row, count in zip(rows, counts, strict=True):
            row.cut(len(row.keys) - count)

    @rule(which=st.integers(0, 2))
    def roll_back_too_far(self, which: int) -> None:
        cache, rows = self.pick(which)
        if not cache.lengths:
            return
        most = min(row.most_rollback(self.layout, self.storage) for row in rows)
        before = cache.lengths
        refused = most + 1
        if all(refused == len(row.keys) for row in rows):
            refused += 1
        with pytest.raises(ValueError, match="rollback count must be"):
            cache.rollback(refused)
        assert cache.lengths == before

    @rule(which=st.integers(0, 2), back=st.integers(0, 6))
    def crop(self, which: int, back: int) -> None:
        cache, rows = self.pick(which)
        most = min(row.most_rollback(self.layout, self.storage) for row in rows)
        length = max(len(row.keys) for row in rows) - min(back, most)
        if cache.lengths:
            cache.crop(length)
            for row in rows:
                row.cut(min(len(row.keys), length))

    @rule(which=st.integers(0, 2))
    def reset(self, which: int) -> None:
        cache, rows = self.pick(which)
        if max(len(row.keys) for row in rows) > 40:
            cache.reset()
            for row in rows:
                row.cut(0)

    @rule(which=st.integers(0, 2))
    def fork(self, which: int) -> None:
        cache, rows = self.pick(which)
        self.family = [*self.family[-2:], (cache.fork(), [row.copy() for row in rows])]

    @rule(which=st.integers(0, 2), order=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def reorder(self, which: int, order: list[int]) -> None:
        cache, rows = self.pick(which)
        if not cache.lengths:
            return
        order = [i % len(rows) for i in order]
        cache.reorder(order)
        rows[:] = [rows[i].copy() for i in order]

    def check_invariants(self, *args, **kwargs) -> None:
        super().check_invariants(*args, **kwargs)
        for cache, rows in self.family:
            assert cache.lengths in ([], [len(row.keys) for row in rows])
        check_pools([cache for cache, _ in self.family])


def check_pools(caches: list[StoredCache]) -> None:
    """Every count equals the tables' entries; whatever is free is made useless."""
    pools = {}
    for cache in caches:
        for memory in cache._memories.values():
            if isinstance(memory, Pages):
                pools.setdefault(id(memory.pool), (memory.pool, []))[1].extend(memory.table)
    for pool, tables in pools.values():
        entries = Counter(page for row in tables for page in row)
        assert pool.references == [entries[page] for page in range(len(pool.references))]
        assert sorted(pool.free) == [p for p, n in enumerate(pool.references) if n == 0]
        for tensor in pool.tensors:
            garbage = torch.nan if tensor.is_floating_point() else 255
            tensor[:, pool.free] = garbage


SMALL = Quantized(8, 4, group=4, sink_tokens=3, recent=3)
KINDS = {
    "dense": (Dense(), Plain()),
    "ring": (Ring(8), Plain()),
    "ring with spare": (Ring(8, 5), Plain()),
    "paged": (Paged(4), Plain()),
    "latent": (Dense(), LATENT),
    "quantized": (Dense(), SMALL),
    "paged × latent": (Paged(4), LATENT),
    "paged × quantized": (Paged(8), SMALL),
    "ring × quantized": (Ring(13, 2), Quantized(4, 8, group=4, sink_tokens=0, recent=3)),
    "ring × latent": (Ring(8), LATENT),
    "latent × quantized": (Dense(), Quantized(8, group=4, sink_tokens=2, recent=3, latent=LATENT)),
}


@pytest.mark.parametrize("histories", [10, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_random_histories_equal_recomputation_from_the_tokens(kind, histories):
    layout, storage = KINDS[kind]

    class Of(History):
        pass

    Of.layout, Of.storage = layout, storage
    run_state_machine_as_test(
        Of,
        settings=settings(
            max_examples=histories,
            stateful_step_count=50,
            deadline=None,
            database=None,
            phases=[Phase.generate],
        ),
    )
    assert Of.steps >= 35 * histories
