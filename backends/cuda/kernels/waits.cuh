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

/* Polls beyond the limit in which the record is written, and after which it has reached the host. */
#define WAIT_REPORTS 1024

/* Counts a poll, and gives up beyond the limit. It faults by a store to address 0: with a trap instruction in a kernel, the compiler does
 * not use the registers that `setmaxnreg` adds. The store that reports and the one that faults are the same instruction, since each
 * further one takes registers of kernels that have none to spare. */
__device__ inline void count_poll(u32& polls, u64 name) {
    if (++polls <= WAIT_LIMIT) return;
    u64* to = polls < WAIT_LIMIT + WAIT_REPORTS ? wait_record : nullptr;
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" :: "l"(to), "l"(name), "l"((u64)blockIdx.x) : "memory");
}
