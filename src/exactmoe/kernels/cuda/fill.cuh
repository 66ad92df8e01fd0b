// What the kernel is given, where the ring lies, and the warps that fill it.

struct Arguments {
    const u8* codes[2];         // of the first and the second projection (down: the same)
    const u8* scales[2];
    u64 code_stride[2], scale_stride[2];  // bytes from expert to expert
    const float* factors[2];
    const u8* on_fp8[2];        // MIXED: of each expert
    const int* offsets;
    const int* slots;
    const u8* x;                // token rows, or packed ones; e4m3 in a8
    const u8* wide_x;           // a8: packed e4m3 values as bf16
    const float* x_scales;      // a8: of rows, or of pieces
    u32 num_experts, k, panels, top_k;
};

// Shared memory addresses of the first stage.
struct Ring {
    u32 x, codes, scales, x_scales, full, empty;
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

    __device__ __forceinline__ Passes(const Arguments& given, u32 expert) {
        if (MIXED) {
            first_on_fp8 = given.on_fp8[0][expert];
            second_on_fp8 = given.on_fp8[1][expert];
        }
        first = first_on_fp8 && second_on_fp8 ? FP8_PASS : BF16_PASS;
        last = first_on_fp8 || second_on_fp8 ? FP8_PASS : BF16_PASS;
    }
};

// One warp: weights, and packed rows. down may start while gate_up ends: its first weights need no h.
__device__ __forceinline__ void fill_ring(const Arguments& given, const Ring& ring, const Work& work,
                                          u32 blocks, u32 items, u32 lane) {
    u32 chunks = given.k / CHUNK;
    bool waited = GATE_UP;
    Place place;
#pragma unroll 1
    for (u32 index = blockIdx.x; index < items; index += gridDim.x) {
        Item item = work.find(given.num_experts, index, blocks);
        u32 eights = GATHER ? 0 : (item.count + 7) / 8;
        // Lanes 0 ... 3 copy codes and scales of both panels.
        bool codes = lane < 2, second = lane % 2;
        u32 panel = GATE_UP ? item.block : 2 * item.block + second;
        panel = panel < given.panels ? panel : panel - 1;
        u32 bytes = codes ? CODE_BYTES : PANEL_SCALE_BYTES;
        const u8* source = codes ? (second ? given.codes[1] : given.codes[0])
                                 : (second ? given.scales[1] : given.scales[0]);
        u64 stride = codes ? (second ? given.code_stride[1] : given.code_stride[0])
                           : (second ? given.scale_stride[1] : given.scale_stride[0]);
        source += item.expert * stride + u64(panel) * chunks * bytes;
        u32 target = (codes ? ring.codes : ring.scales) + second * bytes;
        Passes passes(given, item.expert);
#pragma unroll 1
        for (u32 pass = passes.first; pass <= passes.last; ++pass) {
            u32 rows_bytes = UNITS_FP8 && (!MIXED || pass == FP8_PASS) ? FP8_ROWS_BYTES : ROWS_BYTES;
            const u8* rows = A8 && UNITS_BF16 && (!MIXED || pass == BF16_PASS) ? given.wide_x : given.x;
            u32 expected = WEIGHT_BYTES + eights * (rows_bytes + (A8 ? PIECE_SCALE_BYTES : 0));
            auto fill_weights = [&](u32 chunk, u32 stage) {
                if (lane == 0) barrier_arrive_expect(ring.full + 8 * stage, expected);
                if (lane < 4)
                    copy_bulk(target + stage * 2 * bytes, source + chunk * bytes, bytes,
                              ring.full + 8 * stage);
            };
            auto fill_rows = [&](u32 chunk, u32 stage) {
                u64 piece = item.piece(chunks, chunk);
                if (!GATHER && lane == 4)
                    copy_bulk(ring.x + stage * X_BYTES, rows + piece * rows_bytes,
                              eights * rows_bytes, ring.full + 8 * stage);
                if (!GATHER && A8 && lane == 5)
                    copy_bulk(ring.x_scales + stage * X_SCALE_BYTES, given.x_scales + piece * 8,
                              eights * PIECE_SCALE_BYTES, ring.full + 8 * stage);
            };
            u32 chunk = 0;
            if (!waited) {
                u32 ahead = chunks < STAGES ? chunks : STAGES;
#pragma unroll 1
                for (u32 stage = 0; stage < ahead; ++stage) fill_weights(stage, stage);
                wait_for_earlier_kernels();
                waited = true;
#pragma unroll 1
                for (; chunk < ahead; ++chunk, place.next()) fill_rows(chunk, chunk);
            }
#pragma unroll 1
            for (; chunk < chunks; ++chunk, place.next()) {
                barrier_wait(ring.empty + 8 * place.stage, place.parity ^ 1);
                fill_weights(chunk, place.stage);
                fill_rows(chunk, place.stage);
            }
        }
    }
    // A block without items, too, ends behind gate_up: what follows down may rely on both.
    if (!waited) wait_for_earlier_kernels();
}

// Three warps: rows of x that are not packed; each warp fills every third stage.
__device__ __forceinline__ void gather_rows(const Arguments& given, const Ring& ring,
                                            const Work& work, u32 blocks, u32 items, u32 number,
                                            u32 lane) {
    u32 piece = lane % 8, turn = 0, chunks = given.k / CHUNK;
    Place place;
    for (u32 index = blockIdx.x; index < items; index += gridDim.x) {
        Item item = work.find(given.num_experts, index, blocks);
        u32 row_of[TOKENS / 4];  // of rows lane / 8, + 4, ...
#pragma unroll
        for (u32 i = 0; i < TOKENS / 4; ++i) {
            u32 row = 4 * i + lane / 8;
            row_of[i] = row < item.count ? given.slots[item.first + row] / given.top_k : 0;
        }
        for (u32 chunk = 0; chunk < chunks; ++chunk, place.next()) {
            bool mine = turn == number;
            turn = turn + 1 == GATHER_WARPS ? 0 : turn + 1;
            if (!mine) continue;
            barrier_wait(ring.empty + 8 * place.stage, place.parity ^ 1);
            u32 target = ring.x + place.stage * X_BYTES;
#pragma unroll
            // Eight lanes copy 128 bytes of a row. Rows past the count keep old values: they reach
            // only columns that nobody stores.
            for (u32 i = 0; i < TOKENS / 4; ++i) {
                u32 row = 4 * i + lane / 8;
                if (row < item.count) {
                    const u8* values =
                        given.x + (u64(row_of[i]) * given.k + chunk * CHUNK) * (A8 ? 1 : 2) + piece * 16;
                    u32 to = target + row / 8 * ROWS_BYTES + row % 8 * 128 + (piece ^ (row % 8)) * 16;
                    copy_16(to, values);
                    if (!A8) copy_16(to + ROWS_BYTES / 2, values + 128);
                    if (A8 && piece == 0)
                        copy_4(ring.x_scales + place.stage * X_SCALE_BYTES + row * 4,
                               given.x_scales + u64(row_of[i]) * chunks + chunk);
                }
            }
            copies_wait();
            proxy_fence();
            __syncwarp();
            if (lane == 0) barrier_arrive(ring.full + 8 * place.stage);
        }
    }
}
