/* Attention of single tokens over pages of keys and values on a CPU: the compiled twin of `torch_cache._gathered`.

   Each token reads the pages of its own sequence where they lie, from the first position in its window up to its own
   and no further, and always in the same order: its result has the same bits in a long prefill and in a decode step, whoever is computed beside it.

   Not covered: threads, heads whose width is no multiple of PAGE (the caller takes the twin for them). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PAGE 16 /* positions of a page, as in pages.py: the scores of one page fill one AVX-512 register */
#define LEAST -87.0f /* exp is less than the least normal number below it: 0 */

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(4 * PAGE)));
typedef uint32_t words __attribute__((vector_size(4 * PAGE)));
typedef uint16_t halves __attribute__((vector_size(2 * PAGE)));
typedef uint16_t bf16;

struct batch {
    const void *queries, *keys, *values; /* [tokens, heads, width]; [pages, kv_heads, width, PAGE]; [.., PAGE, width] */
    void *mixed;                         /* out: [tokens, heads, width] */
    const int32_t *tables;               /* [rows, table_width]: the pages of each sequence */
    const int64_t *rows, *positions;     /* [tokens]: its sequence, and its place in it */
    int64_t table_width, tokens, query_stride, heads, kv_heads, width, window; /* window: 0 for all positions */
    float scaling;
};

INLINE floats load_float(const float *from)
{
    floats x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store_float(float *to, floats x) { memcpy(to, &x, sizeof x); }

INLINE floats load_bf16(const bf16 *from)
{
    halves x;
    memcpy(&x, from, sizeof x);
    return (floats)(__builtin_convertvector(x, words) << 16);
}

INLINE void store_bf16(bf16 *to, floats x) /* to the nearest, ties to even */
{
    words bits = (words)x;
    halves y = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, halves);
    memcpy(to, &y, sizeof y);
}

/* exp of LEAST <= x <= 0 as 2^whole * exp(rest), the latter by a polynomial (Cephes); wrong by 1e-7 of it at most */
INLINE float exponential(float x)
{
    float whole = floorf(x * 1.44269504088896341f + 0.5f);
    union {
        int32_t bits;
        float number;
    } power = {((int32_t)whole + 127) << 23};
    x = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float y = 1.9875691500e-4f * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    return (y * x * x + x + 1.0f) * power.number;
}

/* scores to weights that sum to 1, in place; `count` is a multiple of PAGE */
INLINE void soften(float *scores, int64_t count)
{
    float most[PAGE], sums[PAGE] = {0}, highest, sum = 0;
    for (int j = 0; j < PAGE; j++) most[j] = -INFINITY;
    for (int64_t p = 0; p < count; p += PAGE)
        for (int j = 0; j < PAGE; j++) most[j] = scores[p + j] > most[j] ? scores[p + j] : most[j];
    highest = most[0];
    for (int j = 1; j < PAGE; j++) highest = most[j] > highest ? most[j] : highest;
    for (int64_t p = 0; p < count; p += PAGE)
        for (int j = 0; j < PAGE; j++) {
            float below = scores[p + j] - highest, weight = exponential(below < LEAST ? LEAST : below);
            scores[p + j] = below < LEAST ? 0.0f : weight;
            sums[j] += scores[p + j];
        }
    for (int j = 0; j < PAGE; j++) sum += sums[j];
    for (int64_t p = 0; p < count; p++) scores[p] /= sum;
}

