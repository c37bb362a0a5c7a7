"""Small integers packed in words, and where in words rows are. Pure numpy."""

import numpy as np

from ridgeline.core.dtypes import Array, contiguous
from ridgeline.quant.stored import Bytes, nibbles


def unpacked(words: Array, bits: int) -> Bytes:
    """Return the integers of `bits` bits that lie one after the other in words, the low bits of the first word first.

    [.., W] words of any integer type become [.., W * word bits // bits]; an integer may begin in one word and end in
    the next.
    """
    data: Bytes = contiguous(words).view(np.uint8)
    if bits == 8:
        return data
    if bits == 4:
        return nibbles(data)
    count = data.shape[-1] * 8 // bits
    spread = np.unpackbits(data, axis=-1, count=count * bits, bitorder="little")
    return np.packbits(spread.reshape(*data.shape[:-1], count, bits), axis=-1, bitorder="little")[..., 0]


def unpacked_lanes(words: Array, bits: int) -> Bytes:
    """Return the integers of `bits` bits of 32-bit words that hold 32 // bits each: no integer is in two words."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    lanes = contiguous(words).view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return lanes.astype(np.uint8).reshape(*words.shape[:-1], -1)


def unpacked_columns(words_GW: Array, bits: int, columns: slice, count: int) -> Bytes:
    """Return `columns` of `unpacked` words, which hold `count` of them, and unpack few others."""
    blocks, within = covering(columns, count, 32)  # of `bits` words of 32 bits
    return unpacked(words_GW[:, blocks.start * bits : blocks.stop * bits], bits)[:, within]


def covering(rows: slice, num_rows: int, per_word: int) -> tuple[slice, slice]:
    """Return the words that hold `rows` of `num_rows`, and where among the rows of these words they are."""
    first, end, step = rows.indices(num_rows)
    begin = first // per_word
    return slice(begin, -(-end // per_word)), slice(first - begin * per_word, end - begin * per_word, step)
