// What happens before what. Two accesses of the same bytes, not both reads, must be ordered by
// barriers or flags whatever the schedule is; what the asynchronous proxy reads must have gone
// through a proxy fence.
//
// Agents: each warp; its matrix instructions; its copies of 4 and 16 bytes; each mbarrier, for the
// bulk copies that it counts. An agent's accesses have an epoch; a clock holds, of each agent, the
// epoch up to which its accesses came before. Lanes of a warp are one agent: among them only the
// schedule finds a race.

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>

#include "machine.h"

namespace emulator {

static std::vector<Where> places;
static std::map<std::tuple<const void*, int>, u16> numbers;
static u32 warps;

void Clock::join(const Clock& other) {
    if (other.generic.empty()) return;
    if (generic.empty()) generic.resize(other.generic.size()), async.resize(other.generic.size());
    u32 *mine = generic.data(), *seen = async.data();
    const u32 *theirs = other.generic.data(), *their_seen = other.async.data();
    for (size_t i = 0; i < generic.size(); ++i) {
        mine[i] = mine[i] > theirs[i] ? mine[i] : theirs[i];
        seen[i] = seen[i] > their_seen[i] ? seen[i] : their_seen[i];
    }
}

void start_clocks() {
    places.clear(), numbers.clear();
    warps = 0;
    for (Block& block : machine.blocks) warps += u32(block.warps.size());
    machine.agents = 3 * warps + MOST_BARRIERS * u32(machine.blocks.size());
    std::vector<u32> zeros(machine.agents);
    u32 number = 0;
    for (Block& block : machine.blocks) {
        for (Warp& warp : block.warps) {
            warp.agent = number++;
            warp.clock = Clock{zeros, zeros};
            warp.clock.generic[warp.agent] = 1;
        }
        for (Named& named : block.named) named.gathering = Clock{zeros, zeros};
        block.cells.assign((block.dynamic_begin + block.dynamic.size() - SYSTEM_BYTES + 15) / 16, {});
    }
    for (Buffer& buffer : machine.buffers)
        if (buffer.written) buffer.cells.assign((buffer.begin % 16 + buffer.bytes + 15) / 16, {});
}

u32 barrier_agent(Block& block) {
    u32 index = u32(block.barriers.size()) - 1;
    if (index >= MOST_BARRIERS) fail("more than %u barriers in a block", MOST_BARRIERS);
    return 3 * warps + u32(&block - machine.blocks.data()) * MOST_BARRIERS + index;
}

Agent agent_of(Warp& warp) {
    return {warp.agent, warp.clock.generic[warp.agent], &warp.clock, GENERIC};
}

Agent matrix_agent(Warp& warp, u64 instruction) {
    return {warps + warp.agent, u32(instruction) + 1, &warp.clock, ASYNC};
}

Agent copies_agent(Warp& warp) {
    return {2 * warps + warp.agent, warp.copies_issued, &warp.clock, GENERIC};
}

Agent bulk_agent(Warp& warp, const Barrier& barrier) {
    return {barrier.agent, barrier.phase + 1, &warp.clock, ASYNC};
}

// ---- synchronisation

void release(Warp& warp, Clock& to) {
    to.join(warp.clock);
    ++warp.clock.generic[warp.agent];
}

void acquire(Warp& warp, const Clock& from) { warp.clock.join(from); }

void proxy_fence() {
    point();
    Warp& warp = *machine.fiber->warp;
    warp.clock.async = warp.clock.generic;
    ++warp.clock.generic[warp.agent];
}

void thread_fence() {
    point();
    Warp& warp = *machine.fiber->warp;
    warp.clock.join(warp.seen);
    warp.fence = warp.clock;
    ++warp.clock.generic[warp.agent];
}

void matrices_done(Warp& warp, u64 instructions) {
    u32& known = warp.clock.generic[warps + warp.agent];
    known = std::max(known, u32(instructions));
}

// Up to the first that some lane has not waited for.
void small_copies_done(Warp& warp) {
    u32 done = warp.copies_issued;
    for (const Fiber& fiber : warp.fibers)
        for (const SmallCopy& copy : fiber.copies) done = std::min(done, copy.epoch - 1);
    u32& known = warp.clock.generic[2 * warps + warp.agent];
    known = std::max(known, done);
}

// ---- accesses

static u16 known_place(Where where) {
    std::tuple<const void*, int> key{where.file ? where.file : where.function, where.line};
    auto found = numbers.find(key);
    if (found != numbers.end()) return found->second;
    places.push_back(where);
    return numbers[key] = u16(places.size() - 1);
}

static std::string name_of_agent(u32 agent) {
    if (agent >= 3 * warps)
        return "bulk copy of block " + std::to_string((agent - 3 * warps) / MOST_BARRIERS);
    u32 of_block = u32(machine.blocks[0].warps.size()), warp = agent % warps;
    const char* kind = agent < warps ? "" : agent < 2 * warps ? "wgmma of " : "asynchronous copy of ";
    return std::string(kind) + "warp " + std::to_string(warp % of_block) + " of block " +
           std::to_string(warp / of_block);
}

[[noreturn]] static void race(const Access& earlier, const Agent& agent, Kind kind, Where where,
                              const std::string& memory) {
    static const char* const names[] = {"read", "write", "atomic access"};
    bool generic = agent.knows->generic[earlier.agent] >= earlier.epoch;
    fail("race on %s: the %s by %s at %s is not ordered behind the %s by %s at %s%s", memory.c_str(),
         names[kind], name_of_agent(agent.number).c_str(), place_of(where).c_str(), names[earlier.kind],
         name_of_agent(earlier.agent).c_str(), place_of(places[earlier.place]).c_str(),
         generic ? ": a proxy fence is missing between them" : "");
}

static bool ordered(const Access& earlier, const Agent& agent, Kind kind) {
    if (kind == READ && earlier.kind == READ) return true;
    if (kind == ATOMIC && earlier.kind == ATOMIC) return true;
    bool by_threads =
        earlier.agent < warps || (earlier.agent >= 2 * warps && earlier.agent < 3 * warps);
    if (agent.proxy == ASYNC && by_threads && earlier.kind != READ)
        return agent.knows->async[earlier.agent] >= earlier.epoch;
    if (earlier.agent == agent.number && agent.number < warps) return true;
    return agent.knows->generic[earlier.agent] >= earlier.epoch;
}

template <class Name>
static void access(Cell& cell, u16 bytes, const Agent& agent, Kind kind, Where where, Name memory) {
    Access* same = nullptr;
    for (Access& earlier : cell) {
        if (!(earlier.bytes & bytes)) continue;
        if (!ordered(earlier, agent, kind)) race(earlier, agent, kind, where, memory());
        if (earlier.agent == agent.number && earlier.kind == kind) same = &earlier;
    }
    if (kind == WRITE)
        cell.erase(std::remove_if(cell.begin(), cell.end(),
                                  [&](const Access& a) { return !(a.bytes & ~bytes); }),
                   cell.end());
    else if (same && (same->epoch == agent.epoch || !(same->bytes & ~bytes))) {
        same->epoch = agent.epoch, same->bytes |= bytes;
        return;
    }
    cell.push_back({agent.epoch, u16(agent.number), bytes, known_place(where), kind});
}

template <class Name>
static void access_all(std::vector<Cell>& cells, u64 first, u64 bytes, const Agent& agent, Kind kind,
                       Where where, Name memory) {
    for (u64 begin = first, end = first + bytes; begin < end;) {
        u64 stop = std::min(end, begin / 16 * 16 + 16);
        u16 mask = u16(((1u << (stop - begin)) - 1) << (begin % 16));
        access(cells[begin / 16], mask, agent, kind, where, memory);
        begin = stop;
    }
}

void access_shared(Block& block, u32 address, u32 bytes, const Agent& agent, Kind kind, Where where) {
    access_all(block.cells, address - SYSTEM_BYTES, bytes, agent, kind, where, [&] {
        return address < block.dynamic_begin
                   ? "byte " + std::to_string(address - SYSTEM_BYTES) + " of __shared__ variables"
                   : "byte " + std::to_string(address - block.dynamic_begin) +
                         " of dynamic shared memory";
    });
}

void access_global(Buffer& buffer, const void* pointer, u64 bytes, const Agent& agent, Kind kind,
                   Where where) {
    if (!buffer.written) return;
    u64 address = reinterpret_cast<u64>(pointer);
    access_all(buffer.cells, address - buffer.begin / 16 * 16, bytes, agent, kind, where,
               [&] { return "byte " + std::to_string(address - buffer.begin) + " of " + buffer.name; });
}

}  // namespace emulator
