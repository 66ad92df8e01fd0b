// The ring in shared memory, and the warps that fill it: one copies weights, three bring token rows.
//
// Blocks take items off a queue, first all of gate_up, then all of down: whoever waits for h waits
// only for items that running blocks have taken, whatever else occupies the card. The warp that
// copies weights takes the next item as it ends one, and tells the others: first where it is, and
// behind its first copies what comes from far away, factors and units.

constexpr u32 NUM_QUEUES = 4;  // counters: of the next item, by phases; then of each expert

// Shared memory addresses: of the first stage, and of barriers.
struct Ring {
    u32 x, codes, scales, x_scales, full, empty, item_full, item_empty, factors_full;
};

// Where a lane reads in the ring's first stage.
struct Lane {
    u32 codes, scales;  // of its row of the first panel
    u32 x_scales;       // of its first two tokens
    u32 rows;           // token rows
};

// Units of a pass over an item's weights. An expert whose projections differ takes both passes.
constexpr u32 BF16_PASS = 0, FP8_PASS = 1;

struct Passes {
    bool first_on_fp8 = UNITS_FP8, second_on_fp8 = UNITS_FP8;  // the two projections
    u32 first, last;

    __device__ __forceinline__ Passes(const WholeItem& item) {
        if (MIXED) first_on_fp8 = item.first_on_fp8, second_on_fp8 = item.second_on_fp8;
        first = first_on_fp8 && second_on_fp8 ? FP8_PASS : BF16_PASS;
        last = first_on_fp8 || second_on_fp8 ? FP8_PASS : BF16_PASS;
    }
};

__device__ __forceinline__ void tell(Item& told, const Item& item, u32 full, u32 lane) {
    if (lane == 0) {
        told = item;
        barrier_arrive(full);
    }
}

// Factors and units of the two projections are those of lanes 0, 1. Rows need no factors, and units
// in MIXED alone.
__device__ __forceinline__ void tell_factors(WholeItem& told, float factor, u32 on_fp8, u32 full,
                                             u32 lane) {
    float second = __shfl_sync(~0u, factor, 1);
    u32 second_on_fp8 = MIXED ? __shfl_sync(~0u, on_fp8, 1) : 0;
    if (lane == 0) {
        if (MIXED) told.first_on_fp8 = on_fp8, told.second_on_fp8 = second_on_fp8;
        told.first_factor = factor;
        told.second_factor = second;
        barrier_arrive(full);
    }
}

// One warp: takes items and copies their weights.
__device__ __forceinline__ void fill_weights(const Arguments& given, const Ring& ring, Work& work,
                                             u32 lane) {
    // Stages to go when the next item is taken: not long ahead, for a free block may take it.
    constexpr u32 AHEAD = 2;
    u32* next = given.counters + given.phases - 1;
    u32 index = lane == 0 ? atomicAdd(next, 1u) : 0;
    u32 tiles = work.tiles_before[given.num_experts];
    u32 of_gate_up = given.phases & GATE_UP ? tiles * given.gate_up_blocks() : 0;
    u32 items = of_gate_up + (given.phases & DOWN ? tiles * given.down_blocks() : 0);
    // Lanes 0 ... 3 copy codes and scales of both panels.
    bool codes = lane < 2, second = lane % 2;
    u32 bytes = codes ? CODE_BYTES : PANEL_SCALE_BYTES;
    u32 target = (codes ? ring.codes : ring.scales) + second * bytes;
    Place place;
    PlaceIn<ITEMS> turn;
    while (true) {
        index = __shfl_sync(~0u, index, 0);
        barrier_wait(ring.item_empty + 8 * turn.stage, turn.parity ^ 1);
        if (index >= items) break;
        bool down = index >= of_gate_up;
        u32 blocks = down ? given.down_blocks() : given.gate_up_blocks();
        u32 rest = down ? index - of_gate_up : index;
        Item item = work.find(given.num_experts, rest / blocks, rest % blocks, lane);
        item.phase = down ? DOWN : GATE_UP;
        const Projection& weight = down ? given.down : second ? given.up : given.gate;
        float factor = weight.factors[item.expert];
        u32 on_fp8 = MIXED ? weight.on_fp8[item.expert] : 0;
        u32 panels = (down ? given.hidden : given.inner) / PANEL;
        u32 panel = down ? 2 * item.block + second : item.block, chunks = given.chunks(item.phase);
        panel = panel < panels ? panel : panel - 1;
        const u8* source = (codes ? weight.codes : weight.scales) +
                           item.expert * (codes ? weight.code_stride : weight.scale_stride) +
                           u64(panel) * chunks * bytes;
        tell(work.items[turn.stage], item, ring.item_full + 8 * turn.stage, lane);
        u32 passes = 1, take = chunks > AHEAD ? chunks - AHEAD : 0;
#pragma unroll 1
        for (u32 pass = 0; pass < passes; ++pass) {
#pragma unroll 1
            for (u32 chunk = 0; chunk < chunks; ++chunk, place.next()) {
                u32 full = ring.full + 8 * place.stage;
                barrier_wait(ring.empty + 8 * place.stage, place.parity ^ 1);
                if (lane == 0) barrier_arrive_expect(full, WEIGHT_BYTES);
                __syncwarp();
                if (lane < 4)
                    copy_bulk(target + place.stage * 2 * bytes, source + chunk * bytes, bytes, full);
                if (pass == 0 && chunk == 0) {
                    tell_factors(work.items[turn.stage], factor, on_fp8,
                                 ring.factors_full + 8 * turn.stage, lane);
                    if (MIXED) passes += __shfl_sync(~0u, on_fp8, 0) != __shfl_sync(~0u, on_fp8, 1);
                }
                if (pass + 1 == passes && chunk == take) index = lane == 0 ? atomicAdd(next, 1u) : 0;
            }
        }
        turn.next();
    }
    tell(work.items[turn.stage], Item{}, ring.item_full + 8 * turn.stage, lane);
    // The last block of the grid to find nothing more.
    if (lane == 0 && index == items + gridDim.x - 1) atomicExch(next, 0u);
}

