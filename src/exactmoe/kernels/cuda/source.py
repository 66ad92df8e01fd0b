"""The source text of a kernel variant: constants, parts in order, and its matrix instruction.

The parts hold no #include, so run-time compilation needs no header search path.
"""

from dataclasses import dataclass
from importlib.resources import files

from exactmoe.kernels.cuda.wgmma import dispatch, instructions

_BEFORE = ("ptx.cuh", "functions.cuh", "unpack.cuh")
_A16 = ("experts.cuh", "fill.cuh", "turns.cuh", "multiply.cuh", "epilogue.cuh", "experts.cu")
_A8 = (
    "wide.cuh",
    "unpack_fp8.cuh",
    "experts.cuh",
    "fill.cuh",
    "turns.cuh",
    "operands_a8.cuh",
    "multiply_a8.cuh",
    "epilogue.cuh",
    "epilogue_a8.cuh",
    "experts.cu",
)
_PACK, _PACK_A8 = ("ptx.cuh", "pack.cu"), ("ptx.cuh", "wide.cuh", "pack_a8.cu")
# Token widths that are offered in each class. All use one instruction of the same units, so none
# changes a bit.
TOKENS = {"a16": (8, 16, 40, 64, 128), "a8": (8, 16, 40, 64, 112)}
# Units that the experts of a kernel take: "both" decides expert by expert.
UNITS = ("bf16", "fp8", "both")
PANEL = 128  # weight rows
THREADS = 640
# Of shared memory, a block may have this much (sm_90), and the kernel's own arrays need some.
_SHARED_BYTES = 232448 - 8704
_PANEL_BYTES = {"nvfp4": 8192 + 1024, "mxfp4": 8192 + 512}
_STAGING_BYTES = 4 * 32 * 80
_BARRIER_BYTES = 8 * (2 * 12 + 3 * 4)
_ALIGNMENT = 1024
_MOST_STAGES = 12
# Wider tiles read packed rows.
WIDEST_GATHER = 16


@dataclass(frozen=True)
class Variant:
    """One compiled kernel.

    Attributes:
        format: "nvfp4" or "mxfp4".
        tokens: the tile's token width.
        gather: gate_up reads rows of x, not packed ones.
        slot_f32: slots are float32, not bfloat16.
        activation: "a16" or "a8".
        units: of the experts, one of UNITS; "bf16" in a16.
    """

    format: str
    tokens: int
    gather: bool = False
    slot_f32: bool = False
    activation: str = "a16"
    units: str = "bf16"

    @property
    def _a8(self) -> bool:
        return self.activation == "a8"

    @property
    def _fixed_bytes(self) -> int:
        staging = _STAGING_BYTES if self.tokens >= 24 else 0
        if self._a8:
            staging = self.tokens * 136
        of_tokens = 4 * self.tokens * (8 if self._a8 else 4)
        return staging + of_tokens + _BARRIER_BYTES + _ALIGNMENT

    @property
    def _stage_bytes(self) -> int:
        """128 of k of two panels, of the token rows, and the rows' scales."""
        row = 128 if self.units == "fp8" else 256
        return 2 * _PANEL_BYTES[self.format] + self.tokens * (row + 4 * self._a8)

    @property
    def stages(self) -> int:
        """Of the ring, as many as fit."""
        return min(_MOST_STAGES, (_SHARED_BYTES - self._fixed_bytes) // self._stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self._fixed_bytes + self.stages * self._stage_bytes

    entry = "experts"

    def text(self) -> str:
        """CUDA C++."""
        constants = {
            "TOKENS": self.tokens,
            "STAGES": self.stages,
            "FORMAT_NVFP4": int(self.format == "nvfp4"),
            "GATHER": int(self.gather),
            "SLOT_F32": int(self.slot_f32),
            "A8": int(self._a8),
            "UNITS_FP8": int(self.units != "bf16"),
            "UNITS_BF16": int(self.units != "fp8"),
        }
        kinds = {"bf16": ("chain",), "fp8": ("fp8",), "both": ("chain", "fp8")}[self.units]
        batches = 2 if self._a8 and self.tokens > 64 else 1
        matrix = instructions(self.tokens, kinds if self._a8 else ("sum",), batches)
        matrix += dispatch(self.tokens, batches)
        return _defines(constants) + _joined(_BEFORE) + matrix + _joined(_A8 if self._a8 else _A16)


@dataclass(frozen=True)
class Pack:
    """The kernel that packs token rows.

    Attributes:
        activation: "a16" or "a8".
        units: of the experts that read them, one of UNITS.
    """

    activation: str = "a16"
    units: str = "bf16"
    entry = "pack"
    shared_bytes = 0

    def text(self) -> str:
        """CUDA C++."""
        if self.activation == "a16":
            return _joined(_PACK)
        units = {"UNITS_FP8": int(self.units != "bf16"), "UNITS_BF16": int(self.units != "fp8")}
        return _defines(units) + _joined(_PACK_A8)


def _defines(constants: dict[str, int]) -> str:
    return "".join(f"#define {name} {value}\n" for name, value in constants.items())


def _joined(names: tuple[str, ...]) -> str:
    folder = files(__package__)
    return "".join((folder / name).read_text(encoding="utf-8") for name in names)
