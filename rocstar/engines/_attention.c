/* Attention of single tokens over pages of keys and values on a CPU: the compiled twin of `torch_cache._gathered`.

   Each token reads the pages of its own sequence where they lie, from the first position in its window up to its own
   and no further, and always in the same order: its result has the same bits in a long prefill and in a decode step,
   whoever is computed beside it.

   Not covered: threads, heads whose width is no multiple of PAGE (the caller takes the twin for them). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PAGE 16 /* positions of a page, as in pages.py */
#define LEAST -87.0f /* exp is less than the least normal number below it: 0 */

#define INLINE static inline __attribute__((always_inline))
#define TOGETHER 3 /* queries: four sums of each, a key and a number of a query fill the sixteen registers of AVX2 */

typedef uint16_t bf16;

struct batch {
    const void *queries, *keys, *values; /* [tokens, heads, width]; [pages, kv_heads, width, PAGE]; [.., PAGE, width] */
    void *mixed;                         /* out: [tokens, heads, width] */
    const int32_t *tables;               /* [rows, table_width]: the pages of each sequence */
    const int64_t *rows, *positions;     /* [tokens]: its sequence, and its place in it */
    int64_t table_width, tokens, query_stride, heads, kv_heads, width, window; /* window: 0 for all positions */
    float scaling;
};

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

/* attend_float_16, attend_bf16_16 and so on: the same function in vectors of 16, 8 and 4 numbers. GCC keeps vectors
   that the processor lacks in memory: with 16 numbers AVX2 took five times as long. */
#if defined(__x86_64__) && defined(__GNUC__)
#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define NUMBER float
#include "_attention.h"
#define NUMBER bf16
#include "_attention.h"
#undef LANES
#undef TARGET
#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#define NUMBER float
#include "_attention.h"
#define NUMBER bf16
#include "_attention.h"
#undef LANES
#undef TARGET
#define HAS __builtin_cpu_supports
#define CHOOSE(NUMBER)                                                                                                 \
    (!HAS("avx2") || !HAS("fma") ? attend_##NUMBER##_4                                                                 \
     : !HAS("avx512bw") || !HAS("avx512dq") || !HAS("avx512vl") ? attend_##NUMBER##_8                                  \
     : attend_##NUMBER##_16)
#else
#define CHOOSE(NUMBER) attend_##NUMBER##_4
#endif
#define LANES 4
#define TARGET
#define NUMBER float
#include "_attention.h"
#define NUMBER bf16
#include "_attention.h"

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
    (half ? CHOOSE(bf16) : CHOOSE(float))(&b, work);
    Py_END_ALLOW_THREADS;
    free(work);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"attend", attend, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_attention", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__attention(void) { return PyModule_Create(&module); }
