// From f32 accumulators to packed h (gate_up), or to slots at their own places (down).
//
// A lane's sums[4i + j] is row `lane / 4` of the first panel for token 8i + 2 (lane % 4) + j, and
// sums[4i + 2 + j] the same row of the second panel.

// In a16 the operands held weight x 2^-8; the global scale multiplies, or divides where the checkpoint
// keeps its reciprocal (contract section 2). MXFP4's never divides.
template <bool divides>
__device__ __forceinline__ float scaled(float sum, float factor, u32 divide) {
    if (!A8) sum = __fmul_rn(sum, 256.0f);
    return divides && divide ? __fdiv_rn(sum, factor) : __fmul_rn(sum, factor);
}

__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
    return __fmul_rn(silu(min_nan(gate, limit)), max_nan(min_nan(up, limit), -limit));
}

// What a warpgroup knows of an item's tokens, in shared memory of its own: slots, and in a8 their
// routing weights. The slots are asked for before it multiplies.
struct Tokens {
    static constexpr bool HELD = A8 || TOKENS > 16;  // the others' are read where they are needed
    u32 slots, weights, barrier;

    __device__ __forceinline__ Tokens(u32 memory, u32 group)
        : slots(memory + group * TOKENS_BYTES), weights(slots + TOKENS * 4), barrier(1 + group) {}

    __device__ __forceinline__ void ask(const Arguments& given, const Item& item) const {
        if (!HELD) return;
        u32 thread = threadIdx.x % 128;
        sync_threads(barrier, 128);  // the item before is done with them
        if (thread < item.count) copy_4(slots + thread * 4, given.slots + item.first + thread);
    }

    __device__ __forceinline__ void wait() const {
        if (!HELD) return;
        copies_wait();
        sync_threads(barrier, 128);
    }

    // Of the item's tokens `token` and the next; `token` is even.
    __device__ __forceinline__ void two_slots(u32 (&found)[2], const Arguments& given,
                                              const Item& item, u32 token) const {
        if (HELD) return load_8(found, slots + token * 4);
        for (u32 j = 0; j < 2; ++j)
            found[j] = token + j < item.count ? given.slots[item.first + token + j] : 0;
    }

    __device__ __forceinline__ u32 slot(const Arguments& given, const Item& item, u32 token) const {
        if (!HELD) return given.slots[item.first + token];
        u32 found;
        load_4(found, slots + token * 4);
        return found;
    }

    __device__ __forceinline__ void load_weights(const Arguments& given, const Item& item) const {
        u32 thread = threadIdx.x % 128, slot;
        if (thread < item.count) {
            load_4(slot, slots + thread * 4);
            store_4(weights + thread * 4, __float_as_uint(given.weights[slot]));
        }
        sync_threads(barrier, 128);
    }
};

// Where 8 results (features 8p ...) of a token go: into packed h, or into its slot.
template <u32 phase>
__device__ __forceinline__ u16* place_of(const Arguments& given, const Item& item,
                                         const Tokens& tokens, u32 token, u32 eighth) {
    if (phase == DOWN)
        return static_cast<u16*>(given.out) +
               u64(tokens.slot(given, item, token)) * given.hidden + eighth * 8;
    u64 half = (item.piece(given.inner / CHUNK, eighth / 16) + token / 8) * 2 + eighth / 8 % 2;
    return reinterpret_cast<u16*>(given.h.values) + half * 512 + token % 8 * 64 +
           (eighth % 8 ^ token % 8) * 8;
}

