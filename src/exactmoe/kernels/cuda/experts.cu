// gate_up and down of the routed experts on sm_90, class a16: a grouped matrix product with FP4
// weights on the M side (64 rows a warpgroup) and TOKENS tokens on the N side, wgmma m64nNk16 bf16,
// k ascending on one accumulator from +0. TOKENS, the ring and the order of work change no bit.
//
// A block owns one SM: four warpgroups multiply, one more fills a ring in shared memory. A work item
// is 2 panels of 128 weight rows x up to TOKENS tokens of one expert x all of k. Of the two panels
// each lane holds row r of the first and row r of the second: gate and up of one feature, so SwiGLU
// needs no exchange; for down the panels 2j and 2j + 1.
//
// Token rows are gathered from x (GATHER), or read packed: eights of rows of one expert, cut along k
// into pieces of 8 x 64 bf16 that lie as wgmma wants them (128-byte swizzle), so that one bulk copy
// brings eight rows. gate_up writes h packed, kernels/cuda/pack.cu packs x for wide tiles.
//
// Compiled with: TOKENS, STAGES, FORMAT_NVFP4 (else MXFP4), GATE_UP (else down), GATHER, SLOT_F32.
//
// H200, GLM shape, NVFP4: 3.6-3.9 TB/s of weights from 4 tokens on (floor 4.4). What bounds it is
// issue: 179 instructions a warp and stage of 128 x 256 weights, 1050 cycles where 1000 keep up with
// memory at 1.8 GHz, and the power limit takes the clock to 1.7 GHz. docs/log.md has the trials.

extern "C" __global__ void __launch_bounds__(THREADS, 1)
experts(const u8* first_codes, const u8* first_scales, const float* first_factors,
        u64 first_code_stride, u64 first_scale_stride, const u8* second_codes,
        const u8* second_scales, const float* second_factors, u64 second_code_stride,
        u64 second_scale_stride, const int* offsets, const int* slots, const u8* x, void* out,
        u32 num_experts, u32 k, u32 panels, u32 top_k, u32 divide, float limit) {
    extern __shared__ u8 raw[];
    __shared__ Work work;

    u32 x_ring = (shared_address(raw) + 1023) & ~1023u;
    u32 code_ring = x_ring + STAGES * X_BYTES;
    u32 scale_ring = code_ring + STAGES * 2 * CODE_BYTES;
    u32 staging = scale_ring + STAGES * 2 * PANEL_SCALE_BYTES;
    u32 full = staging + WARPS / 4 * OUT_BYTES, empty = full + 8 * STAGES;
    u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + 8 * stage, GATHER ? 2 : 1);
            barrier_init(empty + 8 * stage, WARPS);
        }
        barrier_init_fence();
    }
    // down may start while gate_up ends: the route table is older, only h has to be waited for.
#if GATE_UP
    wait_for_earlier_kernels();
    let_later_kernels_start();
