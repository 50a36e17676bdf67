// y = residual + activation(norm(x) Wᵀ + b) over packed weights (panels.h).
//
// At few rows memory sets the pace: each thread streams its own panels once, front to back. At many rows the threads
// share a grid of row parts and panel parts; a chunk of rows stays in the cache while all panels pass by. Which kernel
// runs and who runs it never changes a result: each output is one chain of sums (product_kernels.h).
#include <algorithm>
#include <array>
#include <utility>

#include "internal.h"
#include "panels.h"
#include "product_kernels.h"
#include "product_tiles.h"

namespace {

// -- the kernels by type and number of rows ---------------------------------------------------------------------------

// stride: bytes from one row of x to the next; apart: from one panel to the next
using Kernel = void (*)(const void* x, int64_t stride, const char* weights, int64_t apart, int64_t K, void* sums);

template <class Type, int R, int S>
void run_floats(const void* x, int64_t stride, const char* weights, int64_t apart, int64_t K, void* sums) {
    multiply<Type, R, S>(static_cast<const float*>(x), stride / 4, weights, apart, K, static_cast<float*>(sums));
}

template <int R, int S>
void run_int8(const void* x, int64_t stride, const char* weights, int64_t apart, int64_t K, void* sums) {
    multiply_int8<R, S>(static_cast<const int8_t*>(x), stride, weights, apart, K, static_cast<int32_t*>(sums));
}

using Kernels = std::array<std::array<Kernel, kRows>, 4>;  // [type][rows - 1]

template <bool side, int... R>
constexpr Kernels all_kernels(std::integer_sequence<int, R...>) {
    return {{{run_floats<Float32, R + 1, side ? side_by_side(R + 1) : 1>...},
             {run_floats<Float16, R + 1, side ? side_by_side(R + 1) : 1>...},
             {run_floats<BFloat16, R + 1, side ? side_by_side(R + 1) : 1>...},
             {run_int8<R + 1, side ? side_by_side(R + 1) : 1>...}}};
}

constexpr Kernels kOnePanel = all_kernels<false>(std::make_integer_sequence<int, kRows>());
constexpr Kernels kSideBySide = all_kernels<true>(std::make_integer_sequence<int, kRows>());

// -- activations in ---------------------------------------------------------------------------------------------------

// Codes -127 … 127 of one row, filled up with zeros to `padded`; returns what one unit is worth: NaN, with codes of zero,
// for a row that is not finite, so that its outputs are NaN and no other row's.
float quantise(const float* x, int64_t K, int64_t padded, int8_t* to) {
    words top = {};
    int64_t k = 0;
    for (; k + W <= K; k += W) {
        words bits = (words)load(x + k) & 0x7fffffff;  // order as whole numbers do, infinity and NaN last
        top = bits > top ? bits : top;
    }
    words rest = (words)load_some(x + k, K - k) & 0x7fffffff;
    top = rest > top ? rest : top;
    uint32_t bits = 0;
    for (int i = 0; i < W; i++) bits = std::max(bits, uint32_t(top[i]));
    float largest;
    std::memcpy(&largest, &bits, 4);
    std::memset(to, kOffset, size_t(padded));
    if (bits >= 0x7f800000) return std::numeric_limits<float>::quiet_NaN();
    if (largest < 1e-30f) return 0;  // the quotient would overflow
    const floats factor = splat(127 / largest), magic = splat(0x1.8p23f);  // adding it rounds to nearest even
    auto coded = [&](floats v) {
        ints whole = (ints)(v * factor + magic) - (ints)magic + kOffset;
        return __builtin_convertvector(whole, codes);
    };
    for (k = 0; k + W <= K; k += W) {
        codes some = coded(load(x + k));
        std::memcpy(to + k, &some, sizeof some);
    }
    codes some = coded(load_some(x + k, K - k));
    std::memcpy(to + k, &some, size_t(K - k));
    return largest / 127;
}

// Rows as the kernels read them: x itself, or a copy that is normalised, quantised or laid out better.
struct Inputs {
    const char* rows;
    int64_t stride;       // bytes
    const float* scales;  // int8: one a row

    Inputs from(int64_t row) const { return {rows + row * stride, stride, scales ? scales + row : nullptr}; }
};

class Preparation {
   public:
    Preparation(const TrProduct& p, int64_t M) : p(p), int8(p.type == TR_INT8) {
        // Rows a power of two apart fall on the same few places of the cache.
        const bool crowded = M > kRows && p.ldx % 512 == 0;
        needed = int8 || p.gamma || crowded;
        stride = int8 ? packed_inputs(TR_INT8, p.K) : round_up(p.K, 16) * 4;
        if (stride % 1024 == 0) stride += 64;
    }

