// Packed words to operands of the fp8 units (four e4m3 in a register), exactly.
//
// formats/fragment_fp8.py says where a code's bits lie in a word. Four magnitudes are the selector of
// a byte permute, whose eight bytes are the magnitudes of e2m1 x 2^(s - 8) as e4m3: one table a scale.

#if UNITS_FP8
// The table of step s: bytes of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, times 2^(s - 8). Of s = 15: zeros.
__device__ __forceinline__ void write_table(u32 s, u32 address) {
    u32 words[2] = {0, 0};
#pragma unroll
    for (u32 magnitude = 1; magnitude < 8; ++magnitude) {
        // e2m1 is 2 or 3 x 2^(shift - 2); below 2^-6 e4m3 counts in steps of 2^-9.
        u32 field = magnitude / 2, mantissa = field ? 2 + magnitude % 2 : 2, shift = field ? field : 0;
        int exponent = int(s) - 8 + int(shift) - 1;  // of the leading bit
        u32 byte = exponent >= -6 ? u32(exponent + 7) * 8 + (mantissa & 1) * 4
                                  : (mantissa << (exponent + 9)) >> 1;
        words[magnitude / 4] |= (s == 15 ? 0 : byte) << (magnitude % 4 * 8);
    }
    store_8(address, words);
}

// Of the scale bytes of a piece of 128, table addresses and the exponent q + 127 of the piece.
struct Tables {
    u32 words[SCALE_BYTES / 4];

    __device__ __forceinline__ void load(u32 address) {
#if FORMAT_NVFP4
        load_8(words, address);
#else
        load_4(words[0], address);
#endif
    }

    // Where the table of a block lies, from that of the first.
    __device__ __forceinline__ u32 of(int block) const {
        return (words[block / 4] >> (block % 4 * 8)) & 0x78;
    }

    // 2^(q + offset / 2^23): two bits lie in each of the first four bytes.
    __device__ __forceinline__ float factor(u32 offset) const {
        u32 exponent = (words[0] & 0x03030303u) * 0x01041040u;
        return __uint_as_float((exponent >> 24 << 23) + offset);
    }
};

// Registers a and b of one word: k = 4c ... 4c + 3 and 16 more.
__device__ __forceinline__ void unpack_fp8(u32 word, const u32 (&first)[2], const u32 (&second)[2],
                                           u32& a, u32& b) {
    u32 magnitudes = word & 0x77777777u;
    a = __byte_perm(first[0], first[1], magnitudes) | (word & 0x80808080u);
    b = __byte_perm(second[0], second[1], magnitudes >> 16) | ((word << 4) & 0x80808080u);
}
#endif
