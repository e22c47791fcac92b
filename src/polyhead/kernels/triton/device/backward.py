"""The gradients, from out and lse: a pass for keys and values, a pass for queries and bias.

    P = exp(z − lse)     dP = dO Vᵀ     dZ = P ∘ (dP − rowsum(dO ∘ O) + dlse)
    dV = Pᵀ dO           dK = scale · (dZ ∘ softcap')ᵀ Q         dQ = scale · (dZ ∘ softcap') K

(FlashAttention-2, Dao 2023.) With dropout P is its kept part times factor in dV, and dP likewise.
Every sum stays within a program, but for a bias by distance or one that pairs share, which are
added to in any order. Rows whose lse is +∞ are silent: they saw nothing, or what is not finite.

Shape letters: N rows of a tile, S keys of a tile, D key size, V value size.
"""

import triton
import triton.language as tl

from polyhead.kernels.triton.device.scores import (
    LOG2E,
    biased,
    bounds_of,
    capped,
    columns_of,
    finite,
    kept,
    load_parts,
    near_of,
    nearby,
    places_of_pairs,
    positions_of_keys,
    product,
    rows_of,
    visible,
)


@triton.jit
def load_keys(
    k, v, batch, kv_head, key, k_there,
    HEAD: tl.constexpr, TAIL: tl.constexpr, VALUE: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Head and tail of the keys and the values of a tile, with nothing that is not finite."""
    k_head, k_tail = load_parts(k, batch, kv_head, key, k_there, HEAD, TAIL, DIM)
    values = load_parts(v, batch, kv_head, key, k_there, VALUE, 0, VALUE_DIM)[0]
    if MASKED:
        k_head = tl.where(finite(k_head), k_head, 0.0)
        k_tail = tl.where(finite(k_tail), k_tail, 0.0)
        values = tl.where(finite(values), values, 0.0)
    return k_head, k_tail, values


@triton.jit
def gradient_of_scores(
    q_head, q_tail, k_head, k_tail, values, grad, lse, delta, batch, head, token, live, key,
    k_there, q_near, origin, k_at, low, high, keep, bias, dropout, scale, cap, factor,
    TAIL: tl.constexpr, BOUNDS: tl.constexpr, KEEP: tl.constexpr, BIAS: tl.constexpr,
    CAP: tl.constexpr, DROPOUT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The weights that values are multiplied with, dZ, and the derivative of softcap."""
    z = product(q_head, tl.trans(k_head), WIDE)
    if TAIL > 0:
        z += product(q_tail, tl.trans(k_tail), WIDE)
    z, slope = capped(z * scale, cap, CAP)
    k_near = nearby(k_at, origin)
    z = biased(z, batch, head, token, live, key, k_there, q_near, k_near, bias, BIAS)
    seen = visible(batch, head, token, live, key, k_there, k_at, low, high, keep, BOUNDS, KEEP)
    weights = tl.where(seen, tl.exp2(z * LOG2E - lse[:, None]), 0.0)
    d_weights = product(grad, tl.trans(values), WIDE)
    shares = weights
    if DROPOUT:
        keeps = kept(batch, head, token, key, dropout)
        shares = tl.where(keeps, weights * factor, 0.0)
        d_weights = tl.where(keeps, d_weights * factor, 0.0)
    return shares, weights * (d_weights - delta[:, None]), slope


@triton.jit(do_not_specialize=["keys", "first"])
def keys_pass(
    q, k, v, grad, lse, delta, d_k, d_v, spans, bounds, keep, q_positions, k_positions, bias,
    dropout, tokens, keys, heads, kv_heads, first, scale, cap, factor,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    VALUE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP: tl.constexpr,
    BOUNDS: tl.constexpr, KEEP: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    DROPOUT: tl.constexpr, POSITIONS: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dK and dV of a block of keys of one kv head, over the rows of its whole group.

    Args:
        q, k, v, grad: Pointers and strides by batch row, head and token; grad is dO.
        lse: ``[B, H, T]`` dense, times log₂e; +∞ for a silent row.
        delta: ``[B, H, T]`` dense: rowsum(dO ∘ O) − dlse.
        d_k, d_v: Pointers and strides by batch row, head and token.
        spans: Pointer ``[1 or B, blocks of keys, 2]`` and stride by batch row: the first query
            that sees anything of a block, and the end; with BOUNDS by index.
    """
    key_blocks = tl.cdiv(keys, KEYS)
    block = tl.program_id(0) % key_blocks
    group = (tl.program_id(0) // key_blocks).to(tl.int64)
    batch = group // kv_heads
    kv_head = group % kv_heads
    key = block * KEYS + tl.arange(0, KEYS)
    k_there = key < keys
    k_head, k_tail, values = load_keys(
        k, v, batch, kv_head, key, k_there, HEAD, TAIL, VALUE, DIM, VALUE_DIM, MASKED
    )
    k_at = positions_of_keys(key, k_there, batch, k_positions, first, POSITIONS)
    begin = tokens * 0
    end = tokens
    if BOUNDS == "indexes":
        begin = tl.load(spans[0] + batch * spans[1] + block * 2)
        end = tl.load(spans[0] + batch * spans[1] + block * 2 + 1)
    sum_head = tl.zeros([KEYS, HEAD], tl.float32)
    sum_tail = tl.zeros([KEYS, TAIL if TAIL > 0 else 1], tl.float32)
    sum_values = tl.zeros([KEYS, VALUE], tl.float32)
    for i in range(begin * GROUP // ROWS, tl.cdiv(end * GROUP, ROWS)):
        there, token, part = rows_of(i, tokens, ROWS, GROUP)
        head = kv_head * GROUP + part
        row = (batch * heads + head) * tokens + token
        row_lse = tl.load(lse + row)
        live = there & (row_lse < float("inf"))
        low, high = bounds_of(bounds, batch, token, BOUNDS)
        q_near, origin = near_of(q_positions, batch, token, BIAS)
        q_head, q_tail = load_parts(q, batch, head, token, live, HEAD, TAIL, DIM)
        row_grad = load_parts(grad, batch, head, token, live, VALUE, 0, VALUE_DIM)[0]
        shares, d_z, slope = gradient_of_scores(
            q_head, q_tail, k_head, k_tail, values, row_grad, row_lse, tl.load(delta + row), batch,
            head, token, live, key, k_there, q_near, origin, k_at, low, high, keep, bias, dropout,
            scale, cap, factor, TAIL, BOUNDS, KEEP, BIAS, CAP, DROPOUT, WIDE,
        )  # fmt: skip
        sum_values += product(tl.trans(shares.to(row_grad.dtype)), row_grad, WIDE)
        d_z = tl.trans((d_z * slope * scale).to(q_head.dtype))
        sum_head += product(d_z, q_head, WIDE)
        if TAIL > 0:
            sum_tail += product(d_z, q_tail, WIDE)
    at = batch * d_k[1] + kv_head * d_k[2] + key.to(tl.int64) * d_k[3]
    store_rows(d_k[0], at, k_there, sum_head, 0, HEAD, DIM)
    if TAIL > 0:
        store_rows(d_k[0], at, k_there, sum_tail, HEAD, TAIL, DIM)
    at = batch * d_v[1] + kv_head * d_v[2] + key.to(tl.int64) * d_v[3]
    store_rows(d_v[0], at, k_there, sum_values, 0, VALUE, VALUE_DIM)


@triton.jit(do_not_specialize=["keys", "first"])
def queries_pass(
    q, k, v, grad, lse, delta, d_q, d_bias, bounds, keep, q_positions, k_positions, bias, dropout,
    tokens, keys, heads, kv_heads, first, scale, cap, factor,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    VALUE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP: tl.constexpr,
    BOUNDS: tl.constexpr, KEEP: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    DROPOUT: tl.constexpr, POSITIONS: tl.constexpr, LEARNS: tl.constexpr, SHARED: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dQ of a block of rows, and with LEARNS what it adds to the gradient of the bias.

    Args as of ``keys_pass``, and:
        d_bias: For slopes, pointer ``[B, H, T]``, a sum for every row. By distance: pointer
            ``[H, 2 n + 1]`` of the columns between, and pointers ``[B, H, T]`` for the first and
            the last column. Of a tensor: pointer and four strides; SHARED: pairs share entries.
    """
    row_blocks = tl.cdiv(tokens * GROUP, ROWS)
    block = tl.program_id(0) % row_blocks
    group = (tl.program_id(0) // row_blocks).to(tl.int64)
    batch = group // kv_heads
    kv_head = group % kv_heads
    there, token, part = rows_of(block, tokens, ROWS, GROUP)
    head = kv_head * GROUP + part
    row = (batch * heads + head) * tokens + token
    row_lse = tl.load(lse + row)
    row_delta = tl.load(delta + row)
    live = there & (row_lse < float("inf"))
    start = tokens * 0
    stop = keys
    low, high = bounds_of(bounds, batch, token, BOUNDS)
    if BOUNDS == "indexes":
        start = tl.min(low, 0) // KEYS * KEYS
        stop = tl.max(high, 0)
    q_near, origin = near_of(q_positions, batch, token, BIAS)
    q_head, q_tail = load_parts(q, batch, head, token, live, HEAD, TAIL, DIM)
    row_grad = load_parts(grad, batch, head, token, live, VALUE, 0, VALUE_DIM)[0]
    sum_head = tl.zeros([ROWS, HEAD], tl.float32)
    sum_tail = tl.zeros([ROWS, TAIL if TAIL > 0 else 1], tl.float32)
    of_first = tl.zeros([ROWS], tl.float32)
    of_last = tl.zeros([ROWS], tl.float32)
    for begin in range(start, stop, KEYS):
        key = begin + tl.arange(0, KEYS)
        k_there = key < keys
        k_head, k_tail, values = load_keys(
            k, v, batch, kv_head, key, k_there, HEAD, TAIL, VALUE, DIM, VALUE_DIM, MASKED
        )
        k_at = positions_of_keys(key, k_there, batch, k_positions, first, POSITIONS)
        _, d_z, slope = gradient_of_scores(
            q_head, q_tail, k_head, k_tail, values, row_grad, row_lse, row_delta, batch, head,
            token, live, key, k_there, q_near, origin, k_at, low, high, keep, bias, dropout, scale,
            cap, factor, TAIL, BOUNDS, KEEP, BIAS, CAP, DROPOUT, WIDE,
        )  # fmt: skip
        if LEARNS:
            pairs = there[:, None] & k_there[None, :]
            if BIAS == "slopes":
                apart = tl.abs(q_near[:, None] - nearby(k_at, origin)[None, :]).to(tl.float32)
                of_first -= tl.sum(d_z * apart, 1)
            elif BIAS == "by_distance":
                column = columns_of(q_near, nearby(k_at, origin), bias[1])
                last = 2 * bias[1]
                of_first += tl.sum(tl.where(column == 0, d_z, 0.0), 1)
                of_last += tl.sum(tl.where(column == last, d_z, 0.0), 1)
                near = pairs & (column > 0) & (column < last)
                tl.atomic_add(d_bias[0] + head[:, None] * (last + 1) + column, d_z, mask=near)
            else:
                pointers = d_bias[0] + places_of_pairs(batch, head, token, key, d_bias)
                if SHARED:
                    tl.atomic_add(pointers, d_z, mask=pairs)
                else:
                    tl.store(pointers, d_z, mask=pairs)
        d_z = (d_z * slope * scale).to(k_head.dtype)
        sum_head += product(d_z, k_head, WIDE)
        if TAIL > 0:
            sum_tail += product(d_z, k_tail, WIDE)
    at = batch * d_q[1] + head * d_q[2] + token.to(tl.int64) * d_q[3]
    store_rows(d_q[0], at, there, sum_head, 0, HEAD, DIM)
    if TAIL > 0:
        store_rows(d_q[0], at, there, sum_tail, HEAD, TAIL, DIM)
    if LEARNS:
        if BIAS == "slopes":
            tl.store(d_bias[0] + row, of_first, mask=there)
        elif BIAS == "by_distance":
            tl.store(d_bias[1] + row, of_first, mask=there)
            tl.store(d_bias[2] + row, of_last, mask=there)


@triton.jit
def store_rows(pointer, at, there, x, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Rows of SIZE whose columns FIRST to FIRST + WIDTH are x."""
    columns = FIRST + tl.arange(0, WIDTH)
    mask = there[:, None] & (columns < SIZE)[None, :]
    tl.store(pointer + at[:, None] + columns[None, :], x.to(pointer.dtype.element_ty), mask=mask)
