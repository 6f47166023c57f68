/* The hot loops of a round: int8 and int4 with a scale per 64 values, their weighted sum, and the outer step; and those
 * of fragments: blocks at any addresses.
 *
 * The numpy code (`StepWidth` in codec/scaled.py, `_numpy_sgd` in outer.py, `_items` in indexspace.py, `_compare` and
 * `_mix` in mixing.py) is the reference: both give the same bits. So
 * each operation is a single, separately rounded float32 operation in the reference's order: compiled with
 * -ffp-contract=off, never with -ffast-math. Sums of steps are of integers, and exact. No function allocates or writes
 * anything but its results, so any number of threads may call it, and the caller (ctypes) has released Python's lock.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 64
#define SCALE_MIN 0x0080u
/* Blocks fetched before they are used (measured), the values in 64 bytes, and the rows whose squares are added in float32. */
#define AHEAD 16
#define LINE_VALUES 16
#define ROWS 1024

/* The widest vectors of this CPU are chosen when the library is loaded. Plain x86-64 has no instruction to round. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__) && !defined(ONE_CPU)
#define EACH_CPU __attribute__((target_clones("avx512f", "avx2", "sse4.1", "default")))
#else
#define EACH_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Of both widths: the largest step that encoding makes, and the last scale with which the lowest step is finite. */
INLINE float most_of(int width) { return width == 8 ? 127.0f : 7.0f; }
INLINE uint32_t scale_max_of(int width) { return width == 8 ? 0x7BFFu : 0x7DFFu; }

/* The scale of a block, a bfloat16, and its steps, before which -1 is returned if a value is NaN or beyond the limit. */
INLINE int32_t quantise(const float *restrict values, int width, uint32_t limit, int8_t *restrict steps) {
    float most = most_of(width);
    uint32_t peak = 0;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t size = bits_of(values[i]) & 0x7FFFFFFFu;
        peak = size > peak ? size : peak;
    }
    if (peak > limit) return -1;
    uint32_t bits = (bits_of(float_of(peak) / most) + 0xFFFFu) >> 16;
    bits = bits < SCALE_MIN ? SCALE_MIN : bits;
    bits = bits > scale_max_of(width) ? scale_max_of(width) : bits;
    bits = peak > 0 ? bits : 0;
    float inverse = bits > 0 ? 1.0f / float_of(bits << 16) : 0.0f;
    /* Of integers, limits cost one instruction each; the largest value has few steps more than the scale allows. */
    int32_t whole[BLOCK], last = (int32_t)most;
    for (int i = 0; i < BLOCK; i++) {
        int32_t exact = (int32_t)rintf(inverse * values[i]);
        exact = exact < -last ? -last : exact;
        whole[i] = exact > last ? last : exact;
    }
    for (int i = 0; i < BLOCK; i++) steps[i] = (int8_t)whole[i];
    return (int32_t)bits;
}

/* Coded blocks are n scales and then the packed steps, at any address. */
INLINE uint32_t scale_of(const uint8_t *data, ptrdiff_t block) {
    uint16_t scale;
    memcpy(&scale, data + 2 * block, sizeof scale);
    return scale;
}

/* Whether encoding can have made all scales. Every step is possible. */
INLINE int are_scales(const uint8_t *data, ptrdiff_t n, int width) {
    int wrong = 0;
    for (ptrdiff_t b = 0; b < n; b++) {
        uint32_t scale = scale_of(data, b);
        wrong |= (scale != 0) & ((scale < SCALE_MIN) | (scale > scale_max_of(width)));
    }
    return !wrong;
}

/* The steps of a block, unpacked into `room` where that is needed. Step i of an int4 block is in the low half of byte i,
 * step i + 32 in its high half. */
INLINE const int8_t *steps_of(const uint8_t *data, ptrdiff_t n, ptrdiff_t block, int width, int8_t *restrict room) {
    const uint8_t *packed = data + 2 * n + block * (BLOCK / 8 * width);
    if (width == 8) return (const int8_t *)packed;
    for (int i = 0; i < BLOCK / 2; i++) {
        room[i] = (int8_t)((int8_t)(uint8_t)(packed[i] << 4) >> 4);
        room[i + BLOCK / 2] = (int8_t)((int8_t)packed[i] >> 4);
    }
    return room;
}

