/* The request table. */
#define IN_PROMPT (1 << 30)

/* Records a token of a request that has not ended. */
__device__ inline void record_token(i64 request, i64 id, const int* stop_ids, i64 stops, int* last_token, int* finished,
                                    int* counts, i64 counts_row) {
    last_token[request] = (int)id;
    int* count = counts + request * counts_row + id;
    /* The bit above the count says something else: a count that is full stays. */
    if ((*count & (IN_PROMPT - 1)) != IN_PROMPT - 1) *count += 1;
    for (i64 i = 0; i < stops; ++i) {
        if (stop_ids[i] == id) finished[request] = 1;
    }
}
