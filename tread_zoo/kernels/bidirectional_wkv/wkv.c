/* The bidirectional WKV on a CPU; `compiled_form.py` calls it, `triton_form.py` has the maths.

A block is some channels in one row of the batch. It walks through time in one direction and then in
the other, with the sums of what it has passed in registers: the first walk writes what comes from
its side, the second adds the other side and the token itself. Blocks are independent of each other.

k, v, o, l: [batch, length, channels]. l is the logarithm of the sum of the weights of a token's mean.
w, u: [channels], w for one step.
places: ascending positions [batch, length], or null.
go, gk, gv, gw, gu: gradients; gw and gu are [batch, channels]. All but go are written. */

#include "../vectors.h"

#define CHANNELS 64 /* of a block: enough vectors to hide how long an exponential takes */
#define VECTORS (CHANNELS / LANES)
#define NOTHING -1e30f /* log-weight of no token; not -inf, whose differences are NaN */
#define SUMS 4

typedef struct {
    const float *k, *v, *w, *u, *places;
    float *o, *l;
    const float *go;
    float *gk, *gv, *gw, *gu;
    int64_t length, channels;
} Mean;

/* The tokens that the walk has passed: m, their largest log-weight as seen from the next token, and
sums of their values times exp(log-weight - m). */
typedef struct {
    Vector m[VECTORS], sums[SUMS][VECTORS];
} State;

/* A walk through a block of a row, in the direction `way`, 1 or -1. */
typedef struct {
    int64_t row, first, count, way;
} Walk;

static inline int64_t step_of(const Mean *mean, Walk walk, int64_t i) {
    return walk.way > 0 ? i : mean->length - 1 - i;
}

/* The distance from the walk's step i to the next. */
static inline float gap_after(const Mean *mean, Walk walk, int64_t i) {
    if (!mean->places || i + 1 == mean->length)
        return 1.0f;
    const float *places = mean->places + walk.row * mean->length;
    return walk.way * (places[step_of(mean, walk, i + 1)] - places[step_of(mean, walk, i)]);
}

/* Lower the log-weight m by `fall` and add a token of log-weight `key`. `old` and `fresh` are the
factors of the sums so far and of the token. The rounding error of m goes into `old`, so that errors
do not add up from step to step. */
static inline void take_in(Vector *m, Vector fall, Vector key, Vector *old, Vector *fresh) {
    const Vector one = (Vector){0} + 1.0f;
    Vector fallen = *m - fall, ahead = fallen - key, small = exp_of(minus_abs(ahead));
    Ints stays = ahead > 0.0f;
    *old = choose(stays, one, small) * (1.0f + ((*m - fallen) - fall));
    *fresh = choose(stays, small, one);
    *m = choose(stays, fallen, key);
}

/* Write o and l. The first walk leaves its state before each step in o, l and `counts`. */
static void average(const Mean *mean, Walk walk, float *counts) {
    State s = {0};
    for (int64_t v = 0; v < VECTORS; v++)
        s.m[v] += NOTHING;
    for (int64_t i = 0; i < mean->length; i++) {
        float gap = gap_after(mean, walk, i);
        int64_t t = step_of(mean, walk, i);
        int64_t at = (walk.row * mean->length + t) * mean->channels + walk.first;
        for (int64_t v = 0; v * LANES < walk.count; v++) {
            int64_t c = v * LANES, count = walk.count - c;
            Vector k = load(mean->k + at + c, count), value = load(mean->v + at + c, count);
            Vector w = load(mean->w + walk.first + c, count), m = s.m[v], old, fresh;
            Vector n = s.sums[0][v], d = s.sums[1][v];
            if (walk.way > 0) {
                Vector u = load(mean->u + walk.first + c, count);
                Vector far = load(mean->l + at + c, count), most = choose(far > m, far, m);
                most = choose(k - most + u > 0.0f, k + u, most);
                Vector own = exp_of(k - most + u), near = exp_of(m - most);
                far = exp_of(far - most);
                n = near * n + far * load(mean->o + at + c, count) + own * value;
                d = near * d + far * load(counts + t * CHANNELS + c, LANES) + own;
                n /= d;
                m = most + log_of(d);
            }
            store(mean->o + at + c, n, count);
            store(mean->l + at + c, m, count);
            store(counts + t * CHANNELS + c, d, LANES);
            take_in(&s.m[v], gap * w, k - (gap - 1.0f) * w, &old, &fresh);
            s.sums[0][v] = old * s.sums[0][v] + fresh * value;
            s.sums[1][v] = old * s.sums[1][v] + fresh;
        }
    }
}