INLINE int encode_of(const float *values, const float *minus, ptrdiff_t n, int width, float bound, uint8_t *data) {
    for (ptrdiff_t b = 0; b < n; b++) {
        float difference[BLOCK];
        int8_t steps[BLOCK];
        const float *block = values + b * BLOCK;
        if (minus != NULL) {
            for (int i = 0; i < BLOCK; i++) difference[i] = block[i] - minus[b * BLOCK + i];
            block = difference;
        }
        int32_t scale = quantise(block, width, bits_of(bound), steps);
        if (scale < 0) return -1;
        uint16_t half = (uint16_t)scale;
        memcpy(data + 2 * b, &half, sizeof half);
        uint8_t *out = data + 2 * n + b * (BLOCK / 8 * width);
        if (width == 8) {
            memcpy(out, steps, BLOCK);
        } else {
            for (int i = 0; i < BLOCK / 2; i++) {
                out[i] = (uint8_t)(((uint8_t)steps[i] & 15u) | ((uint8_t)steps[i + BLOCK / 2] << 4));
            }
        }
    }
    return 0;
}

INLINE int decode_of(const uint8_t *data, ptrdiff_t n, int width, float *restrict values) {
    if (!are_scales(data, n, width)) return -1;
    for (ptrdiff_t b = 0; b < n; b++) {
        int8_t room[BLOCK];
        const int8_t *steps = steps_of(data, n, b, width, room);
        float scale = float_of(scale_of(data, b) << 16);
        for (int i = 0; i < BLOCK; i++) values[b * BLOCK + i] = (float)steps[i] * scale;
    }
    return 0;
}

INLINE int add_of(const uint8_t *data, ptrdiff_t n, int width, float share, float *restrict sum) {
    if (!are_scales(data, n, width)) return -1;
    for (ptrdiff_t b = 0; b < n; b++) {
        int8_t room[BLOCK];
        const int8_t *steps = steps_of(data, n, b, width, room);
        float scale = float_of(scale_of(data, b) << 16);
        for (int i = 0; i < BLOCK; i++) {
            float value = (float)steps[i] * scale;
            value = value * share;
            sum[b * BLOCK + i] = sum[b * BLOCK + i] + value;
        }
    }
    return 0;
}

INLINE int squares_of(const uint8_t *data, ptrdiff_t n, int width, double *restrict norms) {
    if (!are_scales(data, n, width)) return -1;
    for (ptrdiff_t b = 0; b < n; b++) {
        int8_t room[BLOCK];
        const int8_t *steps = steps_of(data, n, b, width, room);
        int32_t sum = 0;
        for (int i = 0; i < BLOCK; i++) sum += (int16_t)steps[i] * (int16_t)steps[i];
        double scale = (double)float_of(scale_of(data, b) << 16);
        norms[b] = scale * scale * (double)sum;
    }
    return 0;
}

/* Blocks of a fragment lie far apart: while one is used, those after it are on their way from memory. */
INLINE void fetch_ahead(float *const *blocks, ptrdiff_t block, ptrdiff_t n) {
#if defined(__GNUC__)
    const float *next = block + AHEAD < n ? blocks[block + AHEAD] : NULL;
    for (int i = 0; next != NULL && i < BLOCK; i += LINE_VALUES) __builtin_prefetch(next + i);
#endif
}

/* What Python calls; the compiler makes a loop for each width. All return 0, or -1 if a value or scale is not allowed.
 *
 * Code n blocks of values, or of values - minus, of which none is NaN or farther than `bound` from 0. */
EACH_CPU int encode(const float *values, const float *minus, ptrdiff_t n, int width, float bound, uint8_t *data) {
    return width == 8 ? encode_of(values, minus, n, 8, bound, data) : encode_of(values, minus, n, 4, bound, data);
}

/* values = step · scale. */
EACH_CPU int decode(const uint8_t *data, ptrdiff_t n, int width, float *values) {
    return width == 8 ? decode_of(data, n, 8, values) : decode_of(data, n, 4, values);
}

