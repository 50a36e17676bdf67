// The inner loops of a product: R rows of activations times one panel of weights.
//
// Floats: every output is one chain of (fused, where the machine has it) multiply-adds over k = 0 … K - 1 that starts at
// zero, so its value depends neither on R nor on the vector's width. int8: exact sums in int32.
#pragma once
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "panels.h"
#include "simd.h"

#define NEVER_INLINE __attribute__((noinline))  // else the compiler keeps the accumulators of several kernels in memory

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
constexpr int kVectors = kPanel / W;  // of a panel

// Rows of a kernel: with the narrowest columns used (two vectors) they and one row's input still fit the registers.
constexpr int kRows = kRegisters == 32 ? 14 : 6;
// Vectors of a panel that are summed together: the whole panel when few rows leave room, so that memory is read in order.
constexpr int columns(int rows) {
    int vectors = kVectors;
    while (vectors > 2 && rows * vectors > kRegisters - 4) vectors /= 2;
    return vectors;
}

// Bytes that are asked for ahead of their use; prefetching by hardware stops at every page.
constexpr int64_t kAhead = 2048;

struct Float32 {
    using Element = float;
    static floats widen(const float* w) { return load(w); }
};
struct Float16 {
    using Element = uint16_t;
    static floats widen(const uint16_t* w) { return load_float16(w); }
};
struct BFloat16 {
    using Element = uint16_t;
    static floats widen(const uint16_t* w) { return load_bfloat16(w); }
};

// sums[r * 32 + n] = sum over k of x[r * ldx + k] * w[k * 32 + n]
template <class Type, int R>
NEVER_INLINE void multiply(const float* x, int64_t ldx, const void* weights, int64_t K, float* sums) {
    constexpr int C = columns(R);
    for (int first = 0; first < kVectors; first += C) {
        const auto* w = static_cast<const typename Type::Element*>(weights) + first * W;
        floats total[R][C] = {};
        for (int64_t k = 0; k < K; k++, w += kPanel) {
            floats wide[C];
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) {
                wide[c] = Type::widen(w + c * W);
                if (c * W * sizeof(*w) % 64 == 0) prefetch(reinterpret_cast<const char*>(w + c * W) + kAhead);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                floats input = splat(x[r * ldx + k]);
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) total[r][c] = fma(input, wide[c], total[r][c]);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) store(sums + r * kPanel + (first + c) * W, total[r][c]);
    }
}

// -- int8 -------------------------------------------------------------------------------------------------------------

// Activations are codes of -127 … 127; where the machine multiplies unsigned by signed bytes they lie 128 higher, and
// 128 times the sum of an output's weights (packed with them) comes off again.
#if defined(__AVX512VNNI__)
constexpr int kOffset = 128;
#else
constexpr int kOffset = 0;
#endif

typedef int8_t codes __attribute__((vector_size(W)));

// total[i] + the four codes in each lane of x times the four weights in the same lane of w.
static inline ints dot(ints total, ints x, ints w) {
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)x, (__m512i)w);
#elif defined(__AVX512BW__)
    // |x| times w with the sign of x: two products of 127 * 127 at most fit 16 bits.
    __m512i signed_w = _mm512_mask_sub_epi8((__m512i)w, _mm512_movepi8_mask((__m512i)x), __m512i{}, (__m512i)w);
    __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)x), signed_w);
    return total + (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)  // the same
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)x), _mm256_sign_epi8((__m256i)w, (__m256i)x));
    return total + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__SSE2__)
    auto odd = [](ints v) { return _mm_srai_epi16((__m128i)v, 8); };
    auto even = [](ints v) { return _mm_srai_epi16(_mm_slli_epi16((__m128i)v, 8), 8); };
    return total + (ints)_mm_madd_epi16(odd(x), odd(w)) + (ints)_mm_madd_epi16(even(x), even(w));
#else
    for (int shift = 24; shift >= 0; shift -= 8) total += ((x << shift) >> 24) * ((w << shift) >> 24);
    return total;
#endif
}

// sums[r * 32 + n] = sum over k of x[r * ldx + k] * w[(k / 4 * 32 + n) * 4 + k % 4]; K is a multiple of 4
template <int R>
NEVER_INLINE void multiply_int8(const int8_t* x, int64_t ldx, const void* weights, int64_t K, int32_t* sums) {
    constexpr int C = columns(R);
    for (int first = 0; first < kVectors; first += C) {
        const int8_t* w = static_cast<const int8_t*>(weights) + first * W * 4;
        ints total[R][C] = {};
        for (int64_t k = 0; k < K; k += 4, w += kPanel * 4) {
            ints four[C];
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) {
                std::memcpy(&four[c], w + c * W * 4, sizeof four[c]);
                if (c * W * 4 % 64 == 0) prefetch(w + c * W * 4 + kAhead);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                int32_t four_codes;
                std::memcpy(&four_codes, x + r * ldx + k, 4);
                ints input = ints{} + four_codes;
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) total[r][c] = dot(total[r][c], input, four[c]);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) std::memcpy(sums + r * kPanel + (first + c) * W, &total[r][c], sizeof(ints));
    }
}
