// Attention of query rows over cached or given keys. One function does every row, so that a whole causal pass and a step
// with a cache give the same bits: what a row comes to depends on its own query, keys and values, in their order.
#include <algorithm>

#include "internal.h"
#include "simd.h"

namespace {

constexpr int TOGETHER = 4;  // keys whose products with a query are summed side by side

// Adds up the lanes of four vectors, each in the same order.
floats4 sums_of(const floats (&v)[TOGETHER]) {
    floats4 q[TOGETHER];
    for (int i = 0; i < TOGETHER; i++) {
        floats4 parts[W / 4];
        std::memcpy(parts, &v[i], sizeof parts);
        for (int half = W / 8; half; half /= 2)
            for (int j = 0; j < half; j++) parts[j] = parts[j] + parts[j + half];
        q[i] = parts[0];
    }
    floats4 lanes[4];  // the transpose
    for (int i = 0; i < 4; i++) lanes[i] = floats4{q[0][i], q[1][i], q[2][i], q[3][i]};
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

// The products of one query with four keys.
floats4 dots(const float* q, const float* const (&keys)[TOGETHER], int64_t width) {
    floats sums[TOGETHER] = {};
    int64_t d = 0;
    for (; d + W <= width; d += W) {
        const floats x = load(q + d);
        for (int i = 0; i < TOGETHER; i++) sums[i] = fma(x, load(keys[i] + d), sums[i]);
    }
    if (d < width) {
        const floats x = load_some(q + d, width - d);
        for (int i = 0; i < TOGETHER; i++) sums[i] = fma(x, load_some(keys[i] + d, width - d), sums[i]);
    }
    return sums_of(sums);
}

// One query head's view: where key and value `s` lie for 0 <= s < seen, and which of them count.
struct Strided {
    const float *keys, *values;
    int64_t key_stride, value_stride, seen;
    const uint8_t* visible;
    const float* key(int64_t s) const { return keys + s * key_stride; }
    const float* value(int64_t s) const { return values + s * value_stride; }
    bool shows(int64_t s) const { return !visible || visible[s]; }
};

struct Inherited {  // slots of a beam's ancestors
    const float *keys, *values;
    int64_t row_stride, slot_stride, seen;
    const int32_t* origin;
    const float* key(int64_t s) const { return keys + origin[s] * row_stride + s * slot_stride; }
    const float* value(int64_t s) const { return values + origin[s] * row_stride + s * slot_stride; }
    bool shows(int64_t) const { return true; }
};

// N vectors of the weighted sum of values from number d on; for each number one chain over the keys in order.
template <int N, class View>
void mix(const View& view, const float* weights, float inverse, int64_t d, float* y) {
    floats sums[N] = {};
    for (int64_t s = 0; s < view.seen; s++) {
        if (!view.shows(s)) continue;  // what is hidden may be NaN
        const float* v = view.value(s) + d;
        const floats w = splat(weights[s]);
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) sums[i] = fma(w, load(v + i * W), sums[i]);
    }
    for (int i = 0; i < N; i++) store(y + d + i * W, sums[i] * splat(inverse));
}

// The same for the last, fewer than W numbers.
template <class View>
void mix_rest(const View& view, const float* weights, float inverse, int64_t d, int64_t width, float* y) {
    floats sums = {};
    for (int64_t s = 0; s < view.seen; s++)
        if (view.shows(s)) sums = fma(splat(weights[s]), load_some(view.value(s) + d, width - d), sums);
    store_some(y + d, sums * splat(inverse), width - d);
}

constexpr int64_t padded(int64_t keys) { return (keys + W - 1) / W * W; }

// One query head. `weights` has room for padded(seen) numbers.
template <class View>
void attend(const float* q, int64_t width, float scale, const View& view, float* weights, float* y) {
    const floats never = splat(-std::numeric_limits<float>::infinity());
    const int64_t end = padded(view.seen);
    for (int64_t s = 0; s < view.seen; s += TOGETHER) {
        const float* keys[TOGETHER];  // the last again where there are fewer: nothing behind it may be read
        for (int i = 0; i < TOGETHER; i++) keys[i] = view.key(std::min(s + i, view.seen - 1));
        const floats4 scores = dots(q, keys, width) * scale;
        std::memcpy(weights + s, &scores, sizeof scores);
    }
    for (int64_t s = 0; s < end; s++)
        if (s >= view.seen || !view.shows(s)) weights[s] = never[0];
    floats most = never, total = {};
    for (int64_t s = 0; s < end; s += W) most = max(load(weights + s), most);
    most = splat(largest(most));
    for (int64_t s = 0; s < end; s += W) {
        const floats score = load(weights + s);
        const floats w = score == never ? floats{} : exp(score - most);
        store(weights + s, w);
        total = total + w;
    }
    const float all = sum(total);
    const float inverse = all == 0 ? 0 : 1 / all;  // no key seen: zeros
    int64_t d = 0;
    for (; d + 8 * W <= width; d += 8 * W) mix<8>(view, weights, inverse, d, y);
    for (; d + 4 * W <= width; d += 4 * W) mix<4>(view, weights, inverse, d, y);
    for (; d + W <= width; d += W) mix<1>(view, weights, inverse, d, y);
    if (d < width) mix_rest(view, weights, inverse, d, width, y);
}

float* room_for(int64_t keys, Member& member) {
    return reinterpret_cast<float*>(member.own(size_t(padded(keys)) * sizeof(float)));
}

// Copies the new keys and values of the row into their slots, for the thread's part of rows and heads.
void append(const TrCached& c, int64_t rows, const Member& member) {
    const int64_t width = c.D_head;
    const Part part(rows * c.H_kv, member);
    for (int64_t i = part.begin; i < part.end; i++) {
        const int64_t r = i / c.H_kv, h = i % c.H_kv, buffer = c.home ? c.home[r] : r;
        const int64_t at = ((buffer * c.H_kv + h) * c.slots + c.lengths[r]) * width;
        for (int64_t t = 0; t < c.T; t++) {
            const int64_t token = r * c.T + t;
            std::copy_n(c.k + token * c.ldk + h * width, width, c.keys + at + t * width);
            std::copy_n(c.v + token * c.ldv + h * width, width, c.values + at + t * width);
        }
    }
}

}  // namespace