    // Room for `count` rows, and for those that a tile reads behind the last one.
    int64_t room(int64_t count) const { return (count + 2 * kTile - 1) * stride; }
    size_t bytes(int64_t count) const { return size_t(room(count) + count * 4); }
    Inputs at(char* scratch, int64_t count) const {
        return {scratch, stride, int8 ? reinterpret_cast<float*>(scratch + room(count)) : nullptr};
    }

    // Writes row m of x as row `to` of a copy; `temporary` has room for K floats.
    void write(int64_t m, const Inputs& copy, int64_t to, float* temporary) const {
        const float* x = p.x + m * p.ldx;
        char* row = const_cast<char*>(copy.rows) + to * stride;
        float* plain = int8 ? temporary : reinterpret_cast<float*>(row);
        if (p.gamma) {
            norm_row(x, p.gamma, p.beta, p.eps, p.K, plain);
            x = plain;
        } else if (!int8) {
            std::memcpy(plain, x, size_t(p.K) * sizeof(float));
        }
        if (int8) const_cast<float*>(copy.scales)[to] = quantise(x, p.K, stride, reinterpret_cast<int8_t*>(row));
    }

    const TrProduct& p;
    const bool int8;
    bool needed;
    int64_t stride;  // bytes
};

// -- sums out ---------------------------------------------------------------------------------------------------------

// x Φ(x), with erfc for the tails so that no digits cancel; t times a polynomial in t = 1 / (1 + 0.35 z) is
// erfc(z) exp(z²) to 5e-9, a least-squares fit made for this place.
floats gelu(floats x) {
    floats z = max(x, -x) * splat(0.70710678f);
    z = z > splat(12.0f) ? splat(12.0f) : z;
    floats t = splat(1.0f) / fma(splat(0.35f), z, splat(1.0f));
    floats tail = splat(-0.19806756f);
    for (float c : {0.77271253f, -0.68118584f, 0.68498653f, -0.0086413463f, 0.23584828f, 0.19434743f})
        tail = fma(tail, t, splat(c));
    tail = tail * t * exp(-z * z);
    return splat(0.5f) * x * (x < 0 ? tail : splat(2.0f) - tail);
}

// Writes rows m … m + R - 1 of y from a panel's sums; scales: those of the rows' codes, null for floats.
void finish(const TrProduct& p, const Panel& panel, const void* sums, const float* scales, int64_t m, int R,
            int64_t n) {
    const int64_t wide = std::min<int64_t>(kPanel, p.N - n);
    for (int64_t c = 0; c < wide; c += W) {
        const floats bias = load(panel.bias + c), factor = scales ? load(panel.scales + c) : bias;
        const ints shift = scales && kOffset ? load_ints(panel.shifts + c) : ints{};
        for (int r = 0; r < R; r++) {
            const ints bits = load_ints(static_cast<const char*>(sums) + (r * kPanel + c) * 4);
            floats value = (floats)bits;
            if (scales) value = __builtin_convertvector(bits - shift, floats) * factor * splat(scales[r]);
            value += bias;
            if (p.activation == TR_RELU) value = value < 0 ? floats{} : value;
            if (p.activation == TR_GELU) value = gelu(value);
            float* y = p.y + (m + r) * p.ldy + n + c;
            const float* residual = p.residual ? p.residual + (m + r) * p.ldr + n + c : nullptr;
            if (c + W <= wide) {
                store(y, residual ? load(residual) + value : value);
            } else {
                store_some(y, residual ? load_some(residual, wide - c) + value : value, wide - c);
            }
        }
    }
}

// -- the whole --------------------------------------------------------------------------------------------------------

constexpr int kFew = 8;                // up to so many rows every thread prepares them all for itself
constexpr int64_t kChunk = 256 << 10;  // bytes of rows that stay in the cache while panels pass by

// The weights of a panel in fp32.
void widen(int32_t type, const void* weights, int64_t count, float* to) {
    const uint16_t* from = static_cast<const uint16_t*>(weights);
    if (type == TR_FLOAT16) {
        for (int64_t i = 0; i < count; i += W) store(to + i, load_float16(from + i));
    } else {
        for (int64_t i = 0; i < count; i += W) store(to + i, load_bfloat16(from + i));
    }
}

// What one thread multiplies: a part of the rows by a part of the panels.
struct Share {
    const TrProduct& p;
    int64_t row_begin, row_end, begin, end;  // rows, panels
    bool all_panels, tiles;
    float* wide;  // room for a panel in fp32, where that is worth while

