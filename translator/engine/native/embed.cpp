#include "internal.h"
#include "simd.h"

namespace {

template <class Load>
void embed(const TrEmbed& c, Part part, int64_t size, Load load_table) {
    const char* table = static_cast<const char*>(c.table);
    for (int64_t r = part.begin; r < part.end; r++) {
        const char* token = table + c.ids[r] * c.width * size;
        const float* position = c.positions + int64_t(c.lengths[r]) * c.width;
        float* y = c.y + r * c.width;
        int64_t d = 0;
        // A product and a sum, each rounded: as PyTorch adds positions to scaled embeddings.
        for (; d + W <= c.width; d += W) store(y + d, load_table(token + d * size) * splat(c.scale) + load(position + d));
        if (d == c.width) continue;
        alignas(64) char rest[W * sizeof(float)] = {};
        std::memcpy(rest, token + d * size, size_t(c.width - d) * size);
        const floats last = load_table(rest) * splat(c.scale) + load_some(position + d, c.width - d);
        for (int64_t i = 0; d + i < c.width; i++) y[d + i] = last[i];
    }
}

}  // namespace

void run_embed(const TrEmbed& c, int64_t rows, Member& member) {
    const Part part(rows, member);
    switch (c.type) {
        case TR_FLOAT16:
            return embed(c, part, 2, [](const char* at) { return load_float16(reinterpret_cast<const uint16_t*>(at)); });
        case TR_BFLOAT16:
            return embed(c, part, 2, [](const char* at) { return load_bfloat16(reinterpret_cast<const uint16_t*>(at)); });
        default:
            return embed(c, part, 4, [](const char* at) { return load(reinterpret_cast<const float*>(at)); });
    }
}

void run_advance(const TrAdvance& c, int64_t rows, Member& member) {
    const Part part(rows, member);
    for (int64_t r = part.begin; r < part.end; r++) c.lengths[r]++;
}
