/* The recurrence of gated linear attention and of delta rules on a CPU; `recurrence.py` calls it.

    S_t = diag(exp g_t) S_{t-1} + w_t x_tᵀ + b_t u_tᵀ,   u_t = S_{t-1}ᵀ a_t,   o_t = scale S_tᵀ q_t

Plain (a and beta null): x = v, w = k, no a. Delta (a null): x = v + u, w = β k, a = -exp(g) k, no b.
Low rank: x = v, w = k. Columns of S are independent of each other but for what they share: q, a, …

Forward, a block is some columns of S, LANES of them in a vector. A step reads and writes each row
of S once, for S_t, o_t and u_{t+1}. Backward goes back by chunks of `span` steps, and computes the
states of a chunk from the one before it, with the u that forward kept. There a block is COLUMNS
columns, LANES keys of one column in a vector: what is summed over columns needs no sum of lanes.
Heads are independent of each other: any split of them gives the same bits.

q, k, a, b: [batch, length, heads, K].
v, u, o: [batch, length, heads, V].
beta: [batch, length, heads].
g: as k (`by_channel`), or as beta.
keep: 0 where a segment begins, else 1, [batch, length] or null.
states: those before every `span` steps but the first, [chunks - 1, batch, heads, K, V].
grads: the gradients of these tensors; all but that of o are written. */

#include "vectors.h"

#define WIDEST 4 /* vectors of a forward block: its o and u fit in registers */
#if LANES == 16
#define COLUMNS 8 /* of a backward block: their sums fit in registers */
#else
#define COLUMNS 4
#endif

typedef enum { PLAIN, DELTA, LOW_RANK } Kind;

typedef struct {
    const float *q, *k, *v, *a, *b, *beta, *g, *keep;
    float *u, *states, *o;
    struct {
        const float *o;
        float *q, *k, *v, *a, *b, *beta, *g;
    } grads;
    float scale;
    int64_t batch, length, heads, K, V, span, by_channel;
    int64_t size;      /* not given: K, filled up to whole vectors */
    int64_t row, head; /* not given: those that are computed */
} Rule;

/* By channel, `size` numbers each: q times the scale, exp(g), …, or the gradients of these. */
typedef struct {
    float *q, *decay, *w, *a, *b;
} Step;

static inline Vector get(const float *from, int64_t j) { return load(from + j * LANES, LANES); }

static inline void put(float *to, int64_t j, Vector v) { store(to + j * LANES, v, LANES); }

static inline Step step_at(float *steps, int64_t i, int64_t size) {
    steps += 5 * size * i;
    return (Step){steps, steps + size, steps + 2 * size, steps + 3 * size, steps + 4 * size};
}

/* The index of a step in a tensor that has one number per head. */
static inline int64_t place(const Rule *r, int64_t t) {
    return (r->row * r->length + t) * r->heads + r->head;
}

static inline int begins(const Rule *r, int64_t t) {
    return t == 0 || (r->keep && r->keep[r->row * r->length + t] == 0);
}

/* The kept state before step t, the first of a chunk but not of the sequence. */
static inline float *state(const Rule *r, int64_t t) {
    int64_t head = r->row * r->heads + r->head;
    return r->states + ((t / r->span - 1) * r->batch * r->heads + head) * r->K * r->V;
}

static void prepare(const Rule *r, int64_t t, Step to) {
    int64_t at = place(r, t);
    float beta = r->beta ? r->beta[at] : 1.0f;
    const Vector zero = {0};
    for (int64_t j = 0; j * LANES < r->K; j++) {
        int64_t n = at * r->K + j * LANES, count = r->K - j * LANES;
        Vector k = load(r->k + n, count);
        Vector g = r->by_channel ? load(r->g + n, count) : zero + r->g[at];
        Vector decay = exp2_of(g * (1 / LN_2));
        put(to.q, j, load(r->q + n, count) * r->scale);
        put(to.decay, j, decay);
        put(to.w, j, beta * k);
        put(to.a, j, r->a ? load(r->a + n, count) : -decay * k);
        put(to.b, j, r->a ? load(r->b + n, count) : zero);
    }
}

