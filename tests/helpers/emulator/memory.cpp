// Shared memory, global memory, and copies from one to the other.

#include <link.h>

#include <cstring>

#include "machine.h"

namespace emulator {

// ---- where an address lies

struct Module {
    u64 begin, end;
};
static Module modules[2];  // the kernel's and this one: constants, threadIdx

void find_modules(const void* of_kernel) {
    const void* wanted[2] = {of_kernel, reinterpret_cast<const void*>(&find_modules)};
    for (int i = 0; i < 2; ++i) {
        modules[i] = {reinterpret_cast<u64>(wanted[i]), 0};
        dl_iterate_phdr(
            [](dl_phdr_info* info, size_t, void* data) {
                Module& found = *static_cast<Module*>(data);
                u64 low = ~0ull, high = 0, statics = 0;
                for (int j = 0; j < info->dlpi_phnum; ++j) {
                    const ElfW(Phdr)& part = info->dlpi_phdr[j];
                    if (part.p_type == PT_TLS) statics = part.p_memsz;
                    if (part.p_type != PT_LOAD) continue;
                    u64 begin = info->dlpi_addr + part.p_vaddr;
                    low = begin < low ? begin : low;
                    high = begin + part.p_memsz > high ? begin + part.p_memsz : high;
                }
                if (found.begin < low || found.begin >= high) return 0;
                if (&found == modules) {
                    machine.statics = static_cast<u8*>(info->dlpi_tls_data);
                    machine.static_bytes = u32(statics);
                }
                found = {low, high};
                return 1;
            },
            &modules[i]);
    }
}

u8* shared_at(Block& block, u32 address, u32 bytes, const char* what, Where where) {
    u64 end = block.dynamic_begin + block.dynamic.size();
    if (address < SYSTEM_BYTES || u64(address) + bytes > end)
        fail("%s: shared bytes %u ... %llu; allowed: %u ... %llu, at %s", what, address,
             u64(address) + bytes, SYSTEM_BYTES, end, place_of(where).c_str());
    if (address >= block.dynamic_begin) return block.dynamic.data() + (address - block.dynamic_begin);
    u32 offset = address - SYSTEM_BYTES;
    if (offset + bytes > machine.static_bytes)
        fail("%s: shared bytes %u ... %u lie between __shared__ variables and the dynamic part, at %s",
             what, address, address + bytes, place_of(where).c_str());
    return (&block == machine.current_block ? machine.statics : block.statics.data()) + offset;
}

static u8* aligned_shared_at(u32 address, u32 bytes, const char* what, Where where) {
    if (address % bytes)
        fail("%s: shared address %u is no multiple of %u, at %s", what, address, bytes,
             place_of(where).c_str());
    return shared_at(*machine.fiber->warp->block, address, bytes, what, where);
}

u32 address_of(const void* pointer, Where where) {
    Block& block = *machine.fiber->warp->block;
    const u8* byte = static_cast<const u8*>(pointer);
    u64 offset = byte - block.dynamic.data(), in_statics = byte - machine.statics;
    if (byte >= block.dynamic.data() && offset <= block.dynamic.size())
        return block.dynamic_begin + u32(offset);
    if (byte >= machine.statics && in_statics < machine.static_bytes)
        return SYSTEM_BYTES + u32(in_statics);
    fail("shared_address of %p, which is not shared memory, at %s", pointer, place_of(where).c_str());
}

u8* dynamic_shared() { return machine.fiber->warp->block->dynamic.data(); }

Buffer* buffer_of(const void* pointer, u64 bytes) {
    static size_t last;
    u64 address = reinterpret_cast<u64>(pointer);
    for (size_t i = 0; i < machine.buffers.size(); ++i) {
        size_t index = (last + i) % machine.buffers.size();
        Buffer& buffer = machine.buffers[index];
        if (address - buffer.begin < buffer.bytes && address - buffer.begin + bytes <= buffer.bytes) {
            last = index;
            return &buffer;
        }
    }
    return nullptr;
}

// The buffer nearest below an address, and how far from its begin.
static std::string nearest(u64 address) {
    const Buffer* found = nullptr;
    for (const Buffer& buffer : machine.buffers)
        if (buffer.begin <= address && (!found || buffer.begin > found->begin)) found = &buffer;
    if (!found) return "before all buffers";
    return std::string("byte ") + std::to_string(address - found->begin) + " of " + found->name +
           ", which has " + std::to_string(found->bytes);
}

Buffer& buffer_at(const void* pointer, u64 bytes, bool written, const char* what, Where where) {
    Buffer* buffer = buffer_of(pointer, bytes);
    if (!buffer)
        fail("%s: %llu bytes of global memory out of range: %s, at %s", what, bytes,
             nearest(reinterpret_cast<u64>(pointer)).c_str(), place_of(where).c_str());
    if (written && !buffer->written)
        fail("%s: writes %s, which was given to be read only, at %s", what, buffer->name,
             place_of(where).c_str());
    return *buffer;
}

// ---- loads and stores

void load(void* words, u32 address, u32 bytes, Where where) {
    point();
    memcpy(words, aligned_shared_at(address, bytes, "load", where), bytes);
    Warp& warp = *machine.fiber->warp;
    access_shared(*warp.block, address, bytes, agent_of(warp), READ, where);
}

void store(u32 address, const void* words, u32 bytes, Where where) {
    point();
    memcpy(aligned_shared_at(address, bytes, "store", where), words, bytes);
    Warp& warp = *machine.fiber->warp;
    access_shared(*warp.block, address, bytes, agent_of(warp), WRITE, where);
}

void raise_to(u32 address, u32 word, Where where) {
    point();
    u32* place = reinterpret_cast<u32*>(aligned_shared_at(address, 4, "raise_to", where));
    if (word > *place) *place = word;
    Warp& warp = *machine.fiber->warp;
    access_shared(*warp.block, address, 4, agent_of(warp), ATOMIC, where);
}

void store_global(void* target, const u32* words, Where where) {
    point();
    if (reinterpret_cast<u64>(target) % 16)
        fail("store_16: address %p is no multiple of 16, at %s", target, place_of(where).c_str());
    Buffer& buffer = buffer_at(target, 16, true, "store_16", where);
    access_global(buffer, target, 16, agent_of(*machine.fiber->warp), WRITE, where);
    memcpy(target, words, 16);
}

// ---- copies

void copy_bulk(u32 target, const void* source, u32 bytes, u32 barrier, Where where) {
    point();
    Warp& warp = *machine.fiber->warp;
    Block& block = *warp.block;
    if (target % 16 || bytes % 16 || bytes == 0 || reinterpret_cast<u64>(source) % 16)
        fail("copy_bulk: %u bytes from %p to %u; all are multiples of 16 and there are some, at %s",
             bytes, source, target, place_of(where).c_str());
    shared_at(block, target, bytes, "copy_bulk", where);
    Buffer& buffer = buffer_at(source, bytes, false, "copy_bulk", where);
    auto found = block.barriers.find(barrier);
    if (found == block.barriers.end() || !found->second.fenced)
        fail(
            "copy_bulk: at shared address %u there is no barrier, or no fence came after its init, at "
            "%s",
            barrier, place_of(where).c_str());
    for (const auto& [address, other] : block.barriers)
        if (address + 8 > target && address < target + bytes)
            fail("copy_bulk: shared bytes %u ... %u hold the barrier at %u, at %s", target,
                 target + bytes, address, place_of(where).c_str());
    Agent agent = bulk_agent(warp, found->second);
    access_global(buffer, source, bytes, agent, READ, where);
    access_shared(block, target, bytes, agent, WRITE, where);
    machine.copies.push_back({&block, target, bytes, barrier, static_cast<const u8*>(source), where});
}

// All that is left of a copy, or its first part.
void perform_copy(u32 index) {
    Copy& copy = machine.copies[index];
    u32 bytes = copy.bytes;
    if (bytes > 16 && chance(48)) bytes = 16 * (1 + random(bytes / 16 - 1));
    memcpy(shared_at(*copy.block, copy.target, bytes, "copy_bulk", copy.where), copy.source, bytes);
    Block& block = *copy.block;
    u32 barrier = copy.barrier;
    copy.target += bytes, copy.source += bytes, copy.bytes -= bytes;
    if (copy.bytes == 0) {
        copy = machine.copies.back();
        machine.copies.pop_back();
    }
    complete_bytes(block, barrier, bytes);
}

void copy_small(u32 target, const void* source, u32 bytes, Where where) {
    point();
    Fiber& fiber = *machine.fiber;
    Warp& warp = *fiber.warp;
    if (reinterpret_cast<u64>(source) % bytes)
        fail("copy_%u: address %p is no multiple of it, at %s", bytes, source, place_of(where).c_str());
    aligned_shared_at(target, bytes, "copy", where);
    Buffer& buffer = buffer_at(source, bytes, false, "copy", where);
    access_global(buffer, source, bytes, agent_of(warp), READ, where);
    ++warp.copies_issued;
    access_shared(*warp.block, target, bytes, copies_agent(warp), WRITE, where);
    fiber.copies.push_back({target, bytes, warp.copies_issued, source, where});
    while (!fiber.copies.empty() && chance(machine.small_chance))
        land(fiber, random(u32(fiber.copies.size())));
}

void land(Fiber& fiber, u32 index) {
    SmallCopy& copy = fiber.copies[index];
    memcpy(shared_at(*fiber.warp->block, copy.target, copy.bytes, "copy", copy.where), copy.source,
           copy.bytes);
    copy = fiber.copies.back();
    fiber.copies.pop_back();
}

void copies_wait() {
    point();
    Fiber& fiber = *machine.fiber;
    while (!fiber.copies.empty()) land(fiber, random(u32(fiber.copies.size())));
    small_copies_done(*fiber.warp);
}

// ---- accesses that the kernel's text makes by itself: the compiler calls these ahead of each

static void touched(const void* pointer, u64 bytes, Kind kind, void* caller) {
    Fiber* fiber = machine.fiber;
    if (!fiber) return;
    u64 address = reinterpret_cast<u64>(pointer);
    if (address - reinterpret_cast<u64>(fiber->stack) < STACK_BYTES) return;
    for (const Module& module : modules)
        if (kind == READ && address >= module.begin && address < module.end) return;
    if (machine.budget-- == 0) yield();
    if (kind != READ) ++machine.progress, fiber->polled = nullptr;
    Where where = {nullptr, static_cast<const char*>(caller), 0};
    Warp& warp = *fiber->warp;
    Block& block = *warp.block;
    u64 in_statics = address - reinterpret_cast<u64>(machine.statics);
    u64 in_dynamic = address - reinterpret_cast<u64>(block.dynamic.data());
    if (in_statics + bytes <= machine.static_bytes)
        access_shared(block, SYSTEM_BYTES + u32(in_statics), u32(bytes), agent_of(warp), kind, where);
    else if (in_dynamic + bytes <= block.dynamic.size())
        access_shared(block, block.dynamic_begin + u32(in_dynamic), u32(bytes), agent_of(warp), kind,
                      where);
    else
        access_global(buffer_at(pointer, bytes, kind != READ, kind == READ ? "load" : "store", where),
                      pointer, bytes, agent_of(warp), kind, where);
}

}  // namespace emulator

