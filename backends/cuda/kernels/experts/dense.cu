/*
 * grouped_linear with dense weights on tensor cores, f16 or bf16 throughout: see tile.cuh.
 *
 * The sum over inputs may run in any order as long as both operands agree, so a lane loads 16 consecutive bytes of two rows, as they
 * lie in memory, and they are the fragments of two products: no shared memory, no transposition. A step is 32 inputs.
 *
 * Bytes: the weights once per item, so of each distinct expert once while an expert has at most TOKENS assignments; activations
 * `TOKENS / 16` times the weights' bytes, from the L2. Floor: the weights of the distinct experts over read bandwidth, 6 us for one token of
 * E128 N768 K2048 k8 in bf16 on an H200.
 */
#if __CUDA_ARCH__ >= 800
struct Dense {
    struct Loaded { Vector low, high; };
    static constexpr int columns = 32;
    static constexpr bool aligned = false;
    const u8 *low, *high;
    int inputs;

    __device__ Dense(const GroupedLinearParams& p, i64 row, i64 end) {
        int lane = threadIdx.x % 32;
        i64 first = row + lane / 4, second = GATED ? first : first + 8;
        const Weight& other = GATED ? p.other : p.weight;
        low = p.weight.elements + (first < end ? first : row) * p.weight.row_bytes + lane % 4 * 16;
        high = other.elements + (second < end ? second : row) * other.row_bytes + lane % 4 * 16;
        inputs = (int)p.inputs;
    }
    /* Whether the lane's 8 inputs of a step are there. */
    __device__ bool is_real(int step) const { return WHOLE || step * 32 + (int)threadIdx.x % 4 * 8 < inputs; }
    __device__ void load(int step, Loaded& to) const {
        to = Loaded{};
        if (!is_real(step)) return;
        to.low = load_stream(low + (i64)step * 64);
        to.high = load_stream(high + (i64)step * 64);
    }
    __device__ void add(int step, const Loaded& own, const X* const (&x)[TILES], float (&sums)[TILES][4]) const {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            Vector v = {};
            if (x[tile] && is_real(step)) v = load_vector(x[tile] + step * 32 + threadIdx.x % 4 * 8);
            multiply(sums[tile], own.low.word[0], own.high.word[0], own.low.word[1], own.high.word[1], v.word[0], v.word[1]);
            multiply(sums[tile], own.low.word[2], own.high.word[2], own.low.word[3], own.high.word[3], v.word[2], v.word[3]);
        }
    }
};
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32) grouped_linear_dense(const __grid_constant__ GroupedLinearParams p) {
    launch_dependents_and_wait();
#if __CUDA_ARCH__ >= 800
    multiply_items<Dense>(p);
#endif
}
