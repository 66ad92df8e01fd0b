// Sizes of the experts kernel, what it is given, and how its blocks find their work.

constexpr u32 GATE_UP = 1, DOWN = 2;             // phases; a launch takes one or both
constexpr u32 WARPS = 16;                        // that multiply
constexpr u32 ROWS_WARPS = 3;                    // that fill the ring's token rows
constexpr u32 THREADS = 32 * (WARPS + 1 + ROWS_WARPS);
constexpr u32 CHUNK = 128;                       // of k, in one stage
constexpr u32 PANEL = 128;                       // weight rows
constexpr u32 CODE_BYTES = PANEL * CHUNK / 2;    // of a panel in a stage
constexpr u32 PANEL_SCALE_BYTES = PANEL * SCALE_BYTES;
constexpr u32 WEIGHT_BYTES = 2 * (CODE_BYTES + PANEL_SCALE_BYTES);
constexpr bool MIXED = UNITS_FP8 && UNITS_BF16;  // some experts run on these units, some on those
constexpr u32 ROWS_BYTES = 8 * CHUNK * (UNITS_BF16 ? 2 : 1);  // of eight token rows in a stage
constexpr u32 FP8_ROWS_BYTES = 8 * CHUNK;        // of them, where they are e4m3
constexpr u32 X_BYTES = TOKENS / 8 * ROWS_BYTES;
constexpr u32 PIECE_SCALE_BYTES = 8 * 4;         // of eight token rows in a stage, class a8
constexpr u32 X_SCALE_BYTES = A8 ? TOKENS * 4 : 0;
constexpr u32 MAX_EXPERTS = 1024;
constexpr bool STAGED = TOKENS >= 24 && !A8;     // the epilogue goes through shared memory
constexpr u32 OUT_ROW = 80;                      // bytes of 32 results of a token, and padding
constexpr u32 OUT_BYTES = STAGED ? 32 * OUT_ROW : 0;  // of a warpgroup: 32 tokens at a time
// Of h in a8: a code of 128 features a token, and two arrays of largest magnitudes.
constexpr u32 STAGING_BYTES = A8 ? TOKENS * (128 + 8) : WARPS / 4 * OUT_BYTES;
constexpr u32 TOKENS_BYTES = TOKENS * (A8 ? 8 : 4);  // what a warpgroup knows of an item's tokens
constexpr u32 ITEMS = 4;                         // that the warps are told ahead

struct Projection {
    const u8* codes;
    const u8* scales;
    u64 code_stride, scale_stride;  // bytes from expert to expert
    const float* factors;
    const u8* on_fp8;               // of each expert
};

// Token rows: bf16 in a16; in a8 e4m3, the same x 2^8 as bf16 for the bf16 units, and scales.
struct Rows {
    u8* values;
    u8* wide;
    float* scales;
};

struct Arguments {
    Projection gate, up, down;
    const int* offsets;
    const int* slots;
    Rows x, h;             // x: of tokens (GATHER), or packed; h packed
    void* out;
    const float* weights;  // a8: routing weights
    u32* counters;         // zeros before and behind every launch; fill.cuh
    u32 num_experts, hidden, inner, top_k;
    u32 phases;
    u32 divide;            // bits 0, 1, 2: gate, up, down divide by their factor
    float limit;

    __device__ __forceinline__ u32 gate_up_blocks() const { return inner / PANEL; }
    __device__ __forceinline__ u32 down_blocks() const { return (hidden / PANEL + 1) / 2; }
    __device__ __forceinline__ u32 chunks(u32 phase) const {
        return (phase == DOWN ? inner : hidden) / CHUNK;
    }
};

// Up to TOKENS rows of one expert, and a block of its weight rows; and where they are in packed rows.
struct Item {
    u32 phase;   // 0: there are no more
    u32 expert, first, count, block;
    u32 base;    // first eight of the expert
    u32 eights;  // of the expert
    u32 eight;   // of the item's first row, in the expert
    u32 tiles;   // of the expert

    // Packed rows of k columns are pieces of eight rows x 128 of k. The eights of expert e begin at
    // offsets[e] / 8 + e, so that each expert begins a new one and no sum over experts is needed.
    // An expert's pieces lie chunk by chunk along k: those that a stage needs follow one another.
    __device__ __forceinline__ u64 piece(u32 chunks, u32 chunk) const {
        return u64(base) * chunks + u64(chunk) * eights + eight;
    }
};