#define CALLER __builtin_return_address(0)
#define TOUCH(name, bytes)                                    \
    extern "C" void __tsan_read##name(void* p) {              \
        emulator::touched(p, bytes, emulator::READ, CALLER);  \
    }                                                         \
    extern "C" void __tsan_write##name(void* p) {             \
        emulator::touched(p, bytes, emulator::WRITE, CALLER); \
    }

TOUCH(1, 1)
TOUCH(2, 2)
TOUCH(4, 4)
TOUCH(8, 8)
TOUCH(16, 16)
extern "C" void __tsan_unaligned_read2(void* p) { emulator::touched(p, 2, emulator::READ, CALLER); }
extern "C" void __tsan_unaligned_read4(void* p) { emulator::touched(p, 4, emulator::READ, CALLER); }
extern "C" void __tsan_unaligned_read8(void* p) { emulator::touched(p, 8, emulator::READ, CALLER); }
extern "C" void __tsan_unaligned_read16(void* p) { emulator::touched(p, 16, emulator::READ, CALLER); }
extern "C" void __tsan_unaligned_write2(void* p) { emulator::touched(p, 2, emulator::WRITE, CALLER); }
extern "C" void __tsan_unaligned_write4(void* p) { emulator::touched(p, 4, emulator::WRITE, CALLER); }
extern "C" void __tsan_unaligned_write8(void* p) { emulator::touched(p, 8, emulator::WRITE, CALLER); }
extern "C" void __tsan_unaligned_write16(void* p) { emulator::touched(p, 16, emulator::WRITE, CALLER); }
extern "C" void __tsan_read_range(void* p, u64 n) { emulator::touched(p, n, emulator::READ, CALLER); }
extern "C" void __tsan_write_range(void* p, u64 n) { emulator::touched(p, n, emulator::WRITE, CALLER); }
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}
