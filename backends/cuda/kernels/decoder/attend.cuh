/*
 * Attention in the decoder kernel.
 */
#if __CUDA_ARCH__ >= 900
__device__ inline Vector choose(bool first, const Vector& a, const Vector& b) {
    Vector v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.word[i] = first ? a.word[i] : b.word[i];
    return v;
}

__device__ inline float largest_of_four(float x) {
    float other = __shfl_xor_sync(0xffffffffu, x, 1);
    x = other > x ? other : x;
    other = __shfl_xor_sync(0xffffffffu, x, 2);
    return other > x ? other : x;
}
__device__ inline float sum_of_four(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* A lane's fragments of the keys and values of a unit; which keys the token attends to, from `skip` to below `count`; the index of its
 * own key; and the values in memory. */
struct Unit {
    Vector key[2][KEY_BLOCKS], value[VALUE_BLOCKS][4];
    int skip, count, own;
    const X* values;

    __device__ bool has(int row) const { return row < count && (!WINDOWS || row >= skip); }
};

#if HEAD_NORMS
/* The norms of queries and of keys of a layer: of each head, or over all heads, whose factors are then known. */
struct HeadNorms {
    const Model& m;
    const Layer& layer;
    float factors[2];

    /* All consumer warps must call. `fresh` has query, key and value of this token. */
    __device__ HeadNorms(const Model& m, const Layer& layer, const X* fresh) : m(m), layer(layer), factors{} {
#if OVER_ALL_HEADS
        __shared__ __align__(16) float2 sums[WARPS];
        float queries = 0.0f, keys = 0.0f;
        for_vectors<(HEADS + KV_HEADS) * HEAD>(fresh, wait_name("heads"), [&](int at, const Vector& v) {
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float x = Lanes<X>::get(v, i);
                squares += x * x;
            }
            (at < HEADS * HEAD ? queries : keys) += squares;
        });
        float2 both = sums_of_row(queries, keys, sums);
        factors[0] = rsqrtf(both.x * (1.0f / (HEADS * HEAD)) + m.head_eps[0]);
        factors[1] = rsqrtf(both.y * (1.0f / (KV_HEADS * HEAD)) + m.head_eps[1]);
#endif
    }
    /* The weight of a query head, `which` 0, or of a key head, 1. */
    __device__ const HEAD_NORM* weight(int which, int head) const {
        return layer.head_norms[which] + (OVER_ALL_HEADS ? head * HEAD : 0);
    }
};

/*
 * Normalises and rotates a head in place. The four lanes of a group have 8 neighbouring elements of each 32, in order, so a lane has
 * both elements of a rotated pair, which are half a head apart. All lanes of a warp must call; only those with `applies` keep the result.
 * The head is number `number` of the queries, `which` 0, or of the keys, 1. `scale` is a factor of the rotation.
 */
__device__ inline void finish_head(Vector (&head)[KEY_BLOCKS], const HeadNorms& norms, int which, int number, float scale,
                                   const float2* sines, bool applies = true) {
    int part = threadIdx.x % 4;
    const HEAD_NORM* weight = norms.weight(which, number);
    float offset = norms.m.head_offsets[which];
#if OVER_ALL_HEADS
    float factor = norms.factors[which];
#else
    float squares = 0.0f;
#pragma unroll
    for (int block = 0; block < KEY_BLOCKS; ++block) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float x = Lanes<X>::get(head[block], i);
            squares += x * x;
        }
    }
    float factor = rsqrtf(sum_of_four(squares) * (1.0f / HEAD) + norms.m.head_eps[which]);
#endif
    /* Two blocks that are half a head apart, or one where nothing is rotated. */
    constexpr int PARTNER = ROPE ? KEY_BLOCKS / 2 : 0;
