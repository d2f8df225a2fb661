/* The selective scan on a CPU; `compiled_form.py` calls it, `torch_form.py` has the maths.

A job is a block: some channels of one group in one row of the batch. It walks through time with its
states [N, CHANNELS] in the cache, a vector of LANES channels at a time; channels beyond the last are
zero. Blocks are independent of each other: any split of them gives the same bits.

u, delta, y: [batch, length, groups * width].
rates: A / ln 2, [groups, size, width].
B, C: [batch, length, groups, size].
D, bias: [groups * width] or null. With a bias, the step sizes are softplus(delta + bias).
keep: 0 where a segment begins, else 1, [batch, length] or null.
states: those before every `span` steps but the first, [chunks - 1, batch, groups, size, width].
grads: the gradients of these tensors, of y given, of the others written. For the caller to add up,
those of A, D and bias have a row for each row of the batch, [batch, ...]; those of B and C one for
each block of a group's channels, [blocks, ...]. */

#include "../vectors.h"

#define CHANNELS 128 /* of a block: the states of 32 steps and their decays fit in L2. In Python, too */
#define VECTORS (CHANNELS / LANES)

typedef struct {
    const float *u, *delta, *rates, *B, *C, *D, *bias, *keep;
    float *states, *y;
    struct {
        const float *y;
        float *u, *delta, *A, *B, *C, *D, *bias;
    } grads;
    int64_t batch, length, groups, size, width, span;
    Vector *scratch; /* not given */
} Scan;

/* A block: its row, group, first channel, number of channels and of vectors. */
typedef struct {
    int64_t row, group, first, channels, vectors;
} Block;

static void load_all(Vector *to, const float *from, Block k) {
    for (int64_t v = 0; v < k.vectors; v++)
        to[v] = load(from + v * LANES, k.channels - v * LANES);
}

static void store_all(float *to, const Vector *from, Block k) {
    for (int64_t v = 0; v < k.vectors; v++)
        store(to + v * LANES, from[v], k.channels - v * LANES);
}

static inline int64_t token(const Scan *s, Block k, int64_t t) {
    return k.row * s->length + t;
}

static inline int64_t channel(const Scan *s, Block k, int64_t t) {
    return (token(s, k, t) * s->groups + k.group) * s->width + k.first;
}

static inline int64_t vector(const Scan *s, Block k, int64_t t) {
    return (token(s, k, t) * s->groups + k.group) * s->size;
}

static inline int64_t state(const Scan *s, Block k, int64_t chunk, int64_t n) {
    int64_t group = (chunk * s->batch + k.row) * s->groups + k.group;
    return (group * s->size + n) * s->width + k.first;
}

static inline int64_t rate(const Scan *s, Block k, int64_t n) {
    return (k.group * s->size + n) * s->width + k.first;
}

/* Write the state after step t, and the decays unless they are null. */
static inline void step(const Scan *s, Block k, int64_t t, const Vector *rates, const Vector *delta,
                        const Vector *x, const Vector *before, Vector *after, Vector *decays) {
    const float *B = s->B + vector(s, k, t), keep = s->keep ? s->keep[token(s, k, t)] : 1.0f;
    for (int64_t n = 0; n < s->size; n++)
        for (int64_t v = 0; v < k.vectors; v++) {
            int64_t i = n * k.vectors + v;
            Vector a = exp2_of(delta[v] * rates[i]) * keep;
            if (decays)
                decays[i] = a;
            after[i] = a * before[i] + x[v] * B[n];
        }
}

/* Write the step sizes of step t, and their derivatives by delta unless `slope` is null. */
static inline void step_sizes(const Scan *s, Block k, int64_t t, Vector *delta, Vector *slope) {
    load_all(delta, s->delta + channel(s, k, t), k);
    for (int64_t v = 0; s->bias && v < k.vectors; v++) {
        int64_t p = v * LANES;
        Vector bias = load(s->bias + k.group * s->width + k.first + p, k.channels - p);
        Vector x = delta[v] + bias;
        delta[v] = softplus_of(x);
        if (slope)
            slope[v] = sigmoid_of(x);
    }
}

static void forward(const Scan *s, Block k) {
    Vector u[VECTORS], delta[VECTORS], x[VECTORS], D[VECTORS] = {0}, out[VECTORS];
    Vector *h = s->scratch, *rates = h + s->size * VECTORS;
    memset(h, 0, s->size * k.vectors * sizeof *h);
    for (int64_t n = 0; n < s->size; n++)
        load_all(rates + n * k.vectors, s->rates + rate(s, k, n), k);
    if (s->D)
        load_all(D, s->D + k.group * s->width + k.first, k);
    for (int64_t t = 0; t < s->length; t++) {
        if (t > 0 && t % s->span == 0)
            for (int64_t n = 0; n < s->size; n++)
                store_all(s->states + state(s, k, t / s->span - 1, n), h + n * k.vectors, k);
        load_all(u, s->u + channel(s, k, t), k);
        step_sizes(s, k, t, delta, 0);
        for (int64_t v = 0; v < k.vectors; v++) {
            x[v] = delta[v] * u[v];
            out[v] = D[v] * u[v];
        }
        step(s, k, t, rates, delta, x, h, h, 0);
        const float *C = s->C + vector(s, k, t);
        for (int64_t n = 0; n < s->size; n++)
            for (int64_t v = 0; v < k.vectors; v++)
                out[v] += C[n] * h[n * k.vectors + v];
        store_all(s->y + channel(s, k, t), out, k);
    }
}

