// gate_up and down of the routed experts on sm_90: a grouped matrix product with FP4 weights on the M
// side (64 rows a warpgroup) and TOKENS tokens on the N side. Class a16: wgmma m64nNk16 bf16, k
// ascending on one accumulator from +0. Class a8: each 128 of k from +0, on the fp8 (m64nNk32) or the
// bf16 units as the expert's bytes decide. TOKENS, the ring and the order of work change no bit.
//
// A block owns one SM: four warpgroups multiply, one more fills a ring in shared memory (fill.cuh). A
// work item is 2 panels of 128 weight rows x up to TOKENS tokens of one expert x all of k. Of the two
// panels each lane holds row r of the first and row r of the second: gate and up of one feature, so
// SwiGLU needs no exchange; for down the panels 2j and 2j + 1.
//
// One launch may hold both phases: items of gate_up come first, and an item of down waits until all of
// h of its expert is written. The weights that it needs are on their way before.
//
// Token rows are gathered from x (GATHER), or read packed: eights of rows of one expert, cut along k
// into pieces of 8 x 64 bf16 or 8 x 128 e4m3 that lie as wgmma wants them (128-byte swizzle), so that
// one bulk copy brings eight rows. gate_up writes h packed, and quantised in a8; kernels/cuda/pack.cu
// and pack_a8.cu pack x for wide tiles. In a8 a piece has 8 scales beside it.
//
// Compiled with: TOKENS, STAGES, FORMAT_NVFP4 (else MXFP4), GATHER, SLOT_F32, A8 (else a16),
// UNITS_FP8, UNITS_BF16 (of the experts; both: MIXED).
//
// H200, GLM shape, NVFP4, a16: 3.4-3.7 TB/s of weights from 2 to 64 tokens (reads reach 4.6), 482 TFLOP/s
// at 4096; DeepSeek-V4's shape, MXFP4, a8: 3.7-4.0 TB/s from 4 to 64. Up to 64
// tokens a16 waits for instructions more than for memory: a stage of 128 x 256 weights is 170 in each
// warp (a8: 133), most of them to unpack. Under load the power limit takes the clock from 1.8 GHz to
// 1.4. `exactmoe bench`, benchmarks/bounds.py, 2026-12-01; docs/log.md has the trials.

extern "C" __global__ void __launch_bounds__(THREADS, 1)
experts(const __grid_constant__ Arguments given) {
    extern __shared__ u8 raw[];
    __shared__ Work work;
    Ring ring;
    ring.x = (shared_address(raw) + 1023) & ~1023u;
    ring.codes = ring.x + STAGES * X_BYTES;
    ring.scales = ring.codes + STAGES * 2 * CODE_BYTES;
    ring.x_scales = ring.scales + STAGES * 2 * PANEL_SCALE_BYTES;
    u32 staging = ring.x_scales + STAGES * X_SCALE_BYTES;
    u32 of_tokens = staging + STAGING_BYTES;
    ring.full = of_tokens + WARPS / 4 * TOKENS_BYTES;
    ring.empty = ring.full + 8 * STAGES;
    ring.item_full = ring.empty + 8 * STAGES;
    ring.item_empty = ring.item_full + 8 * ITEMS;
    ring.factors_full = ring.item_empty + 8 * ITEMS;
    u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            barrier_init(ring.full + 8 * stage, 2);
            barrier_init(ring.empty + 8 * stage, WARPS);
        }
        for (u32 item = 0; item < ITEMS; ++item) {
            barrier_init(ring.item_full + 8 * item, 1);
            barrier_init(ring.item_empty + 8 * item, WARPS + ROWS_WARPS);
            barrier_init(ring.factors_full + 8 * item, 1);
        }
        barrier_init_fence();
    }
#if UNITS_FP8
    write_tables(threadIdx.x);
#endif
#if A8
    clear_amax(staging, threadIdx.x);
#endif
    // down alone may start while gate_up ends: the route table is older, only h has to be waited for.
    if (given.phases & GATE_UP) {
        wait_for_earlier_kernels();
        let_later_kernels_start();
    }
    work.count(given.offsets, given.num_experts);
    if (warp >= WARPS) {
        take_registers<false>();
        if (warp == WARPS) fill_weights(given, ring, work, lane);
        else fill_rows(given, ring, work, warp - WARPS - 1, lane);
        return;
    }

    take_registers<true>();
    Place place;
    PlaceIn<ITEMS> told;
    Turns turns(warp / 4);
    for (u32 turn = 0;; told.next()) {
        barrier_wait(ring.item_full + 8 * told.stage, told.parity);
        const WholeItem& item = work.items[told.stage];
        u32 phase = item.phase;
        if (phase == 0) break;
        Tokens(of_tokens, warp / 4).ask(given, item);
        barrier_wait(ring.factors_full + 8 * told.stage, told.parity);
        float sums[TOKENS / 2];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0.0f;
        Lane in_ring{ring.codes + warp * 512 + lane * 16,
                     ring.scales + (warp * 8 + lane / 4) * SCALE_BYTES,
                     ring.x_scales + lane % 4 * 8, ring.x};
        u32 chunks = given.chunks(phase);
#if A8
        Passes passes(item);
#if UNITS_BF16
        if (passes.first == BF16_PASS) {
            Multiply<Bf16Operands> multiply(ring, in_ring, chunks, turns, item);
            multiply.first_counts = !passes.first_on_fp8;
            multiply.second_counts = !passes.second_on_fp8;
            WIDTHS(item.count, multiply.run, sums, place)
        }
#endif
#if UNITS_FP8
        if (passes.last == FP8_PASS) {
            Multiply<Fp8Operands> multiply(ring, in_ring, chunks, turns, item);
            multiply.first_counts = passes.first_on_fp8;
            multiply.second_counts = passes.second_on_fp8;
            WIDTHS(item.count, multiply.run, sums, place)
        }
#endif
        Tokens tokens(of_tokens, warp / 4);
        tokens.wait();
        bool divides = FORMAT_NVFP4 && given.divide;
        if (phase == GATE_UP) {
            tokens.load_weights(given, item);
            if (divides) finish_a8<true>(sums, given, item, tokens, staging, turn, warp, lane);
            else finish_a8<false>(sums, given, item, tokens, staging, turn, warp, lane);
            ++turn;
        }
#else
        Multiply multiply{ring, in_ring, chunks, bf16_offset(item.first_factor),
                          bf16_offset(item.second_factor)};
        WIDTHS(item.count, multiply.run, sums, place)
        Tokens tokens(of_tokens, warp / 4);
        tokens.wait();
        bool divides = FORMAT_NVFP4 && given.divide;
        if (phase == GATE_UP) {
            if (divides) finish_gate_up<true>(sums, given, item, tokens, staging + warp / 4 * OUT_BYTES, warp, lane);
            else finish_gate_up<false>(sums, given, item, tokens, staging + warp / 4 * OUT_BYTES, warp, lane);
        }
#endif
        else if (divides) finish_down<true>(sums, given, item, tokens, staging + warp / 4 * OUT_BYTES, warp, lane);
        else finish_down<false>(sums, given, item, tokens, staging + warp / 4 * OUT_BYTES, warp, lane);
        bool waited_for = phase == GATE_UP && given.phases != GATE_UP;
        if (waited_for) proxy_fence_global();
        u32 expert = item.expert;
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(ring.item_empty + 8 * told.stage);
            if (waited_for) add_release(given.counters + NUM_QUEUES + expert, 1);
        }
    }
    turns.end();
}
