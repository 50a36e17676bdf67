// Attention of query rows over cached or given keys. One function does every row, so that a whole causal pass and a
// step with a cache give the same bits: what a row comes to depends on its own query, keys and values, in their order.
#include <algorithm>

#include "internal.h"
#include "simd.h"

namespace {

constexpr int TOGETHER = 4;      // keys whose products with a query are summed side by side
constexpr int64_t AT_ONCE = 16;  // queries that share keys and values while these are in the nearest cache
constexpr int64_t NEAR_BY = 32;  // keys that are there at a time
constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct Query {
    const float* q;
    float* y;
    int64_t seen;    // it sees slots 0 … seen - 1
    float* weights;  // room for padded(seen) numbers
};

// Where the keys and values of one head lie, and which of them count.
struct Strided {
    const float *keys, *values;
    int64_t key_stride, value_stride;
    const uint8_t* visible;
    const float* key(int64_t s) const { return keys + s * key_stride; }
    const float* value(int64_t s) const { return values + s * value_stride; }
    bool shows(int64_t s) const { return !visible || visible[s]; }
};

struct Inherited {  // slots of a beam's ancestors
    const float *keys, *values;
    int64_t row_stride, slot_stride;
    const int32_t* origin;
    const float* key(int64_t s) const { return keys + origin[s] * row_stride + s * slot_stride; }
    const float* value(int64_t s) const { return values + origin[s] * row_stride + s * slot_stride; }
    bool shows(int64_t) const { return true; }
};

constexpr int64_t padded(int64_t keys) { return (keys + W - 1) / W * W; }

// The products of one query with four keys.
floats4 dots(const float* q, const float* const (&keys)[TOGETHER], int64_t width) {
    floats a = {}, b = {}, c = {}, d = {};
    auto add = [&](auto read, int64_t from) {
        const floats x = read(q + from);
        a = fma(x, read(keys[0] + from), a);
        b = fma(x, read(keys[1] + from), b);
        c = fma(x, read(keys[2] + from), c);
        d = fma(x, read(keys[3] + from), d);
    };
    int64_t from = 0;
    for (; from + W <= width; from += W) add([](const float* at) { return load(at); }, from);
    if (from < width) add([=](const float* at) { return load_some(at, width - from); }, from);
    return sums(a, b, c, d);
}

// Scores of the slots from `begin`, a multiple of four, to `end`; those that don't count get NEVER.
template <class View>
void score(const Query& query, const View& view, int64_t width, float scale, int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; s += TOGETHER) {
        const float* keys[TOGETHER];  // the last again where there are fewer: nothing behind it may be read
        for (int i = 0; i < TOGETHER; i++) keys[i] = view.key(std::min(s + i, end - 1));
        const floats4 products = dots(query.q, keys, width) * scale;
        std::memcpy(query.weights + s, &products, sizeof products);
        for (int i = 0; i < TOGETHER; i++)
            if (s + i >= end || !view.shows(s + i)) query.weights[s + i] = NEVER;
    }
}

// Scores to weights, in place. A hidden slot's weight is 0 and changes no sum; all are 0 where all are hidden.
void softmax(const Query& query) {
    float* weights = query.weights;
    const int64_t end = padded(query.seen);
    std::fill(weights + (query.seen + TOGETHER - 1) / TOGETHER * TOGETHER, weights + end, NEVER);
    floats most = splat(NEVER), total = {};
    for (int64_t s = 0; s < end; s += W) most = max(load(weights + s), most);
    most = splat(largest(most));
    for (int64_t s = 0; s < end; s += W) {
        const floats w = load(weights + s) == splat(NEVER) ? floats{} : exp(load(weights + s) - most);
        store(weights + s, w);
        total = total + w;
    }
    const float all = sum(total);
    const floats inverse = splat(all == 0 ? 0 : 1 / all);
    for (int64_t s = 0; s < end; s += W) store(weights + s, load(weights + s) * inverse);
}

// Adds weighted values to N vectors of y from number d on: for each number one chain over the slots in order.
template <int N, class View>
void mix(const Query& query, const View& view, int64_t begin, int64_t end, int64_t d) {
    floats sums[N];
    for (int i = 0; i < N; i++) sums[i] = begin ? load(query.y + d + i * W) : floats{};
    for (int64_t s = begin; s < end; s++) {
        if (!view.shows(s)) continue;  // what is hidden may be NaN
        const float* v = view.value(s) + d;
        const floats w = splat(query.weights[s]);
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) sums[i] = fma(w, load(v + i * W), sums[i]);
    }
    for (int i = 0; i < N; i++) store(query.y + d + i * W, sums[i]);
}

// The same for the last n < W numbers.
template <class View>
void mix_rest(const Query& query, const View& view, int64_t begin, int64_t end, int64_t d, int64_t n) {
    floats sums = begin ? load_some(query.y + d, n) : floats{};
    for (int64_t s = begin; s < end; s++)
        if (view.shows(s)) sums = fma(splat(query.weights[s]), load_some(view.value(s) + d, n), sums);
    store_some(query.y + d, sums, n);
}

