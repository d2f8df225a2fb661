/* A depthwise causal convolution with SiLU on a CPU; `compiled_form.py` calls it.

A job is a block of channels in one row of the batch, whose vectors go through time one after
another, with weights and gradients in registers. Backward computes the sums again. Jobs are
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
#define MOST_TAPS 8 /* as in compiled_form.py */

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

/* Compute y, or the gradients, of a vector of channels from `first` on. */
static INLINE void convolve(const Convolution *c, int64_t row, int64_t first, const int64_t taps,
                            const int backward) {
    int64_t count = least(LANES, c->channels - first), start = row * c->length;
    /* Of the last tokens: the inputs, and as much of their gradients as is known. */
    Vector x[MOST_TAPS], gx[MOST_TAPS], w[MOST_TAPS], gw[MOST_TAPS], gbias = {0};
    for (int64_t back = 0; back < taps; back++) {
        x[back] = gx[back] = gw[back] = (Vector){0};
        w[back] = load(c->w + back * c->channels + first, count);
    }
    Vector bias = c->bias ? load(c->bias + first, count) : (Vector){0};
    for (int64_t t = 0; t < c->length; t++) {
        int64_t token = start + t, here = token * c->channels + first;
        for (int64_t back = taps - 1; back > 0; back--)
            x[back] = x[back - 1], gx[back] = gx[back - 1];
        x[0] = load(c->x + here, count), gx[0] = (Vector){0};
        Vector sum = bias;
        for (int64_t back = 0; back < taps; back++)
            sum += reach(c, token, taps, back) * w[back] * x[back];
        Vector slope = c->silu ? sigmoid_of(sum) : (Vector){0} + 1.0f;
        if (!backward) {
            store(c->y + here, c->silu ? sum * slope : sum, count);
            continue;
        }
        Vector g = load(c->gy + here, count) * slope;
        if (c->silu)
            g *= 1.0f + sum * (1.0f - slope);
        gbias += g;
        for (int64_t back = 0; back < taps; back++) {
            Vector part = reach(c, token, taps, back) * g;
            gx[back] += part * w[back];
            gw[back] += part * x[back];
        }
        if (t >= taps - 1)
            store(c->gx + here - (taps - 1) * c->channels, gx[taps - 1], count);
    }
    if (!backward)
        return;
    for (int64_t back = 0; back < least(taps - 1, c->length); back++)
        store(c->gx + (start + c->length - 1 - back) * c->channels + first, gx[back], count);
    for (int64_t back = 0; back < taps; back++)
        store(c->gw + (row * taps + back) * c->channels + first, gw[back], count);
    store(c->gbias + row * c->channels + first, gbias, count);
}

int64_t convolution(const void *given, int64_t begin, int64_t end) {
    Convolution c;
    memcpy(&c, given, sizeof c);
    int64_t blocks = (c.channels + CHANNELS - 1) / CHANNELS;
    for (int64_t i = begin; i < end; i++) {
        int64_t row = i / blocks, first = i % blocks * CHANNELS;
        int64_t last = least(c.channels, first + CHANNELS);
        for (int64_t p = first; p < last; p += LANES)
            if (c.taps != 4)
                convolve(&c, row, p, c.taps, !c.y);
            else if (c.y) /* constants are unrolled */
                convolve(&c, row, p, 4, 0);
            else
                convolve(&c, row, p, 4, 1);
    }
    return 0;
}