/* Compute o and u of the columns from `first` on. scratch: two steps, then S. */
static INLINE void forward_block(const Rule *r, int64_t first, float *scratch, const Kind kind,
                                 const int64_t vectors) {
    int64_t width = r->V - first;
    float *S = scratch + 10 * r->size, *o = r->o;
    Vector x[WIDEST], u[WIDEST], out[WIDEST], next[WIDEST] = {0};
    prepare(r, 0, step_at(scratch, 0, r->size));
    for (int64_t t = 0; t < r->length; t++) {
        Step now = step_at(scratch, t % 2, r->size), later = step_at(scratch, 1 - t % 2, r->size);
        if (t + 1 < r->length)
            prepare(r, t + 1, later);
        if (t > 0 && t % r->span == 0)
            for (int64_t n = 0; n < r->K; n++)
                for (int64_t v = 0; v < vectors; v++)
                    store(state(r, t) + n * r->V + first + v * LANES,
                          get(S, n * vectors + v), width - v * LANES);
        int64_t at = place(r, t) * r->V + first, fresh = begins(r, t);
        if (fresh)
            memset(S, 0, 4 * LANES * r->K * vectors);
        for (int64_t v = 0; v < vectors; v++) {
            x[v] = load(r->v + at + v * LANES, width - v * LANES);
            if (kind != PLAIN) {
                u[v] = fresh ? (Vector){0} : next[v];
                store(r->u + at + v * LANES, u[v], width - v * LANES);
            }
            if (kind == DELTA)
                x[v] += u[v];
            out[v] = next[v] = (Vector){0};
        }
        for (int64_t n = 0; n < r->K; n++)
            for (int64_t v = 0; v < vectors; v++) {
                Vector s = now.decay[n] * get(S, n * vectors + v) + now.w[n] * x[v];
                if (kind == LOW_RANK)
                    s += now.b[n] * u[v];
                put(S, n * vectors + v, s);
                out[v] += now.q[n] * s;
                if (kind != PLAIN)
                    next[v] += later.a[n] * s;
            }
        for (int64_t v = 0; v < vectors; v++)
            store(o + at + v * LANES, out[v], width - v * LANES);
    }
}

/* A constant number of vectors lets compilers keep them in registers. */
#define FORWARD(kind)                                                  \
    (vectors == 1   ? forward_block(r, first, scratch, kind, 1)     \
     : vectors == 2 ? forward_block(r, first, scratch, kind, 2)     \
     : vectors == 3 ? forward_block(r, first, scratch, kind, 3)     \
                    : forward_block(r, first, scratch, kind, WIDEST))

static void forward(const Rule *r, float *scratch) {
    for (int64_t first = 0; first < r->V; first += WIDEST * LANES) {
        int64_t vectors = vectors_of(r->V - first);
        if (r->a)
            FORWARD(LOW_RANK);
        else if (r->beta)
            FORWARD(DELTA);
        else
            FORWARD(PLAIN);
    }
}

static inline int64_t blocks_of(int64_t V) { return (V + COLUMNS - 1) / COLUMNS; }

/* Read COLUMNS numbers, of which `count` exist; the others are 0. */
static inline void load_columns(float *to, const float *from, int64_t count) {
    if (count >= COLUMNS)
        memcpy(to, from, 4 * COLUMNS);
    else
        for (int c = 0; c < COLUMNS; c++)
            to[c] = c < count ? from[c] : 0.0f;
}

/* Write the sum of each of COLUMNS vectors; the vectors are overwritten. */
static inline void sums(float *to, Vector *v) {
    for (int n = COLUMNS / 2; n > 0; n /= 2)
        for (int c = 0; c < n; c++)
            v[c] = pair_sums(v[2 * c], v[2 * c + 1]);
    for (int n = COLUMNS; n < LANES; n *= 2)
        v[0] = pair_sums(v[0], v[0]);
    memcpy(to, v, 4 * COLUMNS);
}