/* Go one step back. `carry` is a_{t+1} g_{t+1} before and a_t g_t after it. */
static void step_back(const Scan *s, Block k, int64_t t, const Vector *rates, const Vector *delta,
                      const Vector *slope, const Vector *decays, const Vector *before,
                      const Vector *after, Vector *carry, Vector *gA, Vector *gD, Vector *gbias) {
    Vector u[VECTORS], x[VECTORS], gy[VECTORS];
    Vector gx[VECTORS], gdelta[VECTORS], D[VECTORS] = {0};
    int64_t here = channel(s, k, t), at = vector(s, k, t);
    int64_t all = s->batch * s->length * s->groups * s->size, sums = k.first / CHANNELS * all + at;
    load_all(u, s->u + here, k);
    load_all(gy, s->grads.y + here, k);
    if (s->D)
        load_all(D, s->D + k.group * s->width + k.first, k);
    for (int64_t v = 0; v < k.vectors; v++) {
        x[v] = delta[v] * u[v];
        gD[v] += gy[v] * u[v];
        gx[v] = gdelta[v] = (Vector){0};
    }
    for (int64_t n = 0; n < s->size; n++) {
        float B = s->B[at + n], C = s->C[at + n];
        Vector gB = {0}, gC = {0};
        for (int64_t v = 0; v < k.vectors; v++) {
            int64_t i = n * k.vectors + v;
            Vector g = C * gy[v] + carry[i];
            gx[v] += B * g;
            gB += x[v] * g;
            gC += gy[v] * after[i];
            carry[i] = decays[i] * g;
            Vector q = carry[i] * before[i];
            gA[i] += delta[v] * q;
            gdelta[v] += rates[i] * q;
        }
        s->grads.B[sums + n] = sum(gB);
        s->grads.C[sums + n] = sum(gC);
    }
    for (int64_t v = 0; v < k.vectors; v++) {
        gdelta[v] = LN_2 * gdelta[v] + u[v] * gx[v];
        if (s->bias)
            gbias[v] += gdelta[v] *= slope[v];
        gx[v] = delta[v] * gx[v] + D[v] * gy[v];
    }
    store_all(s->grads.delta + here, gdelta, k);
    store_all(s->grads.u + here, gx, k);
}

static void backward(const Scan *s, Block k) {
    Vector u[VECTORS], x[VECTORS], gD[VECTORS] = {0}, gbias[VECTORS] = {0};
    int64_t block = s->size * k.vectors, chunks = (s->length + s->span - 1) / s->span;
    Vector *carry = s->scratch, *gA = carry + block, *rates = gA + block;
    Vector *decays = rates + block, *h = decays + s->span * block;
    Vector *deltas = h + (s->span + 1) * block, *slopes = deltas + s->span * k.vectors;
    memset(carry, 0, 2 * block * sizeof *carry);
    for (int64_t n = 0; n < s->size; n++)
        load_all(rates + n * k.vectors, s->rates + rate(s, k, n), k);
    for (int64_t chunk = chunks - 1; chunk >= 0; chunk--) {
        int64_t start = chunk * s->span, steps = least(s->span, s->length - start);
        memset(h, 0, block * sizeof *h);
        for (int64_t n = 0; chunk > 0 && n < s->size; n++)
            load_all(h + n * k.vectors, s->states + state(s, k, chunk - 1, n), k);
        for (int64_t i = 0; i < steps; i++) {
            load_all(u, s->u + channel(s, k, start + i), k);
            Vector *delta = deltas + i * k.vectors;
            step_sizes(s, k, start + i, delta, slopes + i * k.vectors);
            for (int64_t v = 0; v < k.vectors; v++)
                x[v] = delta[v] * u[v];
            step(s, k, start + i, rates, delta, x, h + i * block, h + (i + 1) * block,
                 decays + i * block);
        }
        for (int64_t i = steps - 1; i >= 0; i--)
            step_back(s, k, start + i, rates, deltas + i * k.vectors, slopes + i * k.vectors,
                      decays + i * block, h + i * block, h + (i + 1) * block, carry, gA, gD, gbias);
    }
    int64_t row = k.row * s->groups, at = (row + k.group) * s->width + k.first;
    for (int64_t n = 0; n < s->size; n++)
        store_all(s->grads.A + row * s->size * s->width + rate(s, k, n), gA + n * k.vectors, k);
    store_all(s->grads.D + at, gD, k);
    store_all(s->grads.bias + at, gbias, k);
}

/* Compute y, or where it is null the gradients. */
int64_t scan(const void *given, int64_t begin, int64_t end) {
    Scan s;
    memcpy(&s, given, offsetof(Scan, scratch));
    s.scratch = allocate(VECTORS * (s.size * (2 * s.span + 4) + 2 * s.span));
    if (!s.scratch)
        return 1;
    int64_t blocks = (s.width + CHANNELS - 1) / CHANNELS;
    for (int64_t i = begin; i < end; i++) {
        int64_t first = i % blocks * CHANNELS, channels = least(CHANNELS, s.width - first);
        Block k = {i / blocks / s.groups, i / blocks % s.groups, first, channels, vectors_of(channels)};
        if (s.y)
            forward(&s, k);
        else
            backward(&s, k);
    }
    free(s.scratch);
    return 0;
}
