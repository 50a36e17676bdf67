// Packs weights into panels (panels.h).
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "panels.h"

namespace {

float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

float from_half(uint16_t half) {
    uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);  // infinite or not a number
    return from_bits(sign | to_bits(from_bits(rest << 13) * 0x1p112f));              // right for subnormals too
}

// Rounds to nearest even; what is too large becomes infinite.
uint16_t to_half(float value) {
    uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest >= 0x477ff000) return uint16_t(sign | 0x7c00);
    if (rest < 0x38800000) {  // subnormal: adding 0.5 leaves the 2^-24ths in the last bits
        return uint16_t(sign | (to_bits(from_bits(rest) + 0.5f) - to_bits(0.5f)));
    }
    return uint16_t(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}

float from_bfloat(uint16_t bits) { return from_bits(uint32_t(bits) << 16); }

uint16_t to_bfloat(float value) {
    uint32_t bits = to_bits(value);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

bool finite_half(uint16_t half) { return (half & 0x7c00) != 0x7c00; }
bool finite_bfloat(uint16_t bits) { return (bits & 0x7f80) != 0x7f80; }

// One row of the weight as fp32; false where it is not finite.
bool read_row(const void* weight, int32_t source, int64_t row, int64_t K, float* to) {
    if (source == TR_FLOAT32) {
        std::memcpy(to, static_cast<const float*>(weight) + row * K, size_t(K) * 4);
    } else {
        const uint16_t* from = static_cast<const uint16_t*>(weight) + row * K;
        if (source == TR_FLOAT16) {
            for (int64_t k = 0; k < K; k++) to[k] = from_half(from[k]);
        } else {
            for (int64_t k = 0; k < K; k++) to[k] = from_bfloat(from[k]);
        }
    }
    uint32_t largest = 0;
    for (int64_t k = 0; k < K; k++) largest = std::max(largest, to_bits(to[k]) & 0x7fffffff);
    return largest < 0x7f800000;
}

// Output `n` of a panel with int8 weights.
void pack_int8(const float* row, int64_t K, int n, char* panel) {
    float largest = 0;
    for (int64_t k = 0; k < K; k++) largest = std::max(largest, std::fabs(row[k]));
    bool nothing = largest < 1e-30f;  // the quotient would overflow
    float factor = nothing ? 0 : 127 / largest;
    int8_t* weights = reinterpret_cast<int8_t*>(panel + kPanel * 12);
    int32_t sum = 0;
    for (int64_t k = 0; k < K; k++) {
        int32_t code = int32_t(std::nearbyint(row[k] * factor));
        weights[(k / 4 * kPanel + n) * 4 + k % 4] = int8_t(code);
        sum += code;
    }
    reinterpret_cast<float*>(panel)[kPanel + n] = nothing ? 0 : largest / 127;
    reinterpret_cast<int32_t*>(panel)[2 * kPanel + n] = 128 * sum;
}

// Output `n` of a panel; false where the type can't hold a weight.
bool pack_row(int32_t type, const float* row, int64_t K, int n, char* panel) {
    char* weights = panel + kPanel * 4;
    bool fine = true;
    if (type == TR_FLOAT32) {
        float* to = reinterpret_cast<float*>(weights) + n;
        for (int64_t k = 0; k < K; k++) to[k * kPanel] = row[k];
    } else if (type == TR_FLOAT16) {
        uint16_t* to = reinterpret_cast<uint16_t*>(weights) + n;
        for (int64_t k = 0; k < K; k++) fine &= finite_half(to[k * kPanel] = to_half(row[k]));
    } else if (type == TR_BFLOAT16) {
        uint16_t* to = reinterpret_cast<uint16_t*>(weights) + n;
        for (int64_t k = 0; k < K; k++) fine &= finite_bfloat(to[k * kPanel] = to_bfloat(row[k]));
    } else {
        pack_int8(row, K, n, panel);
    }
    return fine;
}

}  // namespace

int64_t tr_packed_bytes(int32_t type, int64_t N, int64_t K) { return panel_count(N) * panel_bytes(type, K); }

int32_t tr_pack(int32_t type, int64_t N, int64_t K, const void* weight, int32_t source, const float* bias, void* to) {
    std::vector<float> row(static_cast<size_t>(K));
    std::memset(to, 0, static_cast<size_t>(tr_packed_bytes(type, N, K)));
    for (int64_t n = 0; n < N; n++) {
        char* panel = static_cast<char*>(to) + n / kPanel * panel_bytes(type, K);
        if (!read_row(weight, source, n, K, row.data())) return -1;
        if (!pack_row(type, row.data(), K, int(n % kPanel), panel)) return -1;
        if (bias) reinterpret_cast<float*>(panel)[n % kPanel] = bias[n];
    }
    return 0;
}
