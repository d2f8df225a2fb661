/* A depthwise causal convolution with SiLU on a CPU; `compiled_form.py` calls it.

A block is some channels in one row of the batch. Backward computes the sums again. Blocks are
independent of each other: any split of them gives the same bits.

x, y: [batch, length, channels].
w: [taps, channels], the tap of the present step first.
bias: [channels] or null.
same: 1 where the token so many steps back is in the same segment, else 0, [batch, length, taps] or
null.
gy, gx, gw, gbias: gradients; gw is [batch, taps, channels], gbias [batch, channels]. All but gy are
written. */

#include "../vectors.h"

#define CHANNELS 64 /* of a block */
#define VECTORS (CHANNELS / LANES)

typedef struct {
    const float *x, *w, *bias, *same;
    float *y;
    const float *gy;
    float *gx, *gw, *gbias;
    int64_t length, channels, taps, silu;
} Convolution;

/* The factor of the tap `back` steps before a token: 0 in another segment. */
static inline float reach(const Convolution *c, int64_t token, int64_t taps, int64_t back) {
    return c->same ? c->same[token * taps + back] : 1.0f;
}

/* Compute y, or where it is null the gradients, of the channels from `first` on. */
static INLINE void convolve(const Convolution *c, int64_t row, int64_t first, const int64_t taps) {
    int64_t width = least(CHANNELS, c->channels - first);
    Vector gbias[VECTORS] = {0};
    for (int64_t back = 0; !c->y && back < taps; back++)
        memset(c->gw + (row * taps + back) * c->channels + first, 0, 4 * width);
    for (int64_t t = 0; t < c->length; t++)
        for (int64_t v = 0; v * LANES < width; v++) {
            int64_t p = first + v * LANES, count = width - v * LANES, token = row * c->length + t;
            Vector sum = c->bias ? load(c->bias + p, count) : (Vector){0};
            for (int64_t back = 0; back < taps && back <= t; back++)
                sum += reach(c, token, taps, back) * load(c->w + back * c->channels + p, count) *
                       load(c->x + (token - back) * c->channels + p, count);
            Vector slope = c->silu ? sigmoid_of(sum) : (Vector){0} + 1.0f;
            if (c->y) {
                store(c->y + token * c->channels + p, c->silu ? sum * slope : sum, count);
                continue;
            }
            Vector g = load(c->gy + token * c->channels + p, count) * slope;
            if (c->silu)
                g *= 1.0f + sum * (1.0f - slope);
            gbias[v] += g;
            for (int64_t back = 0; back < taps && back <= t; back++) {
                Vector part = reach(c, token, taps, back) * g;
                int64_t at = (token - back) * c->channels + p, tap = back * c->channels + p;
                float *gw = c->gw + row * taps * c->channels + tap;
                Vector gx = part * load(c->w + tap, count);
                store(c->gx + at, back ? load(c->gx + at, count) + gx : gx, count);
                store(gw, load(gw, count) + part * load(c->x + at, count), count);
            }
        }
    for (int64_t v = 0; !c->y && v * LANES < width; v++)
        store(c->gbias + row * c->channels + first + v * LANES, gbias[v], width - v * LANES);
}

/* A job is a block of a row. */
int64_t convolution(const void *given, int64_t begin, int64_t end) {
    Convolution c;
    memcpy(&c, given, sizeof c);
    int64_t blocks = (c.channels + CHANNELS - 1) / CHANNELS;
    for (int64_t i = begin; i < end; i++) {
        int64_t row = i / blocks, first = i % blocks * CHANNELS;
        if (c.taps == 4) /* a constant is unrolled */
            convolve(&c, row, first, 4);
        else
            convolve(&c, row, first, c.taps);
    }
    return 0;
}
