// Packed words to matrix operands (bf16 pairs), exactly.
//
// A word holds 2 x 4 codes of one weight row: the codes that one lane needs in two steps of 16 along
// k. formats/fragment.py places the bits so that a shift and a mask bring a pair of codes to where bf16
// has its sign (bit 15) and, as the number code x 2^-126, its magnitude (bits 8..6). One bf16
// multiply by scale x 2^118 then gives code x scale x 2^-8 exactly; the epilogue undoes the 2^-8.
//
// Bits of each 16-bit half, first pair to fourth (sign; magnitude): 9; 2 1 0 · 13; 6 5 4 ·
// 3 of the other half; 12 11 10 · 15; 8 7 14.

constexpr u32 PAIR = 0x81C081C0u;

__device__ __forceinline__ void unpack(u32 word, u32 (&pairs)[4]) {
    pairs[0] = (word << 6) & PAIR;
    pairs[1] = (word << 2) & PAIR;
    pairs[2] = __funnelshift_r(word, word, 4) & PAIR;
    pairs[3] = (word & 0x81808180u) | ((word >> 8) & 0x00400040u);
}

// Block scales of one weight row for eight steps of 16 along k: bf16 scale x 2^118, those of two
// steps in one word. A scale byte is linear in the bits of that bf16 number, so one byte permute and
// one multiply-add decode two of them.
#if FORMAT_NVFP4
constexpr u32 SCALE_BYTES = 8;      // of one row, of 128 along k
// formats/fragment.py writes an e4m3 scale as 5 bits of exponent (9 = 2^0) and 3 of mantissa; zero is
// 0xFF, whose product with any code is a zero.
struct Scales {
    u32 words[2];

    __device__ __forceinline__ void load(u32 address) { load_8(words, address); }

    // Of steps `step` (low half) and `step` + 1, step even.
    __device__ __forceinline__ u32 pair(int step, u32) const {
        return __byte_perm(words[step / 4], 0, step % 4 ? 0x4342 : 0x4140) * 16 + 0x76007600u;
    }
};
#else
constexpr u32 SCALE_BYTES = 4;
// e8m0 as in the checkpoint; `offset` holds the expert's largest exponent p, so that a block counts
// as 2^(n - p). A block of 32 serves two steps.
struct Scales {
    u32 word;

    __device__ __forceinline__ void load(u32 address) { load_4(word, address); }

    __device__ __forceinline__ u32 pair(int step, u32 offset) const {
        return __byte_perm(word, 0, 0x4040 | (step / 2) * 0x0101) * 128 + offset;
    }
};
#endif

// Both numbers of a pair times the low (`half` 0) or the high scale of a word.
__device__ __forceinline__ u32 times(u32 pair, u32 scales, int half) {
    return half == 0 ? times_low(pair, scales) : times_high(pair, scales);
}

// A operands of steps `step` and `step` + 1, step even: rows of the first and of the second panel.
__device__ __forceinline__ void operands_of_pair(const u32 (&first)[4], const u32 (&second)[4],
                                                 const Scales& first_scale,
                                                 const Scales& second_scale, int step,
                                                 u32 first_offset, u32 second_offset,
                                                 u32 (&a)[4], u32 (&next)[4]) {
    u32 low[4], high[4];
    unpack(first[step / 2], low);
    unpack(second[step / 2], high);
    u32 scale = first_scale.pair(step, first_offset);
    u32 other = second_scale.pair(step, second_offset);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32(&operands)[4] = half ? next : a;
        operands[0] = times(low[2 * half], scale, half);
        operands[2] = times(low[2 * half + 1], scale, half);
        operands[1] = times(high[2 * half], other, half);
        operands[3] = times(high[2 * half + 1], other, half);
    }
}

// What `Scales::pair` adds. MXFP4's factor is 2^p: its exponent bits are the largest scale byte.
__device__ __forceinline__ u32 bf16_offset(float factor) {
    return FORMAT_NVFP4 ? 0 : (245 - (__float_as_uint(factor) >> 23)) * 128 * 65537;
}
