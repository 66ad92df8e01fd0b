"""Builds of the experts kernels without one of their parts, and with clocks: for bounds.py.

Their results are wrong; their times say what the part costs that nothing else hides.
"""

from dataclasses import dataclass

from exactmoe.kernels.cuda.source import Variant

# Never true, but the compiler does not know.
_NEVER = "given.top_k == 0x7FFFFFFF"
_FIRST_CHUNKS = 12  # are copied, so that the ring holds numbers
_COUNT_WEIGHTS = "                if (lane == 0) barrier_arrive_expect(full, WEIGHT_BYTES);\n"
_COUNT_ROWS = "            barrier_arrive_expect(full, eights *"
_NEXT_ITEM = "if (pass + 1 == passes && chunk == take) index = lane == 0 ? atomicAdd(next, 1u) : 0;"
_MATRIX = (
    (("wgmma<N>(sums, a[i], rows", "chunks == 0x7FFFFFFF"),),
    (
        ("wgmma_fp8<N>(chain, a[i], rows", "u32(rows) == 12345"),
        ("wgmma_fp8<N>(chain, a[step], rows", "u32(rows) == 12345"),
    ),
)
_UNPACK_A16 = "    u32 low[4], high[4];\n    unpack(first[step / 2], low);\n"
_UNPACK_A8 = "                                            u32& b) const {\n"
_ENTRY = "    u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;\n"
_EXIT = "    turns.end();\n}"
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


def _put(text: str, old: str, new: str) -> str:
    """Raises: ValueError: the kernels' text has changed."""
    if old not in text:
        raise ValueError(f"the kernels have no {old!r} any more")
    return text.replace(old, new)


def _no_weights(text: str) -> str:
    arrive = f"if (lane == 0) barrier_arrive(full); {_NEXT_ITEM} continue;"
    skip = f"                if (chunk >= {_FIRST_CHUNKS}) {{ {arrive} }}\n"
    assert _NEXT_ITEM in text
    return _put(text, _COUNT_WEIGHTS, skip + _COUNT_WEIGHTS)


def _no_rows(text: str) -> str:
    skip = f"            if (chunk >= {_FIRST_CHUNKS}) {{ barrier_arrive(full); continue; }}\n"
    return _put(text, _COUNT_ROWS, skip + _COUNT_ROWS)


def _no_unpacking(text: str) -> str:
    if "#define A8 0" in text:
        raw = "    for (u32 i = 0; i < 4; ++i) {\n"
        raw += "        a[i] = (i % 2 ? second : first)[step / 2] & 0x3F803F80u;\n"
        raw += "        next[i] = a[i];\n    }\n    return;\n"
        return _put(text, _UNPACK_A16, raw + _UNPACK_A16)
    return _put(
        text, _UNPACK_A8, _UNPACK_A8 + "        a = b = word & 0x77777777u;\n        return;\n"
    )


def _no_matrix(text: str) -> str:
    # What is asked does not change within a stage: a branch for each instruction would cost time.
    for call, never in _MATRIX[text.count("#define A8 1")]:
        text = _put(text, call, f"if ({never}) {call}")
    return text


def _no_epilogue(text: str) -> str:
    finishes = ("finish_gate_up", "finish_down", "finish_a8")
    for name in finishes if "#define A8 1" in text else finishes[:2]:
        text = _put(text, f"if (divides) {name}<true>", f"if (divides && {_NEVER}) {name}<true>")
        text = _put(text, f"else {name}<false>", f"else if ({_NEVER}) {name}<false>")
    return text


PARTS = {
    "weights not read": (_no_weights,),
    "token rows not read": (_no_rows,),
    "codes not unpacked": (_no_unpacking,),
    "nothing multiplied": (_no_matrix,),
    "no epilogue": (_no_epilogue,),
    "weights neither read nor unpacked": (_no_weights, _no_unpacking),
}


@dataclass(frozen=True)
class Without:
    """A variant without one of PARTS; "" is all of it. Each has clocks.

    Attributes:
        variant: what is launched.
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
            ValueError: the kernels' text has changed, so that a part is not found.
        """
        text = self.variant.text()
        for change in PARTS.get(self.part, ()):
            text = change(text)
        text = _put(text, "// ---- barriers in shared memory\n", _CLOCKS)
        text = _put(text, _ENTRY, _ENTRY + "    read_clocks(0);\n")
        return _put(text, _EXIT, "    read_clocks(2);\n" + _EXIT)
