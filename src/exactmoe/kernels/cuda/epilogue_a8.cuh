// h of class a8: times the token's routing weight, quantised, packed as down reads it.
//
// A block's item holds 128 features of h, so one group of 128 that shares a scale. Its four
// warpgroups meet twice: behind the largest magnitudes, and when all codes lie in shared memory.

constexpr u32 GROUP_BARRIER = 5;
constexpr u32 AMAX_BYTES = TOKENS * 4;  // two arrays lie behind the codes

__device__ __forceinline__ void clear_amax(u32 staging, u32 thread) {
    if (thread < 2 * TOKENS) store_4(staging + TOKENS * 128 + thread * 4, 0);
}

// Contract section 3: the exponent of the scale of a group, biased by 127.
__device__ __forceinline__ u32 scale_exponent(u32 amax) {
    float step = __fmul_rn(max_nan(__uint_as_float(amax), 1e-4f), 1.0f / 448.0f);
    u32 bits = __float_as_uint(step);
    return (bits >> 23) + ((bits & 0x7FFFFFu) != 0);
}

__device__ __forceinline__ bool finite(u32 amax) { return amax < 0x7F800000u; }

// `turn` counts the items of gate_up of this block.
template <bool divides>
__device__ __forceinline__ void finish_a8(const float (&sums)[TOKENS / 2], const Arguments& given,
                                          const WholeItem& item, const Tokens& tokens, u32 staging,
                                          u32 turn, u32 warp, u32 lane) {
    u32 amax = staging + TOKENS * 128;
    u32 mine = amax + (turn & 1) * AMAX_BYTES, other = amax + (~turn & 1) * AMAX_BYTES;
    float values[TOKENS / 4], of_gate = item.first_factor, of_up = item.second_factor;
    u32 count = item.count, divide = given.divide;
#pragma unroll
    for (u32 i = 0; i < TOKENS / 8; ++i) {
        if (8 * i >= count) break;
        u32 token = 8 * i + lane % 4 * 2, weights[2];
        load_8(weights, tokens.weights + token * 4);
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            float gate = scaled<divides>(sums[4 * i + j], of_gate, divide & 1);
            float up = scaled<divides>(sums[4 * i + 2 + j], of_up, divide & 2);
            float weight = token + j < count ? __uint_as_float(weights[j]) : 0.0f;
            float value = values[2 * i + j] = __fmul_rn(swiglu(gate, up, given.limit), weight);
            u32 largest = __float_as_uint(value) & 0x7FFFFFFFu;
#pragma unroll
            for (u32 distance = 4; distance < 32; distance *= 2) {
                u32 found = __shfl_xor_sync(~0u, largest, distance);
                largest = largest > found ? largest : found;
            }
            if (lane < 4) raise_to(mine + (token + j) * 4, largest);
        }
    }
    sync_threads(GROUP_BARRIER, 32 * WARPS);
    u32 thread = threadIdx.x, feature = warp * 8 + lane / 4;
    u64 place = item.piece(given.inner / CHUNK, item.block);
#pragma unroll
    for (u32 i = 0; i < TOKENS / 4; i += 2) {
        u32 token = i / 2 * 8 + lane % 4 * 2;
        if (i / 2 * 8 >= item.count) break;
        u32 largest[2];
        load_8(largest, mine + token * 4);
        float scaled_values[2];
#pragma unroll
        for (u32 j = 0; j < 2; ++j)
            scaled_values[j] = __fmul_rn(
                values[i + j], __uint_as_float((254 - scale_exponent(largest[j])) << 23));
        u32 codes = round_e4m3x2(scaled_values[0], scaled_values[1]);
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            u32 code = codes >> (8 * j) & 0xFF, row = (token + j) % 8;
            code = finite(largest[j]) ? (code == 0x80 ? 0 : code) : 0x7F;
            store_1(staging + (token + j) * 128 + (feature / 16 ^ row) * 16 + feature % 16, code);
        }
    }
    if (thread < TOKENS) {
        if (thread < item.count) {
            u32 largest;
            load_4(largest, mine + thread * 4);
            float scale = __uint_as_float(scale_exponent(largest) << 23);
            given.h.scales[(place + thread / 8) * 8 + thread % 8] =
                finite(largest) ? scale : 1.0f;
        }
        store_4(other + thread * 4, 0);  // for the next item
    }
    sync_threads(GROUP_BARRIER, 32 * WARPS);
    for (u32 piece = thread; piece < item.count * 8; piece += 32 * WARPS) {
        u32 token = piece / 8, row = token % 8, codes[4];
        load_16(codes, staging + piece * 16);
        u64 eight = place + token / 8;
        if (MIXED ? given.down.on_fp8[item.expert] != 0 : UNITS_FP8)
            store_16(given.h.values + eight * 1024 + row * 128 + piece % 8 * 16, codes);
        else
            store_wide(given.h.wide + eight * 2048, row, piece % 8 ^ row, codes);
    }
}
