// Fibers, and the order in which they run.

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>

#include "machine.h"

uint3 threadIdx, blockIdx, blockDim, gridDim;

// Saves the caller's registers on its stack, its stack pointer at *from, and goes on at `to`.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
    .text
    .globl emulator_switch
    .type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emulator_switch, .-emulator_switch
)");

namespace emulator {

Machine machine;

u32 random(u32 below) {
    u64& state = machine.random_state;
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return u32((state * 0x2545F4914F6CDD1Dull >> 32) * below >> 32);
}

bool chance(u32 of_256) { return random(256) < of_256; }

// Of an access that the compiler reports only the return address is known; emulate.py makes a line
// of it.
std::string place_of(Where where) {
    if (!where.file) {
        Dl_info found;
        dladdr(where.function, &found);
        char text[40];
        snprintf(text, sizeof text, "<+0x%lx>",
                 long(where.function - static_cast<const char*>(found.dli_fbase)) - 1);
        return text;
    }
    const char* name = strrchr(where.file, '/');
    return std::string(name ? name + 1 : where.file) + ":" + std::to_string(where.line) + " (" +
           where.function + ")";
}

std::string name_of(const Fiber& fiber) {
    const uint3& block = fiber.warp->block->index;
    return "block " + std::to_string(block.x) + (block.y ? "," + std::to_string(block.y) : "") +
           " thread " + std::to_string(fiber.thread);
}

static void to_scheduler() { emulator_switch(&machine.fiber->stack_pointer, machine.scheduler); }

void fail(const char* format, ...) {
    char text[2000];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    Fiber* fiber = machine.fiber;
    machine.error = fiber ? name_of(*fiber) + ": " + text : text;
    if (fiber) to_scheduler();
    throw 0;  // of the scheduler itself
}

void make_runnable(Fiber& fiber) {
    Warp& warp = *fiber.warp;
    warp.runnable |= 1u << fiber.lane;
    if (warp.place < 0) {
        warp.place = int(warp.block->runnable.size());
        warp.block->runnable.push_back(&warp);
    }
}

static void take_off(Fiber& fiber) {
    Warp& warp = *fiber.warp;
    warp.runnable &= ~(1u << fiber.lane);
    if (warp.runnable == 0 && warp.place >= 0) {
        std::vector<Warp*>& list = warp.block->runnable;
        list[warp.place] = list.back();
        list.back()->place = warp.place;
        list.pop_back();
        warp.place = -1;
    }
}

void make_matrix_ready(Warp& warp) {
    if (!warp.listed) machine.matrices.push_back(&warp);
    warp.listed = true;
}

void yield() { to_scheduler(); }

void point() {
    if (static_cast<u8*>(__builtin_frame_address(0)) < machine.fiber->stack + LEAST_STACK)
        fail("more than %llu bytes of local variables", STACK_BYTES - LEAST_STACK);
    ++machine.progress;
    machine.fiber->polled = nullptr;
    if (machine.budget-- == 0) to_scheduler();
}

void park(const void* key, const char* waits, Where where, u32 first, u32 second) {
    Fiber& fiber = *machine.fiber;
    fiber.waits = waits, fiber.where = where;
    fiber.detail[0] = first, fiber.detail[1] = second;
    machine.waiting[key].push_back(&fiber);
    take_off(fiber);
    to_scheduler();
}

void park_poller() {
    machine.pollers.push_back(machine.fiber);
    take_off(*machine.fiber);
    to_scheduler();
}

void wake(const void* key) {
    auto found = machine.waiting.find(key);
    if (found == machine.waiting.end()) return;
    std::vector<Fiber*> woken = std::move(found->second);
    machine.waiting.erase(found);
    for (Fiber* fiber : woken) make_runnable(*fiber);
}

static void enter(Block& block) {
    Block*& current = machine.current_block;
    if (current == &block) return;
    if (current) memcpy(current->statics.data(), machine.statics, machine.static_bytes);
    memcpy(machine.statics, block.statics.data(), machine.static_bytes);
    current = &block;
}

static void resume(Fiber& fiber) {
    enter(*fiber.warp->block);
    machine.fiber = &fiber;
    threadIdx = {fiber.thread, 0, 0};
    blockIdx = fiber.warp->block->index;
    machine.budget = random(machine.most_calls);
    emulator_switch(&machine.scheduler, fiber.stack_pointer);
    machine.fiber = nullptr;
}

static void live() {
    Fiber& fiber = *machine.fiber;
    machine.entry(machine.arguments);
    leave(fiber);
    fiber.done = true;
    take_off(fiber);
    if (fiber.warp->block->living == 0) begin_blocks(1);
    to_scheduler();
}

void start_fibers(u64 most) {
    static u8* stacks;
    static u64 count;
    if (count < most) {
        if (stacks) munmap(stacks, count * STACK_BYTES);
        void* made = mmap(nullptr, most * STACK_BYTES, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (made == MAP_FAILED) fail("no memory for the stacks of %llu threads", most);
        stacks = static_cast<u8*>(made), count = most;
    }
    u64 number = 0;
    for (Block& block : machine.blocks)
        for (Warp& warp : block.warps)
            for (Fiber& fiber : warp.fibers) {
                fiber.stack = stacks + number++ * STACK_BYTES;
                u64* top = reinterpret_cast<u64*>(fiber.stack + STACK_BYTES - 64);
                *--top = 0;  // where `live` would return to; keeps the stack aligned
                *--top = reinterpret_cast<u64>(&live);
                fiber.stack_pointer = top - 6;
            }
}

// The next so many.
void begin_blocks(u64 count) {
    for (; count && machine.begun < machine.blocks.size(); --count)
        for (Warp& warp : machine.blocks[machine.begun++].warps)
            for (Fiber& fiber : warp.fibers) make_runnable(fiber);
}

// A block that can run: the same for some turns, since its storage has to be brought in.
static Block* picked_block() {
    if (machine.block_turns && machine.current_block && !machine.current_block->runnable.empty()) {
        --machine.block_turns;
        return machine.current_block;
    }
    machine.block_turns = random(100);
    u32 count = u32(machine.blocks.size()), first = random(count);
    for (u32 i = 0; i < count; ++i) {
        Block& block = machine.blocks[(first + i) % count];
        if (!block.runnable.empty()) return &block;
    }
    return nullptr;
}

// The likelier of two of the warps that can run: some are ahead of the others for a while.
static Fiber& picked(Block& block) {
    std::vector<Warp*>& list = block.runnable;
    Warp* warp = list[random(u32(list.size()))];
    Warp* other = list[random(u32(list.size()))];
    if (other->priority > warp->priority && chance(224)) warp = other;
    if (chance(2)) warp->priority = random(1000);
    u32 lane = random(LANES), mask = warp->runnable;
    u32 turned = (mask >> lane) | (lane ? mask << (LANES - lane) : 0);
    return warp->fibers[(lane + u32(__builtin_ctz(turned))) % LANES];
}

static bool wake_pollers(bool all) {
    std::vector<Fiber*> kept, list = std::move(machine.pollers);
    for (Fiber* fiber : list) {
        if (all || *fiber->polled != fiber->polled_value) make_runnable(*fiber);
        else kept.push_back(fiber);
    }
    machine.pollers = std::move(kept);
    return machine.pollers.size() < list.size();
}

static std::string waits_of(const Fiber& fiber) {
    char text[200];
    snprintf(text, sizeof text, fiber.waits, fiber.detail[0], fiber.detail[1]);
    return std::string(text) + " at " + place_of(fiber.where);
}

// Who waits where, threads of one reason in a line.
static std::string deadlock() {
    std::map<std::string, std::vector<u32>> lines;
    for (u64 i = 0; i < machine.begun; ++i)
        for (Warp& warp : machine.blocks[i].warps)
            for (Fiber& fiber : warp.fibers)
                if (!fiber.done)
                    lines["block " + std::to_string(machine.blocks[i].index.x) + ": " +
                          waits_of(fiber)].push_back(fiber.thread);
    std::string text = "deadlock: nothing can run, and no copy is on its way";
    for (auto& [line, threads] : lines) {
        text += "\n  " + line + ": threads";
        for (size_t i = 0, first = 0; i < threads.size(); ++i) {
            if (i + 1 < threads.size() && threads[i + 1] == threads[i] + 1) continue;
            text += " " + std::to_string(threads[first]);
            if (i > first) text += "-" + std::to_string(threads[i]);
            first = i + 1;
        }
    }
    return text;
}

void run_all() {
    u64 idle_at = ~0ull;
    while (machine.error.empty()) {
        if (++machine.steps > machine.most_steps) fail("still running after %llu turns", machine.steps);
        if (!machine.copies.empty() && chance(machine.copy_chance))
            perform_copy(random(u32(machine.copies.size())));
        if (!machine.matrices.empty() && chance(machine.matrix_chance)) {
            u32 index = random(u32(machine.matrices.size()));
            Warp* warp = machine.matrices[index];
            machine.matrices[index] = machine.matrices.back();
            machine.matrices.pop_back();
            warp->listed = false;
            if (warp->executed < warp->complete) execute(*warp);
            if (warp->executed < warp->complete) make_matrix_ready(*warp);
        }
        if (!machine.pollers.empty() && machine.steps % 64 == 0) wake_pollers(false);
        if (Block* block = picked_block()) {
            resume(picked(*block));
            continue;
        }
        if (!machine.copies.empty()) {
            perform_copy(random(u32(machine.copies.size())));
            continue;
        }
        bool all_done = true;
        for (Block& block : machine.blocks) all_done = all_done && block.living == 0;
        if (all_done) return;
        if (wake_pollers(false)) continue;
        if (!machine.pollers.empty() && machine.progress != idle_at) {
            idle_at = machine.progress;
            wake_pollers(true);
            continue;
        }
        machine.error = deadlock();
    }
}

}  // namespace emulator
