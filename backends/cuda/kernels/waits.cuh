/*
 * Waits for writes of other blocks of the same launch.
 *
 * Only blocks that are guaranteed to be resident together may wait like this, those of a cooperative launch or of a cluster.
 * Every wait is bounded nevertheless: a warp that has polled WAIT_LIMIT times writes the name of the wait and its block to
 * `wait_record`, pinned memory that the host reads, and faults. So the host can report which wait failed, instead of hanging.
 */
/* Polls before a wait gives up: at about 0.7 us each, ten seconds. */
#define WAIT_LIMIT (1u << 24)

/* The name of the wait, 8 letters at most, and the block. The host sets the address when it loads the module. */
extern "C" __device__ u64* wait_record = nullptr;

/* The first 8 letters of a name as one word, the first in the lowest byte. */
constexpr u64 wait_name(const char* text) {
    u64 name = 0;
    for (int i = 0; i < 8 && text[i]; ++i) name |= (u64)(u8)text[i] << (8 * i);
    return name;
}

/* Counts a poll, and gives up beyond the limit. It faults by a store to address 0: with a trap instruction in a kernel, the compiler does
 * not use the registers that `setmaxnreg` adds. */
__device__ inline void count_poll(u32& polls, u64 name) {
    if (++polls <= WAIT_LIMIT) return;
    u64* record = wait_record;
    if (record) {
        asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" :: "l"(record), "l"(name), "l"((u64)blockIdx.x) : "memory");
        __threadfence_system();
    }
    asm volatile("st.global.u32 [%0], %1;" :: "l"(0ull), "r"(polls) : "memory");
}
