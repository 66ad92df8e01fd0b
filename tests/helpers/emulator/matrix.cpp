// wgmma: rows of A in registers, B in shared memory in 128-byte swizzle, sums in float, k ascending.
//
// B is read at some time between the instruction and the wait that covers it. The sums stay poison
// until then. The order and the precision of the real units are not known: bits are compared only
// with other runs of this machine.

#include <cstring>

#include "machine.h"

namespace emulator {

static void require_poison(const Chain& chain, const char* what, Where where) {
    for (u32 i = 0; i < chain.count; ++i)
        if (as_bits(chain.sums[i]) != POISON)
            fail("%s: sum %u was written while a matrix instruction had it, at %s", what, i,
                 place_of(where).c_str());
}

static Chain& chain_of(Fiber& fiber, float* sums, u32 count, u64 instruction, Where where) {
    for (Chain& chain : fiber.chains) {
        if (chain.sums != sums) continue;
        require_poison(chain, "wgmma", where);
        if (count > chain.count)
            fail("wgmma: %u sums, of which an earlier instruction has %u, at %s", count, chain.count,
                 place_of(where).c_str());
        chain.last = instruction;
        return chain;
    }
    fiber.chains.push_back({sums, count, instruction, std::vector<float>(sums, sums + count)});
    memset(sums, 0xFF, 4 * count);
    return fiber.chains.back();
}

static u32 swizzled(u64 rows, u32 row, u32 byte) {
    u32 begin = u32(rows & 0x3FFF) << 4, stride = u32(rows >> 32 & 0x3FFF) << 4;
    u32 address = begin + row / 8 * stride + row % 8 * 128 + byte;
    return address ^ (address >> 7 & 7) << 4;
}

void matrix(Units units, u32 columns, float* sums, const u32* a, u64 rows, bool go_on, Where where) {
    point();
    Fiber& fiber = *machine.fiber;
    Warp& warp = *fiber.warp;
    if (!fiber.fenced)
        fail("wgmma without wgmma_fence behind the last wgmma_commit, at %s", place_of(where).c_str());
    if (rows >> 62 != 1 || (rows & 0x3FFF) << 4 & 0x380)
        fail("wgmma: descriptor %016llx is not of 128-byte swizzle from a multiple of 1024, at %s",
             rows, place_of(where).c_str());
    u64 instruction = fiber.issued++;
    while (warp.executed + warp.ops.size() <= instruction) warp.ops.push_back({});
    MatrixOp& op = warp.ops[instruction - warp.executed];
    if (op.lanes == 0)
        op.units = units, op.columns = columns, op.rows = rows, op.go_on = go_on, op.where = where;
    if (op.units != units || op.columns != columns || op.rows != rows || op.go_on != go_on)
        fail("wgmma: lanes of warp %u differ in the instruction or in its rows, at %s", warp.number,
             place_of(where).c_str());
    memcpy(op.a[fiber.lane], a, 16);
    op.chains[fiber.lane] = &chain_of(fiber, sums, columns / 2, instruction, where);
    op.lanes |= 1u << fiber.lane;
    if (op.lanes != ~0u) return;
    ++warp.complete;
    Agent agent = matrix_agent(warp, instruction);
    for (u32 row = 0; row < columns; ++row)
        for (u32 byte = 0; byte < 32; byte += 16) {
            u32 address = swizzled(rows, row, byte);
            shared_at(*warp.block, address, 16, "wgmma", where);
            access_shared(*warp.block, address, 16, agent, READ, where);
        }
    make_matrix_ready(warp);
    wake(&warp.block->warps[warp.number / GROUP_WARPS * GROUP_WARPS].ops);
}

void matrix_fence() {
    point();
    machine.fiber->fenced = true;
}

void matrix_commit() {
    point();
    Fiber& fiber = *machine.fiber;
    fiber.fenced = false;
    fiber.groups.push_back(fiber.issued);
}

static void deliver(Fiber& fiber, u64 instructions, Where where) {
    for (auto chain = fiber.chains.begin(); chain != fiber.chains.end();) {
        if (chain->last >= instructions) {
            ++chain;
            continue;
        }
        require_poison(*chain, "wgmma_wait", where);
        memcpy(chain->sums, chain->values.data(), 4 * chain->count);
        chain = fiber.chains.erase(chain);
    }
}

// All groups but the `newest` are done.
void matrix_wait(u32 newest, Where where) {
    point();
    Fiber& fiber = *machine.fiber;
    Warp& warp = *fiber.warp;
    u64 needed = 0;
    while (fiber.groups.size() > newest) needed = fiber.groups.front(), fiber.groups.pop_front();
    Warp* group = &warp.block->warps[warp.number / GROUP_WARPS * GROUP_WARPS];
    for (u32 i = 0; i < GROUP_WARPS; ++i)
        while (group[i].complete < needed)
            park(&group->ops, "wgmma_wait for lanes of warp %u", where, group[i].number);
    while (warp.executed < needed) execute(warp);
    if (needed) matrices_done(warp, needed);
    deliver(fiber, needed, where);
}

// The warp's oldest instruction.
void execute(Warp& warp) {
    MatrixOp& op = warp.ops.front();
    u32 k = op.units, of_word = k / 8;  // numbers in a register
    static float b[32][256], a[16][32], sums[16][256];
    for (u32 row = 0; row < op.columns; ++row)
        for (u32 byte = 0; byte < 32; byte += 16) {
            const u8* from =
                shared_at(*warp.block, swizzled(op.rows, row, byte), 16, "wgmma", op.where);
            for (u32 i = 0; i < 4 * of_word; ++i)
                b[byte / 16 * 4 * of_word + i][row] =
                    op.units == BF16 ? from_bf16(u32(from[2 * i]) | u32(from[2 * i + 1]) << 8)
                                     : from_e4m3(from[i]);
        }
    for (u32 lane = 0; lane < LANES; ++lane) {
        float* kept = op.chains[lane]->values.data();
        for (u32 i = 0; i < 4; ++i)
            for (u32 j = 0; j < of_word; ++j) {
                u32 at = i / 2 * k / 2 + lane % 4 * of_word + j;
                a[lane / 4 + i % 2 * 8][at] = op.units == BF16
                                                  ? from_bf16(op.a[lane][i] >> (16 * j) & 0xFFFF)
                                                  : from_e4m3(op.a[lane][i] >> (8 * j) & 0xFF);
            }
        for (u32 i = 0; i < op.columns / 2; ++i)
            sums[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2] =
                op.go_on ? kept[i] : 0.0f;
    }
    for (u32 row = 0; row < 16; ++row)
        for (u32 step = 0; step < k; ++step)
            for (u32 column = 0; column < op.columns; ++column)
                sums[row][column] += a[row][step] * b[step][column];
    for (u32 lane = 0; lane < LANES; ++lane)
        for (u32 i = 0; i < op.columns / 2; ++i)
            op.chains[lane]->values[i] =
                sums[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
    warp.ops.pop_front();
    ++warp.executed;
}

}  // namespace emulator
