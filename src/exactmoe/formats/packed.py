"""PackedWeight: the canonical bytes of one projection of E experts, and the rules they must keep.

Canonical means checkpoint order: codes row-major, the low nibble the even column, block scales
row-major and linear.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from exactmoe.errors import ConfigError, Unsupported
from exactmoe.formats import e2m1
from exactmoe.formats.scales import E4M3_NAN, E8M0_BIAS, E8M0_NAN, decode_e4m3, power_of_two

# k per block scale (fp8: rows too); a bf16 row only has to fill the 16 lanes of a dot.
BLOCK = {"nvfp4": 16, "mxfp4": 32, "bf16": 16, "fp8": 128}
FP4_FORMATS = ("nvfp4", "mxfp4")
# What k is a multiple of: the last block of an fp8 row may be shorter.
_COLUMNS = {**BLOCK, "fp8": 16}
MAX_BINADES = 96
# Bits of 16 codes that belong to magnitudes.
_MAGNITUDES = 0x7777777777777777
# Codes are looked at in pieces of about this size: masks lie beside them.
_PIECE_BYTES = 32 << 20
F32_INF_BITS = 0x7F800000


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """One projection (gate, up or down) of E experts: N output rows, K inputs a row.

    Attributes:
        format: "nvfp4", "mxfp4", "bf16" or "fp8".
        codes: uint8 [E, N, K // 2]; "fp8": E4M3 bytes uint8 [E, N, K]; "bf16": the weights
            themselves, bfloat16 [E, N, K].
        scales: "nvfp4": E4M3 bytes uint8 [E, N, K // 16]; "mxfp4": E8M0 bytes uint8
            [E, N, K // 32]; "fp8": float32 [E, ceil(N / 128), ceil(K / 128)], one for each 128 x
            128 block (where a checkpoint stores E8M0, `decode_e8m0` of it); "bf16": None.
        global_scale: "nvfp4": float32 [E]; else None.
        global_scale_op: "multiply" (ModelOpt) or "divide" (compressed-tensors). Kept as stored: no
            reciprocal is taken.

    Raises:
        ConfigError: dtypes or shapes that do not belong together, or values that section 2 of the
            contract refuses.
        Unsupported: K is not a multiple of the block (of 16 in "bf16" and "fp8"), or the MXFP4
            exponents of one expert span more than 96 binades.
    """

    format: str
    codes: Tensor
    scales: Tensor | None = None
    global_scale: Tensor | None = None
    global_scale_op: str = "multiply"

    def __post_init__(self) -> None:
        if self.format not in tuple(BLOCK):
            raise ConfigError(f"format is {self.format!r}; allowed: {', '.join(BLOCK)}")
        if self.global_scale_op not in ("multiply", "divide"):
            raise ConfigError(
                f"global_scale_op is {self.global_scale_op!r}; allowed: multiply, divide"
            )
        code_dtype = torch.bfloat16 if self.format == "bf16" else torch.uint8
        _require_tensor("codes", self.codes, code_dtype, 3)
        _require_sizes(self)
        _require_one_device(self)
        if self.codes.device.type != "meta":
            _require_values(self)

    @property
    def num_experts(self) -> int:
        return self.codes.shape[0]

    @property
    def rows(self) -> int:
        """N, outputs of one expert."""
        return self.codes.shape[1]

    @property
    def columns(self) -> int:
        """K, inputs of one expert."""
        return self.codes.shape[2] * (1 if self.format in ("bf16", "fp8") else 2)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, block scales and global scales."""
        return sum(t.nbytes for t in (self.codes, self.scales, self.global_scale) if t is not None)

    @property
    def device(self) -> torch.device:
        return self.codes.device


def _require_tensor(name: str, value: object, dtype: torch.dtype, ndim: int) -> None:
    if not isinstance(value, Tensor) or value.dtype != dtype or value.ndim != ndim:
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ConfigError(f"{name} is {found}; allowed: a {dtype} tensor of {ndim} dimensions")


def require_columns(format: str, columns: int) -> None:
    """Unsupported unless K = `columns` is a multiple of what `format` asks for."""
    if columns % _COLUMNS[format]:
        raise Unsupported(
            f"k is {columns} in a {format} weight; it must be a multiple of {_COLUMNS[format]}"
        )


def _require_sizes(weight: PackedWeight) -> None:
    experts, rows, columns = weight.num_experts, weight.rows, weight.columns
    if min(experts, rows, columns) < 1:
        shape = tuple(weight.codes.shape)
        raise ConfigError(f"codes have shape {shape}; allowed: no empty dimension")
    require_columns(weight.format, columns)
    if weight.format == "bf16":
        if weight.scales is not None:
            raise ConfigError("a bf16 weight has scales; allowed: None")
    else:
        block, is_fp8 = BLOCK[weight.format], weight.format == "fp8"
        _require_tensor("scales", weight.scales, torch.float32 if is_fp8 else torch.uint8, 3)
        scale_rows = -(-rows // block) if is_fp8 else rows
        expected = (experts, scale_rows, -(-columns // block))
        if weight.scales is not None and tuple(weight.scales.shape) != expected:
            found = tuple(weight.scales.shape)
            raise ConfigError(f"scales have shape {found}; codes ask for {expected}")
    if weight.format == "nvfp4":
        _require_tensor("global_scale", weight.global_scale, torch.float32, 1)
        if weight.global_scale is not None and weight.global_scale.shape[0] != experts:
            count = weight.global_scale.shape[0]
            raise ConfigError(f"global_scale has {count} values for {experts} experts")
    elif weight.global_scale is not None:
        raise ConfigError(f"a {weight.format} weight has a global_scale; allowed: None")


def _require_one_device(weight: PackedWeight) -> None:
    parts = {"scales": weight.scales, "global_scale": weight.global_scale}
    for name, part in parts.items():
        if part is not None and part.device != weight.device:
            raise ConfigError(f"{name} is on {part.device}; allowed: {weight.device}, as codes")


def _first(mask: Tensor, rows: int = 1) -> str:
    """The first place of a mask over block scales; `rows` share one of them."""
    expert, row, block = (int(i) for i in mask.nonzero()[0])
    return f"expert {expert}, row {row * rows}, block {block}"


def _require_values(weight: PackedWeight) -> None:
    scales, global_scale = weight.scales, weight.global_scale
    if weight.format == "fp8" and scales is not None:
        _require_fp8_values(weight.codes, scales)
    elif weight.format == "nvfp4" and scales is not None and global_scale is not None:
        # NaN without a sign is the last byte before those that have one.
        if int(scales.max()) >= E4M3_NAN:
            bad = scales >= E4M3_NAN
            byte = int(scales[bad][0])
            raise ConfigError(
                f"block scale 0x{byte:02X} at {_first(bad)}; allowed: E4M3 without NaN or sign"
            )
        wrong = ~(torch.isfinite(global_scale) & (global_scale > 0))
        if bool(wrong.any()):
            expert = int(wrong.nonzero()[0])
            value = float(global_scale[expert])
            raise ConfigError(f"global scale of expert {expert} is {value}; allowed: finite, > 0")
    elif weight.format == "mxfp4" and scales is not None:
        if int(scales.max()) == E8M0_NAN:
            place = _first(scales == E8M0_NAN)
            raise ConfigError(f"block scale 0xFF (NaN) at {place}; allowed: E8M0 bytes 0 to 254")
        low, high = exponent_range(weight)
        span = high - low
        if bool((span > MAX_BINADES).any()):
            expert = int((span > MAX_BINADES).nonzero()[0])
            raise Unsupported(
                f"block exponents of expert {expert} span {int(span[expert])} binades; "
                f"allowed: {MAX_BINADES}"
            )


def _require_fp8_values(codes: Tensor, scales: Tensor) -> None:
    bits = scales.view(torch.int32)  # a thread that flushes subnormals takes 2^-127 for 0
    bad = (bits <= 0) | (bits >= F32_INF_BITS)
    if bool(bad.any()):
        value, place = float(scales[bad][0]), _first(bad, rows=BLOCK["fp8"])
        raise ConfigError(
            f"block scale {value} at {place}; allowed: finite, > 0 (nan is what the E8M0 byte 0xFF "
            "stands for)"
        )
    for expert, rows in enumerate(codes):  # one at a time: the masks are as large as the codes
        nan = rows & 0x7F == E4M3_NAN
        if bool(nan.any()):
            row, column = (int(i) for i in nan.nonzero()[0])
            place = f"expert {expert}, row {row}, block {column // BLOCK['fp8']}, column {column}"
            raise ConfigError(
                f"code 0x{int(rows[row, column]):02X} (NaN) at {place}; allowed: E4M3 without NaN"
            )


def nonzero_blocks(weight: PackedWeight) -> Tensor:
    """Of an FP4 weight, bool [E, N, K // block]: which blocks hold a code other than +0 and -0."""
    return blocks_in_use(weight.codes, BLOCK[weight.format])


def blocks_in_use(codes: Tensor, block: int) -> Tensor:
    """As `nonzero_blocks`, of FP4 codes uint8 [E, N, K // 2]."""
    places = (codes.data_ptr(), codes.storage_offset(), *codes.stride()[:-1])
    if codes.stride(-1) != 1 or any(place % 8 for place in places):
        codes = codes.clone(memory_format=torch.contiguous_format)
    words = codes.view(torch.int64).unflatten(-1, (-1, block // 16))  # of 16 codes
    first, *rest = words.unbind(-1)
    for other in rest:
        first = first | other
    return (first & _MAGNITUDES) != 0


def exponent_range(weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """Smallest and largest block exponent of each expert of an MXFP4 weight, int32 [E] each.

    Only blocks with a non-zero code count; an expert without any gets (0, 0). The largest is p of
    contract section 2.
    """
    if weight.format != "mxfp4" or weight.scales is None:
        raise ConfigError(f"format is {weight.format!r}; allowed: mxfp4, which has block exponents")
    return _exponent_range(weight.codes, weight.scales)


def _exponent_range(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    experts = max(1, _PIECE_BYTES * len(codes) // codes.nbytes)
    lows, highs = [], []
    for some, their in zip(codes.split(experts), scales.split(experts), strict=True):
        counted = blocks_in_use(some, BLOCK["mxfp4"])
        highs.append(torch.where(counted, their, 0).flatten(1).amax(1))
        lows.append(torch.where(counted, their, E8M0_NAN).flatten(1).amin(1))
    low, high = torch.cat(lows).int(), torch.cat(highs).int()
    empty = high < low
    low, high = ((byte - E8M0_BIAS).masked_fill(empty, 0) for byte in (low, high))
    return low, high


def _largest_exponent(weight: PackedWeight, expert: int) -> Tensor:
    """p of one expert, int32 []."""
    assert weight.scales is not None
    only = slice(expert, expert + 1)
    return _exponent_range(weight.codes[only], weight.scales[only])[1][0]


def operand(weight: PackedWeight, expert: int) -> Tensor:
    """What the dot multiplies: float32 [N, K], each value exactly a bf16 (contract section 2).

    NVFP4: e2m1 x e4m3. MXFP4: e2m1 x 2^(n - p), p the largest exponent of this expert. BF16: the
    weight. FP8: e4m3; the dot itself takes the block scales, one for each 128 of k.
    """
    if weight.scales is None:
        return weight.codes[expert].float()
    if weight.format == "fp8":
        return decode_e4m3(weight.codes[expert])
    values = e2m1.decode(e2m1.unpack(weight.codes[expert]))
    if weight.format == "nvfp4":
        block_scales = decode_e4m3(weight.scales[expert])
    else:
        high = _largest_exponent(weight, expert)
        # A block of zeros may carry an exponent above p: its zeros must not meet an Inf.
        exponents = weight.scales[expert].int() - E8M0_BIAS - high
        block_scales = power_of_two(exponents.clamp(max=0))
    return values * block_scales.repeat_interleave(BLOCK[weight.format], -1)


def apply_global_scale(weight: PackedWeight, expert: int, accumulator: Tensor) -> Tensor:
    """The epilogue of a dot, one rounding: acc x global, acc / global, or acc x 2^p (MXFP4).

    BF16, FP8: acc unchanged.
    """
    if weight.format == "mxfp4":
        return accumulator * power_of_two(_largest_exponent(weight, expert))
    if weight.global_scale is None:
        return accumulator
    scale = weight.global_scale[expert]
    return accumulator * scale if weight.global_scale_op == "multiply" else accumulator / scale


def dequantize(weight: PackedWeight) -> Tensor:
    """True values float64 [E, N, K]: code x block scale x global scale.

    Exact, except for the one rounding of a division where the global scale is a divisor.
    """
    if weight.scales is None:
        return weight.codes.double()
    if weight.format == "fp8":
        return decode_e4m3(weight.codes).double() * _spread(weight)
    values = e2m1.decode(e2m1.unpack(weight.codes)).double()
    if weight.format == "nvfp4":
        block_scales = decode_e4m3(weight.scales).double()
    else:
        exponents = weight.scales.long() - E8M0_BIAS
        block_scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float64), exponents)
    values = values * block_scales.repeat_interleave(BLOCK[weight.format], -1)
    if weight.global_scale is None:
        return values
    scale = weight.global_scale.double()[:, None, None]
    return values * scale if weight.global_scale_op == "multiply" else values / scale


def _spread(weight: PackedWeight) -> Tensor:
    """The block scale of every value of an FP8 weight, float64 [E, N, K]."""
    assert weight.scales is not None
    spread = weight.scales.double().repeat_interleave(BLOCK["fp8"], -2)[:, : weight.rows]
    return spread.repeat_interleave(BLOCK["fp8"], -1)[..., : weight.columns]
