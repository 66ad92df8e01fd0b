// Weights of one stage, of one lane: codes and scales of its row of both panels, and their chain of
// 128 along k on one kind of matrix units.

#if UNITS_FP8
struct Fp8Operands {
    u32 first[4], second[4];
    Tables first_tables, second_tables;
    u32 tables;  // address
    static constexpr u32 ROWS = FP8_ROWS_BYTES;  // bytes of eight token rows

    // Tables hold code x 2^(s - 8), s of the largest block of a piece is 14; MXFP4's factor is 2^p.
    static __device__ __forceinline__ u32 offset(float factor) {
        return ((FORMAT_NVFP4 ? 0u : 127u - (__float_as_uint(factor) >> 23)) - 6u) << 23;
    }

    // What a loop over stages keeps for `load`.
    static __device__ __forceinline__ u32 constants() { return kept(shared_address(tables_of_codes)); }

    __device__ __forceinline__ void load(u32 codes, u32 scales, u32 constants) {
        tables = constants;
        load_16(first, codes);
        load_16(second, codes + CODE_BYTES);
        first_tables.load(scales);
        second_tables.load(scales + PANEL_SCALE_BYTES);
    }

    __device__ __forceinline__ void factors(float& of_first, float& of_second, u32 first_offset,
                                            u32 second_offset) const {
        of_first = first_tables.factor(first_offset);
        of_second = second_tables.factor(second_offset);
    }

    __device__ __forceinline__ void of_word(u32 word, const Tables& scales, int step, u32& a,
                                            u32& b) const {
        u32 low[2];
#if FORMAT_NVFP4  // blocks of 16: registers a and b have a scale each
        u32 high[2];
        scales.table(2 * step, tables, low);
        scales.table(2 * step + 1, tables, high);
        unpack_fp8(word, low, high, a, b);
#else
        scales.table(step, tables, low);
        unpack_fp8(word, low, low, a, b);
#endif
    }

    // Half of a stage, of tiles that take no turns; `meanwhile` runs when its registers are made.
    template <int N, int HALF, class Meanwhile>
    __device__ __forceinline__ void multiply(float (&chain)[TOKENS / 2], u64 rows, u32, u32,
                                             const Turns&, Meanwhile meanwhile) const {
        u32 a[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int step = 2 * HALF + i;
            of_word(first[step], first_tables, step, a[i][0], a[i][2]);
            of_word(second[step], second_tables, step, a[i][1], a[i][3]);
        }
        meanwhile();
        made(a[0]);
        made(a[1]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2; ++i)
            wgmma_fp8<N>(chain, a[i], rows + (2 * HALF + i) * 2, HALF + i > 0);
        wgmma_commit();
        if (HALF == 1) wgmma_wait<1>();
    }

    // The operands of a whole stage.
    struct Whole {
        u32 a[4][4];

        __device__ __forceinline__ Whole(const Fp8Operands& weights, u32, u32) {
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                u32(&words)[4] = a[step];
                weights.of_word(weights.first[step], weights.first_tables, step, words[0], words[2]);
                weights.of_word(weights.second[step], weights.second_tables, step, words[1], words[3]);
            }
        }

        template <int N>
        __device__ __forceinline__ void multiply(float (&chain)[TOKENS / 2], u64 rows,
                                                 const Turns& turns) {
#pragma unroll
            for (int step = 0; step < 4; ++step) made(a[step]);
            turns.wait();
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step)
                wgmma_fp8<N>(chain, a[step], rows + step * 2, step > 0);
            wgmma_commit();
            turns.pass();
        }
    };
};
#endif

#if UNITS_BF16
struct Bf16Operands {
    u32 first[4], second[4];
    Scales first_scale, second_scale;
    static constexpr u32 ROWS = ROWS_BYTES;

    static __device__ __forceinline__ u32 offset(float factor) { return bf16_offset(factor); }

    static __device__ __forceinline__ u32 constants() { return 0; }

    __device__ __forceinline__ void load(u32 codes, u32 scales, u32) {
        load_16(first, codes);
        load_16(second, codes + CODE_BYTES);
        first_scale.load(scales);
        second_scale.load(scales + PANEL_SCALE_BYTES);
    }

    // Operands hold weight x 2^-8, and the rows x 2^8 (wide.cuh): a factor of 2^8 here could pass
    // the largest float beside a token's scale.
    __device__ __forceinline__ void factors(float& of_first, float& of_second, u32, u32) const {
        of_first = of_second = 1.0f;
    }

    template <int N, int HALF, class Meanwhile>
    __device__ __forceinline__ void multiply(float (&chain)[TOKENS / 2], u64 rows, u32 first_offset,
                                             u32 second_offset, const Turns& turns,
                                             Meanwhile meanwhile) const {
        constexpr int GROUP = N >= 32 ? 2 : 4;  // steps of 16 along k in one wgmma group
#pragma unroll
        for (int begin = 4 * HALF; begin < 4 * HALF + 4; begin += GROUP) {
            u32 a[GROUP][4];
#pragma unroll
            for (int pair = 0; pair < GROUP / 2; ++pair)
                operands_of_pair(first, second, first_scale, second_scale, begin + 2 * pair,
                                 first_offset, second_offset, a[2 * pair], a[2 * pair + 1]);
            if (begin + GROUP == 4 * HALF + 4) meanwhile();
#pragma unroll
            for (int i = 0; i < GROUP; ++i) made(a[i]);
            turns.wait();
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                int step = begin + i;
                wgmma_chain<N>(chain, a[i],
                               rows + step % 4 * 2 + step / 4 * (ROWS_BYTES / 2 / 16),
                               step > 0);
            }
            wgmma_commit();
            turns.pass();
            wgmma_wait<1>();
        }
    }

    // Of a whole stage, made as they go: all at once would take too many registers.
    struct Whole {
        const Bf16Operands& weights;
        u32 first_offset, second_offset;

        __device__ __forceinline__ Whole(const Bf16Operands& weights, u32 first_offset,
                                         u32 second_offset)
            : weights(weights), first_offset(first_offset), second_offset(second_offset) {}

        template <int N>
        __device__ __forceinline__ void multiply(float (&chain)[TOKENS / 2], u64 rows,
                                                 const Turns& turns) const {
            auto nothing = []() {};
            weights.template multiply<N, 0>(chain, rows, first_offset, second_offset, turns, nothing);
            weights.template multiply<N, 1>(chain, rows, first_offset, second_offset, turns, nothing);
        }
    };
};
#endif
