// The packed form of a weight, the same for every instruction set: panels of 32 outputs, one after another.
//
// A panel holds all that its outputs need, so that a product of few rows reads memory once, from front to back:
//   32 biases; for int8 also 32 scales and 32 sums of the quantised weights times 128; then the weights, for each input
//   32 outputs (int8: for each four inputs 32 outputs of four). Outputs beyond N are zeros.
#pragma once
#include <cstdint>

#include "kernels.h"

constexpr int kPanel = 32;   // outputs; a multiple of every vector's width
constexpr int kGroup = 64;   // int8: inputs are filled up with zeros to whole groups, a row of a matrix unit's tile

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }
inline int64_t panel_count(int64_t N) { return (N + kPanel - 1) / kPanel; }
inline int64_t packed_inputs(int32_t type, int64_t K) { return type == TR_INT8 ? round_up(K, kGroup) : K; }
inline int64_t element_bytes(int32_t type) { return type == TR_FLOAT32 ? 4 : type == TR_INT8 ? 1 : 2; }
inline int64_t panel_bytes(int32_t type, int64_t K) {
    int64_t head = kPanel * (type == TR_INT8 ? 12 : 4);
    return head + kPanel * packed_inputs(type, K) * element_bytes(type);
}

struct Panel {
    const float* bias;
    const float* scales;   // int8 only
    const int32_t* shifts; // int8 only
    const char* weights;

    Panel(const void* block, int32_t type, int64_t K, int64_t index) {
        const char* at = static_cast<const char*>(block) + index * panel_bytes(type, K);
        bias = reinterpret_cast<const float*>(at);
        scales = bias + kPanel;
        shifts = reinterpret_cast<const int32_t*>(scales + kPanel);
        weights = at + kPanel * (type == TR_INT8 ? 12 : 4);
    }
};
