/*
 * Chooses the experts of one token and their weights, as moe_route defines.
 *
 * A team of ROUTE_TEAM threads, one warp if the number of experts allows, owns the token. A thread holds the logits of experts
 * `thread + i * ROUTE_TEAM`, i < EXPERTS_EACH, in registers, together with selection keys: integers in the order of the floats, 0
 * if the expert is taken or excluded. An expert is selected by two reductions over the team: of the largest key, and of the
 * lowest index that has it, so ties go to the lower index. The first warp of the team computes the weights, in the order of
 * slots.
 *
 * GIVEN, BY_LOGIT, GROUP_SUM and DIVISOR are constants of kernels in which every instruction counts. Others read them from their
 * parameters, so that one kernel serves all rules.
 */
/* Kernels without a router do not define SCORE. */
#ifdef SCORE
#ifndef GIVEN
#define GIVEN (given != nullptr)
#endif
#ifndef BY_LOGIT
#define BY_LOGIT rule.by_logit
#endif
#ifndef GROUP_SUM
#define GROUP_SUM rule.group_sum
#endif
#ifndef DIVISOR
#define DIVISOR rule.divisor
#endif
#define SOFTMAX 1
#define SIGMOID 2
#define SELECTED 3
#define SPARSE_MIXER 4

#define TEAM_WARPS (ROUTE_TEAM / 32)

/* The selection key of a float: keys are in the order of floats, equal for both zeros, and never 0. */
__device__ inline u32 key_of(float x) {
    u32 bits = __float_as_uint(x + 0.0f);
    u32 key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return key ? key : 1;
}

__device__ inline u32 warp_largest(u32 x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xffffffffu, x);
#else
    for (int distance = 16; distance; distance /= 2) {
        u32 other = __shfl_xor_sync(0xffffffffu, x, distance);
        x = other > x ? other : x;
    }
    return x;
#endif
}

/* Shared memory for the reductions of a team. */
struct Team {
    int thread;
    /* TEAM_WARPS words. */
    u32* exchange;

    /* Barrier of the team's threads. */
    __device__ void meet() const {
        if (TEAM_WARPS == 1) __syncwarp();
        else __syncthreads();
    }
    /* The maximum over the threads, in all of them. */
    __device__ u32 largest(u32 x) const {
        x = warp_largest(x);
        if (TEAM_WARPS == 1) return x;
        __syncthreads();
        if (thread % 32 == 0) exchange[thread / 32] = x;
        __syncthreads();
        return warp_largest(thread % 32 < TEAM_WARPS ? exchange[thread % 32] : 0);
    }
    /* The sum over the threads, in all of them and in the same order every time. */
    __device__ float sum(float x) const {
        x = warp_sum(x);
        if (TEAM_WARPS == 1) return x;
        __syncthreads();
        if (thread % 32 == 0) exchange[thread / 32] = __float_as_uint(x);
        __syncthreads();
        return warp_sum(thread % 32 < TEAM_WARPS ? __uint_as_float(exchange[thread % 32]) : 0.0f);
    }
    /* The lowest index among the thread's largest keys that equal the team's largest key. */
    __device__ int lowest(int index) const { return (int)~largest(~(u32)index); }
};

/* Data of a router for one token, in CHOICE_WORDS words of shared memory. */
struct Choice {
    float* logits;
    /* By slot. */
    int* chosen;
    float* weights;
    /* By expert, and by group. */
    u32 *keys, *group_keys;

    __device__ Choice(const RouteRule& rule, u32* memory)
        : logits((float*)memory), chosen((int*)(memory + rule.experts)), weights((float*)(memory + rule.experts + rule.slots)),
          keys(memory + rule.experts + 2 * rule.slots), group_keys(keys + rule.experts) {}
};

/* Chooses the experts of a token, and leaves them and their weights for the team's first warp. `logit_of` has the logit of the
 * thread's `i`th expert. With GIVEN, `given` holds the experts. */
