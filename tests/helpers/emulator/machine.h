// The machine that runs a kernel's threads: fibers of one OS thread, one running at a time, in an
// order that a seed decides. As many blocks of the grid live together as a run says; when one ends,
// the next begins.
//
//   schedule.cpp  fibers, the order, deadlocks        barriers.cpp  mbarriers, bar.sync, warps
//   memory.cpp    shared and global memory, copies    matrix.cpp    wgmma
//   races.cpp     what is ordered before what         launch.cpp    a kernel's run

#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <string>
#include <unordered_map>
#include <vector>

#include "device.h"

namespace emulator {

constexpr u32 LANES = 32, GROUP_WARPS = 4, MOST_BARRIERS = 64, NAMED = 16;
constexpr u32 SYSTEM_BYTES = 1024;    // of shared memory, below all that a kernel may use
constexpr u32 SHARED_BYTES = 232448;  // that a block may use
constexpr u64 STACK_BYTES = 128 << 10, LEAST_STACK = 8 << 10;
constexpr u32 POISON = 0xFFFFFFFFu;  // a NaN as f32, bf16 and e4m3

struct Block;
struct Warp;

// ---- races.cpp

// What an agent knows of every agent: its accesses up to an epoch have happened before. `async`:
// they can be seen through the asynchronous proxy too.
struct Clock {
    std::vector<u32> generic, async;
    void join(const Clock& other);
};

enum Kind : u8 { READ, WRITE, ATOMIC };
enum Proxy : u8 { GENERIC, ASYNC };

// The last accesses of 16 bytes that still count.
struct Access {
    u32 epoch;
    u16 agent, bytes;  // a bit each
    u16 place;         // in the table of races.cpp
    Kind kind;
};
using Cell = std::vector<Access>;

struct Agent {
    u32 number, epoch;
    const Clock* knows;
    Proxy proxy;
};

// ---- threads

// Accumulators that matrix instructions in flight will write: the thread sees poison meanwhile.
struct Chain {
    float* sums;
    u32 count;
    u64 last;  // instruction
    std::vector<float> values;
};

struct SmallCopy {
    u32 target, bytes, epoch;
    const void* source;
    Where where;
};

struct Fiber {
    void* stack_pointer;
    u8* stack;
    Warp* warp;
    u32 thread, lane;
    bool done;
    // What it waits for.
    const char* waits;
    Where where;
    u32 detail[2];
    // Between threads.
    u32 result;
    std::vector<SmallCopy> copies;
    const u32* polled;
    u32 polled_value;
    // Matrix instructions.
    bool fenced;
    u64 issued;
    std::deque<u64> groups;  // number of instructions up to the end of each
    std::list<Chain> chains;
};

struct MatrixOp {
    Units units;
    u32 columns, lanes;
    u64 rows;
    bool go_on;
    u32 a[LANES][4];
    Chain* chains[LANES];
    Where where;
};

// Lanes that have come to a collective of their warp.
struct Meeting {
    u32 arrived, mask;
    const char* what;
    u32 values[LANES][4], operands[LANES];
    Where where;
};

struct Warp {
    Block* block;
    u32 number;  // in its block
    std::vector<Fiber> fibers;
    u32 runnable;  // a bit a lane
    int place;     // in the block's list, or -1
    u32 priority;
    Meeting meeting;
    std::deque<MatrixOp> ops;
    u64 complete, executed;  // instructions that all lanes issued; that were run
    bool listed;             // in the machine's `matrices`
    // races.cpp
    u32 agent;
    Clock clock, seen, fence;  // seen by relaxed loads; at the last __threadfence
    u32 copies_issued;
};

struct Barrier {
    u32 address, arrivals, pending, phase;
    int bytes;
    bool fenced;
    u32 agent;
    Clock gathering, released;
};

struct Named {
    u32 expected, arrived;
    Clock gathering;
    std::vector<Warp*> warps;
};

struct Block {
    uint3 index;
    std::vector<Warp> warps;
    std::vector<Warp*> runnable;
    u32 living;
    std::vector<u8> statics, dynamic;
    u32 dynamic_begin;  // shared address
    std::unordered_map<u32, Barrier> barriers;
    Named named[NAMED];
    std::vector<Cell> cells;
};

struct Copy {
    Block* block;
    u32 target, bytes, barrier;
    const u8* source;
    Where where;
};

struct Buffer {
    const char* name;
    u64 begin, bytes;
    bool written;
    std::vector<Cell> cells;
};

struct Machine {
    std::vector<Block> blocks;
    std::vector<Buffer> buffers;
    std::vector<Copy> copies;
    std::vector<Warp*> matrices;  // with instructions that may run
    std::vector<Fiber*> pollers;
    std::unordered_map<const void*, std::vector<Fiber*>> waiting;
    std::unordered_map<u64, Clock> flags;
    u32 agents;
    u8* statics;  // thread-local storage of the kernel's module
    u32 static_bytes;
    Block* current_block;
    u64 begun;  // blocks
    Fiber* fiber;
    void* scheduler;
    std::string error;
    void (*entry)(void* const*);
    void* const* arguments;
    // Chances, of 256, and how many calls a thread makes before another runs.
    u32 copy_chance, matrix_chance, small_chance, most_calls;
    u32 budget, block_turns;
    u64 random_state, progress, steps, most_steps;
};

extern Machine machine;

// schedule.cpp
u32 random(u32 below);
bool chance(u32 of_256);
void point();  // another thread may run now
void park(const void* key, const char* waits, Where where, u32 first = 0, u32 second = 0);
void park_poller();
void wake(const void* key);
void make_runnable(Fiber& fiber);
void yield();
void make_matrix_ready(Warp& warp);
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string place_of(Where where);
std::string name_of(const Fiber& fiber);
void start_fibers(u64 most);
void begin_blocks(u64 count);
void run_all();

// memory.cpp
u8* shared_at(Block& block, u32 address, u32 bytes, const char* what, Where where);
Buffer* buffer_of(const void* pointer, u64 bytes);
Buffer& buffer_at(const void* pointer, u64 bytes, bool written, const char* what, Where where);
void find_modules(const void* of_kernel);
void perform_copy(u32 index);
void land(Fiber& fiber, u32 index);

// barriers.cpp
void complete_bytes(Block& block, u32 barrier, u32 bytes);
void leave(Fiber& fiber);

// matrix.cpp
void execute(Warp& warp);

// races.cpp
void start_clocks();
u32 barrier_agent(Block& block);
Agent agent_of(Warp& warp);
Agent matrix_agent(Warp& warp, u64 instruction);
Agent copies_agent(Warp& warp);
Agent bulk_agent(Warp& warp, const Barrier& barrier);
void access_shared(Block& block, u32 address, u32 bytes, const Agent& agent, Kind kind, Where where);
void access_global(Buffer& buffer, const void* pointer, u64 bytes, const Agent& agent, Kind kind,
                   Where where);
void release(Warp& warp, Clock& to);
void acquire(Warp& warp, const Clock& from);
void matrices_done(Warp& warp, u64 instructions);
void small_copies_done(Warp& warp);

}  // namespace emulator
