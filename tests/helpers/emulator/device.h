// What a kernel's text sees in place of ptx.cuh and of CUDA: the same names and meanings, run by the
// machine of machine.h. No header is included, so that none meets the kernel's own names.
//
// Every function knows where it is called: an error and a deadlock name file, line and function.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#include "arithmetic.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
// One copy a block: the machine changes a thread's storage when it goes to another block.
#define __shared__ thread_local

struct uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct uint3 {
    u32 x, y, z;
};
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

extern uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

struct Where {
    const char* file;
    const char* function;
    int line;
};

enum Exchange { SHUFFLE, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_XOR, BALLOT, SYNC };
enum Units { BF16 = 16, E4M3 = 32 };  // k of one instruction
enum Atomic { ADD, MAX, EXCHANGE, COMPARE };
enum Order { RELAXED, RELEASE };

u32 address_of(const void* pointer, Where where);
u8* dynamic_shared();
void barrier_init(u32 barrier, u32 arrivals, Where where);
void barrier_init_fence();
void barrier_arrive(u32 barrier, u32 bytes, Where where);
void barrier_wait(u32 barrier, u32 parity, Where where);
void copy_bulk(u32 target, const void* source, u32 bytes, u32 barrier, Where where);
void copy_small(u32 target, const void* source, u32 bytes, Where where);
void copies_wait();
void proxy_fence();
void load(void* words, u32 address, u32 bytes, Where where);
void store(u32 address, const void* words, u32 bytes, Where where);
void store_global(void* target, const u32* words, Where where);
void raise_to(u32 address, u32 word, Where where);
void store_transposed(u32 address, const u32* words, Where where);
void sync_threads(u32 barrier, u32 threads, Where where);
void arrive_threads(u32 barrier, u32 threads, Where where);
u32 exchange(Exchange what, u32 mask, u32 value, u32 operand, Where where);
void matrix(Units units, u32 columns, float* sums, const u32* a, u64 rows, bool go_on, Where where);
void matrix_fence();
void matrix_commit();
void matrix_wait(u32 newest, Where where);
u32 atomic(Atomic what, u32* address, u32 value, u32 compare, Order order, Where where);
u32 load_acquire(const u32* address, Where where);
void thread_fence();
void pause();

}  // namespace emulator

#define WHERE emulator::Where where = {__builtin_FILE(), __builtin_FUNCTION(), __builtin_LINE()}

// ---- CUDA

inline void __syncthreads(WHERE) { emulator::sync_threads(0, 0, where); }
inline void __syncwarp(u32 mask = ~0u, WHERE) { emulator::exchange(emulator::SYNC, mask, 0, 0, where); }
inline void __threadfence() { emulator::thread_fence(); }
inline void __nanosleep(u32) { emulator::pause(); }

inline u32 __ballot_sync(u32 mask, bool value, WHERE) {
    return emulator::exchange(emulator::BALLOT, mask, value, 0, where);
}

// Of 4 bytes, of any type; CUDA's 8-byte ones are not here.
#define EXCHANGED(name, what)                                                                      \
    template <class Value>                                                                         \
    inline Value name(u32 mask, Value value, u32 operand, WHERE) {                                 \
        static_assert(sizeof(Value) == 4, "4 bytes are exchanged");                                \
        u32 bits = __builtin_bit_cast(u32, value);                                                 \
        return __builtin_bit_cast(Value,                                                           \
                                  emulator::exchange(emulator::what, mask, bits, operand, where)); \
    }
EXCHANGED(__shfl_sync, SHUFFLE)
EXCHANGED(__shfl_up_sync, SHUFFLE_UP)
EXCHANGED(__shfl_down_sync, SHUFFLE_DOWN)
EXCHANGED(__shfl_xor_sync, SHUFFLE_XOR)
#undef EXCHANGED

inline u32 atomicAdd(u32* address, u32 value, WHERE) {
    return emulator::atomic(emulator::ADD, address, value, 0, emulator::RELAXED, where);
}
inline u32 atomicMax(u32* address, u32 value, WHERE) {
    return emulator::atomic(emulator::MAX, address, value, 0, emulator::RELAXED, where);
}
#define __grid_constant__
inline u32 atomicExch(u32* address, u32 value, WHERE) {
    return emulator::atomic(emulator::EXCHANGE, address, value, 0, emulator::RELAXED, where);
}
inline u32 atomicCAS(u32* address, u32 compare, u32 value, WHERE) {
    return emulator::atomic(emulator::COMPARE, address, value, compare, emulator::RELAXED, where);
}

// ---- ptx.cuh

inline u32 shared_address(const void* pointer, WHERE) { return emulator::address_of(pointer, where); }

