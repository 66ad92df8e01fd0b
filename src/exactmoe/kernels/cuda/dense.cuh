// Sizes of the dense kernels, and the order of their work.

constexpr u32 WARPGROUPS = ROWS > 64 ? ROWS / 64 : 1;  // that multiply, 64 weight rows each
constexpr u32 WARPS = 4 * WARPGROUPS;
constexpr u32 THREADS = 32 * (WARPS + 4);  // and a warp that fills the ring
constexpr u32 EIGHT_BYTES = 8 * 128;       // eight rows of a chunk, 64 of k
constexpr u32 WEIGHT_BYTES = ROWS / 8 * CHUNKS * EIGHT_BYTES;  // of a stage
constexpr u32 TOKEN_BYTES = TOKENS / 8 * CHUNKS * EIGHT_BYTES;
// gate_up: eights of gate and of up rows in turn, each with its chunks one after the other. down:
// chunks, each with its eights.
constexpr u32 EIGHT_STRIDE = GATE_UP ? CHUNKS * EIGHT_BYTES : EIGHT_BYTES;
constexpr u32 CHUNK_STRIDE = GATE_UP ? EIGHT_BYTES : ROWS / 8 * EIGHT_BYTES;
constexpr u32 SEGMENT_STEPS = 4096 / 64 / CHUNKS;  // contract section 4
constexpr u32 GROUP = 16;                          // token tiles that L2 holds
// Tokens that one copy brings: all, or some that a block of a cluster sends to the others.
constexpr u32 PART = TOKENS / CLUSTER;
constexpr u32 PIECE = CLUSTER == 1 || PART < 32 ? PART : 32;
constexpr u32 PIECES = TOKENS / PIECE;
constexpr u32 FEATURES = GATE_UP ? ROWS / 2 : ROWS;  // outputs of a block
constexpr bool STAGED = TOKENS >= 32;              // h is stored through shared memory
constexpr u32 OUT_ROW = 80;                        // bytes of 32 features of a token, and padding
constexpr u32 OUT_BYTES = GATE_UP && STAGED ? 32 * OUT_ROW : 0;  // of a warpgroup

// A place in the ring: which stage, and which parity its barrier has there.
struct Place {
    u32 stage = 0, parity = 0;

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }

    __device__ __forceinline__ u32 last() const { return stage == 0 ? STAGES - 1 : stage - 1; }
};

// Rows block x FEATURES ... of the output for tokens first ... first + count - 1.
struct Item {
    u32 block, first, count;

    // Tokens in the ring: whole pieces.
    __device__ __forceinline__ u32 copied() const { return (count + PIECE - 1) / PIECE * PIECE; }
};

struct Work {
    u32 num_tokens, span, tiles, clusters, items;  // clusters of row blocks

    // Token tiles have `span` tokens. A last one that is at most half full comes after all others,
    // where it fills a round of blocks that has room.
    __device__ __forceinline__ Work(u32 num_tokens, u32 span, u32 rows)
        : num_tokens(num_tokens), span(span) {
        u32 full = num_tokens / span, tail = num_tokens % span;
        tiles = full + (2 * tail > span || full == 0);
        clusters = (rows + FEATURES * CLUSTER - 1) / (FEATURES * CLUSTER);
        items = (full + (tail > 0)) * clusters;
    }

    // GROUP token tiles go over all weight rows together. The blocks of a cluster have the same
    // tokens and each its own rows; the last may have none.
    __device__ __forceinline__ Item find(u32 index, u32 rank) const {
        u32 begin = index / (GROUP * clusters) * GROUP;  // the group's first token tile
        u32 together = tiles - begin < GROUP ? tiles - begin : GROUP;
        if (index >= tiles * clusters) begin = tiles, together = 1;
        u32 rest = index - begin * clusters, first = (begin + rest % together) * span;
        u32 count = num_tokens - first;
        return {rest / together * CLUSTER + rank, first, count < span ? count : span};
    }
};

// Those that multiply need the registers that those that fill don't.
template <bool multiplies>
__device__ __forceinline__ void take_registers() {
    if constexpr (WARPGROUPS == 2) {
        if constexpr (multiplies) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        else asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    }
    if constexpr (WARPGROUPS == 3) {
        if constexpr (multiplies) asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
        else asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    }
}
