#include "internal.h"
#include "simd.h"

void norm_row(const float* x, const float* gamma, const float* beta, float eps, int64_t width, float* y) {
    // Four sums side by side, added up in one order: a single chain would wait for itself.
    const int64_t whole = width / W * W, rest = width - whole;
    auto total = [&](auto term) {
        floats sums[4] = {};
        int64_t i = 0;
        for (; i + 4 * W <= whole; i += 4 * W)
            for (int j = 0; j < 4; j++) sums[j] = term(sums[j], load(x + i + j * W));
        for (; i < whole; i += W) sums[0] = term(sums[0], load(x + i));
        return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    };
    float mean = total([](floats s, floats v) { return s + v; });
    for (int64_t i = whole; i < width; i++) mean += x[i];
    mean /= float(width);
    const floats means = splat(mean);
    float variance = total([&](floats s, floats v) { return fma(v - means, v - means, s); });
    for (int64_t i = whole; i < width; i++) variance = fma1(x[i] - mean, x[i] - mean, variance);
    const float inverse = 1 / std::sqrt(variance / float(width) + eps);
    auto normed = [&](floats v, const float* g, const float* b, auto read) {
        v = (v - means) * splat(inverse);
        if (g) v = b ? fma(v, read(g), read(b)) : v * read(g);
        else if (b) v = v + read(b);
        return v;
    };
    auto at = [](const float* base, int64_t i) { return base ? base + i : nullptr; };
    for (int64_t i = 0; i < whole; i += W) store(y + i, normed(load(x + i), at(gamma, i), at(beta, i), load));
    if (rest) {
        auto some = [&](const float* from) { return load_some(from, rest); };
        store_some(y + whole, normed(some(x + whole), at(gamma, whole), at(beta, whole), some), rest);
    }
}

void run_norm(const TrNorm& norm, int64_t rows, Member& member) {
    const Part part(rows * norm.T, member);
    for (int64_t m = part.begin; m < part.end; m++)
        norm_row(norm.x + m * norm.ldx, norm.gamma, norm.beta, norm.eps, norm.width, norm.y + m * norm.ldy);
}
