// What a warpgroup does with a stage of the ring: wgmma m64nNk16, both operands in shared memory.

struct Multiply {
    u32 full, empty;            // barriers
    u64 weight_rows, token_rows;  // of this warpgroup, in the ring's first stage

    // This warp is done with a stage, which every block of the cluster fills.
    __device__ __forceinline__ void release(u32 stage) const {
        u32 lane = threadIdx.x % 32;
        if constexpr (CLUSTER == 1) {
            if (lane == 0) barrier_arrive(empty + 8 * stage);
        } else {
            if (lane < CLUSTER) barrier_arrive_in(lane, empty + 8 * stage);
        }
    }

    // sums [64, N] += weights x tokens of `steps` stages. A stage is released behind the wgmmas of
    // the next, so that those need not wait.
    template <u32 N>
    __device__ __forceinline__ void run(float (&sums)[TOKENS / 2], Place& place, u32 steps) const {
#pragma unroll 1
        for (u32 step = 0; step < steps; ++step, place.next()) {
            barrier_wait(full + 8 * place.stage, place.parity);
            u64 weights = weight_rows + place.stage * (WEIGHT_BYTES / 16);
            u64 tokens = token_rows + place.stage * (TOKEN_BYTES / 16);
            wgmma_fence();
#pragma unroll
            for (u32 chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
                for (u32 sixteen = 0; sixteen < 4; ++sixteen)
                    wgmma<N>(sums, weights + chunk * (CHUNK_STRIDE / 16) + sixteen * 2,
                             tokens + chunk * (TOKENS * 128 / 16) + sixteen * 2);
            wgmma_commit();
            wgmma_wait<1>();
            if (step > 0) release(place.last());
        }
        wgmma_wait<0>();
        release(place.last());
    }

    // As `run` with the least width that holds `count` tokens: a column has the same bits for every
    // N.
    template <u32 N>
    __device__ __forceinline__ void widths(u32 count, float (&sums)[TOKENS / 2], Place& place,
                                           u32 steps) const {
        if constexpr (N > WIDTH_STEP) {
            if (count <= N - WIDTH_STEP)
                return widths<N - WIDTH_STEP>(count, sums, place, steps);
        }
        run<N>(sums, place, steps);
    }

    // All k of an item; more than 4096 in segments, each from +0.
    __device__ __forceinline__ void all(u32 count, float (&sums)[TOKENS / 2], Place& place,
                                        u32 steps) const {
#if SEGMENTED
        float total[TOKENS / 2];
#pragma unroll
        for (u32 i = 0; i < TOKENS / 2; ++i) total[i] = 0.0f;
#pragma unroll 1
        for (u32 left = steps; left > 0;) {
            u32 now = left < SEGMENT_STEPS ? left : SEGMENT_STEPS;
            left -= now;
            chain(count, sums, place, now);
#pragma unroll
            for (u32 i = 0; i < TOKENS / 2; ++i) total[i] = __fadd_rn(total[i], sums[i]);
        }
#pragma unroll
        for (u32 i = 0; i < TOKENS / 2; ++i) sums[i] = total[i];
#else
        chain(count, sums, place, steps);
#endif
    }

    __device__ __forceinline__ void chain(u32 count, float (&sums)[TOKENS / 2], Place& place,
                                          u32 steps) const {
#pragma unroll
        for (u32 i = 0; i < TOKENS / 2; ++i) sums[i] = 0.0f;
        widths<TOKENS>(count, sums, place, steps);
        // No use of them moves before the wait.
#pragma unroll
        for (u32 i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");
    }
};
