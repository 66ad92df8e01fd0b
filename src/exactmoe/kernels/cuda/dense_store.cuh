// From f32 accumulators to h bf16 [T, I] (gate_up), or to out f32 [T, H] (down).
//
// A lane's sums[4i + j] is row `lane / 4` of its warp's first eight rows for token 8i + 2 (lane % 4)
// + j, and sums[4i + 2 + j] the same row of the second eight: gate and up of one feature, or two
// rows of down.

struct Output {
    void* values;
    u64 stride;  // elements from token to token
    u32 width;   // features
};

#if GATE_UP
__device__ __forceinline__ void store(const float (&sums)[TOKENS / 2], const Item& item,
                                      const Output& out, float limit, u32 staging) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    u32 group = warp / 4, column = item.block * FEATURES + group * 32;
    u16* h = static_cast<u16*>(out.values) + item.first * out.stride + column;
    u32 words[TOKENS / 8];
#pragma unroll
    for (u32 i = 0; i < TOKENS / 8; ++i) {
        float result[2];
#pragma unroll
        for (u32 j = 0; j < 2; ++j)
            result[j] = __fmul_rn(silu(min_nan(sums[4 * i + j], limit)),
                                  max_nan(min_nan(sums[4 * i + 2 + j], limit), -limit));
        words[i] = round_bf16x2(result[0], result[1]);
    }
    constexpr u32 EIGHTS = (FEATURES < 32 ? FEATURES : 32) / 8;  // of features, one a warp
    if constexpr (!STAGED) {
        bool real = warp % 4 < EIGHTS && column + warp % 4 * 8 < out.width;
#pragma unroll
        for (u32 i = 0; i < TOKENS / 4; ++i) {
            u32 token = i / 2 * 8 + lane % 4 * 2 + i % 2;
            u16 value = u16(words[i / 2] >> (16 * (i % 2)));
            if (real && token < item.count)
                h[token * out.stride + warp % 4 * 8 + lane / 4] = value;
        }
    } else {
        staging += group * OUT_BYTES;
        bool real = thread % 4 < EIGHTS && column + thread % 4 * 8 < out.width;
#pragma unroll
        for (u32 begin = 0; begin < TOKENS; begin += 32) {
            u32 quarter[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
                quarter[i] = begin + 8 * i < TOKENS ? words[(begin + 8 * i) / 8 % (TOKENS / 8)] : 0;
            store_transposed(staging + lane * OUT_ROW + warp % 4 * 16, quarter);
            sync_threads(1 + group, 128);
            u32 token = begin + thread / 4;
            if (real && token < item.count) {
                u32 piece[4];
                load_16(piece, staging + thread / 4 * OUT_ROW + thread % 4 * 16);
                store_16(h + token * out.stride + thread % 4 * 8, piece);
            }
            sync_threads(1 + group, 128);
        }
    }
}
#else
// Eight lanes store eight features of a token: whole sectors of 32 bytes.
__device__ __forceinline__ void store(const float (&sums)[TOKENS / 2], const Item& item,
                                      const Output& out, float, u32) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 column = item.block * FEATURES + warp * 16 + lane / 4;
    float* values = static_cast<float*>(out.values) + item.first * out.stride + column;
    bool real = warp * 16 < ROWS && column < out.width;
#pragma unroll
    for (u32 i = 0; i < TOKENS / 2; ++i) {
        u32 token = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float value = sums[i];
        if (value != value) value = __int_as_float(0x7FC00000);
        if (real && token < item.count) values[token * out.stride + i / 2 % 2 * 8] = value;
    }
}
#endif