void run_cached(const TrCached& c, int64_t rows, Member& member) {
    append(c, rows, member);
    member.barrier();
    const int64_t width = c.D_head, group = c.H / c.H_kv, each = c.T * group;
    float* weights = room_for(c.slots, member);
    // By key head first: rows that share ancestors find their keys in the processor's cache.
    const Part part(c.H_kv * rows * each, member);
    for (int64_t i = part.begin; i < part.end; i++) {
        const int64_t h = i / (rows * each) * group + i % group, shared = h / group;
        const int64_t m = i / group % (rows * c.T), r = m / c.T, seen = c.lengths[r] + m % c.T + 1;
        const float* q = c.q + m * c.ldq + h * width;
        float* y = c.y + m * c.ldy + h * width;
        const int64_t head = c.slots * width, row = c.H_kv * head;
        const float *keys = c.keys + shared * head, *values = c.values + shared * head;
        if (c.origin)
            attend(q, width, c.scale, Inherited{keys, values, row, width, seen, c.origin + r * c.ld_origin}, weights, y);
        else
            attend(q, width, c.scale, Strided{keys + r * row, values + r * row, width, width, seen, nullptr}, weights, y);
    }
}

void run_dense(const TrDense& c, int64_t rows, Member& member) {
    const int64_t width = c.D_head, group = c.H / c.H_kv, each = int64_t(c.beams) * c.T * group;
    float* weights = room_for(c.S, member);
    // By sentence, then key head: its keys and values stay in the processor's cache while queries use them.
    const Part part(rows * c.T * c.H, member);
    for (int64_t i = part.begin; i < part.end; i++) {
        const int64_t sentence = i / (each * c.H_kv), shared = i / each % c.H_kv, h = shared * group + i % group;
        const int64_t m = sentence * c.beams * c.T + i / group % (c.beams * c.T);
        const int64_t seen = c.causal ? std::max<int64_t>(0, int64_t(c.S) - c.T + m % c.T + 1) : c.S;
        const Strided view{c.k + sentence * c.k_sentence + shared * c.k_head,
                           c.v + sentence * c.v_sentence + shared * c.v_head,
                           c.k_key, c.v_key, seen, c.visible ? c.visible + sentence * c.S : nullptr};
        attend(c.q + m * c.ldq + h * width, width, c.scale, view, weights, c.y + m * c.ldy + h * width);
    }
}
