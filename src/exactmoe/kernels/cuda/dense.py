"""The source text of the dense kernels: constants, parts in order, and the matrix instructions."""

from dataclasses import dataclass
from importlib.resources import files

_PARTS = (
    "ptx.cuh",
    "tensor_copy.cuh",
    "functions.cuh",
    "dense.cuh",
    "dense_multiply.cuh",
    "dense_store.cuh",
    "dense.cu",
)
CHUNK = 64  # of k: a row of 128 bytes
SEGMENT = 4096  # contract section 4
# Of dynamic shared memory a block may have this much (sm_90). Where a block of gate_up and one of
# down lie on a multiprocessor together, down has more: its ring fills up while it waits for h.
_SHARED_BYTES = 232448
_BESIDE = {"gate_up": 77824, "down": 153600}
_BARRIER_BYTES = 256
_ALIGNMENT = 1024
_STAGING_BYTES = 32 * 80
_MOST_STAGES = 12
_PIECE = 32


@dataclass(frozen=True)
class Dense:
    """One compiled kernel.

    Attributes:
        op: "gate_up" or "down".
        rows: weight rows of a block, 32 or a multiple of 64; gate_up: of gate and up together.
        tokens: the most tokens of a block.
        chunks: 64 of k, in a stage of the ring.
        cluster: blocks that share their tokens.
        blocks: of a multiprocessor: with 2, a block of down begins beside one of gate_up.
        segmented: k is more than 4096.
    """

    op: str
    rows: int
    tokens: int
    chunks: int
    cluster: int
    blocks: int
    segmented: bool

    entry = "dense"

    @property
    def threads(self) -> int:
        """A warpgroup for 64 rows, and one of which a warp fills the ring."""
        return 128 * (self.warpgroups + 1)

    @property
    def warpgroups(self) -> int:
        """That multiply."""
        return -(-self.rows // 64)

    @property
    def features(self) -> int:
        """Outputs of a block."""
        return self.rows // 2 if self.op == "gate_up" else self.rows

    @property
    def piece(self) -> int:
        """Tokens that one copy brings: all, or some that a block of a cluster sends to all."""
        return self.tokens if self.cluster == 1 else min(self.tokens // self.cluster, _PIECE)

    @property
    def stage_bytes(self) -> int:
        """Of the ring: rows of weights and of tokens."""
        return (self.rows + self.tokens) * CHUNK * 2 * self.chunks

    @property
    def _fixed_bytes(self) -> int:
        staged = self.op == "gate_up" and self.tokens >= 32
        staging = _STAGING_BYTES * self.warpgroups if staged else 0
        return staging + _BARRIER_BYTES + _ALIGNMENT

    @property
    def stages(self) -> int:
        """Of the ring, as many as fit."""
        most = _SHARED_BYTES if self.blocks == 1 else _BESIDE[self.op]
        return min(_MOST_STAGES, (most - self._fixed_bytes) // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block. With 32 rows the matrix instruction reads as many
        behind the last stage's.
        """
        eight = 1024 * (self.chunks if self.op == "gate_up" else 1)
        weights = self.stages * self.rows * CHUNK * 2 * self.chunks
        behind = 4 * eight if self.rows < 64 else 0
        return self._fixed_bytes + max(self.stages * self.stage_bytes, weights + behind)

    @property
    def widths(self) -> tuple[int, ...]:
        """Token columns that it multiplies, by how many of its tokens there are."""
        return tuple(range(self._width_step, self.tokens + 1, self._width_step))

    @property
    def _width_step(self) -> int:
        return max(16, self.tokens // 8) if self.tokens >= 64 else self.tokens

    def text(self) -> str:
        """CUDA C++."""
        constants = {
            "GATE_UP": int(self.op == "gate_up"),
            "ROWS": self.rows,
            "TOKENS": self.tokens,
            "CHUNKS": self.chunks,
            "STAGES": self.stages,
            "CLUSTER": self.cluster,
            "BLOCKS": self.blocks,
            "SEGMENTED": int(self.segmented),
            "WIDTH_STEP": self._width_step,
        }
        parts = [f"#define {name} {value}\n" for name, value in constants.items()]
        folder = files(__package__)
        for name in _PARTS:
            if name == "dense_multiply.cuh":
                parts.append(_wgmma(self.widths))
            parts.append((folder / name).read_text(encoding="utf-8"))
        return "".join(parts)


def _wgmma(widths: tuple[int, ...]) -> str:
    """`wgmma<N>(sums, a, b)`: sums [64, N] += a [64, 16] x b [16, N], both in shared memory."""
    text = "template <u32 N> __device__ void wgmma(float (&)[TOKENS / 2], u64, u64);\n"
    for width in widths:
        count = width // 2
        sums = ", ".join(f"%{i}" for i in range(count))
        outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
        text += f"""
template <>
__device__ __forceinline__ void wgmma<{width}>(float (&sums)[TOKENS / 2], u64 a, u64 b) {{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 "
        "{{{sums}}}, %{count}, %{count + 1}, 1, 1, 1, 0, 0;"
        : {outputs}
        : "l"(a), "l"(b));
}}
"""
    return text + "\n"
