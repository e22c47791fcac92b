"""Attention of a block of query rows over a split of the keys, with an online softmax.

    m' = max(m, max z)     α = exp(m − m')     l ← α l + Σ exp(z − m')     acc ← α acc + P V
    out = acc / l          lse = m + log l

(Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022.) Powers are of 2: z · log₂e. A program
is one block of rows of one kv head and one split of the keys (Flash-Decoding, Dao et al. 2023).
Tiles that every row sees whole come first, without any mask; then those at the borders.

Shape letters: N rows of a tile, S keys of a tile, D key size, V value size. The key size is
HEAD + TAIL, each a power of two, so that 576 is 512 + 64 and 80 is 64 + 16; with SHARED the value
is the head of the key, and is read once (absorbed latent attention).
"""

import triton
import triton.language as tl

from polyhead.kernels.triton.device.codes import load_keys_or_values
from polyhead.kernels.triton.device.scores import (
    LN2,
    LOG2E,
    biased,
    bounds_of,
    capped,
    finite,
    kept,
    load_parts,
    near_of,
    nearby,
    positions_of_keys,
    product,
    rows_of,
    visible,
)


@triton.jit(do_not_specialize=["keys", "split_keys", "skipped", "first"])
def attend(
    q, k, v, pages, out, lse, bounds, keep, q_positions, k_positions, bias, dropout,
    tokens, keys, split_keys, kv_heads, skipped, first, scale, cap, factor,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    VALUE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP: tl.constexpr,
    BOUNDS: tl.constexpr, KEEP: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    DROPOUT: tl.constexpr, PAGED: tl.constexpr, POSITIONS: tl.constexpr, SHARED: tl.constexpr,
    K_CODES: tl.constexpr, V_CODES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out ``[splits, B, H, T, V]`` and lse ``[splits, B, H, T]``.

    Args:
        q, k, v: Tuples of pointer and strides by batch row, head and token.
        pages: Pointer ``[B, m]``, its stride, tokens of a page; with PAGED.
        out, lse: Pointer and strides by split, batch row, head and token.
        bounds: Pointers ``[1 or B, T]`` low and high, stride by batch row: of keys' indexes in
            [0, S], or of positions; with BOUNDS.
        keep: Pointer and four strides of an explicit mask; with KEEP.
        q_positions: Pointer ``[1 or B, T]`` and stride by batch row; with a BIAS by position.
        k_positions: Likewise of the keys, with POSITIONS; else they count on from ``first``.
        bias: Pointer ``[H]`` of slopes; ``[H, 2 n + 1]`` and n; or pointer and four strides.
        dropout: Pointer to the seed, least number that is kept, heads, places of the first query
            and of the first key.
        factor: What the weights are multiplied with beside dropout.
    """
    row_blocks = tl.cdiv(tokens * GROUP, ROWS)
    block = tl.program_id(0) % row_blocks
    group = (tl.program_id(0) // row_blocks).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    batch = group // kv_heads
    kv_head = group % kv_heads
    there, token, part = rows_of(block, tokens, ROWS, GROUP)
    head = kv_head * GROUP + part
    q_head, q_tail = load_parts(q, batch, head, token, there, HEAD, TAIL, DIM)
    q_near, origin = near_of(q_positions, batch, token, BIAS)
    low, high = bounds_of(bounds, batch, token, BOUNDS)
    start, stop, whole, whole_stop = share_of_keys(
        split.to(tl.int32), split_keys, keys, low, high, KEYS, BOUNDS, KEEP
    )
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    nonfinite = tl.zeros([ROWS], tl.int32)
    acc = tl.zeros([ROWS, VALUE], tl.float32)
    for at in range(whole, whole_stop, KEYS):
        peak, total, acc, nonfinite = tile(
            peak, total, acc, nonfinite, q_head, q_tail, q_near, origin, at, k, v, pages, low, high,
            keep, k_positions, bias, dropout, batch, kv_head, head, token, there, keys, skipped,
            first, scale, cap, KEYS, HEAD, TAIL, VALUE, DIM, VALUE_DIM, BOUNDS, KEEP, BIAS, CAP,
            DROPOUT, PAGED, POSITIONS, SHARED, K_CODES, V_CODES, WIDE, False,
        )  # fmt: skip
    before = tl.cdiv(whole - start, KEYS)
    after = tl.maximum(tl.cdiv(stop - whole_stop, KEYS), 0)
    for i in range(before + after):
        at = tl.where(i < before, start + i * KEYS, whole_stop + (i - before) * KEYS)
        peak, total, acc, nonfinite = tile(
            peak, total, acc, nonfinite, q_head, q_tail, q_near, origin, at, k, v, pages, low, high,
            keep, k_positions, bias, dropout, batch, kv_head, head, token, there, keys, skipped,
            first, scale, cap, KEYS, HEAD, TAIL, VALUE, DIM, VALUE_DIM, BOUNDS, KEEP, BIAS, CAP,
            DROPOUT, PAGED, POSITIONS, SHARED, K_CODES, V_CODES, WIDE, True,
        )  # fmt: skip

    some = tl.where(total == 0.0, 1.0, total)
    found = acc * (factor / some)[:, None]
    if BOUNDS != "" or KEEP:
        # A row that sees what is not finite is NaN; an infinite sum tells of an infinite value.
        nonfinite |= tl.max((~finite(found)).to(tl.int32), 1)
        found = tl.where((nonfinite != 0)[:, None], float("nan"), found)
    columns = tl.arange(0, VALUE)
    row = split * out[1] + batch * out[2] + head * out[3] + token.to(tl.int64) * out[4]
    mask = there[:, None] & (columns < VALUE_DIM)[None, :]
    pointers = out[0] + row[:, None] + columns[None, :]
    tl.store(pointers, found.to(out[0].dtype.element_ty), mask=mask)
    row = split * lse[1] + batch * lse[2] + head * lse[3] + token.to(tl.int64) * lse[4]
    tl.store(lse[0] + row, (peak + tl.log2(some)) * LN2, mask=there)


@triton.jit
def share_of_keys(
    split, count, keys, low, high, KEYS: tl.constexpr, BOUNDS: tl.constexpr, KEEP: tl.constexpr
):
    """Of a split of the keys: those that some row sees, and those that every row sees.

    Both as begin and end, at whole tiles but for the end of the first. Shares have ``count`` keys;
    where the rows have bounds, all programs of these rows share what lies between, which the host
    does not know: the room of a cache may be far larger.
    """
    begin = 0
    end = keys
    if BOUNDS == "indexes":
        begin = tl.maximum(tl.min(low, 0), 0) // KEYS * KEYS
        end = tl.minimum(tl.max(high, 0), keys)
        tiles = tl.cdiv(tl.maximum(end - begin, 0), KEYS)
        count = tl.cdiv(tiles, tl.num_programs(1)) * KEYS
    start = begin + split * count
    stop = tl.minimum(start + count, end)
    whole = start
    whole_stop = stop
    if BOUNDS == "indexes":
        whole = tl.maximum(start, tl.max(low, 0))
        whole_stop = tl.minimum(stop, tl.min(high, 0))
    start = start // KEYS * KEYS
    if KEEP or BOUNDS == "positions":
        whole_stop = start
    whole = tl.minimum(tl.cdiv(whole, KEYS) * KEYS, tl.maximum(stop, start))
    whole_stop = tl.maximum(whole_stop // KEYS * KEYS, whole)
    return start, stop, whole, whole_stop


@triton.jit
def tile(
    peak, total, acc, nonfinite, q_head, q_tail, q_near, origin, at, k, v, pages, low, high, keep,
    k_positions, bias, dropout, batch, kv_head, head, token, there, keys, skipped, first,
    scale, cap,
    KEYS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, VALUE: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BOUNDS: tl.constexpr, KEEP: tl.constexpr,
    BIAS: tl.constexpr, CAP: tl.constexpr, DROPOUT: tl.constexpr, PAGED: tl.constexpr,
    POSITIONS: tl.constexpr, SHARED: tl.constexpr, K_CODES: tl.constexpr, V_CODES: tl.constexpr,
    WIDE: tl.constexpr, BORDER: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, over the keys from ``at``; BORDER: not all of them seen."""
    key = at + tl.arange(0, KEYS)
    k_there = key < keys
    k_head = load_keys_or_values(
        k, key, k_there, batch, kv_head, pages, skipped, q_head, 0, HEAD, DIM, PAGED, K_CODES
    )
    k_tail = k_head
    if TAIL > 0:
        k_tail = load_keys_or_values(
            k, key, k_there, batch, kv_head, pages, skipped, q_head, HEAD, TAIL, DIM, PAGED, K_CODES
        )
    values = k_head
    if not SHARED:
        values = load_keys_or_values(
            v, key, k_there, batch, kv_head, pages, skipped, q_head, 0, VALUE, VALUE_DIM, PAGED,
            V_CODES,
        )  # fmt: skip
    k_at = positions_of_keys(key, k_there, batch, k_positions, first, POSITIONS)
    masked: tl.constexpr = BORDER and (BOUNDS != "" or KEEP)
    bad = tl.zeros([KEYS], tl.int32)
    if masked:
        # What is hidden must not reach a product: 0 · NaN is NaN.
        bad = tl.max((~finite(k_head)).to(tl.int32), 1) | tl.max((~finite(values)).to(tl.int32), 1)
        k_head = tl.where(finite(k_head), k_head, 0.0)
        values = tl.where(finite(values), values, 0.0)
        if TAIL > 0:
            bad |= tl.max((~finite(k_tail)).to(tl.int32), 1)
            k_tail = tl.where(finite(k_tail), k_tail, 0.0)
    z = product(q_head, tl.trans(k_head), WIDE)
    if TAIL > 0:
        z += product(q_tail, tl.trans(k_tail), WIDE)
    if (BOUNDS != "" or KEEP) and not BORDER:
        nonfinite |= (tl.max(tl.abs(z), 1) == float("inf")).to(tl.int32)
    z, _ = capped(z * scale, cap, CAP)
    z = biased(z, batch, head, token, there, key, k_there, q_near, nearby(k_at, origin), bias, BIAS)
    z = z * LOG2E
    if BORDER:
        seen = visible(batch, head, token, there, key, k_there, k_at, low, high, keep, BOUNDS, KEEP)
        z = tl.where(seen, z, float("-inf"))
        if masked:
            nonfinite |= tl.max((seen & (bad != 0)[None, :]).to(tl.int32), 1)
    new_peak = tl.maximum(peak, tl.max(z, 1))
    # Where nothing has been seen yet the peak is −∞; measure against 0 to keep NaN out.
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(z - safe[:, None])
    rescale = tl.exp2(peak - safe)
    total = total * rescale + tl.sum(weights, 1)
    if DROPOUT:
        weights = tl.where(kept(batch, head, token, key, dropout), weights, 0.0)
    acc = acc * rescale[:, None] + product(weights.to(values.dtype), values, WIDE)
    return new_peak, total, acc, nonfinite
