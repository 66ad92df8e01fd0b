// Whose turn it is at the matrix units, in class a8.
//
// The units take instructions of all warpgroups in rotation. So four that begin together end together,
// and make their operands together while the units wait. In turns, one multiplies while the others
// unpack and add. A warpgroup passes its turn on when its instructions are queued.

// Narrower tiles run their own unpacking beside. In a16 turns cost more than they bring (H200: 7-20 %).
constexpr bool IN_TURNS = A8 && TOKENS > 16;
constexpr u32 FIRST_TURN = 8;  // of four hardware barriers

struct Turns {
    u32 own;  // barrier

    // The last warpgroup passes before the first turn, so the first one begins.
    __device__ __forceinline__ explicit Turns(u32 group) : own(FIRST_TURN + group) {
        if (group == WARPS / 4 - 1) pass();
    }

    __device__ __forceinline__ void wait() const {
        if (IN_TURNS) sync_threads(own, 256);
    }

    __device__ __forceinline__ void pass() const {
        if (IN_TURNS) arrive_threads(own == FIRST_TURN + WARPS / 4 - 1 ? FIRST_TURN : own + 1, 256);
    }

    // No barrier is left with an arrival that nobody waits for.
    __device__ __forceinline__ void end() const {
        if (own == FIRST_TURN) wait();
    }
};
