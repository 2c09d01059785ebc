/*
 * The epilogue of a product, applied to pairs of outputs. EPILOGUE is 0 bias only, 1 a residual is added, 2 a function of each
 * output, 3 gated halves, 4 query, key and value of a layer (rotated; keys and values are written to the cache).
 *
 * Outputs are processed in pairs, so that a thread has both elements that belong together: gate and up, or the two elements that
 * rope rotates. A tile is 8 such pairs: outputs low + i * step and high + i * step for i < 8.
 */
#define PLAIN 0
#define ADDED 1
#define ACTIVATED 2
#define GATED 3
#define HEADS 4

/* The outputs of a tile. */
struct Rows {
    int low, high, step;
    bool turned;
};

__device__ inline Rows rows_of(const EpilogueParams& e, int tile) {
    Rows rows = {16 * tile, 16 * tile + 8, 1, false};
#if EPILOGUE == GATED && !INTERLEAVED
    rows.low = 8 * tile;
    rows.high = (int)(e.outputs / 2) + 8 * tile;
#elif EPILOGUE == GATED
    rows.high = rows.low + 1;
    rows.step = 2;
#elif EPILOGUE == HEADS && ROPE
    int size = (int)e.key_size, head = 16 * tile / size, at = 16 * tile - head * size, pairs = (int)e.pairs;
    if (head < (int)(e.query_heads + e.kv_heads) && at < 2 * pairs) {
        rows.turned = true;
#if NEIGHBOURS
        rows.high = rows.low + 1;
        rows.step = 2;
#else
        rows.low = head * size + at / 2;
        rows.high = rows.low + pairs;
#endif
    }
#endif
    return rows;
}

/* Operands of a pair of outputs of a token, loaded ahead of the product and then prepared. */
struct Ready {
    int first, second;
    float biases[2], added[2];
    float frequency, sine, cosine;
    int position, place;
};

__device__ inline Ready get_ready(const EpilogueParams& e, const Rows& rows, int pair, i64 token) {
    Ready r;
    r.first = rows.low + pair * rows.step;
    r.second = rows.high + pair * rows.step;
    int outputs = (int)e.outputs;
    r.biases[0] = r.first < outputs ? or_else(e.bias, r.first, 0.0f) : 0.0f;
    r.biases[1] = r.second < outputs ? or_else(e.bias, r.second, 0.0f) : 0.0f;
#if EPILOGUE == ADDED
    const Y* added = e.added + token * e.added_row;
    r.added[0] = r.first < outputs ? widen(added[r.first]) : 0.0f;
    r.added[1] = r.second < outputs ? widen(added[r.second]) : 0.0f;
#elif EPILOGUE == HEADS
    r.place = e.places[token];
    r.position = 0;
#if ROPE
    r.position = e.positions[token];
    if (rows.turned) {
        int at = r.first % (int)e.key_size;
        r.frequency = e.frequencies[NEIGHBOURS ? at / 2 : at];
    }
#endif
#endif
    return r;
}

/* Prepares the loaded operands; separate from the loads, so that the loads overlap. */
__device__ inline void turn_ready(const EpilogueParams& e, const Rows& rows, Ready& r) {
#if EPILOGUE == HEADS
    if (r.place >= e.pages * e.slots) r.place = -1;
#if ROPE
    if (rows.turned) {
        float angle = __fmul_rn((float)r.position, r.frequency);
        float scale = r.first < (int)(e.query_heads * e.key_size) ? e.query_scale : e.key_scale;
        r.sine = scale * sinf(angle);
        r.cosine = scale * cosf(angle);
    }
#endif
#endif
}

#if EPILOGUE == HEADS
/* For 16-bit results, to 2^-20: the hardware's sine and cosine, after reduction by whole rotations. */
__device__ inline void turn_quickly(float angle, float& sine, float& cosine) {
    float turns = rintf(angle * 0.15915494309189535f);
    float rest = __fmaf_rn(turns, 1.7484556000744883e-7f, __fmaf_rn(turns, -6.2831854820251465f, angle));
    asm("sin.approx.f32 %0, %1;" : "=f"(sine) : "f"(rest));
    asm("cos.approx.f32 %0, %1;" : "=f"(cosine) : "f"(rest));
}

/* Rotates a pair. Roundings are explicit, so that kernels agree to the bit. */
__device__ inline void turn_pair(float& a, float& b, float sine, float cosine) {
    float turned = __fmaf_rn(a, cosine, -__fmul_rn(b, sine));
    b = __fmaf_rn(b, cosine, __fmul_rn(a, sine));
    a = turned;
}

__device__ inline void place(const EpilogueParams& e, const Ready& r, i64 token, int output, float value) {
    int queries = (int)(e.query_heads * e.key_size), keys = (int)(e.kv_heads * e.key_size);
    bool unreal = ROPE && r.position < 0;
    if (output < queries) {
        if (!unreal) e.y[token * e.y_row + output] = narrow<Y>(value);
    } else if (r.place >= 0 && output < (int)e.outputs) {
        i64 page = r.place / (int)e.slots, slot = r.place % (int)e.slots;
        output -= queries;
        if (output < keys) {
            int head = output / (int)e.key_size, at = output % (int)e.key_size;
            if (!unreal) {
                e.keys[page * e.key_strides.page + head * e.key_strides.head + slot * e.key_strides.slot + at] =
                    narrow<CACHE>(value);
            }
        } else {
            output -= keys;
            int head = output / (int)e.value_size, at = output % (int)e.value_size;
            e.values[page * e.value_strides.page + head * e.value_strides.head + slot * e.value_strides.slot + at] =
                narrow<CACHE>(value);
        }
    }
}
#endif

/* Finishes a pair, whose products are `a` and `b`. */
__device__ inline void apply_epilogue(const EpilogueParams& e, const Rows& rows, const Ready& r, i64 token, float a, float b) {
    a += r.biases[0];
    b += r.biases[1];
#if EPILOGUE == GATED
    int output = INTERLEAVED ? r.first / 2 : r.first;
    if (output >= (int)(e.outputs / 2)) return;
    if (e.limit > 0.0f) {
        if (a > e.limit) a = e.limit;
        if (b > e.limit) b = e.limit;
        if (b < -e.limit) b = -e.limit;
    }
    e.y[token * e.y_row + output] = narrow<Y>(apply(a) * b);
#elif EPILOGUE == HEADS
    if (rows.turned) {
        float turned = a * r.cosine - b * r.sine;
        b = b * r.cosine + a * r.sine;
        a = turned;
    }
    place(e, r, token, r.first, a);
    place(e, r, token, r.second, b);
#else
#if EPILOGUE == ADDED
    a = r.added[0] + e.alpha * a;
    b = r.added[1] + e.alpha * b;
#elif EPILOGUE == ACTIVATED
    if (e.limit > 0.0f && a > e.limit) a = e.limit;
    if (e.limit > 0.0f && b > e.limit) b = e.limit;
    a = apply(a);
    b = apply(b);
#endif
    Y* y = e.y + token * e.y_row;
    if (r.first < (int)e.outputs) y[r.first] = narrow<Y>(a);
    if (r.second < (int)e.outputs) y[r.second] = narrow<Y>(b);
#endif
}
