// What a warpgroup does with one item: weights from the ring to registers, codes to bf16, wgmma.

struct Multiply {
    Ring ring;
    Lane lane;
    u32 chunks, first_offset, second_offset;

    // sums [64, N] of the first N token columns, along all of k. N <= TOKENS is a multiple of 8 that
    // holds the item's tokens: wgmma gives a column the same bits for every N.
    template <int N>
    __device__ __forceinline__ void run(float (&sums)[TOKENS / 2], Place& place) const {
        constexpr bool OVERLAP = TOKENS <= 16;  // a stage's last wgmmas run on into the next stage
        constexpr int GROUP = N >= 64 ? 2 : 4;  // steps of 16 along k in one wgmma group
        u32 first[4], second[4];
        Scales first_scale, second_scale;
        u32 first_codes = kept(lane.codes), first_scales = kept(lane.scales);
        auto fetch = [&]() {
            barrier_wait(ring.full + 8 * place.stage, place.parity);
            u32 from = first_codes + place.stage * 2 * CODE_BYTES;
            u32 scales_from = first_scales + place.stage * 2 * PANEL_SCALE_BYTES;
            load_16(first, from);
            load_16(second, from + CODE_BYTES);
            first_scale.load(scales_from);
            second_scale.load(scales_from + PANEL_SCALE_BYTES);
        };
        u32 elected = kept(threadIdx.x % 32 == 0);
        // Of the stage before, which this lane gives back; none before the first.
        u32 before = 0, gives_back = 0;
        u64 first_rows = operand_to_step_from(lane.rows, ROWS_BYTES);
        if (N < 64) fetch();
#pragma unroll 1
        for (u32 left = chunks; left > 0; --left) {
            u64 rows = first_rows + place.stage * (X_BYTES / 16);
            u32 done = ring.empty + 8 * place.stage;
            if (N >= 64) fetch();
#pragma unroll
            for (int begin = 0; begin < 8; begin += GROUP) {
                u32 a[GROUP][4];
#pragma unroll
                for (int pair = 0; pair < GROUP / 2; ++pair)
                    operands_of_pair(first, second, first_scale, second_scale, begin + 2 * pair,
                                     first_offset, second_offset, a[2 * pair], a[2 * pair + 1]);
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
                if (OVERLAP && begin == 0 && gives_back) barrier_arrive(before);
            }
            if (!OVERLAP && elected) barrier_arrive(done);
            before = done, gives_back = elected;
        }
        if (OVERLAP) {
            wgmma_wait<0>();
            if (elected) barrier_arrive(before);
        }
    }
};