/* Write the gradients. The sums over the passed tokens are of go, go o, and both times the distance
less 1. */
static void differentiate(const Mean *mean, Walk walk) {
    State s = {0};
    Vector gw[VECTORS] = {0}, gu[VECTORS] = {0};
    for (int64_t v = 0; v < VECTORS; v++)
        s.m[v] += NOTHING;
    for (int64_t i = 0; i < mean->length; i++) {
        float gap = gap_after(mean, walk, i);
        int64_t t = step_of(mean, walk, i);
        int64_t at = (walk.row * mean->length + t) * mean->channels + walk.first;
        for (int64_t v = 0; v * LANES < walk.count; v++) {
            int64_t c = v * LANES, count = walk.count - c;
            Vector k = load(mean->k + at + c, count), value = load(mean->v + at + c, count);
            Vector w = load(mean->w + walk.first + c, count), l = load(mean->l + at + c, count);
            Vector go = load(mean->go + at + c, count), o = load(mean->o + at + c, count);
            Vector weight = exp_of(k + s.m[v]), old, fresh;
            Vector gv = weight * s.sums[0][v], z = weight * s.sums[1][v];
            gw[v] -= weight * (value * s.sums[2][v] - s.sums[3][v]);
            if (walk.way > 0) {
                Vector own = go * exp_of(k - l + load(mean->u + walk.first + c, count));
                gu[v] += own * (value - o);
                gv += own;
                z += own * o;
            }
            Vector gk = value * gv - z;
            if (walk.way > 0) {
                gv += load(mean->gv + at + c, count);
                gk += load(mean->gk + at + c, count);
            }
            store(mean->gv + at + c, gv, count);
            store(mean->gk + at + c, gk, count);
            take_in(&s.m[v], gap * w, -l - (gap - 1.0f) * w, &old, &fresh);
            for (int64_t n = 0; n < 2; n++) {
                Vector far = s.sums[2 + n][v] + gap * s.sums[n][v], new = fresh * go;
                if (n == 1)
                    new *= o;
                s.sums[n][v] = old * s.sums[n][v] + new;
                s.sums[2 + n][v] = old * far + (gap - 1.0f) * new;
            }
        }
    }
    for (int64_t v = 0; v * LANES < walk.count; v++) {
        int64_t c = v * LANES, at = walk.row * mean->channels + walk.first + c;
        if (walk.way > 0)
            gw[v] += load(mean->gw + at, walk.count - c);
        store(mean->gw + at, gw[v], walk.count - c);
        store(mean->gu + at, gu[v], walk.count - c);
    }
}

/* Compute o and l, or the gradients where gk is not null. A job is a block of a row. */
int64_t wkv(const void *given, int64_t begin, int64_t end) {
    Mean mean;
    memcpy(&mean, given, sizeof mean);
    int64_t blocks = (mean.channels + CHANNELS - 1) / CHANNELS;
    float *counts = (float *)allocate(mean.length * VECTORS);
    if (!counts)
        return 1;
    for (int64_t i = begin; i < end; i++)
        for (int64_t way = -1; way <= 1; way += 2) {
            int64_t first = i % blocks * CHANNELS;
            Walk walk = {i / blocks, first, least(CHANNELS, mean.channels - first), way};
            if (mean.gk)
                differentiate(&mean, walk);
            else
                average(&mean, walk, counts);
        }
    free(counts);
    return 0;
}
