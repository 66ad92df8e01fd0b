// pack: copies of quantised token rows, sorted by expert, in the pieces that kernels/cuda/experts.cu
// reads: eights of rows of one expert, cut along k into 8 x 128 e4m3 in wgmma's 128-byte swizzle; the
// same codes as bf16 (2 x 8 x 64) for experts on the bf16 units; and 8 scales a piece.
//
// gridDim.x experts, gridDim.y blocks an expert; k is a multiple of 128. Compiled with: UNITS_FP8,
// UNITS_BF16; of experts of both kinds, on_fp8 and also_on_fp8 (of gate and up) say which.

extern "C" __global__ void __launch_bounds__(256)
pack(const int* offsets, const int* slots, const u8* codes, const float* scales, u8* packed,
     u8* wide, float* packed_scales, const u8* on_fp8, const u8* also_on_fp8, u32 k, u32 top_k) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    u32 expert = blockIdx.x, begin = offsets[expert], end = offsets[expert + 1], pieces = k / 128;
    bool to_fp8 = UNITS_FP8, to_bf16 = UNITS_BF16;
    if (UNITS_FP8 && UNITS_BF16) {
        to_fp8 = on_fp8[expert] || also_on_fp8[expert];
        to_bf16 = !on_fp8[expert] || !also_on_fp8[expert];
    }
    u32 eights = (end - begin + 7) / 8;
    for (u32 position = begin + blockIdx.y; position < end; position += gridDim.y) {
        u32 row = (position - begin) % 8, token = slots[position] / top_k;
        u64 eight = u64(begin / 8 + expert) * pieces + (position - begin) / 8;
        const u8* source = codes + u64(token) * k;
        for (u32 part = threadIdx.x; part < k / 16; part += 256) {
            uint4 values = *reinterpret_cast<const uint4*>(source + part * 16);
            u32 words[4] = {values.x, values.y, values.z, values.w}, p = part % 8;
            u64 piece = eight + u64(part / 8) * eights;
            if (to_fp8) store_16(packed + piece * 1024 + row * 128 + (p ^ row) * 16, words);
            if (to_bf16) store_wide(wide + piece * 2048, row, p, words);
        }
        for (u32 piece = threadIdx.x; piece < pieces; piece += 256)
            packed_scales[(eight + u64(piece) * eights) * 8 + row] = scales[u64(token) * pieces + piece];
    }
}
