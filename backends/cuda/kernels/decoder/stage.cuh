/*
 * Stages the activations of products in shared memory, once other blocks have written them to the exchange.
 */
#if __CUDA_ARCH__ >= 900
/* The sum of one value per warp; `from` is aligned to 16 bytes. */
__device__ inline float sum_of_warps(const float* from) {
    float x = 0.0f;
#pragma unroll
    for (int w = 0; w + 4 <= WARPS; w += 4) {
        float4 its = *(const float4*)(from + w);
        x += (its.x + its.y) + (its.z + its.w);
    }
#pragma unroll
    for (int w = WARPS / 4 * 4; w < WARPS; ++w) x += from[w];
    return x;
}

/* The sum over a team's warps of an output of a run. A lane adds 4 partial sums, or 2 where there are two teams; the result is the same
 * in all lanes that share the output. */
template <int SHARERS, int TEAMS> __device__ inline float sum_of_sharers(const float* from) {
    static_assert(WARPS == 8 && TEAMS <= 2, "a run is 32 times 4 sums, or 2");
    float x;
    if constexpr (TEAMS == 1) {
        float4 its = *(const float4*)from;
        x = (its.x + its.y) + (its.z + its.w);
    } else {
        float2 its = *(const float2*)from;
        x = its.x + its.y;
    }
#pragma unroll
    for (int distance = 1; distance < SHARERS; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

/* Sums over the consumer warps. `scratch` must not be reused before the second barrier after the call. */
__device__ inline float sum_of_row(float x, float* scratch) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    meet();
    return sum_of_warps(scratch);
}
__device__ inline float2 sums_of_row(float x, float y, float2* scratch) {
    for (int distance = 16; distance; distance /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, distance);
        y += __shfl_xor_sync(0xffffffffu, y, distance);
    }
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = make_float2(x, y);
    meet();
    x = y = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        x += scratch[i].x;
        y += scratch[i].y;
    }
    return make_float2(x, y);
}

#if !PLANES
/* Stages 8 of COUNT activations as they are. */
template <int COUNT> __device__ inline void keep_eight(u8* to, int at, const Vector& v) { *(Vector*)(to + at * 2) = v; }
#endif

/* Stages elements of the token that a thread normalises together; with `plain`, which only products by bytes need, also as they are. */
__device__ inline void stage_some(u8* to, int at, const float (&values)[TOGETHER], u8* plain) {
    Some out;
#pragma unroll
    for (int i = 0; i < TOGETHER / 2; ++i) out.word[i] = pair_of(values[2 * i], values[2 * i + 1]);
    if constexpr (TOGETHER == 8) {
        Vector all;
#pragma unroll
        for (int i = 0; i < 4; ++i) all.word[i] = out.word[i % (TOGETHER / 2)];
        keep_eight<HIDDEN>(to, at, all);
        if (PLANES && plain && at < HIDDEN) *(Vector*)(plain + at * 2) = all;
    } else {
#pragma unroll
        for (int i = 0; i < TOGETHER / 2; ++i) *(u32*)(to + at * 2 + i * 4) = out.word[i];
    }
}

/* Normalises this thread's elements of the token, and stages them; with `plain`, which only products by bytes need, also as they are. */
__device__ inline void stage_values(const Product& p, const float (&gain)[OWN][TOGETHER], const float (&shift)[OWN][TOGETHER],
                                    float (&values)[OWN][TOGETHER], u8* to, float2* scratch, u8* plain) {
    float mean = 0.0f, squares = 0.0f;
#if NORM == 2
    float rest = 0.0f, sum = 0.0f, left = 0.0f;
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) sum += values[o][i];
    }
    mean = sum_of_row(sum, (float*)scratch) * (1.0f / HIDDEN);
#endif
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
        if ((threadIdx.x + o * MULTIPLIERS) * TOGETHER >= HIDDEN) break;
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            float value = values[o][i] - mean;
            squares += value * value;
#if NORM == 2
            left += value;
#endif
        }
    }
