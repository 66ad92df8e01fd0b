// One run of a kernel, for tests/helpers/emulate.py.

#include "machine.h"

using namespace emulator;

struct Given {
    const char* name;
    void* begin;
    u64 bytes;
    u32 written;
};

struct Launch {
    u32 grid_x, grid_y, threads, shared_bytes;
    u64 seed, most_steps, most_blocks;
    void (*entry)(void* const*);
    void* (*statics)();
    void* const* arguments;
    const Given* buffers;
    u64 num_buffers;
};

static void choose_habits() {
    static const u32 copies[] = {1, 24, 220}, matrices[] = {0, 32, 256}, small[] = {0, 64, 256},
                     calls[] = {4, 40, 400};
    machine.copy_chance = copies[random(3)];
    machine.matrix_chance = matrices[random(3)];
    machine.small_chance = small[random(3)];
    machine.most_calls = calls[random(3)];
}

static void make_block(Block& block, u32 x, u32 y, const Launch& launch) {
    block.index = {x, y, 0};
    block.living = launch.threads;
    block.statics.assign(machine.static_bytes, 0xFF);
    block.dynamic.assign(launch.shared_bytes, 0xFF);
    block.dynamic_begin = SYSTEM_BYTES + (machine.static_bytes + 15) / 16 * 16;
    block.warps.resize(launch.threads / LANES);
    for (u32 number = 0; number < block.warps.size(); ++number) {
        Warp& warp = block.warps[number];
        warp.block = &block, warp.number = number, warp.place = -1, warp.priority = random(1000);
        warp.fibers.resize(LANES);
        for (u32 lane = 0; lane < LANES; ++lane) {
            Fiber& fiber = warp.fibers[lane];
            fiber.warp = &warp, fiber.lane = lane, fiber.thread = number * LANES + lane;
        }
    }
}

// What went wrong, or a null pointer; it lives until the next run.
extern "C" const char* emulator_run(const Launch* given) {
    const Launch& launch = *given;
    static std::string error;
    machine = Machine();
    machine.random_state = (launch.seed + 1) * 0x9E3779B97F4A7C15ull;
    machine.most_steps = launch.most_steps;
    machine.entry = launch.entry, machine.arguments = launch.arguments;
    try {
        choose_habits();
        launch.statics();
        find_modules(reinterpret_cast<const void*>(launch.entry));
        if (launch.threads == 0 || launch.threads % LANES || launch.threads > 1024)
            fail("%u threads a block; allowed: multiples of 32 up to 1024", launch.threads);
        if (u64(machine.static_bytes) + launch.shared_bytes > SHARED_BYTES)
            fail("%u static and %u dynamic bytes of shared memory; allowed: %u together",
                 machine.static_bytes, launch.shared_bytes, SHARED_BYTES);
        for (u64 i = 0; i < launch.num_buffers; ++i) {
            const Given& buffer = launch.buffers[i];
            machine.buffers.push_back({buffer.name,
                                       reinterpret_cast<u64>(buffer.begin),
                                       buffer.bytes,
                                       buffer.written != 0,
                                       {}});
        }
        machine.blocks.resize(u64(launch.grid_x) * launch.grid_y);
        for (u32 y = 0; y < launch.grid_y; ++y)
            for (u32 x = 0; x < launch.grid_x; ++x)
                make_block(machine.blocks[y * launch.grid_x + x], x, y, launch);
        blockDim = {launch.threads, 1, 1}, gridDim = {launch.grid_x, launch.grid_y, 1};
        start_clocks();
        start_fibers(machine.blocks.size() * launch.threads);
        begin_blocks(launch.most_blocks);
        run_all();
    } catch (int) {  // thrown by `fail`, which has written machine.error
    }
    error = machine.error;
    return error.empty() ? nullptr : error.c_str();
}
