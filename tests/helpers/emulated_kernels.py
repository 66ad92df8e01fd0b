"""Small kernels that tests/kernels/cuda/test_emulator.py runs; `fault` says what is done wrong."""

from importlib.resources import files

PTX = (files("exactmoe.kernels.cuda") / "ptx.cuh").read_text(encoding="utf-8")

RELAY = """
extern "C" __global__ void relay(const u32* x, u32* data, u32* flag, u32* out, u32 fault) {
    extern __shared__ u8 raw[];
    u32 base = (shared_address(raw) + 127) & ~127u, barrier = base + 1024, thread = threadIdx.x;
    if (thread == 0) barrier_init(barrier, 1), barrier_init_fence();
    __syncthreads();
    if (blockIdx.x == 0) {
        u32 value = x[thread] + 1;
        data[fault == 7 ? thread + 1 : thread] = value;
        if (fault == 8) const_cast<u32*>(x)[0] = 1;
        if (fault != 1 && fault != 2) proxy_fence_global();
        if (fault != 3) __syncthreads();
        if (thread == 0 && fault != 4 && fault != 5) add_release(flag, 1);
        if (thread == 0 && fault == 4) atomicAdd(flag, 1);
        if (thread == 0 && fault == 5) *flag = 1;
        return;
    }
    if (thread == 0) {
        while (load_acquire(flag) < (fault == 6 ? 2 : 1)) {}
        if (fault == 1) proxy_fence_global();
        barrier_arrive_expect(barrier, 256);
        if (fault == 10) barrier_arrive(barrier);
        copy_bulk(base, data, fault == 9 ? 264 : 256, barrier);
    }
    if (fault == 11) return;
    barrier_wait(barrier, 0);
    u32 word;
    load_4(word, base + 4 * thread);
    out[(blockIdx.x - 1) * 64 + thread] = word * 2;
}
"""

RING = """
extern "C" __global__ void ring(const u32* x, u32* out, u32 fault) {
    extern __shared__ u8 raw[];
    u32 base = (shared_address(raw) + 127) & ~127u, full = base + 512, empty = full + 16;
    u32 lane = threadIdx.x % 32, sum = 0;
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < 2; ++stage)
            barrier_init(full + 8 * stage, 1), barrier_init(empty + 8 * stage, 1);
        if (fault != 6) barrier_init_fence();
    }
    __syncthreads();
    for (u32 turn = 0; turn < 6; ++turn) {
        u32 stage = turn % 2, parity = turn / 2 % 2, place = base + stage * 128;
        if (threadIdx.x >= 32) {
            if (lane) continue;
            if (fault != 1) barrier_wait(empty + 8 * stage, parity ^ (fault == 3 ? 0 : 1));
            barrier_arrive_expect(full + 8 * stage, 128);
            if (fault == 5 && turn == 3) continue;
            u32 target = fault == 7 && turn == 2 ? base + 448 : place;
            copy_bulk(target, x + turn * 32, 128, full + 8 * stage);
            continue;
        }
        if (fault != 2) barrier_wait(full + 8 * stage, parity);
        if (fault == 4 && lane == 0) barrier_arrive(empty + 8 * stage);
        u32 word;
        load_4(word, place + 4 * lane + (fault == 8 ? 2 : 0) + (fault == 9 ? 1024 : 0));
        sum += word;
        __syncwarp();
        if (fault != 4 && lane == 0) barrier_arrive(empty + 8 * stage);
    }
    if (threadIdx.x < 32) out[lane] = sum;
}
"""

COLLECTIVES = """
extern "C" __global__ void collectives(u32* out, u32 fault) {
    extern __shared__ u8 raw[];
    __shared__ u32 counter[1], other[2][32];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, base = (shared_address(raw) + 15) & ~15u;
    if (threadIdx.x == 0) out[5 * 32] = 0;
    if (threadIdx.x == 0) counter[0] = 0;
    other[warp][lane] = lane;
    if (fault != 4) __syncthreads();
    u32 crossed = other[1 - warp][31 - lane];
    if (fault == 3) sync_threads(3, warp ? 64 : 32);
    if (fault == 5) shared_address(&crossed);
    if (fault == 1 && lane == 7) __ballot_sync(~0u, true);
    if (fault == 2 && lane == 7) return;
    u32 from = __shfl_sync(~0u, lane * 3, 5), up = __shfl_up_sync(~0u, lane * 3, 2);
    u32 down = __shfl_down_sync(~0u, lane * 3, 4), exchanged = __shfl_xor_sync(~0u, lane * 3, 8);
    float half = __shfl_xor_sync(~0u, lane * 0.5f, 1);
    u32 ballot = __ballot_sync(~0u, lane % 3 == 0 && lane < 30);
    atomicAdd(out + 5 * 32, 1);
    u32 words[4];
    for (u32 i = 0; i < 4; ++i) words[i] = (lane * 8 + 2 * i) | (lane * 8 + 2 * i + 1) << 16;
    if (warp == 0) store_transposed(base + lane * 16, words);
    __syncthreads();
    if (warp) return;
    u32 count = atomicAdd(out + 5 * 32, 0), stored[4];
    load_16(stored, base + lane * 16);
    u32 found[] = {from, up, down, exchanged, ballot, count, crossed, __float_as_uint(half)};
    for (u32 i = 0; i < 8; ++i)
        if (i != 5 || lane) out[i * 32 + lane] = found[i];
    for (u32 i = 0; i < 4; ++i) out[8 * 32 + lane * 4 + i] = stored[i];
}
"""

# Rows of what `numbers` writes.
WORDS = (
    "round_bf16x2",
    "round_e4m3x2",
    "e4m3x2_to_bf16x2",
    "times_low",
    "times_high",
    "min_nan",
    "max_nan",
    "permute",
)
NUMBERS = """
extern "C" __global__ void numbers(const float* a, const float* b, u32* out, u32 count) {
    for (u32 i = threadIdx.x; i < count; i += 32) {
        u32 both = round_bf16x2(a[i], b[i]), codes = round_e4m3x2(a[i], b[i]);
        u32 found[] = {both, codes, e4m3x2_to_bf16x2(codes), times_low(both, both >> 16),
                       times_high(both, both << 16), __float_as_uint(min_nan(a[i], b[i])),
                       __float_as_uint(max_nan(a[i], b[i])), permute(0x80020100, 0, 0x4B12)};
        for (u32 j = 0; j < 8; ++j) out[j * count + i] = found[j];
    }
}
"""