#pragma unroll
    for (int block = 0; block < (ROPE ? PARTNER : KEY_BLOCKS); ++block) {
        int at = block * 32 + part * 8;
        float low[8], high[8];
        load_eight(weight + at, low);
        if (ROPE) load_eight(weight + at + HEAD / 2, high);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            low[i] = Lanes<X>::get(head[block], i) * factor * (low[i] + offset);
#if ROPE
            high[i] = Lanes<X>::get(head[block + PARTNER], i) * factor * (high[i] + offset);
            float2 turn = sines[at + i];
            float rotated = (low[i] * turn.y - high[i] * turn.x) * scale;
            high[i] = (high[i] * turn.y + low[i] * turn.x) * scale;
            low[i] = rotated;
#endif
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (applies) head[block].word[i] = pair_of(low[2 * i], low[2 * i + 1]);
            if (ROPE && applies) head[block + PARTNER].word[i] = pair_of(high[2 * i], high[2 * i + 1]);
        }
    }
}

/* Writes the token's own key to the cache, normalised and rotated, once it is complete: by one warp for each KV head. */
__device__ inline void write_key(const Model& m, const Layer& layer, const AttentionKind& kind, const Share& share, const HeadNorms& norms,
                                 const X* key_row, const float2* sines) {
    int lane = threadIdx.x % 32, part = lane % 4, head = share.part / PARTS_OF_GROUP;
    bool has = lane < 4;
    Vector key[KEY_BLOCKS];
    u32 polls = 0;
    bool missing;
    do {
        missing = false;
#pragma unroll
        for (int block = 0; block < KEY_BLOCKS; ++block) {
            key[block] = Vector{};
            if (has) key[block] = load_fresh(key_row + block * 32 + part * 8);
            missing |= lacks(key[block]);
        }
        count_poll(polls, wait_name("new key"));
    } while (__any_sync(0xffffffffu, missing));
    finish_head(key, norms, 1, head, kind.key_scale, sines);
    X* to = layer.keys + share.place / SLOTS * m.key_strides.page + head * m.key_strides.head
        + share.place % SLOTS * m.key_strides.slot;
#pragma unroll
    for (int block = 0; block < KEY_BLOCKS; ++block) {
        if (has) store_vector(to + block * 32 + part * 8, key[block]);
    }
}
#endif

/* Attention of a block's share. `fresh` has query, key and value of this token, `pages` the pages of a warp's first two units. The result goes
 * to the splits, or to `whole` if this block alone has all keys of its heads. */
__device__ inline void attend(const Model& m, const Layer& layer, const AttentionKind& kind, const Share& share, const X* fresh,
                              int2 pages, const float* sinks, const float2* sines, float* room, float* partial, X* whole) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, part = lane % 4;
    int kv_head = share.part / PARTS_OF_GROUP, first_head = share.part * TILE_HEADS;
    float* sums = room;
    float* maxima = room + WARPS * TILE_HEADS * VALUE_ROW;
    float* amounts = maxima + WARPS * TILE_HEADS;
    const X* key_row = fresh + (HEADS + kv_head) * HEAD;
    const X* value_row = key_row + KV_HEADS * HEAD;
    Vector query[1 + UPPER][KEY_BLOCKS] = {};
    float weighted[1 + UPPER][VALUE_BLOCKS][4][4] = {}, maximum[1 + UPPER], sum[1 + UPPER];
#pragma unroll
    for (int half = 0; half < 1 + UPPER; ++half) {
        maximum[half] = -infinity();
        sum[half] = 0.0f;
    }
#if SOFTCAP
    float scale = kind.score_scale / m.softcap, cap = m.softcap * LOG2_OF_E;
#else
    float scale = kind.score_scale * LOG2_OF_E;
#endif
#if HEAD_NORMS
    const HeadNorms norms(m, layer, fresh);