/* `work`: room for the queries, the sums and the scores of the heads that share keys */
#define DEFINE(NUMBER)                                                                                                 \
    CLONES static void attend_##NUMBER(const struct batch *b, float *work)                                             \
    {                                                                                                                  \
        int64_t groups = b->heads / b->kv_heads, together = groups * b->width, head = b->width * PAGE;                 \
        float *query = work, *sums = query + together, *scores = sums + together;                                      \
        for (int64_t t = 0; t < b->tokens; t++) {                                                                      \
            const int32_t *table = b->tables + b->rows[t] * b->table_width;                                            \
            int64_t length = b->positions[t] + 1, pages = (length + PAGE - 1) / PAGE;                                  \
            int64_t from = b->window && length > b->window ? length - b->window : 0, first = from / PAGE;              \
            for (int64_t k = 0; k < b->kv_heads; k++) {                                                                \
                const NUMBER *asked = (const NUMBER *)b->queries + t * b->query_stride + k * together;                 \
                NUMBER *mixed = (NUMBER *)b->mixed + (t * b->kv_heads + k) * together;                                 \
                for (int64_t d = 0; d < together; d += PAGE) {                                                         \
                    store_float(query + d, load_##NUMBER(asked + d) * b->scaling);                                     \
                    store_float(sums + d, (floats){0});                                                                \
                }                                                                                                      \
                for (int64_t p = first; p < pages; p++) {                                                              \
                    const NUMBER *key = (const NUMBER *)b->keys + (table[p] * b->kv_heads + k) * head;                 \
                    const NUMBER *next =                                                                               \
                        (const NUMBER *)b->keys + (table[p + 1 < pages ? p + 1 : p] * b->kv_heads + k) * head;         \
                    for (int64_t d = 0; d < head; d += PAGE) __builtin_prefetch(next + d);                             \
                    for (int64_t g = 0; g < groups; g++) {                                                             \
                        const float *q = query + g * b->width;                                                         \
                        floats s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0}; /* four sums hide the time an addition takes */ \
                        for (int64_t d = 0; d < b->width; d += 4) {                                                    \
                            s0 += q[d] * load_##NUMBER(key + d * PAGE);                                                \
                            s1 += q[d + 1] * load_##NUMBER(key + (d + 1) * PAGE);                                      \
                            s2 += q[d + 2] * load_##NUMBER(key + (d + 2) * PAGE);                                      \
                            s3 += q[d + 3] * load_##NUMBER(key + (d + 3) * PAGE);                                      \
                        }                                                                                              \
                        store_float(scores + (g * pages + p) * PAGE, (s0 + s1) + (s2 + s3));                           \
                    }                                                                                                  \
                }                                                                                                      \
                for (int64_t g = 0; g < groups; g++) {                                                                 \
                    float *score = scores + g * pages * PAGE;                                                          \
                    for (int64_t j = first * PAGE; j < from; j++) score[j] = -INFINITY;                                \
                    for (int64_t j = length; j < pages * PAGE; j++) score[j] = -INFINITY;                              \
                    soften(score + first * PAGE, (pages - first) * PAGE);                                              \
                }                                                                                                      \
                for (int64_t p = first; p < pages; p++) {                                                              \
                    const NUMBER *value = (const NUMBER *)b->values + (table[p] * b->kv_heads + k) * head;             \
                    const NUMBER *next =                                                                               \
                        (const NUMBER *)b->values + (table[p + 1 < pages ? p + 1 : p] * b->kv_heads + k) * head;       \
                    for (int64_t d = 0; d < head; d += PAGE) __builtin_prefetch(next + d);                             \
                    int64_t filled = length - p * PAGE < PAGE ? length - p * PAGE : PAGE;                              \
                    for (int64_t d = 0; d < together; d += PAGE) {                                                     \
                        const float *score = scores + (d / b->width * pages + p) * PAGE;                               \
                        floats sum = load_float(sums + d);                                                             \
                        for (int64_t j = 0; j < filled; j++)                                                           \
                            sum += score[j] * load_##NUMBER(value + j * b->width + d % b->width);                      \
                        store_float(sums + d, sum);                                                                    \
                    }                                                                                                  \
                }                                                                                                      \
                for (int64_t d = 0; d < together; d += PAGE) store_##NUMBER(mixed + d, load_float(sums + d));          \
            }                                                                                                          \
        }                                                                                                              \
    }

DEFINE(float)
DEFINE(bf16)

static PyObject *attend(PyObject *self, PyObject *arguments)
{
    struct batch b;
    unsigned long long queries, keys, values, mixed, tables, rows, positions;
    long long table_width, tokens, query_stride, heads, kv_heads, width, window, longest = 0;
    int half;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "pKKKKKKKLLLLLLLf", &half, &queries, &keys, &values, &mixed, &tables, &rows,
                          &positions, &table_width, &tokens, &query_stride, &heads, &kv_heads, &width, &window,
                          &b.scaling))
        return NULL;
    if (kv_heads < 1 || heads % kv_heads || width < PAGE || width % PAGE) {
        PyErr_Format(PyExc_ValueError, "%lld heads over %lld key heads of width %lld", heads, kv_heads, width);
        return NULL;
    }
    b.queries = (const void *)(uintptr_t)queries, b.keys = (const void *)(uintptr_t)keys;
    b.values = (const void *)(uintptr_t)values, b.mixed = (void *)(uintptr_t)mixed;
    b.tables = (const int32_t *)(uintptr_t)tables, b.rows = (const int64_t *)(uintptr_t)rows;
    b.positions = (const int64_t *)(uintptr_t)positions, b.table_width = table_width, b.tokens = tokens;
    b.query_stride = query_stride, b.heads = heads, b.kv_heads = kv_heads, b.width = width;
    b.window = window;
    for (int64_t t = 0; t < tokens; t++) longest = b.positions[t] > longest ? b.positions[t] : longest;
    float *work = malloc(sizeof(float) * (heads / kv_heads) * (2 * width + longest + PAGE));
    if (!work) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS;
    if (half)
        attend_bf16(&b, work);
    else
        attend_float(&b, work);
    Py_END_ALLOW_THREADS;
    free(work);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"attend", attend, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_attention", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__attention(void) { return PyModule_Create(&module); }
