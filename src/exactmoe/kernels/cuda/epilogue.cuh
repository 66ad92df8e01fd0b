// From f32 accumulators to packed h (gate_up), or to slots at their own places (down).
//
// A lane's sums[4i + j] is row `lane / 4` of the first panel for token 8i + 2 (lane % 4) + j, and
// sums[4i + 2 + j] the same row of the second panel.

// In a16 the operands held weight x 2^-8; the global scale multiplies, or divides where the checkpoint
// keeps its reciprocal (contract section 2).
__device__ __forceinline__ float scaled(float sum, float factor, u32 divide) {
    if (!A8) sum = __fmul_rn(sum, 256.0f);
    return divide ? __fdiv_rn(sum, factor) : __fmul_rn(sum, factor);
}

__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
    return __fmul_rn(silu(min_nan(gate, limit)), max_nan(min_nan(up, limit), -limit));
}

// Where 8 results (features 8p ...) of a token go: into packed h, or into its slot.
template <u32 phase>
__device__ __forceinline__ u16* place_of(const Arguments& given, const Item& item, u32 token,
                                         u32 eighth) {
    if (phase == DOWN)
        return static_cast<u16*>(given.out) +
               u64(given.slots[item.first + token]) * given.hidden + eighth * 8;
    u64 half = (item.piece(given.inner / CHUNK, eighth / 16) + token / 8) * 2 + eighth / 8 % 2;
    return reinterpret_cast<u16*>(given.h.values) + half * 512 + token % 8 * 64 +
           (eighth % 8 ^ token % 8) * 8;
}

// words[i]: results of tokens 8i + 2 (lane % 4) and the next, of this lane's row of one panel.
template <u32 phase>
__device__ __forceinline__ void store_panel(const u32 (&words)[TOKENS / 8], const Arguments& given,
                                            const Item& item, u32 column, u32 staging, u32 warp,
                                            u32 lane) {
    if constexpr (!STAGED) {
#pragma unroll
        for (u32 i = 0; i < TOKENS / 4; ++i) {
            u32 token = i / 2 * 8 + lane % 4 * 2 + i % 2;
            u16 value = u16(words[i / 2] >> (16 * (i % 2)));
            if (token < item.count)
                place_of<phase>(given, item, token, column / 8 + warp)[lane / 4] = value;
        }
    } else {
        u32 thread = threadIdx.x % 128, group = warp / 4;
#pragma unroll
        for (u32 begin = 0; begin < TOKENS; begin += 32) {
            u32 quarter[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
                quarter[i] = begin + 8 * i < TOKENS ? words[(begin + 8 * i) / 8 % (TOKENS / 8)] : 0;
            store_transposed(staging + lane * OUT_ROW + warp % 4 * 16, quarter);
            sync_threads(1 + group, 128);
            u32 token = begin + thread / 4, eighth = column / 8 + group * 4 + thread % 4;
            if (token < item.count) {
                u32 piece[4];
                load_16(piece, staging + thread / 4 * OUT_ROW + thread % 4 * 16);
                store_16(place_of<phase>(given, item, token, eighth), piece);
            }
            sync_threads(1 + group, 128);
        }
    }
}

__device__ __forceinline__ void finish_gate_up(const float (&sums)[TOKENS / 2],
                                               const Arguments& given, const Item& item,
                                               u32 staging, u32 warp, u32 lane) {
    u32 words[TOKENS / 8];
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
        float h[2];
#pragma unroll
        for (int j = 0; j < 2; ++j)
            h[j] = swiglu(scaled(sums[4 * i + j], item.first_factor, given.divide & 1),
                          scaled(sums[4 * i + 2 + j], item.second_factor, given.divide & 2),
                          given.limit);
        words[i] = round_bf16x2(h[0], h[1]);
    }
    store_panel<GATE_UP>(words, given, item, item.block * PANEL, staging, warp, lane);
}

__device__ __forceinline__ void finish_down(const float (&sums)[TOKENS / 2], const Arguments& given,
                                            const Item& item, u32 staging, u32 warp, u32 lane) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        u32 column = (2 * item.block + half) * PANEL;
        float factor = item.first_factor;
        if (column < given.hidden) {
#if SLOT_F32
#pragma unroll
            for (u32 i = 0; i < TOKENS / 4; ++i) {
                u32 token = i / 2 * 8 + lane % 4 * 2 + i % 2;
                float value = scaled(sums[i / 2 * 4 + 2 * half + i % 2], factor, given.divide & 4);
                if (value != value) value = __int_as_float(0x7FC00000);
                if (token < item.count)
                    static_cast<float*>(given.out)[u64(given.slots[item.first + token]) *
                                                       given.hidden +
                                                   column + warp * 8 + lane / 4] = value;
            }
#else
            u32 words[TOKENS / 8];
#pragma unroll
            for (int i = 0; i < TOKENS / 8; ++i)
                words[i] =
                    round_bf16x2(scaled(sums[4 * i + 2 * half], factor, given.divide & 4),
                                 scaled(sums[4 * i + 2 * half + 1], factor, given.divide & 4));
            store_panel<DOWN>(words, given, item, column, staging, warp, lane);
#endif
        }
    }
}