/* sum += (step · scale) · share. */
EACH_CPU int add(const uint8_t *data, ptrdiff_t n, int width, float share, float *sum) {
    return width == 8 ? add_of(data, n, 8, share, sum) : add_of(data, n, 4, share, sum);
}

/* The squared norm of each block: scale² times the sum of the squared steps. */
EACH_CPU int squares(const uint8_t *data, ptrdiff_t n, int width, double *norms) {
    return width == 8 ? squares_of(data, n, 8, norms) : squares_of(data, n, 4, norms);
}

/* sgd (no moment), sgdm, nesterov: m = factor · m + g; anchor -= lr · (g, m, or factor · m + g). */
EACH_CPU int sgd_step(float *restrict anchor, float *restrict moment, const float *restrict gradient, ptrdiff_t n,
                      float lr, float factor, int nesterov) {
    if (moment == NULL) {
        for (ptrdiff_t i = 0; i < n; i++) {
            float update = gradient[i] * lr;
            anchor[i] = anchor[i] - update;
        }
        return 0;
    }
    for (ptrdiff_t i = 0; i < n; i++) {
        float m = moment[i] * factor;
        m = m + gradient[i];
        moment[i] = m;
        float ahead = m * factor;
        ahead = ahead + gradient[i];
        float update = (nesterov ? ahead : m) * lr;
        anchor[i] = anchor[i] - update;
    }
    return 0;
}

/* Fragments: n blocks of float32 at these addresses, and as many rows of 64 values.
 *
 * Copy the blocks into the rows, or the rows into the blocks. Blocks at address 0 are left out. */
int gather(float *const *blocks, ptrdiff_t n, float *restrict rows) {
    for (ptrdiff_t b = 0; b < n; b++) {
        fetch_ahead(blocks, b, n);
        if (blocks[b] != NULL) memcpy(rows + b * BLOCK, blocks[b], BLOCK * sizeof *rows);
    }
    return 0;
}

int scatter(float *const *blocks, ptrdiff_t n, const float *restrict rows) {
    for (ptrdiff_t b = 0; b < n; b++) {
        fetch_ahead(blocks, b, n);
        if (blocks[b] != NULL) memcpy(blocks[b], rows + b * BLOCK, BLOCK * sizeof *rows);
    }
    return 0;
}

/* Add to sums, for each of the 64 places, the sum of the squares of the blocks there, and after these, of row - block. */
EACH_CPU int compare(float *const *blocks, ptrdiff_t n, const float *restrict rows, double *restrict sums) {
    for (ptrdiff_t first = 0; first < n; first += ROWS) {
        ptrdiff_t end = first + ROWS < n ? first + ROWS : n;
        float owns[BLOCK] = {0}, differences[BLOCK] = {0};
        for (ptrdiff_t b = first; b < end; b++) {
            fetch_ahead(blocks, b, n);
            const float *own = blocks[b], *row = rows + b * BLOCK;
            for (int i = 0; i < BLOCK; i++) {
                float value = own[i], difference = row[i] - own[i];
                value = value * value;
                difference = difference * difference;
                owns[i] = owns[i] + value;
                differences[i] = differences[i] + difference;
            }
        }
        for (int i = 0; i < BLOCK; i++) {
            sums[i] = sums[i] + (double)owns[i];
            sums[BLOCK + i] = sums[BLOCK + i] + (double)differences[i];
        }
    }
    return 0;
}

/* block += weight · (row - block), from the nearer end. */
EACH_CPU int mix(float *const *blocks, ptrdiff_t n, const float *restrict rows, const float *restrict weights) {
    for (ptrdiff_t b = 0; b < n; b++) {
        fetch_ahead(blocks, b, n);
        float *restrict own = blocks[b];
        const float *row = rows + b * BLOCK;
        int is_near = weights[b] < 0.5f;
        float share = is_near ? weights[b] : weights[b] - 1.0f;
        for (int i = 0; i < BLOCK; i++) {
            float change = row[i] - own[i];
            change = change * share;
            own[i] = (is_near ? own[i] : row[i]) + change;
        }
    }
    return 0;
}