    // Rows first … first + count - 1; row 0 of `inputs` is the first of them.
    void multiply(const Inputs& inputs, int64_t first, int64_t count) const {
        const int64_t most = tiles ? 2 * kTile : kRows, parts = (count + most - 1) / most;
        const int64_t step = tiles ? most : (count + parts - 1) / parts;
        const int side = parts == 1 && !tiles && !wide ? side_by_side(int(count)) : 1;
        for (int64_t index = begin; index < end;) {
            const int S = index + side <= end ? side : 1;
            if (wide) widen(p.type, Panel(p.weights, p.type, p.K, index).weights, kPanel * p.K, wide);
            for (int64_t row = 0; row < count; row += step)
                block(inputs.from(row), first + row, int(std::min(step, count - row)), index, S);
            index += S;
        }
    }

    // R rows by S panels.
    void block(const Inputs& inputs, int64_t m, int R, int64_t index, int S) const {
        const Panel panel(p.weights, p.type, p.K, index);
        const int64_t K = packed_inputs(p.type, p.K);
        alignas(64) float sums[std::max(kRows, 2 * kTile) * kPanel];
        if (tiles) {
            auto multiply = R > kTile ? multiply_tiles<true> : multiply_tiles<false>;
            multiply(inputs.rows, inputs.stride, panel.weights, K, reinterpret_cast<int32_t*>(sums));
        } else {
            const auto& kernels = (S > 1 ? kSideBySide : kOnePanel)[size_t(wide ? TR_FLOAT32 : p.type)];
            const char* weights = wide ? reinterpret_cast<const char*>(wide) : panel.weights;
            kernels[size_t(R - 1)](inputs.rows, inputs.stride, weights, panel_bytes(p.type, p.K), K, sums);
        }
        for (int s = 0; s < S; s++)
            finish(p, Panel(p.weights, p.type, p.K, index + s), sums + s * R * kPanel, inputs.scales, m, R,
                   (index + s) * kPanel);
    }
};

// The rows and panels of one of the team's threads: as many row parts as leave each a few kernels' rows; the threads of
// a row part share its panels.
Share share(const TrProduct& p, int64_t M, const Member& member) {
    int row_parts = 1;
    for (int parts = 2; parts <= member.count; parts++)
        if (member.count % parts == 0 && M >= parts * 4 * kRows) row_parts = parts;
    const int panel_parts = member.count / row_parts;
    const int64_t row_part = member.index / panel_parts, panel_part = member.index % panel_parts;
    const int64_t panels = panel_count(p.N);
    const bool tiles = kTiles && p.type == TR_INT8 && M > kRows;
    return {p, M * row_part / row_parts, M * (row_part + 1) / row_parts, panels * panel_part / panel_parts,
            panels * (panel_part + 1) / panel_parts, panel_parts == 1, tiles, nullptr};
}

}  // namespace

void run_product(const TrProduct& p, int64_t rows, Member& member) {
    const int64_t M = rows * p.T;
    Share mine = share(p, M, member);
    const int64_t row_bytes = p.K * (p.type == TR_INT8 ? 1 : 4), block = mine.tiles ? 2 * kTile : kRows;
    const int64_t step = std::max<int64_t>(4, kChunk / row_bytes / block) * block;
    const int64_t chunk = std::min(step, mine.row_end - mine.row_begin);
    const bool half = p.type == TR_FLOAT16 || p.type == TR_BFLOAT16;
    if (half && chunk > 2 * kRows) mine.wide = reinterpret_cast<float*>(member.own(size_t(p.K) * kPanel * 4));
    const TileUnit unit(mine.tiles);

    Preparation preparation(p, M);
    float* temporary = reinterpret_cast<float*>(member.own(size_t(p.K) * sizeof(float)));
    Inputs inputs = {reinterpret_cast<const char*>(p.x), p.ldx * 4, nullptr};
    const bool together = preparation.needed && M > kFew && !mine.all_panels;
    const bool alone = preparation.needed && !together;
    if (together) {
        inputs = preparation.at(member.shared(preparation.bytes(M)), M);
        Part part(M, member);
        for (int64_t m = part.begin; m < part.end; m++) preparation.write(m, inputs, m, temporary);
        member.barrier();
    }
    const Inputs copy = preparation.at(alone ? member.own(preparation.bytes(chunk)) : nullptr, chunk);
    for (int64_t first = mine.row_begin; first < mine.row_end; first += step) {
        const int64_t count = std::min(step, mine.row_end - first);
        for (int64_t r = 0; alone && mine.begin < mine.end && r < count; r++)
            preparation.write(first + r, copy, r, temporary);
        mine.multiply(alone ? copy : inputs.from(first), first, count);
    }
}
