"""The source text of a kernel variant: constants, parts in order, and its matrix instruction.

The parts hold no #include, so run-time compilation needs no header search path.
"""

from dataclasses import dataclass
from importlib.resources import files

_PARTS = (
    "ptx.cuh",
    "functions.cuh",
    "unpack.cuh",
    "experts.cuh",
    "multiply.cuh",
    "epilogue.cuh",
    "experts.cu",
)
_PACK_PARTS = ("ptx.cuh", "pack.cu")
# Token widths that are offered. All use wgmma m64nNk16, so none changes a bit.
TOKENS = (8, 16, 40, 64, 128)
_WIDTHS = (8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 120)
PANEL = 128  # weight rows
THREADS = 640
# Of shared memory, a block may have this much (sm_90), and the kernel's own arrays need some.
_SHARED_BYTES = 232448 - 8704
_PANEL_BYTES = {"nvfp4": 8192 + 1024, "mxfp4": 8192 + 512}
_STAGING_BYTES = 4 * 32 * 80
_BARRIER_BYTES = 256
_ALIGNMENT = 1024
_MOST_STAGES = 12
# Wider tiles read packed rows.
WIDEST_GATHER = 16


@dataclass(frozen=True)
class Variant:
    """One compiled kernel.

    Attributes:
        op: "gate_up" or "down".
        format: "nvfp4" or "mxfp4".
        tokens: the tile's token width.
        gather: gate_up only: rows come from x, not packed.
        slot_f32: down only: slots are float32, not bfloat16.
    """

    op: str
    format: str
    tokens: int
    gather: bool = False
    slot_f32: bool = False

    @property
    def _fixed_bytes(self) -> int:
        staging = _STAGING_BYTES if self.tokens >= 24 else 0
        return staging + _BARRIER_BYTES + _ALIGNMENT

    @property
    def _stage_bytes(self) -> int:
        """128 of k of two panels and of the token rows."""
        return 2 * _PANEL_BYTES[self.format] + self.tokens * 256

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
            "GATE_UP": int(self.op == "gate_up"),
            "GATHER": int(self.gather),
            "SLOT_F32": int(self.slot_f32),
        }
        parts = [f"#define {name} {value}\n" for name, value in constants.items()]
        folder = files(__package__)
        for name in _PARTS:
            if name == "experts.cuh":
                parts += [_wgmma(_widths(self.tokens)), _dispatch(_widths(self.tokens))]
            parts.append((folder / name).read_text(encoding="utf-8"))
        return "".join(parts)


@dataclass(frozen=True)
class Pack:
    """The kernel that packs token rows."""

    entry = "pack"
    shared_bytes = 0

    def text(self) -> str:
        """CUDA C++."""
        folder = files(__package__)
        return "".join((folder / name).read_text(encoding="utf-8") for name in _PACK_PARTS)


def _widths(tokens: int) -> tuple[int, ...]:
    """Token columns that a tile multiplies, by how many of its rows are taken."""
    return tuple(width for width in _WIDTHS if width < tokens) + (tokens,)


def _dispatch(widths: tuple[int, ...]) -> str:
    """`WIDTHS(count, run, ...)` calls run<N> with the least width that holds `count`."""
    calls = [f"if ((count) <= {width}) run<{width}>(__VA_ARGS__);" for width in widths[:-1]]
    calls.append(f"run<{widths[-1]}>(__VA_ARGS__);")
    return "#define WIDTHS(count, run, ...) " + " else ".join(calls) + "\n"


def _wgmma(widths: tuple[int, ...]) -> str:
    """`wgmma<N>(sums, a, rows)`: sums [64, N] += a [64, 16] x rows [16, N], a in registers."""
    text = "template <int N> __device__ void wgmma(float (&)[TOKENS / 2], const u32 (&)[4], u64);\n"
    for width in widths:
        count = width // 2
        sums = ", ".join(f"%{i}" for i in range(count))
        a = ", ".join(f"%{count + i}" for i in range(4))
        outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
        inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
        text += f"""
template <>
__device__ __forceinline__ void wgmma<{width}>(float (&sums)[TOKENS / 2], const u32 (&a)[4],
                                               u64 rows) {{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 "
        "{{{sums}}}, {{{a}}}, %{count + 4}, 1, 1, 1, 0;"
        : {outputs}
        : {inputs}, "l"(rows));
}}
"""
    return text + "\n"
