/* Attention over pages of NUMBERs, float or bf16, in vectors of LANES numbers, with the instructions that TARGET names.
   `_attention.c` includes this for each. `heads` is a constant once the functions are inlined: the number of queries,
   at most TOGETHER, that each loaded key and value serves. */

#define JOINED(NAME, NUMBER, LANES) NAME##_##NUMBER##_##LANES
#define EXPANDED(NAME, NUMBER, LANES) JOINED(NAME, NUMBER, LANES)
#define OWN(NAME) EXPANDED(NAME, NUMBER, LANES)

typedef float OWN(floats) __attribute__((vector_size(4 * LANES)));
typedef uint32_t OWN(words) __attribute__((vector_size(4 * LANES)));
typedef uint16_t OWN(halves) __attribute__((vector_size(2 * LANES)));

INLINE OWN(floats) OWN(load)(const NUMBER *from)
{
    OWN(floats) x;
    if (sizeof *from == sizeof(float)) {
        memcpy(&x, from, sizeof x);
    } else {
        OWN(halves) half;
        memcpy(&half, from, sizeof half);
        x = (OWN(floats))(__builtin_convertvector(half, OWN(words)) << 16);
    }
    return x;
}

INLINE OWN(floats) OWN(load_float)(const float *from)
{
    OWN(floats) x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void OWN(store_float)(float *to, OWN(floats) x) { memcpy(to, &x, sizeof x); }

INLINE void OWN(store)(NUMBER *to, OWN(floats) x) /* to the nearest, ties to even */
{
    if (sizeof *to == sizeof(float)) {
        memcpy(to, &x, sizeof x);
    } else {
        OWN(words) bits = (OWN(words))x;
        OWN(halves) half = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, OWN(halves));
        memcpy(to, &half, sizeof half);
    }
}

/* The scores of queries with the keys of a page, of the first query first; stride: from one query's to the next's. */
INLINE void OWN(score)(const float *query, const NUMBER *key, int64_t width, float *scores, int64_t stride,
                       const int heads)
{
    for (int64_t j = 0; j < PAGE; j += LANES) {
        OWN(floats) sums[TOGETHER][4] = {{{0}}}; /* four of each query hide the time that an addition takes */
        for (int64_t d = 0; d < width; d += 4)
            _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
                OWN(floats) keys = OWN(load)(key + (d + i) * PAGE + j);
                _Pragma("GCC unroll 3") for (int g = 0; g < heads; g++) sums[g][i] += query[g * width + d + i] * keys;
            }
        _Pragma("GCC unroll 3") for (int g = 0; g < heads; g++)
            OWN(store_float)(scores + g * stride + j, (sums[g][0] + sums[g][1]) + (sums[g][2] + sums[g][3]));
    }
}

/* Adds the first `filled` values of a page, weighted by softened scores, to the sums of queries. */
INLINE void OWN(mix)(float *sums, const float *weights, int64_t stride, const NUMBER *value, int64_t filled,
                     int64_t width, const int heads)
{
    for (int64_t d = 0; d < width; d += LANES) {
        OWN(floats) sum[TOGETHER];
        _Pragma("GCC unroll 3") for (int g = 0; g < heads; g++) sum[g] = OWN(load_float)(sums + g * width + d);
        for (int64_t j = 0; j < filled; j++) {
            OWN(floats) values = OWN(load)(value + j * width + d);
            _Pragma("GCC unroll 3") for (int g = 0; g < heads; g++) sum[g] += weights[g * stride + j] * values;
        }
        _Pragma("GCC unroll 3") for (int g = 0; g < heads; g++) OWN(store_float)(sums + g * width + d, sum[g]);
    }
}

/* The queries of token t from head `query` on, which share key head k. work: room for them, sums and scores. */
INLINE void OWN(attend_together)(const struct batch *b, int64_t t, int64_t k, int64_t query, float *work,
                                 const int heads)
{
    int64_t width = b->width, head = width * PAGE, all = heads * width, length = b->positions[t] + 1;
    int64_t pages = (length + PAGE - 1) / PAGE, stride = pages * PAGE;
    int64_t from = b->window && length > b->window ? length - b->window : 0, first = from / PAGE;
    const int32_t *table = b->tables + b->rows[t] * b->table_width;
    const NUMBER *keys = (const NUMBER *)b->keys + k * head, *values = (const NUMBER *)b->values + k * head;
    const NUMBER *queries = (const NUMBER *)b->queries + t * b->query_stride + query * width;
    NUMBER *mixed = (NUMBER *)b->mixed + (t * b->heads + query) * width;
    float *scaled = work, *sums = scaled + all, *scores = sums + all;
    for (int64_t d = 0; d < all; d += LANES) {
        OWN(store_float)(scaled + d, OWN(load)(queries + d) * b->scaling);
        OWN(store_float)(sums + d, (OWN(floats)){0});
    }
    for (int64_t p = first; p < pages; p++) {
        const NUMBER *next = keys + table[p + 1 < pages ? p + 1 : p] * b->kv_heads * head;
        for (int64_t d = 0; d < head; d += PAGE) __builtin_prefetch(next + d);
        OWN(score)(scaled, keys + table[p] * b->kv_heads * head, width, scores + p * PAGE, stride, heads);
    }
    for (int64_t g = 0; g < heads; g++) {
        float *score = scores + g * stride;
        for (int64_t j = first * PAGE; j < from; j++) score[j] = -INFINITY;
        for (int64_t j = length; j < stride; j++) score[j] = -INFINITY;
        soften(score + first * PAGE, stride - first * PAGE);
    }
    for (int64_t p = first; p < pages; p++) {
        const NUMBER *next = values + table[p + 1 < pages ? p + 1 : p] * b->kv_heads * head;
        for (int64_t d = 0; d < head; d += PAGE) __builtin_prefetch(next + d);
        int64_t filled = length - p * PAGE < PAGE ? length - p * PAGE : PAGE;
        OWN(mix)(sums, scores + p * PAGE, stride, values + table[p] * b->kv_heads * head, filled, width, heads);
    }
    for (int64_t d = 0; d < all; d += LANES) OWN(store)(mixed + d, OWN(load_float)(sums + d));
}

TARGET static void OWN(attend)(const struct batch *b, float *work)
{
    int64_t groups = b->heads / b->kv_heads;
    for (int64_t t = 0; t < b->tokens; t++)
        for (int64_t k = 0; k < b->kv_heads; k++)
            for (int64_t query = k * groups, left = groups; left > 0; query += TOGETHER, left -= TOGETHER)
                if (left == 1)
                    OWN(attend_together)(b, t, k, query, work, 1);
                else if (left == 2)
                    OWN(attend_together)(b, t, k, query, work, 2);
                else
                    OWN(attend_together)(b, t, k, query, work, TOGETHER);
}

#undef JOINED
#undef EXPANDED
#undef OWN
#undef NUMBER
