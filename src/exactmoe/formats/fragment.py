"""Canonical order (the checkpoint's) and fragment order (the sm_90 kernels') of FP4 weights.

Inside each panel of 128 rows the bytes are permuted, so shapes and sizes stay. A panel in fragment
order is cut along k into chunks of 128: of each, the codes of 16 groups of 8 rows, 16 bytes a lane
(lane = 4 x row + c), word j of them with 2 x 4 codes of k = 32j + 2c, + 1, + 8, + 9, + 16, + 17,
+ 24, + 25; and the scale bytes row by row. kernels/cuda/unpack.cuh says where a code's bits lie in
a word and how scale bytes are read. Experts that run on the fp8 units have words and scale bytes of
their own: formats/fragment_fp8.py.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from exactmoe.errors import Unsupported
from exactmoe.formats import fragment_fp8
from exactmoe.formats.packed import BLOCK, FP4_FORMATS, PackedWeight
from exactmoe.formats.scales import E8M0_BIAS

PANEL = 128
CHUNK = 128
# Experts are permuted in pieces of about this many bytes of codes.
_PIECE_BYTES = 32 << 20
# Of the four pairs of a word: where the sign and the magnitude's bits (high to low) of the low code
# lie. The high code's lie 16 bits above, modulo 32.
_SIGN = (9, 13, 19, 15)
_MAGNITUDE = ((2, 1, 0), (6, 5, 4), (12, 11, 10), (8, 7, 14))
# All bits of a word that belong to magnitudes.
_MAGNITUDES = 0x5DF75DF7
# A scale byte that no checkpoint may have.
_ABSENT = 0xFF


def unsupported(weight: PackedWeight) -> str | None:
    """Why a weight has no fragment order; None if it has one."""
    if weight.format not in FP4_FORMATS:
        return f"format is {weight.format}; allowed: {', '.join(FP4_FORMATS)}"
    if weight.rows % PANEL or weight.columns % CHUNK:
        return (
            f"rows and k are {weight.rows} and {weight.columns}; "
            f"allowed: multiples of {PANEL} and {CHUNK}"
        )
    return None


def to_fragment(weight: PackedWeight, fp8: Tensor | None = None) -> None:
    """Permute codes and scales from canonical to fragment order, in place.

    Args:
        fp8: bool [E]: experts in the order of the fp8 units; they are exact there
            (formats/units.py). None: no expert.

    Raises:
        Unsupported: the format or a size has no fragment order.
    """
    _require(weight)
    for codes, scales, on_fp8 in _pieces(weight, fp8):
        made = fragment_fp8.to_fragment(weight.format, codes, scales) if on_fp8 else None
        if made is None:
            new_scales = _scales_to_fragment(weight.format, codes, scales)
            made = fragment_fp8.Arranged(_codes_to_fragment(codes), new_scales)
        scales.copy_(made.scales)
        codes.copy_(made.codes)


def to_canonical(weight: PackedWeight, fp8: Tensor | None = None) -> None:
    """The exact inverse of `to_fragment`, in place."""
    _require(weight)
    for codes, scales, on_fp8 in _pieces(weight, fp8):
        made = _canonical(weight.format, codes, scales, on_fp8)
        codes.copy_(made.codes)
        scales.copy_(made.scales)


def from_fragment(weight: PackedWeight, fp8: Tensor | None = None) -> PackedWeight:
    """A canonical copy of a weight whose tensors are in fragment order.

    Raises:
        Unsupported: the format or a size has no fragment order.
    """
    _require(weight)
    codes, scales = torch.empty_like(weight.codes), torch.empty_like(_scales(weight))
    targets = _cut(codes, scales, fp8)
    for (source, source_scales, on_fp8), (target, target_scales, _) in zip(
        _pieces(weight, fp8), targets, strict=True
    ):
        made = _canonical(weight.format, source, source_scales, on_fp8)
        target.copy_(made.codes)
        target_scales.copy_(made.scales)
    return replace(weight, codes=codes, scales=scales)


def largest_exponents(weight: PackedWeight, fp8: Tensor | None = None) -> Tensor:
    """p of each expert of an MXFP4 weight in fragment order, int32 [E] (contract section 2); 0 for
    an expert of zeros.
    """
    _require(weight)
    found = []
    for codes, scales, on_fp8 in _pieces(weight, fp8):
        if on_fp8:
            width = CHUNK // BLOCK[weight.format]
            found.append(fragment_fp8.largest_exponents(scales, width))
            continue
        experts, rows, row_bytes = codes.shape
        words = codes.contiguous().view(torch.int32)
        # expert, (panel, chunk, group), row, c, word; a word and the four c are a block of 32.
        words = words.view(experts, rows * row_bytes // (8 * 64), 8, 4, 4)
        nonzero = ((words & _MAGNITUDES) != 0).any(3)
        exponents = scales.contiguous().view(experts, -1, 8, 4).int() - E8M0_BIAS
        counted = torch.where(nonzero, exponents, -1000).flatten(1).amax(1)
        found.append(torch.where(counted == -1000, 0, counted))
    return torch.cat(found).int()


def _require(weight: PackedWeight) -> None:
    reason = unsupported(weight)
    if reason is not None:
        raise Unsupported(f"no fragment order: {reason}")


def _scales(weight: PackedWeight) -> Tensor:
    if weight.scales is None:
        raise Unsupported(f"no fragment order: format is {weight.format}, without block scales")
    return weight.scales


def _pieces(weight: PackedWeight, fp8: Tensor | None) -> Iterator[tuple[Tensor, Tensor, bool]]:
    return _cut(weight.codes, _scales(weight), fp8)


def _cut(
    codes: Tensor, scales: Tensor, fp8: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Views of some experts at a time: what is permuted at once needs a copy beside it. All of a
    piece run on the same units, True: fp8.
    """
    experts = codes.shape[0]
    step = max(1, _PIECE_BYTES * experts // codes.nbytes)
    kinds = [False] * experts if fp8 is None else fp8.tolist()
    start = 0
    while start < experts:
        end = start + 1
        while end < min(start + step, experts) and kinds[end] == kinds[start]:
            end += 1
        yield codes[start:end], scales[start:end], kinds[start]
        start = end


def _canonical(format: str, codes: Tensor, scales: Tensor, on_fp8: bool) -> fragment_fp8.Arranged:
    if on_fp8:
        return fragment_fp8.to_canonical(format, codes, scales)
    found = _codes_to_canonical(codes)
    return fragment_fp8.Arranged(found, _scales_to_canonical(format, found, scales))


def _codes_to_fragment(codes: Tensor) -> Tensor:
    experts, rows, row_bytes = codes.shape
    # A byte is a pair: low code, high code. Of 16 bytes, byte 4a + c is pair a of lane c.
    parts = codes.contiguous().view(experts, rows // PANEL, 16, 8, row_bytes // 64, 4, 4, 4)
    words: Tensor | None = None
    for pair, table in enumerate(_tables(codes.device)):
        byte = parts[..., pair, :].permute(0, 1, 4, 2, 3, 6, 5).int()
        bits = table[byte]
        words = bits if words is None else words.bitwise_or_(bits)
    return _bytes(words).view(codes.shape)


def _codes_to_canonical(codes: Tensor) -> Tensor:
    experts, rows, row_bytes = codes.shape
    words = codes.contiguous().view(torch.int32)
    words = words.view(experts, rows // PANEL, row_bytes // 64, 16, 8, 4, 4)
    pairs = []
    for sign, magnitude in zip(_SIGN, _MAGNITUDE, strict=True):
        byte = torch.zeros_like(words, dtype=torch.uint8)
        for high in (0, 1):
            for bit, place in zip((3, 2, 1, 0), (sign, *magnitude), strict=True):
                value = (words >> (place + 16 * high) % 32) & 1
                byte |= (value << (bit + 4 * high)).to(torch.uint8)
        pairs.append(byte)
    # expert, panel, chunk, group, row, c, word, pair -> expert, panel, group, row, chunk, word,
    # pair, c
    parts = torch.stack(pairs, -1).permute(0, 1, 3, 4, 2, 6, 7, 5)
    return parts.reshape(codes.shape)


def _tables(device: torch.device) -> Tensor:
    """int32 [4, 256]: the bits of a word that a byte sets as first ... fourth pair."""
    byte = torch.arange(256, dtype=torch.int64)
    tables = torch.zeros(4, 256, dtype=torch.int64)
    for pair, (sign, magnitude) in enumerate(zip(_SIGN, _MAGNITUDE, strict=True)):
        for high in (0, 1):
            for bit, place in zip((3, 2, 1, 0), (sign, *magnitude), strict=True):
                tables[pair] |= ((byte >> (bit + 4 * high)) & 1) << (place + 16 * high) % 32
    wrapped = torch.where(tables >= 1 << 31, tables - (1 << 32), tables)
    return wrapped.to(torch.int32).to(device)


def _bytes(words: Tensor | None) -> Tensor:
    if words is None:
        raise AssertionError("a word has four pairs")
    return words.contiguous().view(torch.uint8)


def _scales_to_fragment(format: str, codes: Tensor, scales: Tensor) -> Tensor:
    if format == "nvfp4":
        coded = _linear(scales.device)[scales.int()]
    else:
        coded = torch.where(scales == _harmful(codes, scales), _ABSENT, scales)
    width = CHUNK // BLOCK[format]
    experts, rows, blocks = scales.shape
    parts = coded.view(experts, rows // PANEL, PANEL, blocks // width, width)
    return parts.transpose(2, 3).reshape(scales.shape)


def _scales_to_canonical(format: str, codes: Tensor, scales: Tensor) -> Tensor:
    """`codes` are canonical already."""
    width = CHUNK // BLOCK[format]
    experts, rows, blocks = scales.shape
    parts = scales.contiguous().view(experts, rows // PANEL, blocks // width, PANEL, width)
    coded = parts.transpose(2, 3).reshape(scales.shape)
    if format == "nvfp4":
        back = torch.zeros(256, dtype=torch.uint8, device=scales.device)
        table = _linear(scales.device)
        back[table.long()] = torch.arange(256, device=scales.device).to(torch.uint8)
        back[_ABSENT] = 0
        return back[coded.int()]
    return torch.where(coded == _ABSENT, _harmful(codes, coded).to(torch.uint8), coded)


def _linear(device: torch.device) -> Tensor:
    """uint8 [256]: an e4m3 scale as 5 bits of exponent (9 = 2^0) and 3 of mantissa, subnormals
    normalised; zero is 0xFF. Bytes 127 and above, which no weight has, are 0xFF too.
    """
    table = torch.full((256,), _ABSENT, dtype=torch.uint8)
    for byte in range(1, 127):
        exponent, mantissa = byte >> 3, byte & 7
        if exponent == 0:
            shift = 4 - mantissa.bit_length()
            exponent, mantissa = 1 - shift, (mantissa << shift) & 7
        table[byte] = (exponent + 2) * 8 + mantissa
    return table.to(device)


def _harmful(codes: Tensor, scales: Tensor) -> Tensor:
    """int32 [E, 1, 1]: the scale byte that the kernel would decode to Inf, beside largest byte p.

    Only a block of zeros can carry it, and zero times Inf is NaN. In fragment order it is 0xFF,
    which no checkpoint has. -1: p has no such byte.
    """
    nonzero = ((codes & 0x77) != 0).unflatten(-1, (-1, BLOCK["mxfp4"] // 2)).any(-1)
    largest = torch.where(nonzero, scales, 0).amax((-2, -1), keepdim=True).int()
    largest = torch.where(nonzero.any(-1).any(-1)[:, None, None], largest, E8M0_BIAS)
    above, below = largest + 10, largest - 246
    return torch.where(above < _ABSENT, above, torch.where(below >= 0, below, -1))
