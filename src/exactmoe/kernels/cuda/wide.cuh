// e4m3 codes as bf16 operands: their values x 2^8.

// 16 codes of features 16p ... of a row, into a piece of 8 rows x 128 bf16 in wgmma's swizzle: two
// halves of 64 along k.
__device__ __forceinline__ void store_wide(u8* piece, u32 row, u32 p, const u32 (&codes)[4]) {
    u8* half = piece + p / 4 * 1024 + row * 128;
#pragma unroll
    for (u32 eighth = 0; eighth < 2; ++eighth) {
        u32 words[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) words[i] = e4m3x2_to_bf16x2(codes[2 * eighth + i / 2] >> (16 * (i % 2)));
        store_16(half + ((p % 4 * 2 + eighth) ^ row) * 16, words);
    }
}
