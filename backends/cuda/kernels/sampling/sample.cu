/*
 * sample: one block of 1024 threads per row, which owns all of it. Grid: (rows).
 *
 * The filters keep the first so many tokens of the order "larger x first, lower id first among equals", so all of them
 * together are one bound: (value, id). It is found without sorting, by narrowing down the value four bits at a time: a pass
 * counts, for each of 15 thresholds, the tokens at or above it (top-k) or their mass (top-p), and keeps the highest
 * threshold that reaches the target. Masses are whole numbers, so that the order of summing does not matter: exp(x - max)
 * in units of 2^-40. Ties at the bound are kept by id, found the same way.
 *
 * Passes over the row, which stays in the L2: 2 always (largest; draw), 1 for the log-probability, 8 for top-k, 1 + 8 for
 * top-p, 6 more where ties are cut.
 */
#define UNIT 1099511627776.0f

__device__ inline u32 ordered(float x) {
    u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline u64 warp_sum_whole(u64 x) {
    for (int distance = 16; distance; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

struct Row {
    const float* logits;
    i64 columns;
    float temperature, largest;

    __device__ float value(i64 i) const { return logits[i] / temperature + 0.0f; } /* -0 becomes 0 */
    /* NaN and minus infinity are never drawn. */
    __device__ bool drawable(float x) const { return x > -infinity(); }
    __device__ float weight(float x) const { return x == largest ? 1.0f : expf(x - largest); }
    __device__ u64 mass(float x) const { return (u64)(weight(x) * UNIT); }
};

/* The bound: tokens above `value`, and those equal to it up to id `last`. */
struct Bound {
    u32 value;
    i64 last;
    __device__ bool admits(u32 key, i64 id) const { return key > value || (key == value && id <= last); }
};

__device__ u64 block_sum_whole(u64 x) {
    __shared__ u64 partial[32];
    x = warp_sum_whole(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sum_whole(partial[threadIdx.x % 32]);
}

/*
 * The highest 32-bit threshold whose tokens, each measured by `measure(i, key)`, together reach `target`. `key_of` gives
 * the token's place in the order; higher is earlier.
 */
template <typename Key, typename Measure>
__device__ u32 threshold(i64 columns, u64 target, Key key_of, Measure measure) {
    __shared__ u64 sums[15];
    u32 found = 0;
    for (int shift = 28; shift >= 0; shift -= 4) {
        u64 own[15];
#pragma unroll
        for (int j = 0; j < 15; ++j) own[j] = 0;
        for (i64 i = threadIdx.x; i < columns; i += blockDim.x) {
            u32 key;
            if (!key_of(i, key)) continue;
            u64 amount = measure(i, key);
#pragma unroll
            for (int j = 0; j < 15; ++j) own[j] += key >= found + ((u32)(j + 1) << shift) ? amount : 0;
        }
        __syncthreads();
        if (threadIdx.x < 15) sums[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll
        for (int j = 0; j < 15; ++j) {
            u64 total = warp_sum_whole(own[j]);
            if (threadIdx.x % 32 == 0) atomicAdd(&sums[j], total);
        }
        __syncthreads();
        u32 digit = 0;
        for (int j = 0; j < 15; ++j) digit += sums[j] >= target;
        found += digit << shift;
    }
    return found;
}

/* The id of the `wanted`-th token, from the lowest id on, among those whose key is `value`. */
__device__ i64 tie(const Row& row, u32 value, u64 wanted) {
    auto key_of = [&](i64 i, u32& key) {
        float x = row.value(i);
        key = 0xffffffffu - (u32)i;
        return row.drawable(x) && ordered(x) == value;
    };
    u32 found = threshold(row.columns, wanted, key_of, [](i64, u32) -> u64 { return 1; });
    return (i64)(0xffffffffu - found);
}

__device__ Bound top_k(const Row& row, u64 k) {
    auto key_of = [&](i64 i, u32& key) {
        float x = row.value(i);
        key = ordered(x);
        return row.drawable(x);
    };
    u32 value = threshold(row.columns, k, key_of, [](i64, u32) -> u64 { return 1; });
    u64 above = 0, equal = 0;
    for (i64 i = threadIdx.x; i < row.columns; i += blockDim.x) {
        u32 key;
        if (!key_of(i, key)) continue;
        above += key > value;
        equal += key == value;
    }
    above = block_sum_whole(above);
    equal = block_sum_whole(equal);
    if (above + equal <= k) return {value, row.columns};
    return {value, tie(row, value, k - above)};
}

__device__ Bound top_p(const Row& row, Bound bound, float p) {
    auto key_of = [&](i64 i, u32& key) {
        float x = row.value(i);
        key = ordered(x);
        return row.drawable(x) && bound.admits(key, i);
    };
    auto mass_of = [&](i64 i, u32) -> u64 { return row.mass(row.value(i)); };
    u64 all = 0;
    for (i64 i = threadIdx.x; i < row.columns; i += blockDim.x) {
        u32 key;
        if (key_of(i, key)) all += mass_of(i, key);
    }
    all = block_sum_whole(all);
    double wanted = (double)p * (double)all;
    u64 target = wanted < 1.0 ? 1 : (u64)wanted;
    if ((double)target < wanted) target += 1;
    if (target > all) return bound;
    u32 value = threshold(row.columns, target, key_of, mass_of);
    u64 above = 0, equal = 0, count = 0;
    for (i64 i = threadIdx.x; i < row.columns; i += blockDim.x) {
        u32 key;
        if (!key_of(i, key)) continue;
        if (key > value) above += mass_of(i, key);
        if (key == value) {
            equal += mass_of(i, key);
            count += 1;
        }
    }
    above = block_sum_whole(above);
    equal = block_sum_whole(equal);
    count = block_sum_whole(count);
    u64 each = count ? equal / count : 0;
    u64 ties = each ? (target - above + each - 1) / each : count;
    if (ties >= count) return {value, value == bound.value ? bound.last : row.columns};
    return {value, tie(row, value, ties < 1 ? 1 : ties)};
}

/* The first word of Philox4x32-10. */
__device__ u32 philox(u32 key0, u32 key1, u32 c0, u32 c1) {
    u32 c2 = 0, c3 = 0;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        u64 a = (u64)0xD2511F53u * c0, b = (u64)0xCD9E8D57u * c2;
        u32 n0 = (u32)(b >> 32) ^ c1 ^ key0, n2 = (u32)(a >> 32) ^ c3 ^ key1;
        c1 = (u32)b;
        c3 = (u32)a;
        c0 = n0;
        c2 = n2;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return c0;
}

__device__ float gumbel(u32 word) {
    float v = (float)(((double)word + 0.5) * 2.3283064365386963e-10);
    v = fminf(v, 0.99999994f);
    return -logf(-log1pf(-v));
}

/* The index of the largest score, the lowest on ties; -1 if no thread has any. */
__device__ i64 block_argmax(float score, i64 index) {
    __shared__ float scores[32];
    __shared__ i64 indices[32];
    auto merge = [](float& a, i64& i, float b, i64 j) {
        if (j >= 0 && (i < 0 || b > a || (b == a && j < i))) {
            a = b;
            i = j;
        }
    };
    for (int distance = 16; distance; distance /= 2) {
        float other = __shfl_xor_sync(0xffffffffu, score, distance);
        i64 where = __shfl_xor_sync(0xffffffffu, index, distance);
        merge(score, index, other, where);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        scores[threadIdx.x / 32] = score;
        indices[threadIdx.x / 32] = index;
    }
    __syncthreads();
    score = scores[threadIdx.x % 32];
    index = indices[threadIdx.x % 32];
    for (int distance = 16; distance; distance /= 2) {
        float other = __shfl_xor_sync(0xffffffffu, score, distance);
        i64 where = __shfl_xor_sync(0xffffffffu, index, distance);
        merge(score, index, other, where);
    }
    return index;
}

extern "C" __global__ void __launch_bounds__(1024) sample(Extent extent, i64 columns, i64 capacity, const float* logits,
                                                          i64 logits_row, const int* requests, const int* positions,
                                                          const float* parameters, i64 parameters_row, const u32* seeds,
                                                          i64 seeds_row, int* ids, float* log_probability) {
    i64 at = blockIdx.x;
    if (at >= extent.count()) return;
    i64 request = requests[at];
    if (request < 0 || request >= capacity) {
        if (threadIdx.x == 0) {
            ids[at] = -1;
            log_probability[at] = 0.0f;
        }
        return;
    }
    const float* own = parameters + request * parameters_row;
    float temperature = own[0], k = own[1], p = own[2], min_p = own[3];
    bool greedy = !(temperature > 0.0f);
    Row row = {logits + at * logits_row, columns, greedy ? 1.0f : temperature, 0.0f};

    float best = -infinity();
    i64 where = -1;
    for (i64 i = threadIdx.x; i < columns; i += blockDim.x) {
        float x = row.logits[i];
        if (row.drawable(x) && (where < 0 || x > best)) {
            best = x;
            where = i;
        }
    }
    i64 first = block_argmax(best, where);
    if (first < 0) {
        if (threadIdx.x == 0) {
            ids[at] = -1;
            log_probability[at] = 0.0f;
        }
        return;
    }
    i64 drawn = first;
    if (!greedy) {
        row.largest = row.value(first);
        Bound bound = {0, columns};
        if (k >= 1.0f && k < (float)columns) bound = top_k(row, (u64)k);
        if (p < 1.0f) bound = top_p(row, bound, p);
        float score = -infinity();
        i64 index = -1;
        for (i64 i = threadIdx.x; i < columns; i += blockDim.x) {
            float x = row.value(i);
            if (!row.drawable(x) || !bound.admits(ordered(x), i)) continue;
            if (min_p > 0.0f && i != first && !(row.weight(x) >= min_p)) continue;
            float noisy = x + gumbel(philox(seeds[request * seeds_row], seeds[request * seeds_row + 1], (u32)i, (u32)positions[at]));
            if (index < 0 || noisy > score) {
                score = noisy;
                index = i;
            }
        }
        drawn = block_argmax(score, index);
    }
    /* Of the logits as they are: a double holds the sum of any vocabulary. */
    float largest = row.logits[first];
    double sum = 0.0;
    for (i64 i = threadIdx.x; i < columns; i += blockDim.x) {
        float x = row.logits[i];
        if (row.drawable(x)) sum += x == largest ? 1.0f : expf(x - largest);
    }
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    __shared__ double partial[32];
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0.0;
        for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += partial[warp];
        ids[at] = (int)drawn;
        log_probability[at] = drawn < 0 ? 0.0f : row.logits[drawn] == largest ? (float)-log(sum) : (float)((double)(row.logits[drawn] - largest) - log(sum));
    }
}
