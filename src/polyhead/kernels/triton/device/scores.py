"""Scores of a tile: q · k, softcap, bias, mask, dropout.

    z = softcap(q kᵀ · scale) + bias        softcap(x) = c · tanh(x / c)

The query heads of a group are rows of one product: row n is token n // GROUP of head n % GROUP, so
that the rows of a tile are neighbours in the sequence and see nearly the same keys.

Shape letters: N rows of a tile, S keys of a tile, D key size, V value size. A tensor comes as a
tuple of its pointer and its strides; the last dimension of q, k and v is dense.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def product(a, b, WIDE: tl.constexpr):
    """a @ b in float32; the interpreter multiplies the bits of bfloat16, so it gets wider ones."""
    if WIDE:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def rows_of(block, tokens, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Of a block of rows: whether each is there, its token and its head within the group.

    Rows beyond the last read what the last one reads.
    """
    row = block * ROWS + tl.arange(0, ROWS)
    there = row < tokens * GROUP
    row = tl.minimum(row, tokens * GROUP - 1)
    return there, row // GROUP, row % GROUP


@triton.jit
def load_rows(pointer, at, there, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Columns FIRST to FIRST + WIDTH of rows of SIZE; 0 beyond, and where no row is there."""
    columns = FIRST + tl.arange(0, WIDTH)
    mask = there[:, None] & (columns < SIZE)[None, :]
    return tl.load(pointer + at[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def load_parts(
    tensor, batch, head, token, there,
    HEAD: tl.constexpr, TAIL: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Head and tail of rows that lie in order; without a TAIL the head again."""
    at = batch * tensor[1] + head * tensor[2] + token.to(tl.int64) * tensor[3]
    first = load_rows(tensor[0], at, there, 0, HEAD, SIZE)
    rest = first
    if TAIL > 0:
        rest = load_rows(tensor[0], at, there, HEAD, TAIL, SIZE)
    return first, rest


@triton.jit
def bounds_of(bounds, batch, token, BOUNDS: tl.constexpr):
    """Low and high of the keys that some queries see; without BOUNDS anything."""
    low = token
    high = token
    if BOUNDS != "":
        low = tl.load(bounds[0] + batch * bounds[2] + token)
        high = tl.load(bounds[1] + batch * bounds[2] + token)
    return low, high


@triton.jit
def near_of(positions, batch, token, BIAS: tl.constexpr):
    """The positions of some queries in 32 bits and their origin; without such a BIAS anything."""
    near = token
    origin = batch
    if BIAS == "slopes" or BIAS == "by_distance":
        at = tl.load(positions[0] + batch * positions[1] + token)
        origin = tl.min(at, 0)
        near = nearby(at, origin)
    return near, origin


@triton.jit
def key_places(key, there, tensor, batch, head, pages, skipped, PAGED: tl.constexpr):
    """Where the rows of some keys lie behind a tensor's pointer: in order, or in pages."""
    if PAGED:
        at = key + skipped
        page = tl.load(pages[0] + batch * pages[1] + at // pages[2], mask=there, other=0)
        return page * tensor[1] + head * tensor[2] + (at % pages[2]).to(tl.int64) * tensor[3]
    return batch * tensor[1] + head * tensor[2] + key.to(tl.int64) * tensor[3]


@triton.jit
def finite(x):
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def positions_of_keys(key, there, batch, at, first, POSITIONS: tl.constexpr):
    """The positions of some keys: given, or counted from the first."""
    if POSITIONS:
        return tl.load(at[0] + batch * at[1] + key, mask=there, other=0)
    return key.to(tl.int64) + first


@triton.jit
def nearby(position, origin):
    """Positions from an origin in 32 bits; what is farther than 2³⁰ away stands there."""
    apart = tl.minimum(tl.maximum(position - origin, -(1 << 30)), 1 << 30)
    return apart.to(tl.int32)


@triton.jit
def capped(z, cap, CAP: tl.constexpr):
    """softcap(z) and its derivative."""
    if CAP:
        # 1 − 2 / (1 + e^2x) is tanh x, also where e^2x overflows.
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(z * (2.0 * LOG2E / cap)))
        return cap * tanh, 1.0 - tanh * tanh
    return z, tl.full(z.shape, 1.0, tl.float32)


@triton.jit
def biased(z, batch, head, token, there, key, k_there, q_near, k_near, bias, BIAS: tl.constexpr):
    """z plus the bias of these heads ``[N]``, query tokens ``[N]`` and keys ``[S]``."""
    if BIAS == "slopes":
        apart = tl.abs(q_near[:, None] - k_near[None, :]).to(tl.float32)
        return z - tl.load(bias[0] + head)[:, None] * apart
    if BIAS == "by_distance":
        column = columns_of(q_near, k_near, bias[1])
        return z + tl.load(bias[0] + head[:, None] * (2 * bias[1] + 1) + column)
    if BIAS == "tensor":
        at = places_of_pairs(batch, head, token, key, bias)
        return z + tl.load(bias[0] + at, mask=there[:, None] & k_there[None, :], other=0.0)
    return z


@triton.jit
def columns_of(q_near, k_near, far):
    """The column of a bias by distance: far + how much the key is ahead, cut off at both ends."""
    ahead = k_near[None, :] - q_near[:, None]
    return tl.minimum(tl.maximum(ahead, -far), far) + far


@triton.jit
def places_of_pairs(batch, head, token, key, tensor):
    """Where the entries of pairs lie behind a 4-D tensor's pointer."""
    rows = batch * tensor[1] + head.to(tl.int64) * tensor[2] + token.to(tl.int64) * tensor[3]
    return rows[:, None] + key.to(tl.int64)[None, :] * tensor[4]


@triton.jit
def visible(
    batch, head, token, there, key, k_there, k_at, low, high, keep,
    BOUNDS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """``[N, S]`` whether a query sees a key: low ≤ its number < high, and ``keep`` allows it."""
    seen = there[:, None] & k_there[None, :]
    if BOUNDS == "indexes":
        seen &= (low[:, None] <= key[None, :]) & (key[None, :] < high[:, None])
    elif BOUNDS == "positions":
        seen &= (low[:, None] <= k_at[None, :]) & (k_at[None, :] < high[:, None])
    if KEEP:
        at = places_of_pairs(batch, head, token, key, keep)
        seen &= tl.load(keep[0] + at, mask=seen, other=0) != 0
    return seen


@triton.jit
def mixed(x):
    """A 32-bit avalanche (Mueller's integer hash), as ``native.dropout`` has it."""
    x = ((x >> 16) ^ x) * 0x45D9F3B
    x = ((x >> 16) ^ x) * 0x45D9F3B
    return (x >> 16) ^ x


@triton.jit
def kept(batch, head, token, key, dropout):
    """``[N, S]`` which weights dropout keeps: a hash of seed, batch row, head and both places."""
    seed, least, heads, q_place, k_place = dropout
    row = (tl.load(seed) + batch * heads + head).to(tl.uint32)
    query = (token.to(tl.int64) + q_place).to(tl.uint32)
    column = (key.to(tl.int64) + k_place).to(tl.uint32)
    number = mixed(mixed(mixed(row) + query)[:, None] + column[None, :])
    return (number & 0xFFFFFF).to(tl.int32) >= least
