// Where threads meet: mbarriers, bar.sync, collectives of a warp, flags in global memory.

#include <algorithm>
#include <cstring>

#include "machine.h"

namespace emulator {

// ---- mbarriers

static Barrier& barrier_at(Block& block, u32 address, const char* what, Where where) {
    auto found = block.barriers.find(address);
    if (found == block.barriers.end())
        fail("%s: at shared address %u there is no barrier, at %s", what, address,
             place_of(where).c_str());
    return found->second;
}

void barrier_init(u32 address, u32 arrivals, Where where) {
    point();
    Block& block = *machine.fiber->warp->block;
    shared_at(block, address, 8, "barrier_init", where);
    if (address % 8 || arrivals == 0 || arrivals >= 1 << 20 || block.barriers.count(address))
        fail(
            "barrier_init(%u, %u): the address is a multiple of 8 without a barrier, arrivals are "
            "1 ... 2^20 - 1, at %s",
            address, arrivals, place_of(where).c_str());
    Barrier& made = block.barriers[address];
    made.address = address, made.arrivals = made.pending = arrivals;
    made.agent = barrier_agent(block);
    made.gathering = made.released =
        Clock{std::vector<u32>(machine.agents), std::vector<u32>(machine.agents)};
}

void barrier_init_fence() {
    point();
    for (auto& [address, barrier] : machine.fiber->warp->block->barriers) barrier.fenced = true;
}

static void complete_if_all_came(Barrier& barrier) {
    if (barrier.pending || barrier.bytes) return;
    ++barrier.phase;
    barrier.pending = barrier.arrivals;
    // Copies that this phase counted have landed, for both proxies.
    barrier.gathering.generic[barrier.agent] = barrier.gathering.async[barrier.agent] = barrier.phase;
    barrier.released.join(barrier.gathering);
    wake(&barrier);
}

void complete_bytes(Block& block, u32 address, u32 bytes) {
    Barrier& barrier = block.barriers.at(address);
    barrier.bytes -= int(bytes);
    complete_if_all_came(barrier);
}

void barrier_arrive(u32 address, u32 bytes, Where where) {
    point();
    Warp& warp = *machine.fiber->warp;
    Barrier& barrier = barrier_at(*warp.block, address, "barrier_arrive", where);
    if (barrier.pending == 0)
        fail(
            "barrier_arrive: the barrier at %u expects %u arrivals a phase, and phase %u has them all, "
            "at %s",
            address, barrier.arrivals, barrier.phase, place_of(where).c_str());
    release(warp, barrier.gathering);
    barrier.bytes += int(bytes);
    --barrier.pending;
    complete_if_all_came(barrier);
}

void barrier_wait(u32 address, u32 parity, Where where) {
    point();
    Warp& warp = *machine.fiber->warp;
    if (parity > 1) fail("barrier_wait: parity %u, at %s", parity, place_of(where).c_str());
    Barrier& barrier = barrier_at(*warp.block, address, "barrier_wait", where);
    while ((barrier.phase & 1) == parity)
        park(&barrier, "barrier_wait of barrier %u, parity %u", where, address, parity);
    acquire(warp, barrier.released);
}

// ---- bar.sync

static void complete_named(Named& named) {
    for (Warp* warp : named.warps) acquire(*warp, named.gathering);
    named.warps.clear();
    std::fill(named.gathering.generic.begin(), named.gathering.generic.end(), 0);
    std::fill(named.gathering.async.begin(), named.gathering.async.end(), 0);
    named.arrived = 0;
    wake(&named);
}

static Named& arrive_named(const char* what, u32 number, u32 threads, Where where) {
    point();
    Warp& warp = *machine.fiber->warp;
    Block& block = *warp.block;
    if (number >= NAMED || threads % LANES || threads > block.warps.size() * LANES)
        fail("%s(%u, %u): barriers are 0 ... 15, threads whole warps of the block, at %s", what, number,
             threads, place_of(where).c_str());
    Named& named = block.named[number];
    if (named.arrived && named.expected != threads)
        fail("%s(%u, %u): others are there for %u threads, at %s", what, number, threads, named.expected,
             place_of(where).c_str());
    named.expected = threads;
    release(warp, named.gathering);
    ++named.arrived;
    return named;
}

// Of 0 threads: all of the block that are still there.
void sync_threads(u32 number, u32 threads, Where where) {
    Named& named = arrive_named("sync_threads", number, threads, where);
    Warp& warp = *machine.fiber->warp;
    if (std::find(named.warps.begin(), named.warps.end(), &warp) == named.warps.end())
        named.warps.push_back(&warp);
    if (named.arrived == (threads ? threads : warp.block->living)) complete_named(named);
    else park(&named, "sync_threads(%u, %u)", where, number, threads);
}

void arrive_threads(u32 number, u32 threads, Where where) {
    Named& named = arrive_named("arrive_threads", number, threads, where);
    if (named.arrived == threads) complete_named(named);
}

void leave(Fiber& fiber) {
    Block& block = *fiber.warp->block;
    if (!fiber.copies.empty())
        fail("ends with %zu copies that it did not wait for", fiber.copies.size());
    if (!fiber.chains.empty()) fail("ends with matrix instructions that it did not wait for");
    --block.living;
    for (Named& named : block.named)
        if (named.arrived && named.expected == 0 && named.arrived == block.living)
            complete_named(named);
    if (block.living) return;
    for (const Copy& copy : machine.copies)
        if (copy.block == &block)
            fail("its block ends, and a copy is still on its way, from %s",
                 place_of(copy.where).c_str());
}

// ---- collectives of a warp

static const char* const NAMES[] = {"__shfl_sync",     "__shfl_up_sync", "__shfl_down_sync",
                                    "__shfl_xor_sync", "__ballot_sync",  "__syncwarp"};

// True for the lane that comes last.
static bool meet(const char* what, u32 mask, const u32* values, u32 count, u32 operand, Where where) {
    point();
    Fiber& fiber = *machine.fiber;
    Meeting& meeting = fiber.warp->meeting;
    u32 own = 1u << fiber.lane;
    if (!(mask & own))
        fail("%s: its own lane is not in mask %08x, at %s", what, mask, place_of(where).c_str());
    if (meeting.arrived == 0) meeting.what = what, meeting.mask = mask, meeting.where = where;
    if (strcmp(meeting.what, what) || meeting.mask != mask)
        fail("%s with mask %08x at %s, while other lanes of the warp are in %s with mask %08x at %s",
             what, mask, place_of(where).c_str(), meeting.what, meeting.mask,
             place_of(meeting.where).c_str());
    for (u32 i = 0; i < count; ++i) meeting.values[fiber.lane][i] = values[i];
    meeting.operands[fiber.lane] = operand;
    meeting.arrived |= own;
    if (meeting.arrived == mask) return true;
    park(&meeting, "a collective of the warp (mask %08x)", where, mask);
    return false;
}

static void part(Meeting& meeting) {
    meeting.arrived = 0;
    wake(&meeting);
}

u32 exchange(Exchange what, u32 mask, u32 value, u32 operand, Where where) {
    Fiber& fiber = *machine.fiber;
    if (!meet(NAMES[what], mask, &value, 1, operand, where)) return fiber.result;
    Meeting& meeting = fiber.warp->meeting;
    u32 ballot = 0;
    for (u32 lane = 0; lane < LANES; ++lane)
        if (mask >> lane & 1 && meeting.values[lane][0]) ballot |= 1u << lane;
    for (u32 lane = 0; lane < LANES; ++lane) {
        u32 by = meeting.operands[lane], from = lane;
        if (what == SHUFFLE) from = by % LANES;
        if (what == SHUFFLE_UP && lane >= by) from = lane - by;
        if (what == SHUFFLE_DOWN && lane + by < LANES) from = lane + by;
        if (what == SHUFFLE_XOR) from = (lane ^ by) % LANES;
        bool known = mask >> from & 1;
        fiber.warp->fibers[lane].result = what == BALLOT ? ballot
                                          : known        ? meeting.values[from][0]
                                                         : POISON;
    }
    part(meeting);
    return fiber.result;
}

void store_transposed(u32 address, const u32* words, Where where) {
    Warp& warp = *machine.fiber->warp;
    if (!meet("store_transposed", ~0u, words, 4, address, where)) return;
    Meeting& meeting = warp.meeting;
    for (u32 lane = 0; lane < LANES; ++lane) {
        // The lane's address is of row lane % 8 of matrix lane / 8; of a row, element i is what lane
        // 4i + row / 2 holds, in its half row % 2.
        u32 row = lane % 8, matrix = lane / 8, to = meeting.operands[lane];
        if (to % 16)
            fail("store_transposed: address %u of lane %u, at %s", to, lane, place_of(where).c_str());
        u8* bytes = shared_at(*warp.block, to, 16, "store_transposed", where);
        for (u32 i = 0; i < 8; ++i) {
            u16 half = u16(meeting.values[4 * i + row / 2][matrix] >> (16 * (row % 2)));
            memcpy(bytes + 2 * i, &half, 2);
        }
        access_shared(*warp.block, to, 16, agent_of(warp), WRITE, where);
    }
    part(meeting);
}

// ---- flags in global memory

u32 atomic(Atomic what, u32* address, u32 value, u32 compare, Order order, Where where) {
    point();
    Warp& warp = *machine.fiber->warp;
    Buffer& buffer = buffer_at(address, 4, true, "atomic", where);
    access_global(buffer, address, 4, agent_of(warp), ATOMIC, where);
    Clock& flag = machine.flags[reinterpret_cast<u64>(address)];
    u32 before = *address;
    if (what == ADD) *address += value;
    if (what == MAX && value > before) *address = value;
    if (what == EXCHANGE || (what == COMPARE && before == compare)) *address = value;
    if (order == RELEASE) release(warp, flag);
    else warp.seen.join(flag), flag.join(warp.fence);
    return before;
}

u32 load_acquire(const u32* address, Where where) {
    Fiber& fiber = *machine.fiber;
    Buffer& buffer = buffer_at(address, 4, false, "load_acquire", where);
    if (fiber.polled == address && fiber.polled_value == *address) {
        fiber.waits = "load_acquire, again and again: the value stays %u", fiber.where = where;
        fiber.detail[0] = *address;
        park_poller();
    } else if (machine.budget-- == 0) {
        yield();
    }
    if (fiber.polled != address || fiber.polled_value != *address) ++machine.progress;
    fiber.polled = address, fiber.polled_value = *address;
    access_global(buffer, address, 4, agent_of(*fiber.warp), ATOMIC, where);
    acquire(*fiber.warp, machine.flags[reinterpret_cast<u64>(address)]);
    return fiber.polled_value;
}

void pause() { yield(); }

}  // namespace emulator
