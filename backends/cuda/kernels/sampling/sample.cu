/*
 * sample: SPLITS blocks of 1024 threads share a row. Grid: (rows, splits). Each reads its share of the row once, for the largest
 * logit, the sum of exponentials and the draw from all tokens; the block that comes last merges these, in the order of the
 * shares. Filters need to know the whole row: then the last block draws by itself, from its own passes over the row.
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

/* A score and the token it belongs to; -1 if there is none. */
struct Best {
    float score;
    int index;

    __device__ void consider(float other, int where) {
        if (where >= 0 && (index < 0 || other > score || (other == score && where < index))) {
            score = other;
            index = where;
        }
    }
};

/* The largest score, of the lowest token on ties. */
__device__ Best block_best(Best best) {
    __shared__ Best bests[32];
    for (int distance = 16; distance; distance /= 2) {
        float score = __shfl_xor_sync(0xffffffffu, best.score, distance);
        best.consider(score, __shfl_xor_sync(0xffffffffu, best.index, distance));
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = best;
    __syncthreads();
    best = bests[threadIdx.x % 32];
    for (int distance = 16; distance; distance /= 2) {
        float score = __shfl_xor_sync(0xffffffffu, best.score, distance);
        best.consider(score, __shfl_xor_sync(0xffffffffu, best.index, distance));
    }
    return best;
}

/* The sum over the block, in every thread and in the same order every time. */
__device__ double block_sum_wide(double sum) {
    __shared__ double partial[32];
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    __syncthreads();
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = partial[threadIdx.x % 32];
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    return sum;
}

/* What a block found in its share of a row: its largest logit, the sum of exponentials below that, its draw. */
struct alignas(16) Share {
    double sum;
    Best first, drawn;
    u64 unused;
};

/* The draw from what filters leave of a row, by one block. */
__device__ int draw_filtered(const Row& row, int first, float k, float p, float min_p, u32 key0, u32 key1, u32 position) {
    Bound bound = {0, row.columns};
    if (k >= 1.0f && k < (float)row.columns) bound = top_k(row, (u64)k);
    if (p < 1.0f) bound = top_p(row, bound, p);
    Best best = {-infinity(), -1};
    for (i64 i = threadIdx.x; i < row.columns; i += blockDim.x) {
        float x = row.value(i);
        if (!row.drawable(x) || !bound.admits(ordered(x), i)) continue;
        if (min_p > 0.0f && i != first && !(row.weight(x) >= min_p)) continue;
        best.consider(x + gumbel(philox(key0, key1, (u32)i, position)), (int)i);
    }
    return block_best(best).index;
}

extern "C" __global__ void __launch_bounds__(1024) sample(Extent extent, i64 columns, i64 capacity, const float* logits,
                                                          i64 logits_row, const int* requests, const int* positions,
                                                          const float* parameters, i64 parameters_row, const u32* seeds,
                                                          i64 seeds_row, int* ids, float* log_probability, Share* shares,
                                                          u32* counters) {
    __shared__ bool last;
    take_turn();
    i64 at = blockIdx.x;
    if (at >= extent.count()) return;
    i64 request = requests[at];
    if (request < 0 || request >= capacity) {
        if (threadIdx.x == 0 && blockIdx.y == 0) {
            ids[at] = -1;
            log_probability[at] = 0.0f;
        }
        return;
    }
    const float* own = parameters + request * parameters_row;
    float temperature = own[0], k = own[1], p = own[2], min_p = own[3];
    bool greedy = !(temperature > 0.0f), filtered = (k >= 1.0f && k < (float)columns) || p < 1.0f || min_p > 0.0f;
    u32 key0 = seeds[request * seeds_row], key1 = seeds[request * seeds_row + 1], position = (u32)positions[at];
    Row row = {logits + at * logits_row, columns, greedy ? 1.0f : temperature, 0.0f};

    /* This block's share: runs of 1024 tokens, in turn. The sum is kept below the thread's largest so far. */
    Best first = {-infinity(), -1}, drawn = {-infinity(), -1};
    float below = -infinity();
    double sum = 0.0;
#pragma unroll 4
    for (i64 i = (i64)blockIdx.y * 1024 + threadIdx.x; i < columns; i += SPLITS * 1024) {
        float x = row.logits[i];
        if (!row.drawable(x)) continue;
        first.consider(x, (int)i);
        if (x > below) {
            sum *= expf(below - x);
            below = x;
        }
        sum += x == below ? 1.0f : expf(x - below);
        if (!greedy && !filtered) drawn.consider(row.value(i) + gumbel(philox(key0, key1, (u32)i, position)), (int)i);
    }
    first = block_best(first);
    if (!greedy && !filtered) drawn = block_best(drawn);
    sum = block_sum_wide(sum == 0.0 ? 0.0 : sum * (below == first.score ? 1.0f : expf(below - first.score)));
#if SPLITS > 1
    if (threadIdx.x == 0) {
        shares[at * SPLITS + blockIdx.y] = {sum, first, drawn, 0};
        __threadfence();
        last = atomicAdd(counters + at, 1u) == SPLITS - 1;
        if (last) counters[at] = 0;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    first = drawn = {-infinity(), -1};
    double part = 0.0;
    float its = -infinity();
    if (threadIdx.x < SPLITS) {
        const Share* share = shares + at * SPLITS + threadIdx.x;
        part = __ldcg(&share->sum);
        its = __ldcg(&share->first.score);
        first = {its, __ldcg(&share->first.index)};
        drawn = {__ldcg(&share->drawn.score), __ldcg(&share->drawn.index)};
    }
    first = block_best(first);
    drawn = block_best(drawn);
    sum = block_sum_wide(part == 0.0 ? 0.0 : part * (its == first.score ? 1.0f : expf(its - first.score)));
#endif
    int id = first.index;
    if (id >= 0 && !greedy) {
        row.largest = row.value(id);
        id = filtered ? draw_filtered(row, first.index, k, p, min_p, key0, key1, position) : drawn.index;
    }
    if (threadIdx.x == 0) {
        /* Of the logits as they are: a double holds the sum of any vocabulary. */
        float logit = id < 0 ? 0.0f : row.logits[id];
        ids[at] = id;
        log_probability[at] = id < 0 ? 0.0f : logit == first.score ? (float)-log(sum) : (float)((double)(logit - first.score) - log(sum));
    }
}
