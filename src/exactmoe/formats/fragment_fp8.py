"""Fragment order of FP4 experts that the fp8 matrix units take (sm_90), and its exact inverse.

As in formats/fragment.py the bytes of each panel of 128 rows are permuted, chunk by chunk of 128
along k, lane by lane; what differs is a word and a scale byte.

Word j of lane c: the codes of k = 32j + 4c + i (register a) and 32j + 16 + 4c + i (register b), i =
0 ... 3. Nibble i holds the magnitude of a's code i, nibble 4 + i that of b's; the sign of a's code
i is bit 8i + 7, that of b's bit 8i + 3. So one byte permute of an 8-byte table turns four
magnitudes into four e4m3 bytes.

A scale byte: bits 6 ... 3 choose the table, of code x 2^(s - 8) for s = 0 ... 14 and of zeros for
15. Bits 1, 0 of the piece's first four bytes are the piece's exponent q + 127, low bits first: s is
the block's exponent less q, plus 14. A block of zeros whose own scale has no such s takes table 15;
its byte then lies in the magnitudes of its first three codes, which no table shows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from exactmoe.formats.packed import BLOCK
from exactmoe.formats.scales import E8M0_BIAS
from exactmoe.formats.units import MAX_FP8_BINADES, PIECE

PANEL = 128
_ZEROS = 15  # the table of zeros
_NONE = -1000


class Arranged(NamedTuple):
    """Codes uint8 [E, N, K // 2] and scales uint8 [E, N, blocks] of experts, in one order."""

    codes: Tensor
    scales: Tensor


def to_fragment(format: str, codes: Tensor, scales: Tensor) -> Arranged:
    """Canonical codes and scales of experts that are exact on the fp8 units (formats/units.py)."""
    block = BLOCK[format]
    nonzero = ((codes & 0x77) != 0).unflatten(-1, (-1, block // 2)).any(-1)
    exponents = _exponents(format, scales)
    pieces = exponents.unflatten(-1, (-1, PIECE // block))
    counted = nonzero.unflatten(-1, (-1, PIECE // block))
    largest = torch.where(counted, pieces, _NONE).amax(-1)
    # A piece of zeros takes the expert's largest exponent, an expert of zeros 0.
    whole = largest.amax((-2, -1), keepdim=True)
    whole = torch.where(whole == _NONE, 0, whole)
    largest = torch.where(largest == _NONE, whole, largest)
    steps = (pieces - largest[..., None] + MAX_FP8_BINADES).flatten(-2)
    fits = (steps >= 0) & (steps <= MAX_FP8_BINADES)
    table = torch.where(fits, steps, _ZEROS) << 3
    table = table.unflatten(-1, (-1, PIECE // block))
    exponent = largest + E8M0_BIAS
    for byte in range(4):
        table[..., byte] |= (exponent >> (2 * byte)) & 3
    hidden = _hidden(codes, scales, ~fits, block)
    return Arranged(_codes_to_fragment(hidden), _rows_to_fragment(table.to(torch.uint8)))


def to_canonical(format: str, codes: Tensor, scales: Tensor) -> Arranged:
    """The exact inverse of `to_fragment`."""
    block = BLOCK[format]
    table = _rows_to_canonical(scales, PIECE // block).int()
    largest = _piece_exponents(table)
    steps = (table >> 3) & 15
    exponents = (steps + largest[..., None] - MAX_FP8_BINADES).flatten(-2)
    absent = (steps == _ZEROS).flatten(-2)
    found = _codes_to_canonical(codes)
    kept = _bytes_of(format, torch.where(absent, 0, exponents))
    hidden = found.unflatten(-1, (-1, block // 2))
    own = (
        hidden[..., 0].int() & 7
        | (hidden[..., 0].int() >> 4 & 7) << 3
        | (hidden[..., 1].int() & 3) << 6
    )
    cleared = torch.where(absent[..., None], hidden & 0x88, hidden).flatten(-2)
    return Arranged(cleared, torch.where(absent, own, kept).to(torch.uint8))


def largest_exponents(scales: Tensor, width: int) -> Tensor:
    """The largest exponent of each expert over its pieces, int32 [E], from scales in fragment
    order, `width` of them a piece.
    """
    table = scales.contiguous().view(scales.shape[0], -1, width).int()
    return _piece_exponents(table).amax(-1).int()


def _piece_exponents(table: Tensor) -> Tensor:
    """Scale bytes int32 [..., width] -> q int32 [...]."""
    parts = [(table[..., byte] & 3) << (2 * byte) for byte in range(4)]
    return torch.stack(parts).sum(0).int() - E8M0_BIAS


def _exponents(format: str, scales: Tensor) -> Tensor:
    """int32: the power of two of each scale byte; `_NONE` where it is none."""
    if format == "mxfp4":
        return scales.int() - E8M0_BIAS
    table = torch.full((256,), _NONE, dtype=torch.int32)
    for byte, exponent in _POWERS.items():
        table[byte] = exponent
    return table.to(scales.device)[scales.int()]


def _bytes_of(format: str, exponents: Tensor) -> Tensor:
    """int32: the scale byte of each power of two."""
    if format == "mxfp4":
        return exponents + E8M0_BIAS
    table = torch.zeros(32, dtype=torch.int32)
    for byte, exponent in _POWERS.items():
        table[exponent + 16] = byte
    return table.to(exponents.device)[(exponents + 16).clamp(0, 31).long()]


# e4m3 bytes that are powers of two, and their exponents.
_POWERS = {1: -9, 2: -8, 4: -7} | {field << 3: field - 7 for field in range(1, 16)}


def _hidden(codes: Tensor, scales: Tensor, absent: Tensor, block: int) -> Tensor:
    """Codes with the scale bytes of some blocks of zeros in their magnitudes."""
    parts = codes.unflatten(-1, (-1, block // 2)).clone()
    byte = torch.where(absent, scales, 0)
    parts[..., 0] |= byte & 7 | (byte >> 3 & 7) << 4
    parts[..., 1] |= byte >> 6
    return parts.flatten(-2)


def _codes_to_fragment(codes: Tensor) -> Tensor:
    experts, rows, row_bytes = codes.shape
    pairs = codes.contiguous().view(torch.int16)
    # Dimensions: expert, panel, group, row, chunk, word, half, c.
    pairs = pairs.view(experts, rows // PANEL, 16, 8, row_bytes // 64, 4, 2, 4)
    first, second = pairs[..., 0, :].int() & 0xFFFF, pairs[..., 1, :].int() & 0xFFFF
    words = first & 0x7777 | (second & 0x7777) << 16
    words |= _spread(first) << 4 | _spread(second)
    # -> expert, panel, chunk, group, row, c, word
    words = words.permute(0, 1, 4, 2, 3, 6, 5).contiguous()
    return words.view(torch.uint8).view(codes.shape)


def _codes_to_canonical(codes: Tensor) -> Tensor:
    experts, rows, row_bytes = codes.shape
    words = codes.contiguous().view(torch.int32)
    words = words.view(experts, rows // PANEL, row_bytes // 64, 16, 8, 4, 4)
    first = words & 0x7777 | _gathered(words >> 4)
    second = words >> 16 & 0x7777 | _gathered(words)
    # expert, panel, chunk, group, row, c, word, half -> expert, panel, group, row, chunk, word,
    # half, c
    pairs = torch.stack((first, second), -1).permute(0, 1, 3, 4, 2, 6, 7, 5)
    wrapped = torch.where(pairs >= 1 << 15, pairs - (1 << 16), pairs)
    return wrapped.to(torch.int16).contiguous().view(torch.uint8).view(codes.shape)


def _spread(pairs: Tensor) -> Tensor:
    """Signs of four codes, bits 4i + 3, to bits 8i + 3."""
    parts = [(pairs & 8 << 4 * i) << 4 * i for i in range(4)]
    return parts[0] | parts[1] | parts[2] | parts[3]


def _gathered(words: Tensor) -> Tensor:
    """Signs at bits 8i + 3 to bits 4i + 3."""
    parts = [words >> 4 * i & 8 << 4 * i for i in range(4)]
    return parts[0] | parts[1] | parts[2] | parts[3]


def _rows_to_fragment(table: Tensor) -> Tensor:
    """[E, N, pieces, width] -> scales in fragment order: panel, chunk, row."""
    experts, rows, pieces, width = table.shape
    parts = table.view(experts, rows // PANEL, PANEL, pieces, width).transpose(2, 3)
    return parts.reshape(experts, rows, pieces * width)


def _rows_to_canonical(scales: Tensor, width: int) -> Tensor:
    """Scales in fragment order -> [E, N, pieces, width]."""
    experts, rows, blocks = scales.shape
    pieces = blocks // width
    parts = scales.contiguous().view(experts, rows // PANEL, pieces, PANEL, width)
    return parts.transpose(2, 3).reshape(experts, rows, pieces, width)
