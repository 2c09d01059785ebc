/* The request table. */
#define IN_PROMPT (1 << 30)

/* Records a token of a request that has not finished. */
__device__ inline void record_token(const TokenRecords& records, i64 request, i64 id) {
    records.last_token[request] = (int)id;
    int* count = &records.counts.at(request, id);
    /* The bit above the count marks prompt tokens: a count that is full stays. */
    if ((*count & (IN_PROMPT - 1)) != IN_PROMPT - 1) *count += 1;
    for (i64 i = 0; i < records.stops; ++i) {
        if (records.stop_ids[i] == id) records.finished[request] = 1;
    }
}