#if NORM == 2
    float2 both = sums_of_row(squares, left, scratch + WARPS);
    /* Corrects the mean for its rounding. */
    rest = both.y * (1.0f / HIDDEN);
    squares = both.x * (1.0f / HIDDEN) - rest * rest;
    squares = squares > 0.0f || is_nan(squares) ? squares : 0.0f;
#else
    squares = sum_of_row(squares, (float*)scratch) * (1.0f / HIDDEN);
#endif
    float scale = rsqrtf(squares + p.eps);
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
        int at = (threadIdx.x + o * MULTIPLIERS) * TOGETHER;
        if (at >= WITH_WHOLE_WARPS(HIDDEN)) break;
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
#if NORM == 2
            values[o][i] = ((values[o][i] - mean) - rest) * scale * gain[o][i] + shift[o][i];
#else
            values[o][i] = values[o][i] * scale * (gain[o][i] + p.weight_offset);
#endif
        }
        stage_some(to, at, values[o], plain);
    }
}

/* Loads the weights and biases of a norm. */
__device__ inline void load_norm(const G* gains, const SHIFT* shifts, float (&gain)[OWN][TOGETHER], float (&shift)[OWN][TOGETHER]) {
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
        int at = (threadIdx.x + o * MULTIPLIERS) * TOGETHER;
        /* Every register is set on every path: otherwise the compiler keeps it alive from one layer to the next. */
        bool has = at < HIDDEN;
        load_together(has && gains ? gains + at : nullptr, 1.0f, gain[o]);
#if NORM == 2
        load_together(has && shifts ? shifts + at : nullptr, 0.0f, shift[o]);
#endif
    }
}

#if !KEEPS_TOKEN
/* Stages the normalised token; with `plain`, which only products by bytes need, also as it is. */
__device__ inline void stage_normed(const Product& p, const G* gains, const SHIFT* shifts, const X* x, bool there, u8* to,
                                    float2* scratch, u8* plain = nullptr) {
    float gain[OWN][TOGETHER], shift[OWN][TOGETHER], values[OWN][TOGETHER];
    Some own[OWN];
    load_norm(gains, shifts, gain, shift);
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
        int at = (threadIdx.x + o * MULTIPLIERS) * TOGETHER;
        own[o] = Some{};
        if (at < HIDDEN) own[o] = load_some(x + at);
    }
    /* A token from before this launch may equal the sentinel. */
    if (!there) await_some((const u8*)x, own, wait_name("token"));
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) values[o][i] = element(own[o], i);
    }
    stage_values(p, gain, shift, values, to, scratch, plain);
}
#endif

#if KEEPS_TOKEN
/*
 * With KEEPS_TOKEN every block keeps the token in shared memory, and adds results of attention and MLP to it: once they are normalised,
 * with POST_NORMS, and the sums of all ranks, with RANKS. A thread always has the same elements, those it normalises.
 */
__device__ inline u8* token_at(int o) {
    return memory + TOKEN_AT + (threadIdx.x + o * MULTIPLIERS) * (TOGETHER * 2);
}

/* The sum of squares of a row. Four of these in turn, each with memory of its own, have enough barriers between them. */
__device__ inline float mean_square(const float (&values)[OWN][TOGETHER], float* scratch) {
    float squares = 0.0f;
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) squares += values[o][i] * values[o][i];
    }
    return sum_of_row(squares, scratch) * (1.0f / HIDDEN);
}

/* Copies the token in front of the first layer. */
__device__ inline void take_token(const X* x) {
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
        int at = (threadIdx.x + o * MULTIPLIERS) * TOGETHER;
        if (at < HIDDEN) *(Some*)token_at(o) = load_some(x + at);
    }
}

/* Waits for this thread's elements of a result, which begins at `result`. */
__device__ inline void take_result(const Model& m, const u8* result, float (&values)[OWN][TOGETHER]) {
#if RANKS > 1
    add_parts(m.ranks, result, values);
#else
    Some own[OWN];
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
        int at = (threadIdx.x + o * MULTIPLIERS) * TOGETHER;
        own[o] = Some{};
        if (at < HIDDEN) own[o] = load_some(result + at * 2);
    }
    await_some(result, own, wait_name("result"));
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) values[o][i] = element(own[o], i);
    }
