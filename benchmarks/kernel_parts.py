"""Builds of the experts kernels without one of their parts, and with clocks: for bounds.py.

Their results are wrong; their times say what the part costs that nothing else hides.
"""

from dataclasses import dataclass

from exactmoe.errors import Unsupported
from exactmoe.kernels.cuda.source import Variant

# Never true, but the compiler does not know.
_NEVER = "given.top_k == 0x7FFFFFFF"
# (old text, new text), per part; each old text stands once in the kernels.
_Changes = tuple[tuple[str, str], ...]

# A block copies its first stages only, so that the ring holds numbers.
_NO_WEIGHTS: _Changes = (
    (
        "    while (true) {\n        index =",
        "    u32 copied = 0;\n    while (true) {\n        index =",
    ),
    (
        "                if (lane == 0) barrier_arrive_expect(full, WEIGHT_BYTES);\n",
        "                bool copies = copied < STAGES;\n"
        "                copied += copies;\n"
        "                if (lane == 0 && copies) barrier_arrive_expect(full, WEIGHT_BYTES);\n"
        "                if (lane == 0 && !copies) barrier_arrive(full);\n",
    ),
    ("                if (lane < 4)\n", "                if (copies && lane < 4)\n"),
)
_UNPACK_A16 = "    u32 low[4], high[4];\n    unpack(first[step / 2], low);\n"
_NO_UNPACKING_A16: _Changes = (
    (
        _UNPACK_A16,
        "    for (u32 i = 0; i < 4; ++i) {\n"
        "        a[i] = (i % 2 ? second : first)[step / 2] & 0x3F803F80u;\n"
        "        next[i] = a[i];\n    }\n    return;\n" + _UNPACK_A16,
    ),
)
_UNPACK_A8 = "                                            u32& b) const {\n"
_NO_UNPACKING_A8: _Changes = (
    (_UNPACK_A8, _UNPACK_A8 + "        a = b = word & 0x77777777u;\n        return;\n"),
)


def _when(condition: str, *calls: str) -> _Changes:
    return tuple((call, f"if ({condition}) {call}") for call in calls)


# What is asked does not change within a stage: a branch for each instruction would cost time.
_NO_MATRIX_A16 = _when("chunks == 0x7FFFFFFF", "wgmma<N>(sums, a[i], rows")
_NO_MATRIX_A8 = _when(
    "u32(rows) == 12345",
    "wgmma_fp8<N>(chain, a[i], rows",
    "wgmma_fp8<N>(chain, a[step], rows",
)


def _without(*finishes: str) -> _Changes:
    changes = []
    for name in finishes:
        changes.append((f"if (divides) {name}<true>", f"if (divides && {_NEVER}) {name}<true>"))
        changes.append((f"else {name}<false>", f"else if ({_NEVER}) {name}<false>"))
    return tuple(changes)


_NO_EPILOGUE_A16 = _without("finish_gate_up", "finish_down")
_NO_EPILOGUE_A8 = _without("finish_a8", "finish_down")
# Part -> changes in class a16, and in a8 on the fp8 units.
PARTS: dict[str, tuple[_Changes, _Changes]] = {
    "weights not read": (_NO_WEIGHTS, _NO_WEIGHTS),
    "codes not unpacked": (_NO_UNPACKING_A16, _NO_UNPACKING_A8),
    "nothing multiplied": (_NO_MATRIX_A16, _NO_MATRIX_A8),
    "no epilogue": (_NO_EPILOGUE_A16, _NO_EPILOGUE_A8),
}

_ENTRY = "    u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;\n"
_EXIT = "    turns.end();\n}"
_BEFORE = "// ---- barriers in shared memory\n"
_CLOCKS = """
__device__ u64 clocks[4];  // cycles and ns at the begin and the end of a block

__device__ void read_clocks(u32 place) {
    if (threadIdx.x != 0 || blockIdx.x != 0) return;
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
    clocks[place] = clock64();
    clocks[place + 1] = time;
}
"""
_TIMED: _Changes = (
    (_BEFORE, _BEFORE + _CLOCKS),
    (_ENTRY, _ENTRY + "    read_clocks(0);\n"),
    (_EXIT, "    read_clocks(2);\n" + _EXIT),
)


@dataclass(frozen=True)
class Without:
    """A variant without one of PARTS; "" is all of it. Each has clocks.

    Attributes:
        variant: what is launched; of class a8 on the fp8 units alone.
        part: a key of PARTS, or "".
    """

    variant: Variant
    part: str = ""
    entry = "experts"

    @property
    def shared_bytes(self) -> int:
        return self.variant.shared_bytes

    def text(self) -> str:
        """CUDA C++.

        Raises:
            Unsupported: experts of class a8 on the bf16 units; or the kernels' text has changed, so
                that a part is not found.
        """
        a8 = self.variant.activation == "a8"
        if a8 and self.variant.units != "fp8":
            raise Unsupported(
                f"the experts take units {self.variant.units!r}; allowed in class a8: 'fp8' "
                "(--format mxfp4)"
            )
        text = self.variant.text()
        changes = PARTS[self.part][a8] if self.part else ()
        for old, new in (*changes, *_TIMED):
            if text.count(old) != 1:
                raise Unsupported(
                    f"the kernels have {old!r} {text.count(old)} times; allowed: once (their text "
                    f"has changed: see kernel_parts.py, {self.part or 'clocks'})"
                )
            text = text.replace(old, new)
        return text
