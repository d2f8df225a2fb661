/* What the C forms have in common: threads, and vectors of as many float32 numbers as the CPU has
lanes.

Each C file has one function for Python: int64_t name(const void *given, int64_t begin, int64_t end).
It computes the jobs [begin, end) of a call. `given` has the fields of the file's first struct in
their order; a tensor that the call does not need is null. It returns 0, or 1 if memory is lacking.
*/

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif defined(__AVX__)
#define LANES 8
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define LANES 4
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#endif
#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif

#define INLINE inline __attribute__((always_inline))
#define LN_2 0.693147180559945309f

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));

#if defined(_OPENMP)
/* Compute `jobs` jobs on the threads that torch has: threads of another kind would wait for these,
which still spin. Return 0, or 1 if one of them lacks memory. */
int64_t share(int64_t (*compute)(const void *, int64_t, int64_t), const void *given, int64_t jobs,
              int64_t threads) {
    int64_t failed = 0;
#pragma omp parallel for num_threads(threads) reduction(| : failed)
    for (int64_t i = 0; i < threads; i++)
        failed |= compute(given, jobs * i / threads, jobs * (i + 1) / threads);
    return failed;
}
#endif

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The number of vectors that `count` numbers take. */
static inline int64_t vectors_of(int64_t count) { return (count + LANES - 1) / LANES; }

/* Memory for `count` vectors, or null. */
static inline Vector *allocate(int64_t count) {
    return aligned_alloc(sizeof(Vector), count * sizeof(Vector));
}

/* `count` numbers, LANES at most, and zeros behind them. */
static inline Vector load(const float *from, int64_t count) {
    Vector v = {0};
    if (count >= LANES)
        memcpy(&v, from, sizeof v);
    else
        memcpy(&v, from, 4 * count);
    return v;
}

static inline void store(float *to, Vector v, int64_t count) {
    if (count >= LANES)
        memcpy(to, &v, sizeof v);
    else
        memcpy(to, &v, 4 * count);
}

/* Each loop has a constant length, without which compilers do it number by number. */
static inline float sum(Vector v) {
    float x[LANES];
    memcpy(x, &v, sizeof v);
#if LANES == 16
    for (int i = 0; i < 8; i++)
        x[i] += x[i + 8];
#endif
#if LANES >= 8
    for (int i = 0; i < 4; i++)
        x[i] += x[i + 4];
#endif
    return (x[0] + x[2]) + (x[1] + x[3]);
}

/* The sums of neighbours: those of a, then those of b. */
static inline Vector pair_sums(Vector a, Vector b) { return PICK(a, b, EVEN) + PICK(a, b, ODD); }

/* 2^x within an ulp or two; 0 below 2^-125, infinity from 2^128 on, NaN of NaN. Adding 1.5 * 2^23
leaves the nearest integer in the lowest bits, which become the exponent. */
static inline Vector exp2_of(Vector x) {
    const Vector zero = {0}, most = zero + 128.0f;
    Ints tiny = x < -125.0f, huge = x > 128.0f;
    x = (Vector)(((Ints)x & ~huge) | ((Ints)most & huge));
    Vector shifted = x + 12582912.0f, f = x - (shifted - 12582912.0f);
    Vector p = zero + 0.000153533605f;
    p = p * f + 0.0013398875f;
    p = p * f + 0.00961843692f;
    p = p * f + 0.0555033237f;
    p = p * f + 0.240226477f;
    p = p * f + 0.693147182f;
    p = p * f + 1.0f;
    return (Vector)((Ints)((Bits)p + ((Bits)shifted << 23)) & ~tiny);
}

static inline Vector exp_of(Vector x) { return exp2_of(x * (1 / LN_2)); }

/* `a` where the mask is set, else `b`. */
static inline Vector choose(Ints mask, Vector a, Vector b) {
    return (Vector)(((Ints)a & mask) | ((Ints)b & ~mask));
}

static inline Vector minus_abs(Vector x) { return (Vector)((Ints)x | INT32_MIN); }

/* log(1 + x) of 0 ≤ x ≤ 1 within two ulps, NaN of NaN. */
static inline Vector log1p_of(Vector x) {
    const Vector zero = {0};
    Vector p = zero - 0.0032440212f;
    p = p * x + 0.019851444f;
    p = p * x - 0.0569595f;
    p = p * x + 0.106036514f;
    p = p * x - 0.1530559f;
    p = p * x + 0.19675939f;
    p = p * x - 0.24954134f;
    p = p * x + 0.33329964f;
    p = p * x - 0.49999902f;
    p = p * x + 1.0f;
    return p * x;
}

static inline Vector sigmoid_of(Vector x) {
    const Vector one = (Vector){0} + 1.0f;
    Vector small = exp_of(minus_abs(x));
    return choose(x > 0.0f, one, small) / (one + small);
}

/* log(1 + exp x). */
static inline Vector softplus_of(Vector x) {
    return choose(x < 0.0f, (Vector){0}, x) + log1p_of(exp_of(minus_abs(x)));
}

/* log x of a normal number, NaN of what is not finite; next to 1 within a rounding of 1. */
static inline Vector log_of(Vector x) {
    Ints bits = (Ints)x, exponent = (bits >> 23) - 127;
    Vector fraction = (Vector)((bits & 0x7fffff) | 0x3f800000) - 1.0f;
    return __builtin_convertvector(exponent, Vector) * LN_2 + log1p_of(fraction) + x * 0.0f;
}