#endif
}

/* The token with the result of a product added, rounded; in shared memory too. With POST_NORMS the result is normalised before. */
__device__ inline void add_result(const Model& m, const Product& p, const G* gains, const u8* result, float (&values)[OWN][TOGETHER],
                                  float* scratch) {
#if POST_NORMS
    float gain[OWN][TOGETHER];
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
        int at = (threadIdx.x + o * MULTIPLIERS) * TOGETHER;
        load_together(at < HIDDEN ? gains + at : nullptr, 1.0f, gain[o]);
    }
#endif
    take_result(m, result, values);
#if POST_NORMS
    float scale = rsqrtf(mean_square(values, scratch) + p.eps);
#endif
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
        if ((threadIdx.x + o * MULTIPLIERS) * TOGETHER >= HIDDEN) break;
        Some token = *(const Some*)token_at(o);
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
#if POST_NORMS
            values[o][i] *= scale * (gain[o][i] + p.weight_offset);
#endif
            values[o][i] = element(token, i) + p.alpha * values[o][i];
        }
#pragma unroll
        for (int i = 0; i < TOGETHER / 2; ++i) token.word[i] = pair_of(values[o][2 * i], values[o][2 * i + 1]);
        *(Some*)token_at(o) = token;
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) values[o][i] = element(token, i);
    }
}

/*
 * Adds the result of attention (P is UP) or of the MLP before (P is INPUT) to the token, and stages the normalised token for product P
 * if this block has tiles of it. Of `scratch` both norms use a part.
 */
template <int P>
__device__ inline void stage_token(const Model& m, const Layer& layer, const G* post_norm, const u8* result, bool has_result, bool stages,
                                   float2* scratch, u8* plain = nullptr) {
    float gain[OWN][TOGETHER], shift[OWN][TOGETHER], values[OWN][TOGETHER];
    float2* before = POST_NORMS ? scratch + P / 2 * WARPS : scratch;
#if RANKS > 1
    /* Their trip is over before that of the other ranks' parts. */
    load_norm(layer.norm_weights[P / 2], layer.norm_biases[P / 2], gain, shift);
#endif
    if (has_result) {
        add_result(m, m.products[P == UP ? OUTPUT : DOWN], post_norm, result, values, (float*)before);
    } else {
#pragma unroll
        for (int o = 0; o < OWN; ++o) {
            Some token = {};
            if ((threadIdx.x + o * MULTIPLIERS) * TOGETHER < HIDDEN) token = *(const Some*)token_at(o);
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) values[o][i] = element(token, i);
        }
    }
    if (!stages) return;
    const Product& p = m.products[P];
#if !NORM
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
        int at = (threadIdx.x + o * MULTIPLIERS) * TOGETHER;
        if (at < WITH_WHOLE_WARPS(HIDDEN)) stage_some(memory + ACTIVATIONS_AT, at, values[o], plain);
    }
#else
#if RANKS == 1
    load_norm(layer.norm_weights[P / 2], layer.norm_biases[P / 2], gain, shift);
#endif
    stage_values(p, gain, shift, values, memory + ACTIVATIONS_AT, POST_NORMS ? (float2*)((float*)before + WARPS) : before, plain);
#endif
}

/* Adds the result of the last MLP to the token, and writes it. */
__device__ inline void leave_token(const Model& m, const G* post_norm, const u8* result, float* scratch) {
    float values[OWN][TOGETHER];
    add_result(m, m.products[DOWN], post_norm, result, values, scratch);
#pragma unroll
    for (int o = 0; o < OWN; ++o) {
        int at = (threadIdx.x + o * MULTIPLIERS) * TOGETHER;
        if (at >= HIDDEN) break;
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) m.y[at + i] = narrow<X>(values[o][i]);
    }
}
#endif

