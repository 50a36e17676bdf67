// The inner loops of a product: R rows of activations times one panel of weights.
//
// Floats: every output is one chain of (fused, where the machine has it) multiply-adds over k = 0 … K - 1 that starts at
// zero, so its value depends neither on R nor on the vector's width. int8: exact sums in int32.
#pragma once
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>

#include "panels.h"
#include "simd.h"

// Else the compiler keeps the accumulators of several kernels in memory.
#define NEVER_INLINE __attribute__((noinline))

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
constexpr int kVectors = kPanel / W;  // of a panel

// Rows of a kernel: with the narrowest columns used (two vectors) they and one row's input still fit the registers.
constexpr int kRows = kRegisters == 32 ? 14 : 6;
// Vectors of a panel that are summed together: all of them when few rows leave room, so that memory is read in order.
constexpr int columns(int rows) {
    int vectors = kVectors;
    while (vectors > 2 && rows * vectors > kRegisters - 4) vectors /= 2;
    return vectors;
}

// Panels that few rows take side by side: several streams are read faster than one, and more sums wait less for each
// other.
constexpr int side_by_side(int rows) {
    int panels = 4;
    while (panels > 1 && rows * panels * kVectors > kRegisters - 8) panels /= 2;
    return panels;
}

// Inputs that a panel's columns take in turn, where they are summed a part at a time: the next part finds them cached.
constexpr int64_t kBlock = 128;

// Bytes that are asked for ahead of their use; prefetching by hardware stops at every page.
constexpr int64_t kAhead = 2048;

template <int bytes>
static inline void fetch(const void* at) {
#pragma GCC unroll 2
    for (int i = 0; i < bytes; i += 64) prefetch(static_cast<const char*>(at) + kAhead + i);
}

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

// sums[(s * R + r) * 32 + n] = sum over k of x[r * ldx + k] * w[s][k * 32 + n] for S panels that lie `apart` bytes.
template <class Type, int R, int S>
NEVER_INLINE void multiply(const float* x, int64_t ldx, const char* weights, int64_t apart, int64_t K, float* sums) {
    constexpr int C = S > 1 ? kVectors : columns(R);
    constexpr int64_t row_bytes = kPanel * sizeof(typename Type::Element);
    const int64_t block = C < kVectors ? kBlock : K;
    for (int64_t from = 0; from < K; from += block) {
        const int64_t to = std::min(from + block, K);
        for (int first = 0; first < kVectors; first += C) {
            floats total[S][R][C];
            auto each = [&](auto&& take) {
#pragma GCC unroll 4
                for (int s = 0; s < S; s++)
#pragma GCC unroll 16
                    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                        for (int c = 0; c < C; c++) take(total[s][r][c], sums + (s * R + r) * kPanel + (first + c) * W);
            };
            each([&](floats& sum, const float* before) { sum = from ? load(before) : floats{}; });
            const char* at = weights + from * row_bytes + first * W * sizeof(typename Type::Element);
            for (int64_t k = from; k < to; k++, at += row_bytes) {
#pragma GCC unroll 4
                for (int s = 0; s < S; s++) {
                    const auto* w = reinterpret_cast<const typename Type::Element*>(at + s * apart);
                    floats wide[C];
#pragma GCC unroll 8
                    for (int c = 0; c < C; c++) wide[c] = Type::widen(w + c * W);
                    if (first == 0) fetch<row_bytes>(w);
#pragma GCC unroll 16
                    for (int r = 0; r < R; r++) {
                        floats input = splat(x[r * ldx + k]);
#pragma GCC unroll 8
                        for (int c = 0; c < C; c++) total[s][r][c] = fma(input, wide[c], total[s][r][c]);
                    }
                }
            }
            each([](floats& sum, float* after) { store(after, sum); });
        }
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

static inline ints load_ints(const void* from) {
    ints v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

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

// sums[(s * R + r) * 32 + n] = sum over k of x[r * ldx + k] * w[s][(k / 4 * 32 + n) * 4 + k % 4]; K is a multiple of 4.
template <int R, int S>
NEVER_INLINE void multiply_int8(const int8_t* x, int64_t ldx, const char* weights, int64_t apart, int64_t K,
                                int32_t* sums) {
    constexpr int C = S > 1 ? kVectors : columns(R);
    const int64_t block = C < kVectors ? kBlock * 4 : K;
    for (int64_t from = 0; from < K; from += block) {
        const int64_t to = std::min(from + block, K);
        for (int first = 0; first < kVectors; first += C) {
            ints total[S][R][C];
            auto each = [&](auto&& take) {
#pragma GCC unroll 4
                for (int s = 0; s < S; s++)
#pragma GCC unroll 16
                    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                        for (int c = 0; c < C; c++) take(total[s][r][c], sums + (s * R + r) * kPanel + (first + c) * W);
            };
            each([&](ints& sum, const int32_t* before) { sum = from ? load_ints(before) : ints{}; });
            const char* at = weights + (from * kPanel + first * W * 4);
            for (int64_t k = from; k < to; k += 4, at += kPanel * 4) {
#pragma GCC unroll 4
                for (int s = 0; s < S; s++) {
                    ints four[C];
#pragma GCC unroll 8
                    for (int c = 0; c < C; c++) four[c] = load_ints(at + s * apart + c * W * 4);
                    if (first == 0) fetch<kPanel * 4>(at + s * apart);
#pragma GCC unroll 16
                    for (int r = 0; r < R; r++) {
                        int32_t codes;
                        std::memcpy(&codes, x + r * ldx + k, 4);
                        ints input = ints{} + codes;
#pragma GCC unroll 8
                        for (int c = 0; c < C; c++) total[s][r][c] = dot(total[s][r][c], input, four[c]);
                    }
                }
            }
            each([](ints& sum, int32_t* after) { std::memcpy(after, &sum, sizeof sum); });
        }
    }
}
