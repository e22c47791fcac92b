"""The recurrence of heads that remember a state: token by token, and in chunks.

    S_t = D_t S_{t−1} + k_t u_tᵀ    u_t = β_t (v_t − (D_t S_{t−1})ᵀ k_t)    o_t = S_tᵀ q_t · scale

``steps`` goes from token to token. Of more tokens ``chunk_pairs`` computes what needs no state, all
chunks beside each other, with G the sums of the log decays within a chunk:

    P_ij = (q_i ∘ exp(G_i − G_j))ᵀ k_j · scale      for j ≤ i
    A_ij = β_i (k_i ∘ exp(G_i − G_j))ᵀ k_j          for j < i
    X = (I + A)⁻¹ diag(β)                           with delta

and ``chunks`` goes from chunk to chunk (Yang et al. 2024, arXiv 2406.06484, section 3.2):

    U = X (V − (K ∘ exp G) S)        without delta: β V
    O = (Q ∘ exp G) S + P U
    S ← exp(G_C) S + (K ∘ exp(G_C − G))ᵀ U

A difference G_i − G_j is the sum of the decays between both, never a difference of sums, so that
strong decays leave weak ones their digits and −∞ is a decay like others.

Shape letters: C tokens of a chunk, K key size, V values of a program. A tensor comes as a tuple of
its pointer and its strides; q, k and v have the heads that share one of theirs at its end.
"""

import triton
import triton.language as tl

from polyhead.kernels.triton.device.scores import product


@triton.jit
def real_tokens(real, batch, token, tokens, REAL: tl.constexpr):
    """Which tokens are there and no padding."""
    there = token < tokens
    if REAL:
        there &= tl.load(real[0] + batch * real[1] + token * real[2], mask=there, other=0) != 0
    return there


