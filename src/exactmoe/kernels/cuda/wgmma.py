"""Text of the matrix instruction in each token width, and of the choice between widths."""

_WIDTHS = (8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 120)
# Name of the function; k of a step and types; what stands behind the descriptor: scale of the
# accumulator (1: kept), signs, and for 16-bit types the order of B.
_KINDS = {
    "sum": ("wgmma", "k16.f32.bf16.bf16", "1, 1, 1, 0"),
    "chain": ("wgmma_chain", "k16.f32.bf16.bf16", "go_on, 1, 1, 0"),
    "fp8": ("wgmma_fp8", "k32.f32.e4m3.e4m3", "go_on, 1, 1"),
}


def widths(tokens: int, batches: int = 1) -> tuple[int, ...]:
    """Token columns that a tile multiplies, by how many of its rows are taken; in so many batches,
    each a multiple of 8.
    """
    if batches > 1:
        return tuple(range(8 * batches, tokens + 1, 8 * batches))
    return tuple(width for width in _WIDTHS if width < tokens) + (tokens,)


def dispatch(tokens: int, batches: int = 1) -> str:
    """`WIDTHS(count, run, ...)` calls run<N> with the least width that holds `count`."""
    *narrow, widest = widths(tokens, batches)
    calls = [f"if ((count) <= {width}) run<{width}>(__VA_ARGS__);" for width in narrow]
    calls.append(f"run<{widest}>(__VA_ARGS__);")
    return "#define WIDTHS(count, run, ...) " + " else ".join(calls) + "\n"


def instructions(tokens: int, kinds: tuple[str, ...], batches: int = 1) -> str:
    """`wgmma<N>(sums, a, rows)`: sums [64, N] += a [64, 16] x rows [16, N], a in registers.

    `wgmma_chain<N>(..., go_on)` begins at +0 unless go_on; `wgmma_fp8` takes 32 along k of e4m3.
    """
    of_batch = [width // batches for width in widths(tokens, batches)]
    return "".join(_instruction(kind, width) for kind in kinds for width in (0, *of_batch))


def _instruction(kind: str, width: int) -> str:
    """Of one width; of 0 the declaration."""
    name, shape, rest = _KINDS[kind]
    more, flag = (", bool", ", bool more") if kind != "sum" else ("", "")
    if width == 0:
        kept = "float (&)[TOKENS / 2], const u32 (&)[4], u64"
        return f"template <int N> __device__ void {name}({kept}{more});\n"
    count = width // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    head, tail, extra = "", "", ""
    if flag:
        head = f'"{{ .reg .pred go_on; setp.ne.b32 go_on, %{count + 5}, 0;\\n"\n        '
        tail, extra = " }", ', "r"(int(more))'
    return f"""
template <>
__device__ __forceinline__ void {name}<{width}>(float (&sums)[TOKENS / 2], const u32 (&a)[4],
                                               u64 rows{flag}) {{
    asm volatile(
        {head}"wgmma.mma_async.sync.aligned.m64n{width}{shape} "
        "{{{sums}}}, {{{a}}}, %{count + 4}, {rest};{tail}"
        : {outputs}
        : {inputs}, "l"(rows){extra});
}}
"""