#endif
    work.count(offsets, num_experts);

    u32 blocks = GATE_UP ? panels : (panels + 1) / 2;
    u32 items = work.tiles_before[num_experts] * blocks, chunks = k / CHUNK;
    Place place;

    if (warp >= WARPS) take_registers<false>();
    if (warp == WARPS) {  // weights, and packed rows
        bool waited = GATE_UP;
#pragma unroll 1
        for (u32 index = blockIdx.x; index < items; index += gridDim.x) {
            Item item = work.find(num_experts, index, blocks);
            u32 eights = GATHER ? 0 : (item.count + 7) / 8;
            const u8* rows = x + u64(item.group + lane) * chunks * ROWS_BYTES;
            // Lanes 0 ... 3 copy codes and scales of both panels.
            bool codes = lane < 2, second = lane % 2;
            u32 panel = GATE_UP ? item.block : 2 * item.block + second;
            panel = panel < panels ? panel : panel - 1;
            u32 bytes = codes ? CODE_BYTES : PANEL_SCALE_BYTES;
            const u8* source = codes ? (second ? second_codes : first_codes)
                                     : (second ? second_scales : first_scales);
            u64 stride = codes ? (second ? second_code_stride : first_code_stride)
                               : (second ? second_scale_stride : first_scale_stride);
            source += item.expert * stride + u64(panel) * chunks * bytes;
            u32 ring = (codes ? code_ring : scale_ring) + second * bytes;
            auto fill_weights = [&](u32 chunk, u32 stage) {
                if (lane == 0)
                    barrier_arrive_expect(full + 8 * stage, WEIGHT_BYTES + eights * ROWS_BYTES);
                if (lane < 4)
                    copy_bulk(ring + stage * 2 * bytes, source + chunk * bytes, bytes,
                              full + 8 * stage);
            };
            auto fill_rows = [&](u32 chunk, u32 stage) {
                if (lane < eights)
                    copy_bulk(x_ring + stage * X_BYTES + lane * ROWS_BYTES,
                              rows + chunk * ROWS_BYTES, ROWS_BYTES, full + 8 * stage);
            };
            u32 chunk = 0;
            if (!waited) {  // the ring's first weights need no h
                u32 ahead = chunks < STAGES ? chunks : STAGES;
#pragma unroll 1
                for (u32 stage = 0; stage < ahead; ++stage) fill_weights(stage, stage);
                wait_for_earlier_kernels();
                waited = true;
#pragma unroll 1
                for (; chunk < ahead; ++chunk, place.next()) fill_rows(chunk, chunk);
            }
#pragma unroll 1
            for (; chunk < chunks; ++chunk, place.next()) {
                barrier_wait(empty + 8 * place.stage, place.parity ^ 1);
                fill_weights(chunk, place.stage);
                fill_rows(chunk, place.stage);
            }
        }
        return;
    }
    if (warp > WARPS) {  // rows of x: each warp fills every third stage
        u32 number = warp - WARPS - 1, piece = lane % 8, turn = 0;
        for (u32 index = blockIdx.x; GATHER && index < items; index += gridDim.x) {
            Item item = work.find(num_experts, index, blocks);
            u32 row_of[TOKENS / 4];  // of rows lane / 8, + 4, ...
#pragma unroll
            for (u32 i = 0; i < TOKENS / 4; ++i) {
                u32 row = 4 * i + lane / 8;
                row_of[i] = row < item.count ? slots[item.first + row] / top_k : 0;
            }
            for (u32 chunk = 0; chunk < chunks; ++chunk, place.next()) {
                bool mine = turn == number;
                turn = turn + 1 == GATHER_WARPS ? 0 : turn + 1;
                if (!mine) continue;
                barrier_wait(empty + 8 * place.stage, place.parity ^ 1);
                u32 target = x_ring + place.stage * X_BYTES;
#pragma unroll
                // Eight lanes copy 128 bytes of a row. Rows past the count keep old values: they
                // reach only columns that nobody stores.
                for (u32 i = 0; i < TOKENS / 4; ++i) {
                    u32 row = 4 * i + lane / 8;
                    if (row < item.count) {
                        const u8* values = x + (u64(row_of[i]) * k + chunk * CHUNK) * 2 + piece * 16;
                        u32 to = target + row / 8 * ROWS_BYTES + row % 8 * 128 +
                                 (piece ^ (row % 8)) * 16;
                        copy_16(to, values);
                        copy_16(to + ROWS_BYTES / 2, values + 128);
                    }
                }
                copies_wait();
                proxy_fence();
                __syncwarp();
                if (lane == 0) barrier_arrive(full + 8 * place.stage);
            }
        }
        return;
    }

    take_registers<true>();
    u64 ring_rows = operand(x_ring, ROWS_BYTES);
    for (u32 index = blockIdx.x; index < items; index += gridDim.x) {
        Item item = work.find(num_experts, index, blocks);
        float first_factor = first_factors[item.expert];
        float second_factor = second_factors[item.expert];
#if FORMAT_NVFP4
        constexpr u32 first_offset = 0, second_offset = 0;
#else
        // The factor is 2^p: its exponent bits are the largest scale byte.
        u32 first_offset = (245 - (__float_as_uint(first_factor) >> 23)) * 128 * 65537;
        u32 second_offset = (245 - (__float_as_uint(second_factor) >> 23)) * 128 * 65537;
#endif
        float sums[TOKENS / 2];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0.0f;
        Multiply multiply{full, empty, code_ring + warp * 512 + lane * 16,
                          scale_ring + (warp * 8 + lane / 4) * SCALE_BYTES, ring_rows, chunks,
                          first_offset, second_offset};
        WIDTHS(item.count, multiply.run, sums, place)
        finish(sums, item, first_factor, second_factor, divide, limit, slots, out, panels,
               staging + warp / 4 * OUT_BYTES, warp, lane);
    }
}
