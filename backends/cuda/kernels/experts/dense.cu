/*
 * grouped_linear on tensor cores for dense weights and few assignments per expert, f16 or bf16 throughout: see tile.cuh.
 *
 * The sum over inputs may run in any order as long as both operands agree, so a lane loads 16 consecutive bytes of two rows, as
 * they lie in memory, and they are the fragments of two products without a transposition. A lane reads from the ring buffer only
 * what it copied itself. A step is 32 inputs.
 *
 * Bytes: the weights once per item, so each distinct expert once while an expert has at most TOKENS assignments; activations at
 * most `TOKENS / 16` times the weights' bytes, from the L2. Floor: the weights of the distinct experts over read bandwidth, 6 us
 * for one token of E128 N768 K2048 k8 in bf16 on an H200.
 */
#if __CUDA_ARCH__ >= 800
struct Dense {
    struct Inputs { Vector of[TILES]; };
    struct Weights {
        Vector low, high;
        __device__ Weights(const u8* stage) {
            low = ((const Vector*)stage)[threadIdx.x % 32];
            high = ((const Vector*)stage)[threadIdx.x % 32 + 32];
        }
    };
    static constexpr int columns = 32, stage = 1024;
    static constexpr bool aligned = false;
    const u8 *low, *high;
    int inputs;

    __device__ Dense(const GroupedLinearParams& p) : low(p.weight.elements), high(p.weight.elements), inputs((int)p.inputs) {}
    __device__ void aim(const GroupedLinearParams& p, i64 row, i64 end) {
        const int lane = threadIdx.x % 32;
        const i64 first = row + lane / 4, second = GATED ? first : first + 8;
        const Weight& other = GATED ? p.other : p.weight;
        low = p.weight.elements + (first < end ? first : row) * p.weight.row_bytes + lane % 4 * 16;
        high = other.elements + (second < end ? second : row) * other.row_bytes + lane % 4 * 16;
    }
    /* Whether the lane's 8 inputs of a step exist. */
    __device__ bool is_real(int step) const { return WHOLE || step * 32 + (int)threadIdx.x % 4 * 8 < inputs; }
    __device__ void copy(u8* stage, int step) const {
        const i64 at = is_real(step) ? (i64)step * 64 : 0;
        copy_ahead((Vector*)stage + threadIdx.x % 32, low + at, is_real(step));
        copy_ahead((Vector*)stage + threadIdx.x % 32 + 32, high + at, is_real(step));
    }
    __device__ void load(const X* const (&x)[TILES], int step, Inputs& to) const {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            to.of[tile] = Vector{};
            if (x[tile] && is_real(step)) to.of[tile] = load_vector(x[tile] + step * 32 + threadIdx.x % 4 * 8);
        }
    }
    __device__ void add(const Weights& w, const Inputs& x, float (&sums)[TILES][4]) const {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const Vector& v = x.of[tile];
            multiply(sums[tile], w.low.word[0], w.high.word[0], w.low.word[1], w.high.word[1], v.word[0], v.word[1]);
            multiply(sums[tile], w.low.word[2], w.high.word[2], w.low.word[3], w.high.word[3], v.word[2], v.word[3]);
        }
    }
};
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) grouped_linear_dense(const __grid_constant__ GroupedLinearParams p) {
    launch_dependents_and_wait();
#if __CUDA_ARCH__ >= 800
    multiply_items<Dense>(p);
#endif
}