// words[i]: results of tokens 8i + 2 (lane % 4) and the next, of this lane's row of one panel.
template <u32 phase>
__device__ __forceinline__ void store_panel(const u32 (&words)[TOKENS / 8], const Arguments& given,
                                            const Item& item, const Tokens& tokens, u32 column,
                                            u32 staging, u32 warp, u32 lane) {
    if constexpr (!STAGED) {
#pragma unroll
        for (u32 i = 0; i < TOKENS / 4; ++i) {
            u32 token = i / 2 * 8 + lane % 4 * 2 + i % 2;
            u16 value = u16(words[i / 2] >> (16 * (i % 2)));
            if (token < item.count)
                place_of<phase>(given, item, tokens, token, column / 8 + warp)[lane / 4] = value;
        }
    } else {
        u32 thread = threadIdx.x % 128, group = warp / 4;
#pragma unroll
        for (u32 begin = 0; begin < TOKENS; begin += 32) {
            if (begin >= item.count) break;
            u32 quarter[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
                quarter[i] = begin + 8 * i < TOKENS ? words[(begin + 8 * i) / 8 % (TOKENS / 8)] : 0;
            store_transposed(staging + lane * OUT_ROW + warp % 4 * 16, quarter);
            sync_threads(tokens.barrier, 128);
            u32 token = begin + thread / 4, eighth = column / 8 + group * 4 + thread % 4;
            if (token < item.count) {
                u32 piece[4];
                load_16(piece, staging + thread / 4 * OUT_ROW + thread % 4 * 16);
                store_16(place_of<phase>(given, item, tokens, token, eighth), piece);
            }
            sync_threads(tokens.barrier, 128);
        }
    }
}

template <bool divides>
__device__ __forceinline__ void finish_gate_up(const float (&sums)[TOKENS / 2],
                                               const Arguments& given, const WholeItem& item,
                                               const Tokens& tokens, u32 staging, u32 warp,
                                               u32 lane) {
    u32 words[TOKENS / 8];
    float of_gate = item.first_factor, of_up = item.second_factor;
    u32 divide = given.divide, count = item.count;
#pragma unroll
    for (u32 i = 0; i < TOKENS / 8; ++i) {
        if (8 * i >= count) break;
        float h[2];
#pragma unroll
        for (u32 j = 0; j < 2; ++j)
            h[j] = swiglu(scaled<divides>(sums[4 * i + j], of_gate, divide & 1),
                          scaled<divides>(sums[4 * i + 2 + j], of_up, divide & 2), given.limit);
        words[i] = round_bf16x2(h[0], h[1]);
    }
    store_panel<GATE_UP>(words, given, item, tokens, item.block * PANEL, staging, warp, lane);
}

#if SLOT_F32
// Eight lanes write 32 bytes of a token.
template <bool divides>
__device__ __forceinline__ void finish_down(const float (&sums)[TOKENS / 2], const Arguments& given,
                                            const WholeItem& item, const Tokens& tokens, u32,
                                            u32 warp, u32 lane) {
    u32 column = 2 * item.block * PANEL, count = item.count, divide = given.divide & 4;
    bool both = column + PANEL < given.hidden;
    float factor = item.first_factor;
    float* out = static_cast<float*>(given.out) + column + warp * 8 + lane / 4;
#pragma unroll
    for (u32 i = 0; i < TOKENS / 8; ++i) {
        if (8 * i >= count) break;
        u32 token = 8 * i + lane % 4 * 2, slots[2];
        tokens.two_slots(slots, given, item, token);
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            float* row = out + u64(slots[j]) * given.hidden;
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                float value = scaled<divides>(sums[4 * i + 2 * half + j], factor, divide);
                if (value != value) value = __int_as_float(0x7FC00000);
                if (token + j < count && (half == 0 || both)) row[half * PANEL] = value;
            }
        }
    }
}
#else
template <bool divides>
__device__ __forceinline__ void finish_down(const float (&sums)[TOKENS / 2], const Arguments& given,
                                            const WholeItem& item, const Tokens& tokens,
                                            u32 staging, u32 warp, u32 lane) {
    u32 count = item.count, divide = given.divide & 4;
    float factor = item.first_factor;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        u32 column = (2 * item.block + half) * PANEL;
        if (column < given.hidden) {
            u32 words[TOKENS / 8];
#pragma unroll
            for (u32 i = 0; i < TOKENS / 8; ++i) {
                if (8 * i >= count) break;
                words[i] = round_bf16x2(
                    scaled<divides>(sums[4 * i + 2 * half], factor, divide),
                    scaled<divides>(sums[4 * i + 2 * half + 1], factor, divide));
            }
            store_panel<DOWN>(words, given, item, tokens, column, staging, warp, lane);
        }
    }
}
#endif