/* Write a block of S' after a step. */
static INLINE void step_again(int64_t size, Step p, const float *x, const float *u,
                              const float *before, float *after, const Kind kind) {
    for (int64_t j = 0; j * LANES < size; j++) {
        Vector decay = get(p.decay, j), w = get(p.w, j), b = get(p.b, j);
        for (int c = 0; c < COLUMNS; c++) {
            Vector s = decay * get(before + c * size, j) + w * x[c];
            if (kind == LOW_RANK)
                s += b * u[c];
            put(after + c * size, j, s);
        }
    }
}

/* Go one step back in a block. G is the gradient of S' after the step, without what o adds to it, and
becomes that of S' before the step. gx is written; `grads` is added to. */
static INLINE void step_back(int64_t size, Step p, Step grads, const float *go, const float *x,
                             const float *u, const float *before, const float *after, float *G,
                             float *gx, const Kind kind) {
    float gu[COLUMNS];
    Vector to_x[COLUMNS], to_u[COLUMNS];
    for (int c = 0; c < COLUMNS; c++)
        to_x[c] = to_u[c] = (Vector){0};
    for (int64_t j = 0; j * LANES < size; j++) {
        Vector q = get(p.q, j), w = get(p.w, j), b = get(p.b, j);
        Vector gq = get(grads.q, j), gw = get(grads.w, j), gb = get(grads.b, j);
        Vector gdecay = get(grads.decay, j);
        for (int c = 0; c < COLUMNS; c++) {
            Vector g = get(G + c * size, j) + q * go[c];
            put(G + c * size, j, g);
            gq += get(after + c * size, j) * go[c];
            gw += g * x[c];
            gdecay += g * get(before + c * size, j);
            to_x[c] += g * w;
            if (kind == LOW_RANK) {
                gb += g * u[c];
                to_u[c] += g * b;
            }
        }
        put(grads.q, j, gq);
        put(grads.w, j, gw);
        put(grads.decay, j, gdecay);
        if (kind == LOW_RANK)
            put(grads.b, j, gb);
    }
    sums(gx, to_x);
    if (kind == LOW_RANK)
        sums(gu, to_u);
    for (int64_t j = 0; j * LANES < size; j++) {
        Vector decay = get(p.decay, j), a = get(p.a, j), ga = get(grads.a, j);
        for (int c = 0; c < COLUMNS; c++) {
            Vector g = decay * get(G + c * size, j);
            if (kind != PLAIN) {
                float by = kind == DELTA ? gx[c] : gu[c];
                g += a * by;
                ga += get(before + c * size, j) * by;
            }
            put(G + c * size, j, g);
        }
        put(grads.a, j, ga);
    }
}

/* Write the gradients of a step's inputs, from the gradients of what `prepare` made of them. */
static void finish(const Rule *r, int64_t t, Step p, Step grads) {
    int64_t at = place(r, t);
    float beta = r->beta ? r->beta[at] : 1.0f;
    Vector gbeta = {0}, total = {0};
    for (int64_t j = 0; j * LANES < r->K; j++) {
        int64_t n = at * r->K + j * LANES, count = r->K - j * LANES;
        Vector decay = get(p.decay, j), k = load(r->k + n, count), ga = get(grads.a, j);
        Vector gk = beta * get(grads.w, j), g = get(grads.decay, j);
        if (r->a) {
            store(r->grads.a + n, ga, count);
            store(r->grads.b + n, get(grads.b, j), count);
        } else {
            gk -= decay * ga;
            g -= k * ga;
        }
        gbeta += k * get(grads.w, j);
        total += decay * g;
        store(r->grads.q + n, get(grads.q, j) * r->scale, count);
        store(r->grads.k + n, gk, count);
        if (r->by_channel)
            store(r->grads.g + n, decay * g, count);
    }
    if (r->beta)
        r->grads.beta[at] = sum(gbeta);
    if (!r->by_channel)
        r->grads.g[at] = sum(total);
}

