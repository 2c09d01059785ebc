/*
 * grouped_linear on tensor cores for dense weights and few assignments per expert, f16 or bf16 throughout: see tile.cuh.
 *
 * The sum over inputs may run in any order as long as both operands agree, so 16 consecutive bytes of two rows, as they lie in
 * memory, are a lane's fragments of two products without a transposition. A step is 64 inputs, and eight lanes copy the 128 bytes of
 * a row: whole lines, which memory delivers faster than halves of twice as many.
 *
 * Bytes: the weights once per item, so each distinct expert once while an expert has at most TOKENS assignments; activations at
 * most `TOKENS / 16` times the weights' bytes, from the L2. Floor: the weights of the distinct experts over read bandwidth, 6 us
 * for one token of E128 N768 K2048 k8 in bf16 on an H200.
 */
#if __CUDA_ARCH__ >= 800
struct Dense {
    struct Inputs { Vector of[TILES][2]; };
    /* The vectors of a lane: two of each of its rows. */
    struct Weights {
        Vector low[2], high[2];
        __device__ Weights(u32 stage) {
            const int lane = threadIdx.x % 32, row = lane / 4;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                low[half] = read_shared(stage + place(row, half * 4 + lane % 4) * 16);
                high[half] = read_shared(stage + place(row + 8, half * 4 + lane % 4) * 16);
            }
        }
    };
    static constexpr int columns = 64, stage = 2048;
    static constexpr float sum_factor = 1.0f;
    static constexpr bool aligned = false;
    /* The rows that a lane copies: four apart, in either half of the tile. */
    const u8 *from[4];
    int inputs;

    /* The index of a vector of a row in a stage. Neighbouring rows begin in different halves of the banks. */
    __device__ static int place(int row, int vector) { return row * 8 + (vector ^ row % 2 * 4); }

    __device__ Dense(const GroupedLinearParams& p) : from{}, inputs((int)p.inputs) {}
    __device__ void aim(const GroupedLinearParams& p, i64 row, i64 end, int) {
        const int lane = threadIdx.x % 32;
        const Weight& other = GATED ? p.other : p.weight;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Weight& weight = i < 2 ? p.weight : other;
            const i64 own = row + lane / 8 + i % 2 * 4 + (GATED ? 0 : i / 2 * 8);
            from[i] = weight.elements + (own < end ? own : row) * weight.row_bytes + lane % 8 * 16;
        }
    }
    __device__ void copy(u32 stage, int step) const {
        const int lane = threadIdx.x % 32;
        const bool real = WHOLE || step * 64 + lane % 8 * 8 < inputs;
        const i64 at = real ? (i64)step * 128 : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) copy_ahead(stage + place(lane / 8 + i * 4, lane % 8) * 16, from[i] + at, real);
    }
    __device__ void load(const X* const (&x)[TILES], int step, Inputs& to) const {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = step * 64 + half * 32 + threadIdx.x % 4 * 8;
                to.of[tile][half] = Vector{};
                if (WHOLE || column < inputs) to.of[tile][half] = load_vector(x[tile] + column);
            }
        }
    }
    __device__ void add(u32 stage, int, const Inputs& x, float (&sums)[TILES][4]) const {
        const Weights w(stage);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const Vector &v = x.of[tile][half], &low = w.low[half], &high = w.high[half];
                multiply(sums[tile], low.word[0], high.word[0], low.word[1], high.word[1], v.word[0], v.word[1]);
                multiply(sums[tile], low.word[2], high.word[2], low.word[3], high.word[3], v.word[2], v.word[3]);
            }
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
