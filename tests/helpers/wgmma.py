"""A hand-written product on wgmma m64nNk16 bf16, for what its documents do not promise.

One warpgroup a block: 64 rows of W [64, K] by N tokens of X [T, K], k ascending in steps of 16, one
float32 chain from +0. No swizzle: shared memory holds core matrices of 8 rows x 16 bytes, first all
of the lower eight k, then those of the upper eight.
"""

import torch
from torch import Tensor

from device_code import loaded

ROWS = 64
WIDTHS = (8, 16, 24, 32, 64, 128, 136, 256)

_SOURCE = """
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ u32 shared_address(const void* p) {
  u64 address;
  asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(p));
  return (u32)address;
}

// Core matrices: `leading` bytes apart along k, 128 apart along rows.
__device__ u64 descriptor(u32 address, u32 leading) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)(leading >> 4) << 16 | (u64)(128 >> 4) << 32;
}

extern "C" __global__ void product(const u32* w, const u32* x, float* out, int k_words,
                                   int padded_tokens) {
  constexpr int N = @N@;
  __shared__ __align__(128) u32 a_tile[64 * 8];
  __shared__ __align__(128) u32 b_tile[N * 8];
  const int thread = threadIdx.x, warp = thread / 32, row = thread % 32 / 4, pair = thread % 4;
  const int first_token = blockIdx.x * N;
  float d[N / 2];
  for (int i = 0; i < N / 2; ++i) d[i] = 0.0f;
  for (int k = 0; k < k_words; k += 8) {
    for (int i = thread; i < 64 * 8; i += 128)
      a_tile[(i % 8 / 4 * 8 + i / 64) * 32 + i / 8 % 8 * 4 + i % 4] =
          w[i / 8 * k_words + k + i % 8];
    for (int i = thread; i < N * 8; i += 128)
      b_tile[(i % 8 / 4 * (N / 8) + i / 64) * 32 + i / 8 % 8 * 4 + i % 4] =
          x[(first_token + i / 8) * k_words + k + i % 8];
    const u32* own = w + (warp * 16 + row) * k_words + k + pair;
    u32 a0 = own[0], a1 = own[8 * k_words], a2 = own[4], a3 = own[8 * k_words + 4];
    u64 a = descriptor(shared_address(a_tile), 8 * 128);
    u64 b = descriptor(shared_address(b_tile), N / 8 * 128);
    int keep = @KEEP@;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %@LAST@, 0;\\n"
                 "wgmma.mma_async.sync.aligned.m64n@N@k16.f32.bf16.bf16 {@D@}, @A@, %@B@, p, 1, 1"
                 "@TRANSPOSE@; }"
                 : @OUTPUTS@ : @INPUTS@, "l"(b), "r"(keep) : "memory");
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    __syncthreads();
  }
  for (int j = 0; j < N / 8; ++j)
    for (int i = 0; i < 4; ++i)
      out[(warp * 16 + row + i / 2 * 8) * padded_tokens + first_token + 8 * j + 2 * pair + i % 2] =
          d[4 * j + i];
}
"""


def source(width: int, a_from_registers: bool = False, first_overwrites: bool = False) -> str:
    """The kernel for N = width; first_overwrites: the first step has scale-d 0, else it adds to
    +0.
    """
    outputs = width // 2
    registers = 4 if a_from_registers else 1
    text = {
        "N": str(width),
        "D": ", ".join(f"%{i}" for i in range(outputs)),
        "A": ", ".join(f"%{outputs + i}" for i in range(registers)),
        "B": str(outputs + registers),
        "LAST": str(outputs + registers + 1),
        "OUTPUTS": ", ".join(f'"+f"(d[{i}])' for i in range(outputs)),
        "INPUTS": '"r"(a0), "r"(a1), "r"(a2), "r"(a3)' if a_from_registers else '"l"(a)',
        "TRANSPOSE": ", 0" if a_from_registers else ", 0, 0",
        "KEEP": "k != 0" if first_overwrites else "1",
    }
    if a_from_registers:
        text["A"] = "{" + text["A"] + "}"
    made = _SOURCE
    for name, value in text.items():
        made = made.replace(f"@{name}@", value)
    return made


def product(
    w: Tensor,
    x: Tensor,
    width: int,
    a_from_registers: bool = False,
    first_overwrites: bool = False,
) -> Tensor:
    """w bf16 [64, K], x bf16 [T, K] on a card -> float32 [T, 64]; K a multiple of 16."""
    tokens, columns = x.shape
    blocks = -(-tokens // width)
    padded = torch.zeros(blocks * width, columns, dtype=torch.bfloat16, device=x.device)
    padded[:tokens] = x
    out = torch.full((ROWS, blocks * width), float("nan"), device=x.device)
    kernel = loaded(source(width, a_from_registers, first_overwrites), "product")
    kernel.launch(blocks, 128, [w.contiguous(), padded, out, columns // 2, blocks * width])
    return out[:, :tokens].T.contiguous()
