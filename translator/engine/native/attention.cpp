#include <algorithm>

#include "internal.h"
#include "simd.h"

namespace {

// The dot product of one query with one key, in an order that only D_head decides.
float dot(const float* q, const float* k, int64_t width) {
    floats sums = {};
    int64_t d = 0;
    for (; d + W <= width; d += W) sums = fma(load(q + d), load(k + d), sums);
    if (d < width) sums = fma(load_some(q + d, width - d), load_some(k + d, width - d), sums);
    return sum(sums);
}

// One query head over `seen` keys, of which key(s) and value(s) give the rows and shown(s) says which count.
template <class Key, class Value, class Shown>
void attend(const float* q, int64_t width, int64_t seen, float scale, Key key, Value value, Shown shown, float* weights,
            float* y) {
    const float never = -std::numeric_limits<float>::infinity();
    float most = never;
    const int64_t padded = (seen + W - 1) / W * W;
    for (int64_t s = 0; s < padded; s++) {
        weights[s] = s < seen && shown(s) ? dot(q, key(s), width) * scale : never;
        most = weights[s] > most ? weights[s] : most;
    }
    floats total = {};
    for (int64_t s = 0; s < padded; s += W) {
        floats w = load(weights + s);
        w = w == splat(never) ? floats{} : exp(w - splat(most));
        store(weights + s, w);
        total = total + w;
    }
    const float sum_of_weights = sum(total);
    const float inverse = sum_of_weights == 0 ? 0 : 1 / sum_of_weights;
    std::fill(y, y + width, 0.0f);
    for (int64_t s = 0; s < seen; s++) {
        if (!shown(s)) continue;
        const float* v = value(s);
        for (int64_t d = 0; d < width; d++) y[d] = fma1(weights[s], v[d], y[d]);
    }
    for (int64_t d = 0; d < width; d++) y[d] *= inverse;
}

}  // namespace

void run_cached(const TrCached& c, int64_t rows, Member& member) {
    const int64_t width = c.D_head;
    const Part writing(rows * c.H_kv, member);
    for (int64_t i = writing.begin; i < writing.end; i++) {
        const int64_t r = i / c.H_kv, h = i % c.H_kv, buffer = c.home ? c.home[r] : r;
        const int64_t slot = (buffer * c.H_kv + h) * c.slots + c.lengths[r];
        for (int64_t t = 0; t < c.T; t++) {
            const float* k = c.k + (r * c.T + t) * c.ldk + h * width;
            const float* v = c.v + (r * c.T + t) * c.ldv + h * width;
            std::copy(k, k + width, c.keys + (slot + t) * width);
            std::copy(v, v + width, c.values + (slot + t) * width);
        }
    }
    member.barrier();
    float* weights = reinterpret_cast<float*>(member.own(size_t(c.slots + W) * sizeof(float)));
    const Part part(rows * c.T * c.H, member);
    for (int64_t i = part.begin; i < part.end; i++) {
        const int64_t m = i / c.H, h = i % c.H, r = m / c.T, t = m % c.T, shared = h / (c.H / c.H_kv);
        auto at = [&](int64_t s) {
            const int64_t buffer = c.origin ? c.origin[r * c.ld_origin + s] : r;
            return ((buffer * c.H_kv + shared) * c.slots + s) * width;
        };
        attend(
            c.q + m * c.ldq + h * width, width, c.lengths[r] + t + 1, c.scale,
            [&](int64_t s) { return c.keys + at(s); }, [&](int64_t s) { return c.values + at(s); },
            [](int64_t) { return true; }, weights, c.y + m * c.ldy + h * width);
    }
}

void run_dense(const TrDense& c, int64_t rows, Member& member) {
    const int64_t width = c.D_head;
    float* weights = reinterpret_cast<float*>(member.own(size_t(c.S + W) * sizeof(float)));
    const Part part(rows * c.T * c.H, member);
    for (int64_t i = part.begin; i < part.end; i++) {
        const int64_t m = i / c.H, h = i % c.H, r = m / c.T, t = m % c.T, shared = h / (c.H / c.H_kv);
        const int64_t sentence = r / std::max(1, c.beams);
        const float* k = c.k + sentence * c.k_sentence + shared * c.k_head;
        const float* v = c.v + sentence * c.v_sentence + shared * c.v_head;
        attend(
            c.q + m * c.ldq + h * width, width, c.causal ? std::max<int64_t>(0, c.S - c.T + t + 1) : c.S, c.scale,
            [&](int64_t s) { return k + s * c.k_key; }, [&](int64_t s) { return v + s * c.v_key; },
            [&](int64_t s) { return !c.visible || c.visible[sentence * c.S + s]; }, weights,
            c.y + m * c.ldy + h * width);
    }
}