// By one lane of each warp that fills rows: all of h of the item's expert is written.
__device__ __forceinline__ void wait_for_h(const Arguments& given, const Item& item) {
    u32* ready = given.counters + NUM_QUEUES + item.expert;
    u32 written = item.tiles * given.gate_up_blocks() * WARPS;
    while (load_acquire(ready) < written) {}
    proxy_fence_global();
    // The last to have seen it clears it for the next launch.
    u32 all = written + item.tiles * given.down_blocks() * ROWS_WARPS;
    if (atomicAdd(ready, 1u) + 1 == all) atomicExch(ready, 0u);
}

static_assert(STAGES >= ROWS_WARPS, "a warp that waits for a stage would see the wrong parity");

// A warp's share of an item's rows, which are not packed. Eight lanes copy 128 bytes of a row. Rows
// past the count keep old values: they reach only columns that nobody stores.
__device__ __forceinline__ void gather_rows(const Arguments& given, const Ring& ring,
                                            const Item& item, Place& place, u32& turn, u32 lane) {
    u32 piece = lane % 8, chunks = given.hidden / CHUNK;
    u32 row_of[TOKENS / 4];  // of rows lane / 8, + 4, ...
#pragma unroll
    for (u32 i = 0; i < TOKENS / 4; ++i) {
        u32 row = 4 * i + lane / 8;
        row_of[i] = row < item.count ? given.slots[item.first + row] / given.top_k : 0;
    }
    for (u32 chunk = 0; chunk < chunks; ++chunk, place.next()) {
        bool mine = turn == 0;
        turn = mine ? ROWS_WARPS - 1 : turn - 1;
        if (!mine) continue;
        barrier_wait(ring.empty + 8 * place.stage, place.parity ^ 1);
        u32 target = ring.x + place.stage * X_BYTES;
#pragma unroll
        for (u32 i = 0; i < TOKENS / 4; ++i) {
            u32 row = 4 * i + lane / 8;
            if (row < item.count) {
                const u8* values = given.x.values +
                                   (u64(row_of[i]) * given.hidden + chunk * CHUNK) * (A8 ? 1 : 2) +
                                   piece * 16;
                u32 to = target + row / 8 * ROWS_BYTES + row % 8 * 128 + (piece ^ (row % 8)) * 16;
                copy_16(to, values);
                if (!A8) copy_16(to + ROWS_BYTES / 2, values + 128);
                if (A8 && piece == 0)
                    copy_4(ring.x_scales + place.stage * X_SCALE_BYTES + row * 4,
                           given.x.scales + u64(row_of[i]) * chunks + chunk);
            }
        }
        copies_wait();
        proxy_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.full + 8 * place.stage);
    }
}

// A warp's share of an item's packed rows.
__device__ __forceinline__ void copy_rows(const Arguments& given, const Ring& ring,
                                          const Item& item, const Passes& passes, Place& place,
                                          u32& turn, u32 lane) {
    u32 chunks = given.chunks(item.phase), eights = (item.count + 7) / 8;
    const Rows& rows = item.phase == DOWN ? given.h : given.x;
#pragma unroll 1
    for (u32 pass = passes.first; pass <= passes.last; ++pass) {
        bool fp8 = UNITS_FP8 && (!MIXED || pass == FP8_PASS);
        const u8* values = A8 && !fp8 ? rows.wide : rows.values;
        u32 bytes = fp8 ? FP8_ROWS_BYTES : ROWS_BYTES;
#pragma unroll 1
        for (u32 chunk = 0; chunk < chunks; ++chunk, place.next()) {
            bool mine = turn == 0;
            turn = mine ? ROWS_WARPS - 1 : turn - 1;
            if (!mine || lane != 0) continue;
            u32 full = ring.full + 8 * place.stage;
            u64 piece = item.piece(chunks, chunk);
            barrier_wait(ring.empty + 8 * place.stage, place.parity ^ 1);
            barrier_arrive_expect(full, eights * (bytes + (A8 ? PIECE_SCALE_BYTES : 0)));
            copy_bulk(ring.x + place.stage * X_BYTES, values + piece * bytes, eights * bytes, full);
            if (A8)
                copy_bulk(ring.x_scales + place.stage * X_SCALE_BYTES, rows.scales + piece * 8,
                          eights * PIECE_SCALE_BYTES, full);
        }
    }
}

// Three warps; each fills every third stage, `turn` counts to its next one.
__device__ __forceinline__ void fill_rows(const Arguments& given, const Ring& ring, const Work& work,
                                          u32 turn, u32 lane) {
    Place place;
    PlaceIn<ITEMS> told;
    if (given.phases == DOWN) wait_for_earlier_kernels();
    for (;; told.next()) {
        barrier_wait(ring.item_full + 8 * told.stage, told.parity);
        const WholeItem& whole = work.items[told.stage];
        Item item = whole;
        if (MIXED && item.phase != 0)
            barrier_wait(ring.factors_full + 8 * told.stage, told.parity);
        Passes passes(whole);
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.item_empty + 8 * told.stage);
        if (item.phase == 0) return;
        bool waits = item.phase == DOWN && given.phases != DOWN;
        if (waits && lane == 0) wait_for_h(given, item);
        if (GATHER && item.phase == GATE_UP) gather_rows(given, ring, item, place, turn, lane);
        else copy_rows(given, ring, item, passes, place, turn, lane);
        __syncwarp();
    }
}
