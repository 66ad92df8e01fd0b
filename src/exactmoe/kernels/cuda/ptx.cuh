// The PTX instructions that the kernels use, one function each. No header is included, so run-time
// compilation needs no search path.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- barriers in shared memory

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred ready;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ready, [%0], %1;\n"
        "@ready bra done;\n"
        "bra again;\n"
        "done:\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// ---- the kernel before and the kernel after, when launched to overlap (else these do nothing)

__device__ __forceinline__ void wait_for_earlier_kernels() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void let_later_kernels_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- between blocks, through global memory

__device__ __forceinline__ u32 load_acquire(const u32* from) {
    u32 word;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}

__device__ __forceinline__ void add_release(u32* to, u32 value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Stores write through the generic proxy, bulk copies read through the asynchronous one.
__device__ __forceinline__ void proxy_fence_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---- copies into shared memory

// `bytes` (a multiple of 16) from global memory; their arrival is counted by the barrier.
__device__ __forceinline__ void copy_bulk(u32 target, const void* source, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void copy_16(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void copy_4(u32 target, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

// All copy_16 and copy_4 of this thread have landed.
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// copy_16 writes through the generic proxy, wgmma reads through the asynchronous one.
__device__ __forceinline__ void proxy_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- loads from shared memory, stores

__device__ __forceinline__ void load_16(u32 (&words)[4], u32 address) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address));
}

__device__ __forceinline__ void load_8(u32 (&words)[2], u32 address) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address));
}

// Of words that nobody changes any more: the compiler may move it.
__device__ __forceinline__ void load_constant_8(u32 (&words)[2], u32 address) {
    asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address));
}

__device__ __forceinline__ void load_4(u32& word, u32 address) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
}

__device__ __forceinline__ void store_16(void* target, const u32 (&words)[4]) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

__device__ __forceinline__ void store_16(u32 address, const u32 (&words)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

__device__ __forceinline__ void store_8(u32 address, const u32 (&words)[2]) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(words[0]), "r"(words[1])
                 : "memory");
}

__device__ __forceinline__ void store_4(u32 address, u32 word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ void store_1(u32 address, u32 byte) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(byte) : "memory");
}

__device__ __forceinline__ void raise_to(u32 address, u32 word) {
    asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

// Four 8x8 matrices of 16-bit values, each stored transposed; lane i gives the address of row i % 8
// of matrix i / 8.
__device__ __forceinline__ void store_transposed(u32 address, const u32 (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

__device__ __forceinline__ void sync_threads(u32 barrier, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// As sync_threads, without waiting.
__device__ __forceinline__ void arrive_threads(u32 barrier, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- the compiler

// A value that a loop needs again and again: else it is made anew in every round.
__device__ __forceinline__ u32 kept(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

// ---- matrix units

// The registers hold these values from here on. Operands that the compiler made behind the fence cost
// another one, and the units wait for them.
__device__ __forceinline__ void made(u32 (&words)[4]) {
    asm volatile("" : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])::"memory");
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int newest>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(newest) : "memory");
}

// Rows of 128 bytes in 128-byte swizzle; each next eight of them `stride` bytes on.
__device__ __forceinline__ u64 operand(u32 address, u32 stride) {
    return u64((address & 0x3FFFF) >> 4) | (u64(stride >> 4) << 32) | (u64(1) << 62);
}

// ---- registers of a thread, by all warps of a warpgroup

template <int registers>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// ---- bytes

// Nibble i of the selector picks byte i of the result from the eight of low and high; its bit 3
// would pick the byte's sign.
__device__ __forceinline__ u32 permute(u32 low, u32 high, u32 selector) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
    return bytes;
}

// ---- arithmetic, each rounded to nearest even, subnormals kept

// Two bf16 times the low, or the high bf16 of another word.
__device__ __forceinline__ u32 times_low(u32 pair, u32 factors) {
    u32 product;
    asm("{ .reg .b16 low, high; .reg .b32 both; mov.b32 {low, high}, %2;\n"
        "mov.b32 both, {low, low}; mul.rn.bf16x2 %0, %1, both; }"
        : "=r"(product) : "r"(pair), "r"(factors));
    return product;
}

__device__ __forceinline__ u32 times_high(u32 pair, u32 factors) {
    u32 product;
    asm("{ .reg .b16 low, high; .reg .b32 both; mov.b32 {low, high}, %2;\n"
        "mov.b32 both, {high, high}; mul.rn.bf16x2 %0, %1, both; }"
        : "=r"(product) : "r"(pair), "r"(factors));
    return product;
}

__device__ __forceinline__ float min_nan(float a, float b) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

__device__ __forceinline__ float max_nan(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

// Two bf16 in a word, low half first; a NaN is 0x7FC0 (contract section 1).
__device__ __forceinline__ u32 round_bf16x2(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    if (low != low) word = (word & 0xFFFF0000u) | 0x7FC0u;
    if (high != high) word = (word & 0x0000FFFFu) | 0x7FC00000u;
    return word;
}

// Two e4m3 in the low 16 bits, low byte first, saturating at 448; 0x80 where a value rounds to -0.
__device__ __forceinline__ u32 round_e4m3x2(float low, float high) {
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

// Two e4m3 (the low 16 bits) x 2^8 as two bf16, exactly.
__device__ __forceinline__ u32 e4m3x2_to_bf16x2(u32 codes) {
    u32 word;
    asm("{ .reg .b32 halves; .reg .b16 low, high; .reg .f32 a, b;\n"
        "cvt.rn.f16x2.e4m3x2 halves, %1; mov.b32 {low, high}, halves;\n"
        "cvt.f32.f16 a, low; cvt.f32.f16 b, high;\n"
        "mul.rn.f32 a, a, 0f43800000; mul.rn.f32 b, b, 0f43800000; cvt.rn.bf16x2.f32 %0, b, a; }"
        : "=r"(word) : "h"(u16(codes)));
    return word;
}