@triton.jit
def load_tokens(x, batch, head, token, there, first, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """``[C, WIDTH]`` in float32: features from ``first`` of tokens; 0 where they are not there."""
    at = batch * x[1] + head // x[4] * x[2] + token.to(tl.int64) * x[3]
    features = first + tl.arange(0, WIDTH)
    mask = there[:, None] & (features < SIZE)[None, :]
    return tl.load(x[0] + at[:, None] + features[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_token(x, batch, head, token, there, first, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """``[WIDTH]`` in float32: features from ``first`` of one token."""
    at = batch * x[1] + head // x[4] * x[2] + token.to(tl.int64) * x[3]
    features = first + tl.arange(0, WIDTH)
    return tl.load(x[0] + at + features, mask=(features < SIZE) & there, other=0.0).to(tl.float32)


@triton.jit
def load_numbers(x, batch, head, token, there):
    """A number for each token in float32, a log decay or β."""
    at = batch * x[1] + head * x[2] + token.to(tl.int64) * x[3]
    return tl.load(x[0] + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def load_parts_of_tokens(
    x, batch, head, token, there, PARTS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr
):
    """``[PARTS, C, WIDTH]`` in float32: rows of tokens, their features cut into parts."""
    at = batch * x[1] + head // x[4] * x[2] + token.to(tl.int64) * x[3]
    features = (tl.arange(0, PARTS) * WIDTH)[:, None, None] + tl.arange(0, WIDTH)[None, None, :]
    mask = there[None, :, None] & (features < SIZE)
    return tl.load(x[0] + at[None, :, None] + features, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def places_of_state(
    state, batch, head, columns, KEY: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr
):
    """Where the numbers of a state lie, and which of them are there."""
    features = tl.arange(0, KEY)
    at = (features * state[3])[:, None] + (columns * state[4])[None, :]
    there = (features < KEY_DIM)[:, None] & (columns < VALUE_DIM)[None, :]
    return state[0] + batch * state[1] + head * state[2] + at, there


@triton.jit(do_not_specialize=["tokens"])
def steps(
    q, k, v, decay, beta, real, state, last, out, tokens, heads, scale,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DECAY: tl.constexpr, BETA: tl.constexpr, DELTA: tl.constexpr, STATE: tl.constexpr,
    REAL: tl.constexpr,
):  # fmt: skip
    """out ``[B, H, T, V]`` and the last state ``[B, H, K, V]``: a program takes some values.

    Args:
        q, k, v: Pointer, strides by batch row, head and token, heads that share one.
        decay: Log decays likewise; with DECAY, by ``"token"`` or ``"feature"``.
        beta: Pointer and strides by batch row, head and token; with BETA.
        real: Pointer ``[B, T]`` uint8 and strides; with REAL.
        state, last: Pointer and four strides; the first with STATE. They may be the same.
        out: Pointer and strides by batch row, head and token.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * VALUE
    batch = row // heads
    head = row % heads
    columns = first + tl.arange(0, VALUE)
    S = tl.zeros([KEY, VALUE], tl.float32)
    if STATE:
        places, within = places_of_state(state, batch, head, columns, KEY, KEY_DIM, VALUE_DIM)
        S = tl.load(places, mask=within, other=0.0)
    token = row - row
    for _ in range(tokens):
        is_real = real_tokens(real, batch, token, tokens, REAL)
        k_t = load_token(k, batch, head, token, is_real, 0, KEY, KEY_DIM)
        u = load_token(v, batch, head, token, is_real, first, VALUE, VALUE_DIM)
        if DECAY == "feature":
            S *= tl.exp(load_token(decay, batch, head, token, is_real, 0, KEY, KEY_DIM))[:, None]
        if DECAY == "token":
            S *= tl.exp(load_numbers(decay, batch, head, token, is_real))
        if DELTA:
            u -= tl.sum(k_t[:, None] * S, 0)
        if BETA:
            u *= load_numbers(beta, batch, head, token, is_real)
        S += k_t[:, None] * u[None, :]
        q_t = load_token(q, batch, head, token, is_real, 0, KEY, KEY_DIM) * scale
        found = tl.where(is_real, tl.sum(q_t[:, None] * S, 0), 0.0)
        at = batch * out[1] + head * out[2] + token * out[3]
        kind = out[0].dtype.element_ty
        tl.store(out[0] + at + columns, found.to(kind), mask=columns < VALUE_DIM)
        token += 1
    places, within = places_of_state(last, batch, head, columns, KEY, KEY_DIM, VALUE_DIM)
    tl.store(places, S, mask=within)


@triton.jit(do_not_specialize=["tokens", "count"])
def chunk_pairs(
    q, k, decay, beta, real, pairs, solved, tokens, count, heads, scale,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, KEY_DIM: tl.constexpr,
    DECAY: tl.constexpr, BETA: tl.constexpr, DELTA: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """P, and with DELTA X: dense ``[B, H, count, C, C]`` in float32, a program for each chunk."""
    place = tl.program_id(0).to(tl.int64)
    row = place // count
    batch = row // heads
    head = row % heads
    index = tl.arange(0, CHUNK)
    start = place % count * CHUNK
    token = start + index
    there = real_tokens(real, batch, token, tokens, REAL)
    behind = index[:, None] > index[None, :]
    P = tl.zeros([CHUNK, CHUNK], tl.float32)
    A = tl.zeros([CHUNK, CHUNK], tl.float32)
    for part in range(PARTS):
        feature = part * WIDTH
        q_rows = load_tokens(q, batch, head, token, there, feature, WIDTH, KEY_DIM)
        k_rows = load_tokens(k, batch, head, token, there, feature, WIDTH, KEY_DIM)
        if DECAY == "feature":
            # From the last key to the first: a row's logs are the decays behind that key.
            logs = tl.zeros([CHUNK, WIDTH], tl.float32)
            for step in range(CHUNK):
                j = CHUNK - 1 - step
                after = start + j + 1
                is_next = real_tokens(real, batch, after, tokens, REAL)
                log = load_token(decay, batch, head, after, is_next, feature, WIDTH, KEY_DIM)
                logs = tl.where((index > j)[:, None], logs + log[None, :], 0.0)
                is_real = real_tokens(real, batch, start + j, tokens, REAL)
                key = load_token(k, batch, head, start + j, is_real, feature, WIDTH, KEY_DIM)
                decayed = tl.exp(logs) * key[None, :]
                here = (index == j)[None, :]
                P += tl.where(here, tl.sum(q_rows * decayed, 1)[:, None], 0.0)
                if DELTA:
                    A += tl.where(here, tl.sum(k_rows * decayed, 1)[:, None], 0.0)
        else:
            P += product(q_rows, tl.trans(k_rows), False)
            if DELTA:
                A += product(k_rows, tl.trans(k_rows), False)
    P *= scale
    if DECAY == "token":
        log = load_numbers(decay, batch, head, token, there)
        decays = tl.exp(tl.cumsum(tl.where(behind, log[:, None], 0.0), 0))
        P *= decays
        A *= decays
    at = place * CHUNK * CHUNK + (index * CHUNK)[:, None] + index[None, :]
    tl.store(pairs + at, tl.where(index[:, None] >= index[None, :], P, 0.0))
    if DELTA:
        A = tl.where(behind, A, 0.0)
        X = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
        if BETA:
            A *= load_numbers(beta, batch, head, token, there)[:, None]
        for i in range(1, CHUNK):
            weights = tl.sum(tl.where(index[:, None] == i, A, 0.0), 0)
            earlier = tl.sum(weights[:, None] * X, 0)
            X = tl.where(index[:, None] == i, X - earlier[None, :], X)
        if BETA:
            X *= load_numbers(beta, batch, head, token, there)[None, :]
        tl.store(solved + at, X)


@triton.jit(do_not_specialize=["tokens", "count"])
def chunks(
    q, k, v, decay, beta, real, pairs, solved, state, last, out, tokens, count, heads, scale,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DECAY: tl.constexpr, BETA: tl.constexpr,
    DELTA: tl.constexpr, STATE: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """As ``steps``, with P and X of every chunk. Keys are cut into parts, a product for each."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * VALUE
    batch = row // heads
    head = row % heads
    index = tl.arange(0, CHUNK)
    columns = first + tl.arange(0, VALUE)
    square = (index * CHUNK)[:, None] + index[None, :]
    features = (tl.arange(0, PARTS) * WIDTH)[:, None, None] + tl.arange(0, WIDTH)[None, :, None]
    within = (features < KEY_DIM) & (columns < VALUE_DIM)[None, None, :]
    S = tl.zeros([PARTS, WIDTH, VALUE], tl.float32)
    if STATE:
        places = features * state[3] + (columns * state[4])[None, None, :]
        places += batch * state[1] + head * state[2]
        S = tl.load(state[0] + places, mask=within, other=0.0)
    token = index.to(tl.int64)
    place = row * count * CHUNK * CHUNK
    for _ in range(count):
        there = real_tokens(real, batch, token, tokens, REAL)
        q_read = load_parts_of_tokens(q, batch, head, token, there, PARTS, WIDTH, KEY_DIM) * scale
        k_read = load_parts_of_tokens(k, batch, head, token, there, PARTS, WIDTH, KEY_DIM)
        at = batch * v[1] + head // v[4] * v[2] + token * v[3]
        mask = there[:, None] & (columns < VALUE_DIM)[None, :]
        u = tl.load(v[0] + at[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        k_written = k_read
        if DECAY != "":
            is_next = real_tokens(real, batch, token + 1, tokens, REAL) & (index < CHUNK - 1)
            if DECAY == "feature":
                log = load_parts_of_tokens(decay, batch, head, token, there, PARTS, WIDTH, KEY_DIM)
                later = load_parts_of_tokens(
                    decay, batch, head, token + 1, is_next, PARTS, WIDTH, KEY_DIM
                )
                before = tl.exp(tl.cumsum(log, 1))
                behind = tl.exp(tl.cumsum(later, 1, reverse=True))
                kept = tl.exp(tl.sum(log, 1))[:, :, None]
            else:
                log = load_numbers(decay, batch, head, token, there)
                later = load_numbers(decay, batch, head, token + 1, is_next)
                before = tl.exp(tl.cumsum(log, 0))[None, :, None]
                behind = tl.exp(tl.cumsum(later, 0, reverse=True))[None, :, None]
                kept = tl.exp(tl.sum(log, 0))
            q_read *= before
            k_read *= before
            k_written *= behind
        if DELTA:
            u -= tl.sum(product(k_read, S, False), 0)
            u = product(tl.load(solved + place + square), u, False)
        elif BETA:
            u *= load_numbers(beta, batch, head, token, there)[:, None]
        found = tl.sum(product(q_read, S, False), 0)
        found += product(tl.load(pairs + place + square), u, False)
        found = tl.where(there[:, None], found, 0.0)
        if DECAY != "":
            S *= kept
        S += product(
            tl.trans(k_written, 0, 2, 1), tl.broadcast_to(u[None], (PARTS, CHUNK, VALUE)), False
        )
        at = batch * out[1] + head * out[2] + token * out[3]
        mask = (token < tokens)[:, None] & (columns < VALUE_DIM)[None, :]
        kind = out[0].dtype.element_ty
        tl.store(out[0] + at[:, None] + columns[None, :], found.to(kind), mask=mask)
        token += CHUNK
        place += CHUNK * CHUNK
    places = features * last[3] + (columns * last[4])[None, None, :]
    tl.store(last[0] + batch * last[1] + head * last[2] + places, S, mask=within)
