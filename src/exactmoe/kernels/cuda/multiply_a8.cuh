// What a warpgroup does with one item in class a8: as multiply.cuh, but each 128 along k is a chain of
// its own from +0, and sums = fma(chain, scale of the token, sums), k ascending.

template <class Operands>
struct Multiply {
    Ring ring;
    Lane lane;
    u32 chunks, first_offset, second_offset;
    Turns turns;
    bool first_counts, second_counts;  // MIXED: of the projections, which run on these units

    __device__ __forceinline__ Multiply(const Ring& ring, const Lane& lane, u32 chunks,
                                        const Turns& turns, const WholeItem& item)
        : ring(ring), lane(lane), chunks(chunks),
          first_offset(Operands::offset(item.first_factor)),
          second_offset(Operands::offset(item.second_factor)), turns(turns) {}

    // What a finished chain is multiplied by.
    template <int N>
    struct Factors {
        float first, second;  // of the two weight rows
        u32 tokens[N / 8][2];
    };

    // The chain of eight tokens.
    __device__ __forceinline__ void add_eight(float (&sums)[TOKENS / 2], int to,
                                              const float (&chain)[TOKENS / 2], int from,
                                              float first, float second,
                                              const u32 (&tokens)[2]) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float factor = __fmul_rn(j < 2 ? first : second, __uint_as_float(tokens[j % 2]));
            float& total = sums[4 * to + j];
            float sum = __fmaf_rn(chain[4 * from + j], factor, total);
            total = !MIXED || (j < 2 ? first_counts : second_counts) ? sum : total;
        }
    }

    template <int N>
    __device__ __forceinline__ void add(float (&sums)[TOKENS / 2], const float (&chain)[TOKENS / 2],
                                        const Factors<N>& by) const {
#pragma unroll
        for (int i = 0; i < N / 8; ++i)
            add_eight(sums, i, chain, i, by.first, by.second, by.tokens[i]);
    }

    template <int N>
    __device__ __forceinline__ void factors(Factors<N>& found, const Operands& weights,
                                            u32 x_scales) const {
        weights.factors(found.first, found.second, first_offset, second_offset);
#pragma unroll
        for (int i = 0; i < N / 8; ++i)
            load_8(found.tokens[i], x_scales + i * 32);
    }

    // sums [64, N] of the first N token columns, along all of k. N <= TOKENS is a multiple of 8 that
    // holds the item's tokens: wgmma gives a column the same bits for every N.
    template <int N>
    __device__ __forceinline__ void run(float (&sums)[TOKENS / 2], Place& place) const {
        if constexpr (TOKENS <= 16) run_ahead<N>(sums, place);
        else run_in_turn<N>(sums, place);
    }

    // A stage's last instructions run on while the next stage's first operands are made.
    template <int N>
    __device__ __forceinline__ void run_ahead(float (&sums)[TOKENS / 2], Place& place) const {
        u64 first_rows = operand_to_step_from(lane.rows, Operands::ROWS);
        u32 codes = kept(lane.codes), scales = kept(lane.scales), constants = Operands::constants();
        u32 x_scales = kept(lane.x_scales), elected = kept(threadIdx.x % 32 == 0);
        // Of the stage before, which this lane gives back; none before the first.
        u32 before = 0, gives_back = 0;
        float chain[TOKENS / 2];
        Factors<N> by{};  // zeros: the chain before the first adds nothing
#pragma unroll
        for (int i = 0; i < N / 2; ++i) chain[i] = 0.0f;
        Operands weights;
        auto fetch = [&]() {
            barrier_wait(ring.full + 8 * place.stage, place.parity);
            weights.load(codes + place.stage * 2 * CODE_BYTES,
                         scales + place.stage * 2 * PANEL_SCALE_BYTES, constants);
        };
        fetch();
#pragma unroll 1
        for (u32 left = chunks; left > 0; --left) {
            u64 rows = first_rows + place.stage * (X_BYTES / 16);
            u32 done = ring.empty + 8 * place.stage;
            weights.template multiply<N, 0>(chain, rows, first_offset, second_offset, turns, [&]() {
                wgmma_wait<0>();
                add<N>(sums, chain, by);
                if (gives_back) barrier_arrive(before);
            });
            factors<N>(by, weights, x_scales + place.stage * X_SCALE_BYTES);
            weights.template multiply<N, 1>(chain, rows, first_offset, second_offset, turns, [&]() {
                place.next();
                if (left > 1) fetch();
            });
            before = done, gives_back = elected;
        }
        wgmma_wait<0>();
        add<N>(sums, chain, by);
        if (elected) barrier_arrive(before);
    }

    // A tile of more than 64 tokens takes its columns in two batches, one behind the other: their
    // chains share registers, and operands are made once.
    //
    // Each stage finds anew, from the place of a lane's codes, where the lane's scales and its tokens'
    // lie: kept from stage to stage that would be spilled.
    template <int N>
    __device__ __forceinline__ void run_in_turn(float (&sums)[TOKENS / 2], Place& place) const {
        constexpr int BATCHES = TOKENS > 64 ? 2 : 1, WIDTH = N / BATCHES;
        static_assert(X_BYTES % 512 == 0, "a warp's codes begin at a multiple of 512");
        u64 first_rows = operand_to_step_from(lane.rows, Operands::ROWS);
        u32 constants = Operands::constants();
        // A chain begins at +0 by its first instruction; without a value here, the compiler lets no
        // two instructions of it overlap.
        float chain[TOKENS / 2];
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) chain[i] = 0.0f;
#pragma unroll 1
        for (u32 left = chunks; left > 0; --left, place.next()) {
            Operands weights;
            u32 codes = lane.codes + place.stage * 2 * CODE_BYTES;
            u32 scales = lane.scales + place.stage * 2 * PANEL_SCALE_BYTES;
            if (BATCHES > 1) scales = ring.scales + (codes - ring.codes) / (CHUNK / 2) * SCALE_BYTES;
            barrier_wait(ring.full + 8 * place.stage, place.parity);
            weights.load(codes, scales, constants);
            u64 rows = first_rows + place.stage * (X_BYTES / 16);
            u32 x_scales = ring.x_scales + place.stage * X_SCALE_BYTES + codes / 16 % 4 * 8;
            typename Operands::Whole whole(weights, first_offset, second_offset);
            float first, second;
            weights.factors(first, second, first_offset, second_offset);
#pragma unroll
            for (int batch = 0; batch < BATCHES; ++batch) {
                whole.template multiply<WIDTH>(
                    chain, rows + batch * (WIDTH / 8 * Operands::ROWS / 16), turns);
                wgmma_wait<0>();
#pragma unroll
                for (int i = 0; i < WIDTH / 8; ++i) {
                    u32 tokens[2];
                    load_8(tokens, x_scales + (batch * WIDTH / 8 + i) * 32);
                    add_eight(sums, batch * WIDTH / 8 + i, chain, i, first, second, tokens);
                }
            }
            __syncwarp();  // every lane has read its tokens' scales
            if (lane.codes / 16 % 32 == 0) barrier_arrive(ring.empty + 8 * place.stage);
        }
    }
};