inline void barrier_init(u32 barrier, u32 arrivals, WHERE) {
    emulator::barrier_init(barrier, arrivals, where);
}
inline void barrier_init_fence() { emulator::barrier_init_fence(); }
inline void barrier_arrive(u32 barrier, WHERE) { emulator::barrier_arrive(barrier, 0, where); }
inline void barrier_arrive_expect(u32 barrier, u32 bytes, WHERE) {
    emulator::barrier_arrive(barrier, bytes, where);
}
inline void barrier_wait(u32 barrier, u32 parity, WHERE) {
    emulator::barrier_wait(barrier, parity, where);
}

// One kernel runs at a time.
inline void wait_for_earlier_kernels() {}
inline void let_later_kernels_start() {}

inline void copy_bulk(u32 target, const void* source, u32 bytes, u32 barrier, WHERE) {
    emulator::copy_bulk(target, source, bytes, barrier, where);
}
inline void copy_16(u32 target, const void* source, WHERE) {
    emulator::copy_small(target, source, 16, where);
}
inline void copy_4(u32 target, const void* source, WHERE) {
    emulator::copy_small(target, source, 4, where);
}
inline void copies_wait() { emulator::copies_wait(); }
inline void proxy_fence() { emulator::proxy_fence(); }
inline void proxy_fence_global() { emulator::proxy_fence(); }

inline void load_16(u32 (&words)[4], u32 address, WHERE) { emulator::load(words, address, 16, where); }
inline void load_8(u32 (&words)[2], u32 address, WHERE) { emulator::load(words, address, 8, where); }
inline void load_constant_8(u32 (&words)[2], u32 address, WHERE) {
    emulator::load(words, address, 8, where);
}
inline void load_4(u32& word, u32 address, WHERE) { emulator::load(&word, address, 4, where); }
inline void store_16(void* target, const u32 (&words)[4], WHERE) {
    emulator::store_global(target, words, where);
}
inline void store_16(u32 address, const u32 (&words)[4], WHERE) {
    emulator::store(address, words, 16, where);
}
inline void store_8(u32 address, const u32 (&words)[2], WHERE) {
    emulator::store(address, words, 8, where);
}
inline void store_4(u32 address, u32 word, WHERE) { emulator::store(address, &word, 4, where); }
inline void store_1(u32 address, u32 byte, WHERE) { emulator::store(address, &byte, 1, where); }
inline void raise_to(u32 address, u32 word, WHERE) { emulator::raise_to(address, word, where); }
inline void store_transposed(u32 address, const u32 (&words)[4], WHERE) {
    emulator::store_transposed(address, words, where);
}
inline void sync_threads(u32 barrier, u32 threads, WHERE) {
    emulator::sync_threads(barrier, threads, where);
}
inline void arrive_threads(u32 barrier, u32 threads, WHERE) {
    emulator::arrive_threads(barrier, threads, where);
}

inline void made(u32 (&)[4]) {}
inline u32 kept(u32 value) { return value; }
inline void wgmma_fence() { emulator::matrix_fence(); }
inline void wgmma_commit() { emulator::matrix_commit(); }
template <int newest>
inline void wgmma_wait(WHERE) {
    emulator::matrix_wait(newest, where);
}
inline u64 operand(u32 address, u32 stride) {
    return u64((address & 0x3FFFF) >> 4) | (u64(stride >> 4) << 32) | (u64(1) << 62);
}

template <int registers>
inline void more_registers() {}
template <int registers>
inline void fewer_registers() {}

// ---- between blocks, through global memory

inline u32 load_acquire(const u32* address, WHERE) { return emulator::load_acquire(address, where); }
inline void add_release(u32* address, u32 value, WHERE) {
    emulator::atomic(emulator::ADD, address, value, 0, emulator::RELEASE, where);
}

// ---- the entry, called with addresses of its arguments

namespace emulator {

template <u32... numbers>
struct Places {};

template <class... Types, u32... places>
__attribute__((no_sanitize("thread"))) inline void call(void (*entry)(Types...), void* const* values,
                                                        Places<places...>) {
    entry(*static_cast<Types*>(values[places])...);
}

template <class... Types>
__attribute__((no_sanitize("thread"))) inline void call(void (*entry)(Types...), void* const* values) {
    call(entry, values, Places<__integer_pack(sizeof...(Types))...>());
}

// Bytes of each argument, then 0.
template <class... Types>
inline void sizes(void (*)(Types...), u32* found) {
    u32 bytes[] = {sizeof(Types)..., 0};
    for (u32 i = 0; i <= sizeof...(Types); ++i) found[i] = bytes[i];
}

}  // namespace emulator
