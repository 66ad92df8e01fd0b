// gate_up and down of a dense bf16 MLP on sm_90: weights on the M side, tokens on the N side, wgmma
// m64nNk16 bf16, k ascending on one accumulator from +0, both operands in shared memory. Nothing
// that it is compiled with changes a bit.
//
// A work item is ROWS weight rows x up to TOKENS tokens x all of k. In gate_up eights of gate and of
// up rows take turns, so that each lane holds both sums of a feature. ROWS may be 32: the other
// half of the matrix instruction's 64 rows is whatever lies behind in shared memory, and no one
// stores it. One warp fills a ring by tensor copies: a stage is CHUNKS x 64 of k, each row 128 bytes
// in 128-byte swizzle. The blocks of a cluster have the same tokens; each reads some pieces of them
// and sends these to all; a piece without tokens is not copied, and what its columns multiply no one
// stores. Rows and k are multiples of 64; tensor copies fill up with zeros.
//
// down starts while gate_up ends, and reads weights until h is there.
//
// Measured before the tiles were chosen by it and before absent tokens were no longer copied: one
// H200, 2026-11-30, medians of 15 replays of a graph over rotating weights, H 4096, us of gate_up +
// down with the best tiles (three cuBLAS calls beside them) at 1 / 16 / 64 / 256 / 1024 / 4096 tokens:
// I 2048: 17.6 / 17.0 / 22.1 / 35.5 / 85 / 334 (25.0 / 25.8 / 26.7 / 31.5 / 73 / 267)
// I 12288: 77 / 77 / 86 / 147 / 445 / 1958 (88 / 86 / 90 / 118 / 399 / 1764)
//
// Compiled with: GATE_UP (else down), ROWS, TOKENS, CHUNKS, STAGES, CLUSTER, BLOCKS (of a
// multiprocessor), SEGMENTED (k > 4096), WIDTH_STEP (widths of N that a tail of tokens may take).

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS)
dense(const __grid_constant__ TensorMap first_map, const __grid_constant__ TensorMap second_map,
      const __grid_constant__ TensorMap token_map, void* values, u64 stride, u32 num_tokens,
      u32 span, u32 rows, u32 k, float limit) {
    extern __shared__ u8 raw[];
    u32 weight_ring = (shared_address(raw) + 1023) & ~1023u;
    u32 token_ring = weight_ring + STAGES * WEIGHT_BYTES;
    u32 staging = token_ring + STAGES * TOKEN_BYTES;
    u32 full = staging + WARPGROUPS * OUT_BYTES, empty = full + 8 * STAGES;
    u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    u32 rank = CLUSTER == 1 ? 0 : rank_in_cluster();

    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(empty + 8 * stage, WARPS * CLUSTER);
        }
        barrier_init_fence();
    }
    if constexpr (CLUSTER == 1) __syncthreads();
    else cluster_sync();
#if GATE_UP
    wait_for_earlier_kernels();
    let_later_kernels_start();
#endif

    Work work(num_tokens, span, rows);
    u32 steps = (k / 64 + CHUNKS - 1) / CHUNKS, step_of_item = gridDim.x / CLUSTER;
    Place place;

    if (warp >= WARPS) {
        take_registers<false>();
        if (warp == WARPS && elected()) {
            bool waited = GATE_UP;
            prefetch_map(first_map);
            prefetch_map(second_map);
            prefetch_map(token_map);
#pragma unroll 1
            for (u32 index = blockIdx.x / CLUSTER; index < work.items; index += step_of_item) {
                Item item = work.find(index, rank);
                u32 row = item.block * FEATURES, token_bytes = item.copied() * CHUNKS * 128;
                auto fill_weights = [&](u32 step, u32 stage) {
                    u32 to = weight_ring + stage * WEIGHT_BYTES, barrier = full + 8 * stage;
                    barrier_arrive_expect(barrier, WEIGHT_BYTES + token_bytes);
#if GATE_UP
#pragma unroll
                    for (u32 eight = 0; eight < ROWS / 8; ++eight)
                        copy_box(to + eight * EIGHT_STRIDE, eight % 2 ? second_map : first_map,
                                 row + eight / 2 * 8, step * CHUNKS, barrier);
#else
                    copy_box(to, first_map, row, step * CHUNKS, barrier);
#endif
                };
                auto fill_tokens = [&](u32 step, u32 stage) {
                    u32 to = token_ring + stage * TOKEN_BYTES, barrier = full + 8 * stage;
                    if constexpr (CLUSTER == 1) {
                        copy_box(to, token_map, item.first, step * CHUNKS, barrier);
                    } else {
#pragma unroll
                        for (u32 turn = 0; turn < PIECES / CLUSTER; ++turn) {
                            u32 token = (turn * CLUSTER + rank) * PIECE;
                            if (token >= item.count) continue;
#pragma unroll
                            for (u32 chunk = 0; chunk < CHUNKS; ++chunk)
                                copy_box_to((1 << CLUSTER) - 1,
                                            to + (chunk * TOKENS + token) * 128, token_map,
                                            item.first + token, step * CHUNKS + chunk, barrier);
                        }
                    }
                };
                u32 step = 0;
                if (!waited) {  // the ring's first weights need no h
                    u32 ahead = steps < STAGES ? steps : STAGES;
#pragma unroll 1
                    for (u32 stage = 0; stage < ahead; ++stage) fill_weights(stage, stage);
                    wait_for_earlier_kernels();
                    waited = true;
#pragma unroll 1
                    for (; step < ahead; ++step, place.next()) fill_tokens(step, step);
                }
#pragma unroll 1
                for (; step < steps; ++step, place.next()) {
                    barrier_wait(empty + 8 * place.stage, place.parity ^ 1);
                    fill_weights(step, place.stage);
                    fill_tokens(step, place.stage);
                }
            }
        }
    } else {
        take_registers<true>();
        Multiply multiply{full, empty, operand(weight_ring + warp / 4 * 8 * EIGHT_STRIDE, EIGHT_STRIDE),
                          operand(token_ring, EIGHT_BYTES)};
        Output out{values, stride, rows};
#pragma unroll 1
        for (u32 index = blockIdx.x / CLUSTER; index < work.items; index += step_of_item) {
            Item item = work.find(index, rank);
            float sums[TOKENS / 2];
            multiply.all(item.count, sums, place, steps);
            store(sums, item, out, limit, staging);
        }
    }
    // Others may still arrive at this block's barriers.
    if constexpr (CLUSTER > 1) cluster_sync();
}