// Factors and units of the two projections come later.
struct WholeItem : Item {
    float first_factor, second_factor;
    u32 first_on_fp8, second_on_fp8;
};

struct Work {
    u32 tiles_before[MAX_EXPERTS + 1];  // of experts 0 ... e - 1
    u32 offsets[MAX_EXPERTS + 1];
    u32 of_warp[THREADS / 32];
    WholeItem items[ITEMS];

    __device__ __forceinline__ u32 tiles_of(u32 expert) const {
        return (offsets[expert + 1] - offsets[expert] + TOKENS - 1) / TOKENS;
    }

    // By all threads of the block; each looks after two experts. One warp alone takes 4 us for it.
    __device__ __forceinline__ void count(const int* from, u32 experts) {
        static_assert(2 * THREADS >= MAX_EXPERTS, "two experts a thread");
        u32 thread = threadIdx.x, lane = thread % 32, expert = 2 * thread;
        u32 begin = expert <= experts ? from[expert] : 0, end = begin, last = begin;
        if (expert < experts) end = last = from[expert + 1];
        if (expert + 1 < experts) last = from[expert + 2];
        u32 own = (end - begin + TOKENS - 1) / TOKENS, sum = own + (last - end + TOKENS - 1) / TOKENS;
        u32 inclusive = sum;
#pragma unroll
        for (u32 distance = 1; distance < 32; distance *= 2) {
            u32 other = __shfl_up_sync(~0u, inclusive, distance);
            if (lane >= distance) inclusive += other;
        }
        if (lane == 31) of_warp[thread / 32] = inclusive;
        __syncthreads();
        if (expert <= experts) {
            u32 before = inclusive - sum;
            for (u32 warp = 0; warp < thread / 32; ++warp) before += of_warp[warp];
            tiles_before[expert] = before;
            offsets[expert] = begin;
            if (expert < experts) {
                tiles_before[expert + 1] = before + own;
                offsets[expert + 1] = end;
            }
        }
        __syncthreads();
    }

    // By all lanes of a warp: the last expert whose tiles begin at or before this one.
    __device__ __forceinline__ Item find(u32 experts, u32 tile, u32 block, u32 lane) const {
        u32 coarse = lane * 32, passed = __ballot_sync(
            ~0u, coarse < experts && tiles_before[coarse] <= tile);
        u32 fine = (__popc(passed) - 1) * 32 + lane;
        passed = __ballot_sync(~0u, fine < experts && tiles_before[fine] <= tile);
        Item item{};
        u32 expert = item.expert = fine - lane + __popc(passed) - 1;
        u32 begin = (tile - tiles_before[expert]) * TOKENS, first = offsets[expert];
        u32 rows = offsets[expert + 1] - first, left = rows - begin;
        item.first = first + begin, item.count = left < TOKENS ? left : TOKENS, item.block = block;
        item.base = first / 8 + expert, item.eights = (rows + 7) / 8, item.eight = begin / 8;
        item.tiles = tiles_of(expert);
        return item;
    }
};

// A place in a ring of `size`: which stage, and which parity its barrier has there.
template <u32 size>
struct PlaceIn {
    u32 stage = 0, parity = 0;

    __device__ __forceinline__ void next() {
        if (++stage == size) stage = 0, parity ^= 1;
    }
};
using Place = PlaceIn<STAGES>;

// A wgmma operand. Nothing is known of its address, so that the compiler makes each step from it one
// addition.
__device__ __forceinline__ u64 operand_to_step_from(u32 address, u32 stride) {
    return operand(0, stride) | kept(u32(operand(address, 0)));
}

// A wide tile's accumulators need registers that the filling warps don't.
template <bool multiplies>
__device__ __forceinline__ void take_registers() {
    if constexpr (TOKENS >= (A8 ? 64 : 96)) {
        if constexpr (multiplies) more_registers<112>();
        else fewer_registers<32>();
    } else if constexpr (TOKENS >= (A8 ? 16 : 64)) {
        if constexpr (multiplies) more_registers<104>();
        else fewer_registers<64>();
    }
}
