/*
 * From logits to a token; shared by the kernels of this folder. `leave_share` summarises chunks of CHUNK tokens of a row, and
 * `choose` merges them. sample.cu describes the filters.
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

    __device__ float scaled(float logit) const { return logit / temperature + 0.0f; } /* -0 becomes 0 */
    __device__ float value(i64 i) const { return scaled(logits[i]); }
    /* NaN and minus infinity are never sampled. */
    __device__ bool drawable(float x) const { return x > -infinity(); }
    __device__ float weight(float x) const { return x == largest ? 1.0f : expf(x - largest); }
    __device__ u64 mass(float x) const { return (u64)(weight(x) * UNIT); }
};

/* The bound of the filters: keeps tokens above `value`, and those equal to it up to id `last`. */
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
 * The highest 32-bit threshold whose tokens, each measured by `measure(i, key)`, together reach `target`. `key_of` gives a
 * token's sort key; a higher key comes earlier. `Amount` accumulates a thread's measures.
 */
template <typename Amount, typename Key, typename Measure>
__device__ u32 threshold(i64 columns, u64 target, Key key_of, Measure measure) {
    __shared__ u64 sums[15];
    u32 found = 0;
    for (int shift = 28; shift >= 0; shift -= 4) {
        Amount own[15];
#pragma unroll
        for (int j = 0; j < 15; ++j) own[j] = 0;
        for (i64 i = threadIdx.x; i < columns; i += blockDim.x) {
            u32 key;
            if (!key_of(i, key)) continue;
            Amount amount = measure(i, key);
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

/* The id of the `wanted`-th token, counted from the lowest id, among those whose key is `value`. */
__device__ i64 tie(const Row& row, u32 value, u64 wanted) {
    auto key_of = [&](i64 i, u32& key) {
        float x = row.value(i);
        key = 0xffffffffu - (u32)i;
        return row.drawable(x) && ordered(x) == value;
    };
    u32 found = threshold<u32>(row.columns, wanted, key_of, [](i64, u32) -> u32 { return 1; });
    return (i64)(0xffffffffu - found);
}

__device__ Bound top_k(const Row& row, u64 k) {
    auto key_of = [&](i64 i, u32& key) {
        float x = row.value(i);
        key = ordered(x);
        return row.drawable(x);
    };
    u32 value = threshold<u32>(row.columns, k, key_of, [](i64, u32) -> u32 { return 1; });
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
    u32 value = threshold<u64>(row.columns, target, key_of, mass_of);
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

/* An upper bound of the noise of a random word, from its leading zeros: -ln(-ln(1 - v)) is at most -ln v, and each leading zero
 * adds less than ln 2. */
__device__ inline float most_noise(u32 word) { return (float)(__clz((int)word) + 1) * 0.6932f; }

/* A score and its token; -1 if there is none. */
struct Best {
    float score;
    int index;

    __device__ void consider(float other, int where) {
        if (where >= 0 && (index < 0 || other > score || (other == score && where < index))) {
            score = other;
            index = where;
        }
    }

    /* The best of a warp, in every lane. */
    __device__ void agree() {
        for (int distance = 16; distance; distance /= 2) {
            float other = __shfl_xor_sync(0xffffffffu, score, distance);
            consider(other, __shfl_xor_sync(0xffffffffu, index, distance));
        }
    }
};

__device__ inline Best none() { return {-infinity(), -1}; }

/* The largest score of a block of 1024; the lowest token on ties. */
__device__ Best block_best(Best best) {
    __shared__ Best bests[32];
    best.agree();
    __syncthreads();
    if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = best;
    __syncthreads();
    best = bests[threadIdx.x % 32];
    best.agree();
    return best;
}

__device__ inline float warp_largest(float x) {
    for (int distance = 16; distance; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

__device__ inline double warp_sum_wide(double x) {
    for (int distance = 16; distance; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

/* The summary of a chunk of a row: its largest logit, the sum of exponentials relative to it, its sample. */
struct alignas(16) Share {
    double sum;
    Best first, drawn;
    u64 unused;
};
static_assert(sizeof(Share) == SHARE, "Share as large as in Rust");

/* The sampling parameters of a request. */
struct Settings {
    float temperature, top_k, top_p, min_p;
    u32 key0, key1, position;

    __device__ Settings(const float* own, const u32* seed, int position)
        : temperature(own[0]), top_k(own[1]), top_p(own[2]), min_p(own[3]), key0(seed[0]), key1(seed[1]),
          position((u32)position) {}
    __device__ bool greedy() const { return !(temperature > 0.0f); }
    __device__ bool filters(i64 columns) const {
        return (top_k >= 1.0f && top_k < (float)columns) || top_p < 1.0f || min_p > 0.0f;
    }
};

/* The index in the row of element `k` of a thread's vector `u`. */
template <int WARPS> __device__ inline int index_of(int begin, int u, int k) {
    return begin + (u * WARPS * 32 + (int)threadIdx.x) * 4 + k;
}

/*
 * Summarises a chunk, which a block of WARPS warps holds as PIECES vectors of four per thread. Elements past the last token are
 * minus infinity. The order of sums does not depend on the number of warps: it is that of eight.
 */
template <int PIECES, int WARPS>
__device__ void leave_share(float (&x)[PIECES][4], int begin, i64 columns, const float* row_of_logits, const Settings& settings,
                            Share* to) {
    static_assert(PIECES * WARPS * 32 * 4 == CHUNK && (WARPS == 8 || PIECES == 1));
    __shared__ float tops[WARPS];
    __shared__ float fours[PIECES == 1 ? CHUNK / 4 : 1];
    __shared__ double sums[8];
    __shared__ Best bests[WARPS];
    __shared__ int first;
    __shared__ u32 reached;
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    if (thread == 0) {
        first = 0x7fffffff;
        reached = 0;
    }
    float top = -infinity();
#pragma unroll
    for (int u = 0; u < PIECES; ++u) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (is_nan(x[u][k])) x[u][k] = -infinity();
            top = fmaxf(top, x[u][k]);
        }
    }
    float own_top = top;
    top = warp_largest(top);
    if (lane == 0) tops[warp] = top;
    __syncthreads();
    top = warp_largest(tops[lane % WARPS]);
    bool any = top > -infinity();
    if (any && own_top == top) {
        /* Rarely executed by more than one thread. */
        int index = 0x7fffffff;
#pragma unroll
        for (int u = PIECES - 1; u >= 0; --u) {
#pragma unroll
            for (int k = 3; k >= 0; --k) index = x[u][k] == top ? index_of<WARPS>(begin, u, k) : index;
        }
        atomicMin(&first, index);
    }

    /* Sums four at a time in f32, and these sums in f64. */
    double sum = 0.0;
#pragma unroll
    for (int u = 0; u < PIECES; ++u) {
        float four = 0.0f;
#pragma unroll
        for (int k = 0; k < 4; ++k) four += x[u][k] == top ? 1.0f : expf(x[u][k] - top);
        if constexpr (PIECES == 1) {
            fours[thread] = four;
        } else {
            sum += four;
        }
    }
    Best drawn = none();
    if (any && !settings.greedy() && !settings.filters(columns)) {
        Row row = {row_of_logits, columns, settings.temperature, 0.0f};
#pragma unroll
        for (int u = 0; u < PIECES; ++u) {
            u32 bar = *(volatile u32*)&reached;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (!row.drawable(x[u][k])) continue;
                float value = row.scaled(x[u][k]);
                if (ordered(value + most_noise(0)) < bar) continue;
                u32 word = philox(settings.key0, settings.key1, (u32)index_of<WARPS>(begin, u, k), settings.position);
                if (ordered(value + most_noise(word)) < bar) continue;
                drawn.consider(value + gumbel(word), index_of<WARPS>(begin, u, k));
            }
            if (u + 1 == PIECES) break;
            float best = warp_largest(drawn.score);
            if (lane == 0 && best > -infinity()) atomicMax(&reached, ordered(best));
        }
    }
    if constexpr (PIECES == 1) {
        __syncthreads();
        if (warp < 8) {
#pragma unroll
            for (int u = 0; u < 4; ++u) sum += fours[u * 256 + thread];
        }
    }
    sum = warp_sum_wide(sum);
    drawn.agree();
    if (lane == 0) {
        if (warp < 8) sums[warp] = sum;
        bests[warp] = drawn;
    }
    __syncthreads();
    if (warp > 0) return;

    sum = warp_sum_wide(lane < 8 && any ? sums[lane % 8] : 0.0);
    drawn = lane < WARPS ? bests[lane % WARPS] : none();
    drawn.agree();
    if (lane == 0) *to = {sum, {top, any ? first : -1}, drawn, 0};
}

/*
 * Merges the chunks of a row, and samples again if filters depend on the whole row. Called by a block of 1024, or by one warp if
 * there are no filters; `first` is the thread's own first chunk. Thread 0 gets the token, or -1, and the logarithm of its
 * probability.
 */
__device__ inline void choose(const float* logits, i64 columns, const Settings& settings, bool filtered, const Share* shares,
                              i64 chunks, Share share, int& id, float& log_probability) {
    int lane = threadIdx.x % 32;
    /* Every warp by itself. */
    Best first = share.first, drawn = share.drawn;
    for (i64 chunk = lane + 32; chunk < chunks; chunk += 32) {
        first.consider(shares[chunk].first.score, shares[chunk].first.index);
        drawn.consider(shares[chunk].drawn.score, shares[chunk].drawn.index);
    }
    first.agree();
    drawn.agree();
    /* The sums of chunks are relative to each chunk's own largest logit. */
    auto below = [&](const Share& part) -> double {
        if (part.first.index < 0) return 0.0;
        return part.sum * (part.first.score == first.score ? 1.0f : expf(part.first.score - first.score));
    };
    double sum = below(share);
    for (i64 chunk = lane + 32; chunk < chunks; chunk += 32) sum += below(shares[chunk]);
    sum = warp_sum_wide(sum);

    Row row = {logits, columns, settings.temperature, 0.0f};
    id = settings.greedy() ? first.index : drawn.index;
    if (filtered && first.index >= 0) {
        row.largest = row.value(first.index);
        Bound bound = {0, columns};
        if (settings.top_k >= 1.0f && settings.top_k < (float)columns) bound = top_k(row, (u64)settings.top_k);
        if (settings.top_p < 1.0f) bound = top_p(row, bound, settings.top_p);
        Best best = none();
        for (i64 i = threadIdx.x; i < columns; i += blockDim.x) {
            float x = row.value(i);
            if (!row.drawable(x) || !bound.admits(ordered(x), i)) continue;
            if (settings.min_p > 0.0f && i != first.index && !(row.weight(x) >= settings.min_p)) continue;
            best.consider(x + gumbel(philox(settings.key0, settings.key1, (u32)i, settings.position)), (int)i);
        }
        id = block_best(best).index;
    }
    if (threadIdx.x == 0) {
        /* The log probability is that of the logits before temperature and filters. In f64 the sum is accurate for any vocabulary. */
        float logit = id < 0 || id == first.index ? first.score : row.logits[id];
        log_probability = id < 0 ? 0.0f : logit == first.score ? (float)-log(sum) : (float)((double)(logit - first.score) - log(sum));
    }
}