#endif
    bool asked = false;
    auto ask_values = [&](Unit& its) {
#pragma unroll
        for (int block = 0; block < VALUE_BLOCKS; ++block) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int row = 2 * part + i % 2 + i / 2 * 8, at = block * 64 + group * 8;
                its.value[block][i] = Vector{};
                const X* from = row == its.own ? value_row : its.values + row * m.value_strides.slot;
                if (at < HEAD && its.has(row)) its.value[block][i] = load_fresh(from + at);
            }
        }
    };
    auto ask = [&](int unit, int page) {
        Unit its;
        int base = unit * UNIT;
        const Strides &of_keys = m.key_strides, &of_values = m.value_strides;
        const X* keys = layer.keys + page * of_keys.page + kv_head * of_keys.head + base % SLOTS * of_keys.slot;
        its.values = layer.values + page * of_values.page + kv_head * of_values.head + base % SLOTS * of_values.slot;
        bool real = unit < share.units && page >= 0 && page < (int)m.pages;
        its.count = real ? share.keys - base : 0;
        its.skip = share.from - base;
        /* The token's own key may not be in the cache yet. */
        its.own = real ? share.place - (page * SLOTS + base % SLOTS) : -1;
#pragma unroll
        for (int set = 0; set < 2; ++set) {
#pragma unroll
            for (int block = 0; block < KEY_BLOCKS; ++block) {
                int row = 8 * set + group, at = block * 32 + part * 8;
                its.key[set][block] = Vector{};
                const X* from = row == its.own ? key_row : keys + row * of_keys.slot;
                if (at < HEAD && its.has(row)) its.key[set][block] = load_fresh(from + at);
            }
        }
        if (!APART) ask_values(its);
        return its;
    };
    /* Waits until the token's own key, value or both are complete, which they usually are when the query is. */
    auto await_own = [&](Unit& its, bool of_key, bool of_value) {
        int own = its.own;
        bool has_key = of_key && group == own % 8, has_value = of_value && part == own % 8 / 2;
        u32 polls = 0;
        while (true) {
            bool missing = false;
            if (of_key) {
#pragma unroll
                for (int block = 0; block < KEY_BLOCKS; ++block) {
                    missing |= has_key && lacks(choose(own < 8, its.key[0][block], its.key[1][block]));
                }
            }
            if (of_value) {
#pragma unroll
                for (int block = 0; block < VALUE_BLOCKS; ++block) {
                    Vector low = choose(own % 2, its.value[block][1], its.value[block][0]);
                    Vector high = choose(own % 2, its.value[block][3], its.value[block][2]);
                    missing |= has_value && lacks(choose(own < 8, low, high));
                }
            }
            if (!__any_sync(0xffffffffu, missing)) break;
            if (of_key) {
#pragma unroll
                for (int set = 0; set < 2; ++set) {
#pragma unroll
                    for (int block = 0; block < KEY_BLOCKS; ++block) {
                        int at = block * 32 + part * 8;
                        if (8 * set + group == own && at < HEAD) its.key[set][block] = load_fresh(key_row + at);
                    }
                }
            }
            if (of_value) {
#pragma unroll
                for (int block = 0; block < VALUE_BLOCKS; ++block) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        int at = block * 64 + group * 8;
                        if (2 * part + i % 2 + i / 2 * 8 == own && at < HEAD) its.value[block][i] = load_fresh(value_row + at);
                    }
                }
            }
            count_poll(polls, wait_name("own key"));
        }
    };
    int unit = share.first + share.split * WARPS + warp, stride = share.live * WARPS;
    if (unit < share.units) {
#pragma unroll
        for (int half = 0; half < 1 + UPPER; ++half) {
#pragma unroll
            for (int block = 0; block < KEY_BLOCKS; ++block) {
                int head = group + 8 * half, at = block * 32 + part * 8;
                if (head < TILE_HEADS && at < HEAD) query[half][block] = load_fresh(fresh + (first_head + head) * HEAD + at);
            }
        }
    }
    Unit next;
    if (AHEAD) next = ask(unit, pages.x);
