// Packed words to operands of the fp8 units (four e4m3 in a register), exactly.
//
// formats/fragment_fp8.py says where a code's bits lie in a word. Four magnitudes are the selector of
// a byte permute, whose eight bytes are the magnitudes of e2m1 x 2^(s - 8) as e4m3: one table a scale.

#if UNITS_FP8
// Tables of s = 0 ... 15, eight bytes each: of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, times 2^(s - 8); of 15:
// zeros. All 16 are 128 bytes, so lanes of different tables read different banks.
__shared__ uint2 tables_of_codes[16];

__device__ __forceinline__ void write_tables(u32 s) {
    if (s > 15) return;
    u32 words[2] = {0, 0};
#pragma unroll
    for (u32 magnitude = 1; magnitude < 8; ++magnitude) {
        // e2m1 is 2 or 3 x 2^(field - 2); below 2^-6 e4m3 counts in steps of 2^-9.
        u32 field = magnitude / 2, mantissa = field ? 2 + magnitude % 2 : 2;
        int exponent = int(s) - 8 + int(field) - 1;  // of the leading bit
        u32 byte = exponent >= -6 ? u32(exponent + 7) * 8 + (mantissa & 1) * 4
                                  : (mantissa << (exponent + 9)) >> 1;
        words[magnitude / 4] |= (s == 15 ? 0 : byte) << (magnitude % 4 * 8);
    }
    tables_of_codes[s] = make_uint2(words[0], words[1]);
}

// Of the scale bytes of a piece of 128, its tables and the exponent q + 127 of the piece.
struct Tables {
    u32 words[SCALE_BYTES / 4];

    __device__ __forceinline__ void load(u32 address) {
#if FORMAT_NVFP4
        load_8(words, address);
#else
        load_4(words[0], address);
#endif
    }

    // The table of a block; `tables`: address of all of them.
    __device__ __forceinline__ void table(int block, u32 tables, u32 (&bytes)[2]) const {
        u32 places = words[block / 4] & 0x78787878u;  // all four, by one instruction
        load_constant_8(bytes, tables + __byte_perm(places, 0, 0x4440 | block % 4));
    }

    // 2^(q + offset / 2^23): bits 1, 0 of the first four bytes, to where float has its exponent.
    __device__ __forceinline__ float factor(u32 offset) const {
        u32 exponent = (words[0] & 0x03030303u) * 0x00820820u + offset;
        return __uint_as_float(exponent & 0x7F800000u);
    }
};

// Four bytes of a table. The selector's nibbles are below 8, which __byte_perm would see to again.
__device__ __forceinline__ u32 chosen(const u32 (&table)[2], u32 selector) {
    return permute(table[0], table[1], selector);
}

// Registers a and b of one word: k = 4c ... 4c + 3 and 16 more.
__device__ __forceinline__ void unpack_fp8(u32 word, const u32 (&first)[2], const u32 (&second)[2],
                                           u32& a, u32& b) {
    u32 magnitudes = word & 0x77777777u;
    a = chosen(first, magnitudes) | (word & 0x80808080u);
    b = chosen(second, magnitudes >> 16) | ((word << 4) & 0x80808080u);
}
#endif
