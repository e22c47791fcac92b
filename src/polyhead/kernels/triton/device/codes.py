"""Keys and values in 8 or 4 bits, turned into numbers where they are read.

    number = zero + scale · code, rounded to the dtype of the query

A unit is UNIT tokens. Keys have a scale for each channel of a unit, values one for SHARE channels
of a token (``native.coding.Coding``). In 4 bits a byte holds a token of the first half of its unit
(low) and the token half a unit later (high).

Shape letters: S keys of a tile, D size of a row.
"""

import triton
import triton.language as tl

from polyhead.kernels.triton.device.scores import key_places, load_rows


@triton.jit
def load_keys_or_values(
    tensor, key, there, batch, head, pages, skipped, like,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, PAGED: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    """Columns FIRST to FIRST + WIDTH of the rows of some keys, ``[S, WIDTH]``; 0 beyond SIZE.

    Args:
        tensor: Pointer and strides by batch row (or page), head and token. Of codes, strides by
            batch row (or page), head and unit, then pointers of scale and zero and their strides.
        key: ``[S]`` indexes of the keys.
        there: ``[S]`` which of them there are.
        batch, head: Which row and kv head.
        pages: Pointer ``[B, m]``, its stride, tokens (of codes: units) of a page; with PAGED.
        skipped: Tokens of the first page before key 0.
        like: A tensor of the dtype that codes become.
        CODES: None; or bits, tokens of a unit, channels of a value that share a scale (0: of keys),
            channels of a token.
    """
    if CODES is None:
        row = key_places(key, there, tensor, batch, head, pages, skipped, PAGED)
        rows = load_rows(tensor[0], row, there, FIRST, WIDTH, SIZE)
    else:
        rows = decoded(
            tensor, key + skipped, there, batch, head, pages, FIRST, WIDTH, SIZE, PAGED,
            CODES[0], CODES[1], CODES[2], CODES[3],
        ).to(like.dtype)  # fmt: skip
    return rows


@triton.jit
def decoded(
    tensor, at, there, batch, head, pages,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, PAGED: tl.constexpr,
    BITS: tl.constexpr, UNIT: tl.constexpr, SHARE: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """The same of codes in float32, of the tokens ``at`` ``[S]`` from the first unit on."""
    unit = (at // UNIT).to(tl.int64)
    token = at % UNIT
    place = batch
    if PAGED:
        place = tl.load(pages[0] + batch * pages[1] + unit // pages[2], mask=there, other=0)
        unit = unit % pages[2]
    columns = FIRST + tl.arange(0, WIDTH)
    mask = there[:, None] & (columns < SIZE)[None, :]
    row = place * tensor[1] + head * tensor[2] + unit * tensor[3]
    byte = token % (UNIT // 2) if BITS == 4 else token
    row += byte * ROW
    codes = tl.load(tensor[0] + row[:, None] + columns[None, :], mask=mask, other=0)
    if BITS == 4:
        codes = tl.where((token < UNIT // 2)[:, None], codes & 15, codes >> 4)
    row = place * tensor[6] + head * tensor[7] + unit * tensor[8]
    if SHARE > 0:
        row += token * (ROW // SHARE)
        columns = columns // SHARE
    of = row[:, None] + columns[None, :]
    scale = tl.load(tensor[4] + of, mask=mask, other=0.0).to(tl.float32)
    zero = tl.load(tensor[5] + of, mask=mask, other=0.0).to(tl.float32)
    return zero + codes.to(tl.float32) * scale