template <typename Logit>
__device__ inline void choose_experts(const RouteRule& rule, const RouterVectors& vectors, const Team& team, const Choice& choice,
                                      const int* given, Logit logit_of) {
    const int experts = (int)rule.experts, slots = (int)rule.slots, groups = (int)rule.groups;
    float *const logits = choice.logits, *const weights = choice.weights;
    int* const chosen = choice.chosen;
    u32 *const keys = choice.keys, *const group_keys = choice.group_keys;
    float z[EXPERTS_EACH];
    u32 key[EXPERTS_EACH];
    float most = -infinity();
    bool unsound = false;
#pragma unroll
    for (int i = 0; i < EXPERTS_EACH; ++i) {
        int expert = team.thread + i * ROUTE_TEAM;
        z[i] = -infinity();
        if (expert < experts) {
            z[i] = logit_of(i) + or_else(vectors.bias, expert, 0.0f);
            logits[expert] = z[i];
            unsound = unsound || is_nan(z[i]);
            most = z[i] > most ? z[i] : most;
        }
    }
    team.meet();
    /* NaN is ordered above all numbers. */
    u32 top = team.largest(unsound ? 0xffffffffu : key_of(most));
    unsound = top >= key_of(infinity()) || top == key_of(-infinity());
    most = __uint_as_float(top & 0x80000000u ? top & 0x7fffffffu : ~top);

    /* The sum of the exponentials, where scores are a softmax. */
    float total = 1.0f;
#if SCORE == SOFTMAX
    total = 0.0f;
#pragma unroll
    for (int i = 0; i < EXPERTS_EACH; ++i) total += team.thread + i * ROUTE_TEAM < experts ? expf(z[i] - most) : 0.0f;
    total = team.sum(total);
#endif
    auto score_of = [&](float logit) {
#if SCORE == SOFTMAX
        return expf(logit - most) / total;
#elif SCORE == SIGMOID
        return 1.0f / (1.0f + expf(-logit));
#else
        return logit;
#endif
    };

    if (GIVEN) {
        for (int slot = team.thread; slot < slots; slot += ROUTE_TEAM) chosen[slot] = given[slot];
        team.meet();
    } else {
#pragma unroll
        for (int i = 0; i < EXPERTS_EACH; ++i) {
            int expert = team.thread + i * ROUTE_TEAM;
            key[i] = 0;
            if (expert >= experts) continue;
            /* Without groups and a selection bias, selection uses logits, which have the order of the scores; scores may round to
             * equal numbers. */
            float by = BY_LOGIT ? z[i] : score_of(z[i]) + or_else(vectors.selection_bias, expert, 0.0f);
            key[i] = key_of(by);
        }
        if (groups > 1) {
#pragma unroll
            for (int i = 0; i < EXPERTS_EACH; ++i) {
                int expert = team.thread + i * ROUTE_TEAM;
                if (expert < experts) keys[expert] = key[i];
            }
            team.meet();
            const int size = experts / groups;
            auto value_of = [](u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); };
            for (int group = team.thread; group < groups; group += ROUTE_TEAM) {
                u32 first = 0, second = 0;
                for (int i = 0; i < size; ++i) {
                    u32 here = keys[group * size + i];
                    if (here > first) {
                        second = first;
                        first = here;
                    } else if (here > second) {
                        second = here;
                    }
                }
                group_keys[group] = GROUP_SUM && second ? key_of(value_of(first) + value_of(second)) : first;
            }
            team.meet();
            /* The best groups are selected one after the other and marked by 0. */
            for (int taken = 0; taken < (int)rule.top_groups; ++taken) {
                u32 best = 0;
                int index = 0x7fffffff;
                for (int group = team.thread; group < groups; group += ROUTE_TEAM) {
                    if (group_keys[group] > best) {
                        best = group_keys[group];
                        index = group;
                    }
                }
                u32 largest = team.largest(best);
                index = team.lowest(best == largest ? index : 0x7fffffff);
                if (team.thread == 0) group_keys[index] = 0;
                team.meet();
            }
#pragma unroll
            for (int i = 0; i < EXPERTS_EACH; ++i) {
                int expert = team.thread + i * ROUTE_TEAM;
                if (expert < experts && group_keys[expert / size]) key[i] = 0;
            }
        }
        for (int slot = 0; slot < slots; ++slot) {
            u32 best = 0;
            int index = 0x7fffffff;
#pragma unroll
            for (int i = 0; i < EXPERTS_EACH; ++i) {
                if (key[i] > best) {
                    best = key[i];
                    index = team.thread + i * ROUTE_TEAM;
                }
            }
            u32 largest = team.largest(best);
            index = team.lowest(best == largest ? index : 0x7fffffff);
            /* If no expert can be selected, the slots are filled from the first expert on. */
            if (unsound) index = slot;
#if SCORE == SPARSE_MIXER
            float limit = logits[index], near = 0.0f;
#pragma unroll
            for (int i = 0; i < EXPERTS_EACH; ++i) {
                float magnitude = z[i] < 0.0f ? -z[i] : z[i];
                float reach = rule.threshold * (magnitude > limit ? magnitude : limit);
                if (team.thread + i * ROUTE_TEAM == index) near += 1.0f;
                else if (key[i] && limit - z[i] <= reach) near += z[i] == limit ? 1.0f : expf(z[i] - limit);
            }
            near = team.sum(near);
            if (team.thread == 0) weights[slot] = 1.0f / near;
#endif
#pragma unroll
            for (int i = 0; i < EXPERTS_EACH; ++i) {
                if (team.thread + i * ROUTE_TEAM == index) key[i] = 0;
            }
            if (team.thread == 0) chosen[slot] = index;
        }
        team.meet();
    }
    /* Weights, by the first warp. Slots that are skipped, or have no valid expert, have the weight 0. */
    if (team.thread < 32) {
        auto known = [&](int expert) { return expert >= 0 && expert < experts; };
        float sum = 0.0f;
#if SCORE == SELECTED
        float limit = -infinity(), exponentials = 0.0f;
        for (int slot = 0; slot < slots; ++slot) {
            if (known(chosen[slot]) && logits[chosen[slot]] > limit) limit = logits[chosen[slot]];
        }
        for (int slot = 0; slot < slots; ++slot) {
            if (known(chosen[slot])) exponentials += expf(logits[chosen[slot]] - limit);
        }
#endif
        for (int slot = team.thread; slot < slots; slot += 32) {
            int expert = chosen[slot];
            float weight = 0.0f;
            if (known(expert)) {
#if SCORE == SELECTED
                weight = expf(logits[expert] - limit) / exponentials;
#elif SCORE == SPARSE_MIXER
                weight = weights[slot];
#else
                weight = score_of(logits[expert]);
#endif
            }
            weights[slot] = weight;
        }
        __syncwarp();
        if (DIVISOR) {
            for (int slot = 0; slot < slots; ++slot) sum += weights[slot];
        }
        __syncwarp();
        float divisor = DIVISOR == 1 ? sum + rule.eps : DIVISOR == 2 ? (sum < rule.eps ? rule.eps : sum) : 1.0f;
        for (int slot = team.thread; slot < slots; slot += 32) {
            int expert = chosen[slot];
            float weight = 0.0f;
            if (known(expert)) {
                weight = weights[slot] / divisor * rule.scale * or_else(vectors.scale, expert, 1.0f);
                if (unsound) weight = __uint_as_float(0x7fc00000u);
            }
            weights[slot] = weight;
        }
    }
}
#endif
