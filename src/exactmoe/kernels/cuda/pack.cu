// pack: copies of token rows, sorted by expert, in the pieces that kernels/cuda/experts.cu reads:
// eights of rows of one expert, cut along k into 2 x 8 x 64 bf16 in wgmma's 128-byte
// swizzle; the eights of an expert follow one another in each 128 of k.
//
// gridDim.x experts, gridDim.y blocks an expert; k is a multiple of 128. Rows that pad an expert's
// last eight are not written.

extern "C" __global__ void __launch_bounds__(256)
pack(const int* offsets, const int* slots, const uint4* x, uint4* packed, u32 k, u32 top_k) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    u32 expert = blockIdx.x, begin = offsets[expert], end = offsets[expert + 1];
    u32 eights = (end - begin + 7) / 8;
    for (u32 position = begin + blockIdx.y; position < end; position += gridDim.y) {
        u32 row = position - begin, lane = row % 8;
        const uint4* source = x + u64(slots[position] / top_k) * (k / 8);
        uint4* target = packed + u64(begin / 8 + expert) * k + row / 8 * 128 + lane * 8;
        for (u32 eighth = threadIdx.x; eighth < k / 8; eighth += 256)
            target[u64(eighth / 16) * eights * 128 + eighth / 8 % 2 * 64 + (eighth % 8 ^ lane)] =
                source[eighth];
    }
}
