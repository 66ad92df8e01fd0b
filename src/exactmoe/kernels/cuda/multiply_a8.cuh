// What a warpgroup does with one item in class a8: as multiply.cuh, but each 128 along k is a chain of
// its own from +0, and sums = fma(chain, scale of the token, sums), k ascending.

template <class Operands>
struct Multiply {
    Ring ring;
    Lane lane;
    u32 chunks, first_offset, second_offset;
    bool first_counts, second_counts;  // MIXED: of the projections, which run on these units

    __device__ __forceinline__ Multiply(const Ring& ring, const Lane& lane, u32 chunks,
                                        float first_factor, float second_factor)
        : ring(ring), lane(lane), chunks(chunks), first_offset(Operands::offset(first_factor)),
          second_offset(Operands::offset(second_factor)) {}

    // sums [64, N] of the first N token columns, along all of k.
    template <int N>
    __device__ __forceinline__ void run(float (&sums)[TOKENS / 2], Place& place) const {
        constexpr bool AHEAD = N < 64;  // the next stage's weights are loaded while wgmmas run
        Operands weights;
        auto fetch = [&]() {
            barrier_wait(ring.full + 8 * place.stage, place.parity);
            weights.load(lane.codes + place.stage * 2 * CODE_BYTES,
                         lane.scales + place.stage * 2 * PANEL_SCALE_BYTES);
        };
        bool elected = threadIdx.x % 32 == 0;
        if (AHEAD) fetch();
#pragma unroll 1
        for (u32 left = chunks; left > 0; --left) {
            if (!AHEAD) fetch();
            float chain[TOKENS / 2];
            weights.template multiply<N>(chain, lane.rows + place.stage * (X_BYTES / 16),
                                         lane.tables, first_offset, second_offset);
            float first_factor, second_factor;
            weights.factors(first_factor, second_factor, first_offset, second_offset);
            u32 scales_from = lane.x_scales + place.stage * X_SCALE_BYTES;
            u32 done = ring.empty + 8 * place.stage;
            place.next();
            if (AHEAD && left > 1) fetch();
            u32 token[N / 8][2];
#pragma unroll
            for (int i = 0; i < N / 8; ++i) load_8(token[i], scales_from + i * 32);
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < N / 8; ++i) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float scale = __uint_as_float(token[i][j]);
                    float& first = sums[4 * i + j];
                    float& second = sums[4 * i + 2 + j];
                    float of_first = __fmaf_rn(chain[4 * i + j], __fmul_rn(first_factor, scale), first);
                    float of_second =
                        __fmaf_rn(chain[4 * i + 2 + j], __fmul_rn(second_factor, scale), second);
                    first = !MIXED || first_counts ? of_first : first;
                    second = !MIXED || second_counts ? of_second : second;
                }
            }
            if (elected) barrier_arrive(done);
        }
    }

};