template <class View>
void attend(const Query* queries, int64_t count, const View& view, int64_t width, float scale) {
    int64_t seen = 0;
    for (int64_t i = 0; i < count; i++) seen = std::max(seen, queries[i].seen);
    for (int64_t begin = 0; begin < seen; begin += NEAR_BY)
        for (const Query* query = queries; query < queries + count; query++)
            score(*query, view, width, scale, begin, std::min(begin + NEAR_BY, query->seen));
    for (int64_t i = 0; i < count; i++) {
        softmax(queries[i]);
        if (queries[i].seen == 0) std::fill_n(queries[i].y, width, 0.0f);
    }
    for (int64_t begin = 0; begin < seen; begin += NEAR_BY)
        for (const Query* query = queries; query < queries + count; query++) {
            const int64_t end = std::min(begin + NEAR_BY, query->seen);
            if (end <= begin) continue;
            int64_t d = 0;
            for (; d + 8 * W <= width; d += 8 * W) mix<8>(*query, view, begin, end, d);
            for (; d + 4 * W <= width; d += 4 * W) mix<4>(*query, view, begin, end, d);
            for (; d + W <= width; d += W) mix<1>(*query, view, begin, end, d);
            if (d < width) mix_rest(*query, view, begin, end, d, width - d);
        }
}

// Shares out `heads` key heads of `owners` rows or sentences, `each` queries a head, and attends with up to AT_ONCE of
// these at a time: describe(owner, head, number, query) fills one in, with(owner, head, queries, count) attends.
template <class Describe, class With>
void share(int64_t owners, int64_t heads, int64_t each, int64_t keys, Member& member, Describe describe, With with) {
    float* weights = reinterpret_cast<float*>(member.own(size_t(AT_ONCE * padded(keys)) * sizeof(float)));
    Query queries[AT_ONCE];
    for (int64_t i = 0; i < AT_ONCE; i++) queries[i].weights = weights + i * padded(keys);
    const int64_t blocks = (each + AT_ONCE - 1) / AT_ONCE;
    const Part part(owners * heads * blocks, member);
    for (int64_t i = part.begin; i < part.end; i++) {
        // By head first: beams that share ancestors find their keys in the processor's cache.
        const int64_t block = i % blocks, owner = i / blocks % owners, head = i / blocks / owners;
        const int64_t first = block * AT_ONCE, count = std::min(AT_ONCE, each - first);
        for (int64_t j = 0; j < count; j++) describe(owner, head, first + j, queries[j]);
        with(owner, head, queries, count);
    }
}

// Copies the new keys and values of the row into their slots, for the thread's part of rows and heads.
void append(const TrCached& c, int64_t rows, const Member& member) {
    const int64_t width = c.D_head;
    const Part part(rows * c.H_kv, member);
    for (int64_t i = part.begin; i < part.end; i++) {
        const int64_t r = i / c.H_kv, h = i % c.H_kv, buffer = c.home ? c.home[r] : r;
        const int64_t at = ((buffer * c.H_kv + h) * c.slots + c.lengths[r]) * width;
        for (int64_t t = 0; t < c.T; t++) {
            if (c.origin && h == 0) c.origin[r * c.ld_origin + c.lengths[r] + t] = int32_t(buffer);
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
    const int64_t width = c.D_head, group = c.H / c.H_kv, of_head = c.slots * width, of_row = c.H_kv * of_head;
    auto describe = [&](int64_t r, int64_t head, int64_t i, Query& query) {
        const int64_t t = i / group, token = r * c.T + t, at = (head * group + i % group) * width;
        query.q = c.q + token * c.ldq + at;
        query.y = c.y + token * c.ldy + at;
        query.seen = c.lengths[r] + t + 1;
    };
    auto with = [&](int64_t r, int64_t head, const Query* queries, int64_t n) {
        const float *keys = c.keys + head * of_head, *values = c.values + head * of_head;
        if (c.origin) {
            const Inherited view{keys, values, of_row, width, c.origin + r * c.ld_origin};
            attend(queries, n, view, width, c.scale);
        } else {
            const Strided view{keys + r * of_row, values + r * of_row, width, width, nullptr};
            attend(queries, n, view, width, c.scale);
        }
    };
    share(rows, c.H_kv, c.T * group, c.slots, member, describe, with);
}

void run_dense(const TrDense& c, int64_t rows, Member& member) {
    const int64_t width = c.D_head, group = c.H / c.H_kv, tokens = int64_t(c.beams) * c.T;
    auto describe = [&](int64_t sentence, int64_t head, int64_t i, Query& query) {
        const int64_t token = sentence * tokens + i / group, at = (head * group + i % group) * width;
        query.q = c.q + token * c.ldq + at;
        query.y = c.y + token * c.ldy + at;
        query.seen = c.causal ? std::max<int64_t>(0, int64_t(c.S) - c.T + token % c.T + 1) : c.S;
    };
    auto with = [&](int64_t sentence, int64_t head, const Query* queries, int64_t n) {
        const Strided view{c.k + sentence * c.k_sentence + head * c.k_head,
                           c.v + sentence * c.v_sentence + head * c.v_head,
                           c.k_key, c.v_key, c.visible ? c.visible + sentence * c.S : nullptr};
        attend(queries, n, view, width, c.scale);
    };
    share(rows / c.beams, c.H_kv, tokens * group, c.S, member, describe, with);
}