/* Memory of the backward pass. G and S0: the gradient of S' and S' before the chunk, [columns, size].
S: S' after each step, [span, COLUMNS, size]. */
typedef struct {
    float *steps, *grads, *zeros, *G, *S0, *S;
} Memory;

/* Compute the states of a chunk again and go back, in the columns from `first` on. */
static INLINE void block_back(const Rule *r, const Memory *m, int64_t start, int64_t steps,
                              int64_t first, const Kind kind) {
    const int64_t size = r->size, block = COLUMNS * size, width = r->V - first;
    float *G = m->G + first * size, go[COLUMNS], x[COLUMNS], u[COLUMNS] = {0}, gx[COLUMNS];
    for (int64_t n = 0; n < 2 * steps; n++) {
        int64_t i = n < steps ? n : 2 * steps - 1 - n, at = place(r, start + i) * r->V + first;
        int fresh = begins(r, start + i);
        const float *before = fresh ? m->zeros : i ? m->S + (i - 1) * block : m->S0 + first * size;
        float *after = m->S + i * block;
        Step p = step_at(m->steps, i, size), grads = step_at(m->grads, i, size);
        load_columns(x, r->v + at, width);
        if (kind != PLAIN)
            load_columns(u, r->u + at, width);
        for (int c = 0; kind == DELTA && c < COLUMNS; c++)
            x[c] += u[c];
        if (n < steps) {
            step_again(size, p, x, u, before, after, kind);
            continue;
        }
        load_columns(go, r->grads.o + at, width);
        step_back(size, p, grads, go, x, u, before, after, G, gx, kind);
        memcpy(r->grads.v + at, gx, 4 * least(COLUMNS, width));
        if (fresh)
            memset(G, 0, 4 * block);
    }
}

static void backward(const Rule *r, float *scratch) {
    int64_t block = COLUMNS * r->size, all_blocks = blocks_of(r->V) * block;
    float *zeros = scratch + 10 * r->span * r->size, *G = zeros + block, *S0 = G + all_blocks;
    Memory m = {scratch, scratch + 5 * r->span * r->size, zeros, G, S0, S0 + all_blocks};
    memset(zeros, 0, 4 * (block + 2 * all_blocks));
    for (int64_t start = (r->length - 1) / r->span * r->span; start >= 0; start -= r->span) {
        int64_t steps = least(r->span, r->length - start);
        for (int64_t i = 0; i < steps; i++)
            prepare(r, start + i, step_at(m.steps, i, r->size));
        for (int64_t n = 0; start > 0 && n < r->K; n++)
            for (int64_t v = 0; v < r->V; v++)
                m.S0[v * r->size + n] = state(r, start)[n * r->V + v];
        memset(m.grads, 0, 4 * 5 * steps * r->size);
        for (int64_t first = 0; first < r->V; first += COLUMNS)
            if (r->a)
                block_back(r, &m, start, steps, first, LOW_RANK);
            else if (r->beta)
                block_back(r, &m, start, steps, first, DELTA);
            else
                block_back(r, &m, start, steps, first, PLAIN);
        for (int64_t i = 0; i < steps; i++)
            finish(r, start + i, step_at(m.steps, i, r->size), step_at(m.grads, i, r->size));
    }
}

/* Compute o and u, or where o is null the gradients. A job is a head of a row. */
int64_t recurrence(const void *given, int64_t begin, int64_t end) {
    Rule r;
    memcpy(&r, given, offsetof(Rule, size));
    r.size = vectors_of(r.K) * LANES;
    int64_t ahead = 10 * r.size + r.K * WIDEST * LANES;
    int64_t back = (10 * r.span + (1 + 2 * blocks_of(r.V) + r.span) * COLUMNS) * r.size;
    float *scratch = (float *)allocate(vectors_of(r.o ? ahead : back));
    if (!scratch)
        return 1;
    for (int64_t i = begin; i < end; i++) {
        r.row = i / r.heads;
        r.head = i % r.heads;
        if (r.o)
            forward(&r, scratch);
        else
            backward(&r, scratch);
    }
    free(scratch);
    return 0;
}
