/* Processing of a logit before sampling. */

template <typename T> struct alignas(sizeof(T) * WIDTH) Piece { T of[WIDTH]; };

struct Penalties {
    float repetition, presence, frequency;

    __device__ explicit Penalties(const float* own) : repetition(own[4]), presence(own[5]), frequency(own[6]) {}
    /* If false, counts have no effect, bit for bit. */
    __device__ bool any() const { return repetition != 1.0f || presence != 0.0f || frequency != 0.0f; }
    __device__ float of(float value, int seen) const {
        int generated = seen & (IN_PROMPT - 1);
        if (seen != 0) value = value > 0.0f ? value / repetition : value * repetition;
        if (generated > 0) value = value - frequency * (float)generated - presence;
        return value;
    }
};