#pragma unroll 1
    for (; unit < share.units; unit += stride) {
        Unit now;
        if (AHEAD) {
            /* The next unit is loaded while this one is multiplied. */
            now = next;
            int page = pages.y;
            if (asked && unit + stride < share.units) page = m.block_table[(unit + stride) * UNIT / SLOTS];
            next = ask(unit + stride, page);
        } else {
            now = ask(unit, asked ? m.block_table[unit * UNIT / SLOTS] : pages.x);
        }
        auto& key = now.key;
        auto& value = now.value;
        int own = now.own;
        bool again = asked;
        if (!asked) {
            bool all;
            u32 polls = 0;
            do {
                all = true;
#pragma unroll
                for (int half = 0; half < 1 + UPPER; ++half) {
#pragma unroll
                    for (int block = 0; block < KEY_BLOCKS; ++block) {
                        int head = group + 8 * half, at = block * 32 + part * 8;
                        if (lacks(query[half][block])) {
                            all = false;
                            query[half][block] = load_fresh(fresh + (first_head + head) * HEAD + at);
                        }
                    }
                }
                count_poll(polls, wait_name("query"));
            } while (!all);
            asked = true;
#if HEAD_NORMS
#pragma unroll
            for (int half = 0; half < 1 + UPPER; ++half) {
                int head = group + 8 * half;
                finish_head(query[half], norms, 0, first_head + (head < TILE_HEADS ? head : 0), kind.query_scale, sines);
            }
#endif
        }
        if (own >= 0 && own < UNIT) {
            await_own(now, true, !APART);
#if HEAD_NORMS
            auto finish = [&](Vector (&its)[KEY_BLOCKS], bool applies) {
                finish_head(its, norms, 1, kv_head, kind.key_scale, sines, applies);
            };
            if (own < 8) finish(key[0], group == own);
            else finish(key[1], group + 8 == own);
#endif
        }
        float scores[2][4] = {}, others[2][4] = {};
#pragma unroll
        for (int set = 0; set < 2; ++set) {
#pragma unroll
            for (int block = 0; block < KEY_BLOCKS; ++block) {
                const Vector& low = query[0][block];
                const Vector& high = query[UPPER][block];
                const Vector& its = key[set][block];
                auto upper = [&](int i) { return UPPER ? high.word[i] : 0; };
                multiply(scores[set], low.word[0], upper(0), low.word[1], upper(1), its.word[0], its.word[1]);
                multiply(others[set], low.word[2], upper(2), low.word[3], upper(3), its.word[2], its.word[3]);
            }
        }
#pragma unroll
        for (int set = 0; set < 2; ++set) {
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[set][i] += others[set][i];
        }
        if (APART) ask_values(now);
        float factor[1 + UPPER];
        u32 weights[1 + UPPER][2];
#pragma unroll
        for (int half = 0; half < 1 + UPPER; ++half) {
            float its[4], top = -infinity();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                bool there = now.has(2 * part + i % 2 + i / 2 * 8);
                float score = scores[i / 2][half * 2 + i % 2] * scale;
#if SOFTCAP
                score = cap * tanhf(score);
#endif
                its[i] = there ? score : -infinity();
                top = its[i] > top ? its[i] : top;
            }
            top = largest_of_four(top);
            float larger = top > maximum[half] ? top : maximum[half], shift = larger == -infinity() ? 0.0f : larger;
            factor[half] = power(maximum[half] - shift);
            maximum[half] = larger;
            sum[half] *= factor[half];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                its[i] = weight_of(its[i] - shift);
                sum[half] += its[i];
            }
            weights[half][0] = pair_of(its[0], its[1]);
            weights[half][1] = pair_of(its[2], its[3]);
        }
        if (APART && own >= 0 && own < UNIT) await_own(now, false, true);
        /* Values are the 16-row operand, two elements for each 8 lanes; weights are the 8-column operand. */
