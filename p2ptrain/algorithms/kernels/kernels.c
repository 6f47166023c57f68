/* The hot loops of a round: int8 and int4 with a scale per 64 values, their weighted sum, and the outer step.
 *
 * The numpy code beside each call is the reference: both give the same bits. So each operation is a single, separately
 * rounded float32 operation in the reference's order: compiled with -ffp-contract=off, never with -ffast-math. Sums of
 * steps are of integers, and exact. No function allocates, and the caller (ctypes) has released Python's lock.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 64
#define SCALE_MIN 0x0080u
#define INF_BITS 0x7F800000u

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

/* The steps of one block, and its scale (a bfloat16, returned). -1: a value is not finite. */
INLINE int32_t quantise(const float *restrict values, float most, uint32_t scale_max, int8_t *restrict steps) {
    uint32_t peak = 0;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t size = bits_of(values[i]) & 0x7FFFFFFFu;
        peak = size > peak ? size : peak;
    }
    if (peak >= INF_BITS) return -1;
    uint32_t bits = (bits_of(float_of(peak) / most) + 0xFFFFu) >> 16;
    bits = bits < SCALE_MIN ? SCALE_MIN : bits;
    bits = bits > scale_max ? scale_max : bits;
    bits = peak > 0 ? bits : 0;
    float inverse = bits > 0 ? 1.0f / float_of(bits << 16) : 0.0f;
    for (int i = 0; i < BLOCK; i++) {
        float exact = rintf(inverse * values[i]);
        exact = exact < -most ? -most : exact;
        exact = exact > most ? most : exact;
        steps[i] = (int8_t)exact;
    }
    return (int32_t)bits;
}

/* Step i of an int4 block is in the low half of byte i, step i + 32 in its high half. */
INLINE void unpack(const uint8_t *restrict packed, int width, int8_t *restrict steps) {
    if (width == 8) {
        memcpy(steps, packed, BLOCK);
        return;
    }
    for (int i = 0; i < BLOCK / 2; i++) {
        steps[i] = (int8_t)((int8_t)(uint8_t)(packed[i] << 4) >> 4);
        steps[i + BLOCK / 2] = (int8_t)((int8_t)packed[i] >> 4);
    }
}

/* Code n blocks of finite values: n scales, then the packed steps. Returns 0, or -1 if a value is not finite. */
EACH_CPU int encode(const float *values, ptrdiff_t n, int width, float most, int scale_max, uint16_t *scales,
                    uint8_t *packed) {
    for (ptrdiff_t b = 0; b < n; b++) {
        int8_t steps[BLOCK];
        int32_t scale = quantise(values + b * BLOCK, most, (uint32_t)scale_max, steps);
        if (scale < 0) return -1;
        scales[b] = (uint16_t)scale;
        if (width == 8) {
            memcpy(packed + b * BLOCK, steps, BLOCK);
        } else {
            uint8_t *out = packed + b * (BLOCK / 2);
            for (int i = 0; i < BLOCK / 2; i++) {
                out[i] = (uint8_t)(((uint8_t)steps[i] & 15u) | ((uint8_t)steps[i + BLOCK / 2] << 4));
            }
        }
    }
    return 0;
}

/* values = step · scale. The scales were checked. */
EACH_CPU void decode(const uint16_t *scales, const uint8_t *packed, ptrdiff_t n, int width, float *values) {
    for (ptrdiff_t b = 0; b < n; b++) {
        int8_t steps[BLOCK];
        unpack(packed + b * (BLOCK / 8 * width), width, steps);
        float scale = float_of((uint32_t)scales[b] << 16);
        float *out = values + b * BLOCK;
        for (int i = 0; i < BLOCK; i++) out[i] = (float)steps[i] * scale;
    }
}

/* sum += (step · scale) · share. */
EACH_CPU void add(const uint16_t *scales, const uint8_t *packed, ptrdiff_t n, int width, float share, float *sum) {
    for (ptrdiff_t b = 0; b < n; b++) {
        int8_t steps[BLOCK];
        unpack(packed + b * (BLOCK / 8 * width), width, steps);
        float scale = float_of((uint32_t)scales[b] << 16);
        float *out = sum + b * BLOCK;
        for (int i = 0; i < BLOCK; i++) {
            float value = (float)steps[i] * scale;
            value = value * share;
            out[i] = out[i] + value;
        }
    }
}

/* The squared norm of each block: scale² times the sum of the squared steps. */
EACH_CPU void squares(const uint16_t *scales, const uint8_t *packed, ptrdiff_t n, int width, double *norms) {
    for (ptrdiff_t b = 0; b < n; b++) {
        int8_t steps[BLOCK];
        unpack(packed + b * (BLOCK / 8 * width), width, steps);
        int32_t sum = 0;
        for (int i = 0; i < BLOCK; i++) sum += (int32_t)steps[i] * (int32_t)steps[i];
        double scale = (double)float_of((uint32_t)scales[b] << 16);
        norms[b] = scale * scale * (double)sum;
    }
}

/* sgd (no moment), sgdm, nesterov: m = factor · m + g; anchor -= lr · (g, m, or factor · m + g). */
EACH_CPU void sgd_step(float *restrict anchor, float *restrict moment, const float *restrict gradient, ptrdiff_t n,
                       float lr, float factor, int nesterov) {
    if (moment == NULL) {
        for (ptrdiff_t i = 0; i < n; i++) {
            float update = gradient[i] * lr;
            anchor[i] = anchor[i] - update;
        }
        return;
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
}