/* Stages results of other blocks as they are. */
template <int COUNT> __device__ inline void stage_plain(const X* x, u8* to) {
    for_vectors<COUNT, WITH_WHOLE_WARPS(COUNT)>(x, wait_name("operand"), [&](int at, const Vector& v) { keep_eight<COUNT>(to, at, v); });
}

/* Merges the splits of four neighbouring elements of attention's result. Maxima are in units of log2. */
__device__ inline uint2 merge_four(const float* partial, int live, const float* sinks, int at) {
    const int next = TILE_HEADS * VALUE_ROW;
    int head = at / HEAD;
    const float* head_from = partial + (head / TILE_HEADS * SPLITS * TILE_HEADS + head % TILE_HEADS) * VALUE_ROW;
    const float* from = head_from + at % HEAD;
    head_from += HEAD;
    float largest = -infinity(), total = 0.0f, merged[4] = {};
#if SINKS
    /* A sink is a score without a value. */
    largest = sinks[head] * LOG2_OF_E;
    total = weight_of(0.0f);
#endif
#pragma unroll 1
    for (int base = 0; base < live; base += SPLITS_AT_ONCE) {
        Vector part[SPLITS_AT_ONCE];
        float2 amount[SPLITS_AT_ONCE];
        u32 polls = 0, missing;
        do {
            missing = 0;
#pragma unroll
            for (int s = 0; s < SPLITS_AT_ONCE; ++s) {
                part[s] = Vector{};
                amount[s] = make_float2(-infinity(), 0.0f);
                if (base + s < live) {
                    part[s] = load_fresh(from + (base + s) * next);
                    amount[s] = load_fresh_pair(head_from + (base + s) * next);
                }
            }
#pragma unroll
            for (int s = 0; s < SPLITS_AT_ONCE; ++s) {
                missing = larger_of(missing, largest_word(part[s]));
                missing = larger_of(missing, larger_of(__float_as_uint(amount[s].x), __float_as_uint(amount[s].y)));
            }
            count_poll(polls, wait_name("splits"));
        } while (missing == ~0u);
        float before = largest;
#pragma unroll
        for (int s = 0; s < SPLITS_AT_ONCE; ++s) largest = amount[s].x > largest ? amount[s].x : largest;
        float shift = largest == -infinity() ? 0.0f : largest, factor = power(before - shift);
        total *= factor;
#pragma unroll
        for (int i = 0; i < 4; ++i) merged[i] *= factor;
#pragma unroll
        for (int s = 0; s < SPLITS_AT_ONCE; ++s) {
            factor = power(amount[s].x - shift);
            total += amount[s].y * factor;
#pragma unroll
            for (int i = 0; i < 4; ++i) merged[i] += __uint_as_float(part[s].word[i]) * factor;
        }
    }
    float factor = total == 0.0f ? 0.0f : __fdividef(1.0f, total);
    return make_uint2(pair_of(merged[0] * factor, merged[1] * factor), pair_of(merged[2] * factor, merged[3] * factor));
}

/* Stages the result of attention, merged by each block for itself. */
__device__ inline void stage_merged(const float* partial, int live, const float* sinks, u8* to) {
#if PLANES
#pragma unroll 1
    for (int at = threadIdx.x * 8; at < WITH_WHOLE_WARPS(HEADS * HEAD); at += MULTIPLIERS * 8) {
        Vector v = {};
        if (at < HEADS * HEAD) {
            uint2 low = merge_four(partial, live, sinks, at), high = merge_four(partial, live, sinks, at + 4);
            v = Vector{{low.x, low.y, high.x, high.y}};
        }
        keep_eight<HEADS * HEAD>(to, at, v);
    }
#else
#pragma unroll 1
    for (int at = threadIdx.x * 4; at < HEADS * HEAD; at += MULTIPLIERS * 4) *(uint2*)(to + at * 2) = merge_four(partial, live, sinks, at);
#endif
}
#endif
