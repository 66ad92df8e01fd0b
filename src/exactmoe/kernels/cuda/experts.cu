// gate_up and down of the routed experts on sm_90: a grouped matrix product with FP4 weights on the M
// side (64 rows a warpgroup) and TOKENS tokens on the N side. Class a16: wgmma m64nNk16 bf16, k
// ascending on one accumulator from +0. Class a8: each 128 of k from +0, on the fp8 (m64nNk32) or the
// bf16 units as the expert's bytes decide. TOKENS, the ring and the order of work change no bit.
//
// A block owns one SM: four warpgroups multiply, one more fills a ring in shared memory. A work item
// is 2 panels of 128 weight rows x up to TOKENS tokens of one expert x all of k. Of the two panels
// each lane holds row r of the first and row r of the second: gate and up of one feature, so SwiGLU
// needs no exchange; for down the panels 2j and 2j + 1.
//
// Token rows are gathered from x (GATHER), or read packed: eights of rows of one expert, cut along k
// into pieces of 8 x 64 bf16 or 8 x 128 e4m3 that lie as wgmma wants them (128-byte swizzle), so that
// one bulk copy brings eight rows. gate_up writes h packed, and quantised in a8; kernels/cuda/pack.cu
// and pack_a8.cu pack x for wide tiles. In a8 a piece has 8 scales beside it.
//
// Compiled with: TOKENS, STAGES, FORMAT_NVFP4 (else MXFP4), GATE_UP (else down), GATHER, SLOT_F32, A8
// (else a16), UNITS_FP8, UNITS_BF16 (of the experts; both: MIXED), DOWN_FP8, DOWN_MIXED (of down).
//
// H200, GLM shape, NVFP4, a16: 3.4-3.6 TB/s of weights from 4 to 64 tokens (reads reach 4.6), 511 TFLOP/s
// at 4096. What bounds it is the matrix units: a wgmma with A in registers takes 32 cycles even for
// 8 tokens, and a stage of 128 x 256 weights has 32 of them in bf16, 16 in fp8; memory brings a stage
// in 950 cycles at 1.8 GHz, and the power limit takes the clock to 1.7 GHz and below. DeepSeek-V4's
// shape, MXFP4, a8: 3.3-3.8 TB/s. `exactmoe bench`, 2026-11-30; docs/log.md has the trials.

extern "C" __global__ void __launch_bounds__(THREADS, 1)
experts(const u8* first_codes, const u8* first_scales, const float* first_factors,
        u64 first_code_stride, u64 first_scale_stride, const u8* second_codes,
        const u8* second_scales, const float* second_factors, u64 second_code_stride,
        u64 second_scale_stride, const int* offsets, const int* slots, const u8* x, void* out,
        u32 num_experts, u32 k, u32 panels, u32 top_k, u32 divide, float limit
#if A8
        , const u8* wide_x, const float* x_scales, const u8* first_on_fp8, const u8* second_on_fp8,
        u8* wide_h, float* h_scales, const u8* down_on_fp8, const float* weights
#endif
) {
    extern __shared__ u8 raw[];
    __shared__ Work work;
    Arguments given{{first_codes, second_codes},
                    {first_scales, second_scales},
                    {first_code_stride, second_code_stride},
                    {first_scale_stride, second_scale_stride},
                    {first_factors, second_factors}};
    given.offsets = offsets, given.slots = slots, given.x = x;
    given.num_experts = num_experts, given.k = k, given.panels = panels, given.top_k = top_k;
#if A8
    given.on_fp8[0] = first_on_fp8, given.on_fp8[1] = second_on_fp8;
    given.wide_x = wide_x, given.x_scales = x_scales;
#endif

    Ring ring;
    ring.x = (shared_address(raw) + 1023) & ~1023u;
    ring.codes = ring.x + STAGES * X_BYTES;
    ring.scales = ring.codes + STAGES * 2 * CODE_BYTES;
    ring.x_scales = ring.scales + STAGES * 2 * PANEL_SCALE_BYTES;
    u32 staging = ring.x_scales + STAGES * X_SCALE_BYTES;
    ring.full = staging + STAGING_BYTES;
    ring.empty = ring.full + 8 * STAGES;
    u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            barrier_init(ring.full + 8 * stage, GATHER ? 2 : 1);
            barrier_init(ring.empty + 8 * stage, WARPS);
        }
        barrier_init_fence();
    }
#if UNITS_FP8
    write_tables(threadIdx.x);
#endif
#if A8 && GATE_UP
    clear_amax(staging, threadIdx.x);
#endif
    // down may start while gate_up ends: the route table is older, only h has to be waited for.
#if GATE_UP
    wait_for_earlier_kernels();
    let_later_kernels_start();
#endif
    work.count(offsets, num_experts);

    u32 blocks = GATE_UP ? panels : (panels + 1) / 2;
    u32 items = work.tiles_before[num_experts] * blocks;
    if (warp >= WARPS) {
        take_registers<false>();
        if (warp == WARPS) fill_ring(given, ring, work, blocks, items, lane);
        else if (GATHER) gather_rows(given, ring, work, blocks, items, warp - WARPS - 1, lane);
        return;
    }

    take_registers<true>();
    Place place;
    for (u32 index = blockIdx.x, turn = 0; index < items; index += gridDim.x, ++turn) {
        Item item = work.find(num_experts, index, blocks);
        float first_factor = first_factors[item.expert];
        float second_factor = second_factors[item.expert];
        float sums[TOKENS / 2];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0.0f;
        Lane in_ring{ring.codes + warp * 512 + lane * 16,
                     ring.scales + (warp * 8 + lane / 4) * SCALE_BYTES,
                     ring.x_scales + lane % 4 * 8, ring.x};
#if A8
        Passes passes(given, item.expert);
#if UNITS_BF16
        if (passes.first == BF16_PASS) {
            Multiply<Bf16Operands> multiply(ring, in_ring, k / CHUNK, first_factor, second_factor);
            multiply.first_counts = !passes.first_on_fp8;
            multiply.second_counts = !passes.second_on_fp8;
            WIDTHS(item.count, multiply.run, sums, place)
        }
#endif
#if UNITS_FP8
        if (passes.last == FP8_PASS) {
            Multiply<Fp8Operands> multiply(ring, in_ring, k / CHUNK, first_factor, second_factor);
            multiply.first_counts = passes.first_on_fp8;
            multiply.second_counts = passes.second_on_fp8;
            WIDTHS(item.count, multiply.run, sums, place)
        }
#endif
#else
        Multiply multiply{ring, in_ring, k / CHUNK, bf16_offset(first_factor),
                          bf16_offset(second_factor)};
        WIDTHS(item.count, multiply.run, sums, place)
#endif
#if A8 && GATE_UP
        Quantized h{static_cast<u8*>(out), wide_h, h_scales, down_on_fp8};
        finish_a8(sums, item, first_factor, second_factor, divide, limit, slots, weights, h, panels,
                  staging, turn, warp, lane);
#else
        finish(sums, item, first_factor, second_factor, divide, limit, slots, out, panels,
               staging + warp / 4 * OUT_BYTES, warp, lane);
#endif
    }
}