#pragma unroll
        for (int half = 0; half < 1 + UPPER; ++half) {
            float own = factor[half], even = 1.0f, odd = 1.0f;
            if (again) {
                even = __shfl_sync(0xffffffffu, own, 8 * part);
                odd = __shfl_sync(0xffffffffu, own, 8 * part + 4);
            }
#pragma unroll
            for (int block = 0; block < VALUE_BLOCKS; ++block) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float (&sums)[4] = weighted[half][block][j];
                    const Vector (&its)[4] = value[block];
                    auto pair = [&](int i, u32 choice) { return __byte_perm(its[i].word[j], its[i + 1].word[j], choice); };
                    sums[0] *= even;
                    sums[1] *= odd;
                    sums[2] *= even;
                    sums[3] *= odd;
                    multiply(sums, pair(0, 0x5410), pair(0, 0x7632), pair(2, 0x5410), pair(2, 0x7632), weights[half][0],
                             weights[half][1]);
                }
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 1 + UPPER; ++half) {
        float amount = sum_of_four(sum[half]);
        if (part == 0 && group + 8 * half < TILE_HEADS) {
            maxima[(group + 8 * half) * WARPS + warp] = maximum[half];
            amounts[(group + 8 * half) * WARPS + warp] = amount;
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            int head = 2 * part + n + 8 * half;
            if (head >= TILE_HEADS) break;
#pragma unroll
            for (int block = 0; block < VALUE_BLOCKS; ++block) {
                int at = block * 64 + group * 8;
                if (at >= HEAD) break;
                const float (&its)[4][4] = weighted[half][block];
                float4* to = (float4*)(sums + (warp * TILE_HEADS + head) * VALUE_ROW + at);
                to[0] = make_float4(its[0][n], its[0][2 + n], its[1][n], its[1][2 + n]);
                to[1] = make_float4(its[2][n], its[2][2 + n], its[3][n], its[3][2 + n]);
            }
        }
    }
    meet();
    partial += (i64)(share.part * SPLITS + share.split) * (TILE_HEADS * VALUE_ROW);
#pragma unroll 1
    for (int item = threadIdx.x; item < TILE_HEADS * (HEAD / 4); item += MULTIPLIERS) {
        int head = item / (HEAD / 4), at = item % (HEAD / 4) * 4;
        float largest = -infinity(), total = 0.0f;
        float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) largest = maxima[head * WARPS + w] > largest ? maxima[head * WARPS + w] : largest;
#if SINKS
        /* Otherwise the sink counts when splits are merged. */
        bool counts = MERGED && share.live == 1;
        float sink = counts ? sinks[first_head + head] * LOG2_OF_E : -infinity();
        largest = sink > largest ? sink : largest;
#endif
        float shift = largest == -infinity() ? 0.0f : largest;
#if SINKS
        total = weight_of(sink - shift);
#endif
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            float factor = power(maxima[head * WARPS + w] - shift);
            float4 its = *(const float4*)(sums + (w * TILE_HEADS + head) * VALUE_ROW + at);
            total += amounts[head * WARPS + w] * factor;
            merged.x += its.x * factor;
            merged.y += its.y * factor;
            merged.z += its.z * factor;
            merged.w += its.w * factor;
        }
        if (MERGED && share.live == 1) {
            float factor = total == 0.0f ? 0.0f : __fdividef(1.0f, total);
            uint2 four = {pair_of(merged.x * factor, merged.y * factor), pair_of(merged.z * factor, merged.w * factor)};
            leave(whole + (share.part * TILE_HEADS + head) * HEAD + at, four);
            continue;
        }
        float* out = partial + head * VALUE_ROW;
        leave(out + at, merged.x, merged.y, merged.z, merged.w);
        if (at == 0) leave(out + HEAD, largest, total, 0.0f, 0.0f);
    }
#if HEAD_NORMS
    /* Last, because no block waits for it. */
    if (warp == WARPS - 1 && share.split == 0 && share.part % PARTS_OF_GROUP == 0 && share.place >= 0) {
        write_key(m, layer, kind, share, norms, key_row, sines);
    }
#endif
}

/* Merges the splits of a block's heads. The blocks that computed them share their elements. */
__device__ inline void leave_merged(const Share& share, const float* partial, const float* sinks, X* to) {
    const int fours = TILE_HEADS * HEAD / 4;
    int each = (fours + share.live - 1) / share.live;
#pragma unroll 1
    for (int i = threadIdx.x; i < each && share.split * each + i < fours; i += MULTIPLIERS) {
        int at = (share.part * fours + share.split * each + i) * 4;
        leave(to + at, merge_four(partial, share.live, sinks, at));
    }
}
#endif
