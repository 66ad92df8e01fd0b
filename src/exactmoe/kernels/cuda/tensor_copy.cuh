// PTX of tensor copies (TMA) and of clusters: blocks that share what one of them reads. The same
// place in shared memory has the same address in each block.

struct alignas(64) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<u64>(&map)) : "memory");
}

// A box of bf16 [chunks, rows, 64] from (chunk, row) on; what lies outside of the tensor is zeros.
// The barrier counts all bytes of the box.
__device__ __forceinline__ void copy_box(u32 target, const TensorMap& map, u32 row, u32 chunk,
                                         u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(target),
        "l"(reinterpret_cast<u64>(&map)), "r"(0), "r"(row), "r"(chunk), "r"(barrier)
        : "memory");
}

// The same into each block of the cluster whose bit is set, counted by that block's barrier.
__device__ __forceinline__ void copy_box_to(u16 blocks, u32 target, const TensorMap& map, u32 row,
                                            u32 chunk, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(target),
        "l"(reinterpret_cast<u64>(&map)), "r"(0), "r"(row), "r"(chunk), "r"(barrier), "h"(blocks)
        : "memory");
}

// True in one lane of the warp. The compiler knows that it is one, and loops over none.
__device__ __forceinline__ bool elected() {
    u32 chosen;
    asm volatile(
        "{\n"
        ".reg .pred one;\n"
        "elect.sync _|one, 0xFFFFFFFF;\n"
        "selp.u32 %0, 1, 0, one;\n"
        "}\n"
        : "=r"(chosen));
    return chosen;
}

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of all blocks of the cluster.
__device__ __forceinline__ void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release;\n"
        "barrier.cluster.wait.acquire;" ::
            : "memory");
}

// Arrives at the same barrier of another block of the cluster, or of this one.
__device__ __forceinline__ void barrier_arrive_in(u32 rank, u32 barrier) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}\n" ::"r"(barrier),
        "r"(rank)
        : "memory");
}
