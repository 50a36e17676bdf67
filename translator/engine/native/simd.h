// The compiler's vectors, W floats wide. What they compute depends on the instruction set only: a product and a sum are
// one rounding where it has a fused form (`fma`), and lanes are added up in one fixed order (`sum`).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float floats __attribute__((vector_size(4 * W)));
typedef float floats4 __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(4 * W)));
typedef uint32_t words __attribute__((vector_size(4 * W)));
typedef uint16_t halves __attribute__((vector_size(2 * W)));

static inline floats load(const float* from) {
    floats v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

static inline void store(float* to, floats v) { std::memcpy(to, &v, sizeof v); }

static inline floats splat(float x) { return x - floats{}; }  // x + 0 would cost an addition: it is not x for -0

// The first n < W floats; the other lanes are `rest`, and nothing behind is touched.
static inline floats load_some(const float* from, int64_t n, float rest = 0) {
#if defined(__AVX512F__)
    return (floats)_mm512_mask_loadu_ps((__m512)splat(rest), __mmask16((1u << n) - 1), from);
#elif defined(__AVX2__)
    const ints there = ints{0, 1, 2, 3, 4, 5, 6, 7} < int32_t(n);
    return there ? (floats)_mm256_maskload_ps(from, (__m256i)there) : splat(rest);
#else
    floats v = splat(rest);
    for (int64_t i = 0; i < n; i++) v[i] = from[i];
    return v;
#endif
}

static inline void store_some(float* to, floats v, int64_t n) { std::memcpy(to, &v, size_t(n) * sizeof(float)); }

static inline floats fma(floats a, floats b, floats c) {  // a * b + c
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

static inline float fma1(float a, float b, float c) {  // the same for one number
#if defined(__AVX2__) || defined(__AVX512F__) || (defined(__ARM_NEON) && defined(__aarch64__))
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

static inline floats max(floats a, floats b) { return a > b ? a : b; }  // b where either is NaN

// Four of the eight lanes of a and b.
template <int i, int j, int k, int l>
static inline floats4 shuffled(floats4 a, floats4 b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, i, j, k, l);
#else
    typedef int32_t ints4 __attribute__((vector_size(16)));
    return __builtin_shuffle(a, b, ints4{i, j, k, l});
#endif
}

// The upper half of the lanes put onto the lower until four are left.
template <class Fold>
static inline floats4 fold_to_four(floats v, [[maybe_unused]] Fold with) {
#if defined(__AVX512F__)
    typedef float floats8 __attribute__((vector_size(32)));
    floats8 half[2];
    std::memcpy(half, &v, sizeof v);
    const floats8 eight = with(half[0], half[1]);
#elif defined(__AVX2__)
    const floats eight = v;
#else
    return v;
#endif
#if defined(__AVX2__) || defined(__AVX512F__)
    floats4 quarter[2];
    std::memcpy(quarter, &eight, sizeof eight);
    return with(quarter[0], quarter[1]);
#endif
}

// Folds the lanes in halves, upper onto lower.
template <class Fold>
static inline float fold(floats v, Fold with) {
    floats4 q = fold_to_four(v, with);
    floats4 swapped = floats4{q[2], q[3], q[0], q[1]};
    q = with(q, swapped);
    swapped = floats4{q[1], q[0], q[3], q[2]};
    return with(q, swapped)[0];
}

static inline float sum(floats v) {
    return fold(v, [](auto a, auto b) { return a + b; });
}

// The sums of four vectors, each as above.
static inline floats4 sums(floats a, floats b, floats c, floats d) {
    auto plus = [](auto x, auto y) { return x + y; };
    const floats4 A = fold_to_four(a, plus), B = fold_to_four(b, plus);
    const floats4 C = fold_to_four(c, plus), D = fold_to_four(d, plus);
    // (A0 + A2, B0 + B2, A1 + A3, B1 + B3), and the same of C and D.
    const floats4 ab = shuffled<0, 4, 1, 5>(A, B) + shuffled<2, 6, 3, 7>(A, B);
    const floats4 cd = shuffled<0, 4, 1, 5>(C, D) + shuffled<2, 6, 3, 7>(C, D);
    return shuffled<0, 1, 4, 5>(ab, cd) + shuffled<2, 3, 6, 7>(ab, cd);
}

static inline float largest(floats v) {
    return fold(v, [](auto a, auto b) -> decltype(a) { return a > b ? a : b; });
}

// e to the x, about 1e-7 off relatively; below -86.6 it is exactly 0, NaN stays NaN.
static inline floats exp(floats x) {
    const floats magic = splat(0x1.8p23f);  // adding it rounds to a whole number, in the low bits
    floats shifted = fma(x, splat(1.44269504f), magic);
    floats n = shifted - magic;
    floats r = fma(n, splat(-0x1.62e4p-1f), x);  // ln 2 in two parts; n times the first, a short one, is exact
    r = fma(n, splat(-0x1.7f7d1cp-20f), r);
    floats p = splat(1.0f / 5040);
    p = fma(p, r, splat(1.0f / 720));
    p = fma(p, r, splat(1.0f / 120));
    p = fma(p, r, splat(1.0f / 24));
    p = fma(p, r, splat(1.0f / 6));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r, splat(1.0f));
    p = fma(p, r, splat(1.0f));
    // 2^n as 2 * 2^(n - 1): n may be 128.
    floats power = (floats)(((ints)shifted - (ints)magic + 126) << 23);
    floats y = (p + p) * power;
    y = x < splat(-86.6f) ? floats{} : y;
    return x > splat(88.72283f) ? splat(std::numeric_limits<float>::infinity()) : y;
}

// W numbers of two bytes as floats.
static inline floats load_bfloat16(const uint16_t* from) {
    halves h;
    std::memcpy(&h, from, sizeof h);
    return (floats)(__builtin_convertvector(h, words) << 16);
}

static inline floats load_float16(const uint16_t* from) {
#if defined(__AVX512F__)
    return (floats)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)from));  // "z": else GCC warns
#elif defined(__AVX2__)
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#else
    halves h;
    std::memcpy(&h, from, sizeof h);
    words bits = __builtin_convertvector(h, words);
    words magnitude = (bits & 0x7fff) << 13;
    floats value = (floats)magnitude * splat(0x1p112f);  // the exponent's bias, subnormal numbers too
    words finite = (words)value;
    words endless = magnitude | 0x7f800000;  // infinity, NaN
    return (floats)((magnitude >= 0x0f800000 ? endless : finite) | (bits & 0x8000) << 16);
#endif
}

static inline void prefetch(const void* address) { __builtin_prefetch(address); }
