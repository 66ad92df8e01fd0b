// What a warpgroup does with one item: weights from the ring to registers, codes to bf16, wgmma.

struct Multiply {
    u32 full, empty;    // barriers
    u32 codes, scales;  // of this lane, in the ring's first stage
    u64 ring_rows;      // token rows of the ring's first stage
    u32 chunks, first_offset, second_offset;

    // sums [64, N] of the first N token columns, along all of k. N <= TOKENS is a multiple of 8 that
    // holds the item's tokens: wgmma gives a column the same bits for every N.
    template <int N>
    __device__ __forceinline__ void run(float (&sums)[TOKENS / 2], Place& place) const {
        constexpr int GROUP = N >= 64 ? 2 : 4;  // steps of 16 along k in one wgmma group
        u32 first[4], second[4];
        Scales first_scale, second_scale;
        auto fetch = [&]() {
            barrier_wait(full + 8 * place.stage, place.parity);
            u32 from = codes + place.stage * 2 * CODE_BYTES;
            u32 scales_from = scales + place.stage * 2 * PANEL_SCALE_BYTES;
            load_16(first, from);
            load_16(second, from + CODE_BYTES);
            first_scale.load(scales_from);
            second_scale.load(scales_from + PANEL_SCALE_BYTES);
        };
        bool elected = threadIdx.x % 32 == 0;
        if (N < 64) fetch();
#pragma unroll 1
        for (u32 left = chunks; left > 0; --left) {
            u64 rows = ring_rows + place.stage * (X_BYTES / 16);
            u32 done = empty + 8 * (OVERLAP ? place.last() : place.stage);
            if (N >= 64) fetch();
#pragma unroll
            for (int begin = 0; begin < 8; begin += GROUP) {
                u32 a[GROUP][4];
#pragma unroll
                for (int pair = 0; pair < GROUP / 2; ++pair) {
                    int step = begin + 2 * pair;
                    u32 low[4], high[4];
                    unpack(first[step / 2], low);
                    unpack(second[step / 2], high);
                    u32 scale = first_scale.pair(step, first_offset);
                    u32 other = second_scale.pair(step, second_offset);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        u32(&operands)[4] = a[2 * pair + half];
                        operands[0] = times(low[2 * half], scale, half);
                        operands[2] = times(low[2 * half + 1], scale, half);
                        operands[1] = times(high[2 * half], other, half);
                        operands[3] = times(high[2 * half + 1], other, half);
                    }
                }
                if (begin + GROUP == 8) {
                    place.next();
                    if (N < 64 && left > 1) fetch();  // while the matrix units work
                }
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < GROUP; ++i) {
                    int step = begin + i;
                    wgmma<N>(sums, a[i], rows + step % 4 * 2 + step / 4 * (ROWS_BYTES / 2 / 16));
                }
                wgmma_commit();
                if (OVERLAP || begin + GROUP < 8) wgmma_wait<1>();
                else wgmma_wait<0>();
                // Behind the first group of this stage, all of the one before is done.
                if (OVERLAP && begin == 0 && left < chunks && elected) barrier_arrive(done);
            }
            if (!OVERLAP && elected) barrier_arrive(done);
        }
        if (OVERLAP) {
            wgmma_wait<0>();
            if (elected) barrier_arrive(empty + 8 * place.last());
        }
    }
};
