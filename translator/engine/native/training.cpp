// What a training step does around its matrix products: norms, dropout, attention over packed sentences, the loss.
// Activations are fp32 or bfloat16 in memory (`type`), sums are fp32. Dropout's mask is a hash of seed and place: the
// backward pass makes it again, and it is the same for every instruction set and thread count.
#include <algorithm>

#include "internal.h"
#include "simd.h"

namespace {

struct Float32 {
    typedef float Number;
    static floats read(const float* from) { return load(from); }
    static floats read_some(const float* from, int64_t n) { return load_some(from, n); }
    static void write(float* to, floats v) { store(to, v); }
    static void write_some(float* to, floats v, int64_t n) { store_some(to, v, n); }
};

struct BFloat16 {
    typedef uint16_t Number;
    static floats read(const uint16_t* from) { return load_bfloat16(from); }
    static floats read_some(const uint16_t* from, int64_t n) {
        uint16_t some[W] = {};
        std::memcpy(some, from, size_t(n) * 2);
        return load_bfloat16(some);
    }
    static halves rounded(floats v) {  // to nearest, ties to even; NaN stays NaN
        const words bits = (words)v;
        const words even = bits + 0x7fff + ((bits >> 16) & 1);
        return __builtin_convertvector((v == v ? even : bits | 0x400000) >> 16, halves);
    }
    static void write(uint16_t* to, floats v) {
        const halves h = rounded(v);
        std::memcpy(to, &h, sizeof h);
    }
    static void write_some(uint16_t* to, floats v, int64_t n) {
        const halves h = rounded(v);
        std::memcpy(to, &h, size_t(n) * 2);
    }
};

template <class Work>
void with_type(int32_t type, Work work) {
    if (type == TR_BFLOAT16) work(BFloat16{});
    else work(Float32{});
}

// -- dropout ----------------------------------------------------------------------------------------------------------

words hashed(words x) {  // the finaliser of MurmurHash3
    x ^= x >> 16;
    x *= 0x85ebca6b;
    x ^= x >> 13;
    x *= 0xc2b2ae35;
    return x ^ (x >> 16);
}

words lanes() {
    words v{};
    for (int i = 0; i < W; i++) v[i] = uint32_t(i);
    return v;
}

// Which of a matrix's elements are dropped: one byte each of the hash of 64 elements' common number and their lane.
class Dropout {
   public:
    static constexpr int64_t block = 64;  // elements: 16 hashes of 4 bytes

    Dropout(uint32_t seed, int32_t threshold)
        : seed_(hashed(words{} + seed)), threshold_(uint32_t(threshold)), scale_(splat(256.0f / float(256 - threshold))) {}

    // Calls work(element, keep) for each W elements of block `b`; `keep` is the factor, 0 or 1 / (1 - p).
    template <class Work>
    void each(int64_t b, Work work) const {
        for (int lane = 0; lane < 16; lane += W) {
            const words place = lanes() + uint32_t(b * 16 + lane);
            const words random = hashed(place * 0x9e3779b9u + seed_);
            for (int byte = 0; byte < 4; byte++) {
                const words drawn = (random >> (8 * byte)) & 0xff;
                work(b * block + byte * 16 + lane, drawn >= threshold_ ? scale_ : floats{});
            }
        }
    }

   private:
    words seed_;
    uint32_t threshold_;
    floats scale_;
};

// Applies work(element, count, keep) to `total` elements, W or fewer at a time.
template <class Work>
void dropped(const Dropout& dropout, int64_t total, const Member& member, Work work) {
    const Part part((total + Dropout::block - 1) / Dropout::block, member);
    for (int64_t b = part.begin; b < part.end; b++)
        dropout.each(b, [&](int64_t i, floats keep) {
            if (i < total) work(i, std::min<int64_t>(W, total - i), keep);
        });
}

// -- attention --------------------------------------------------------------------------------------------------------

int64_t whole(int64_t n) { return (n + W - 1) / W * W; }

// One head of one sentence in fp32, keys also transposed and padded with zeros to whole vectors.
struct Head {
    int64_t keys, padded, width;
    float *k, *v, *kt, *vt, *p, *dp, *dk, *dv, *q, *dy, *dq;

    Head(const TrPackedAttention& a, int64_t most, Member& member) {
        width = a.D_head;
        const int64_t wide = whole(most), rows = most * width;
        float* at = reinterpret_cast<float*>(member.own(size_t(4 * rows + 2 * wide * width + 2 * wide + 3 * width) * 4));
        auto take = [&](int64_t n) { float* here = at; at += n; return here; };
        k = take(rows), v = take(rows), dk = take(rows), dv = take(rows);
        kt = take(wide * width), vt = take(wide * width);
        p = take(wide), dp = take(wide), q = take(width), dy = take(width), dq = take(width);
    }

    template <class T>
    static void row(const typename T::Number* from, float* to, int64_t n) {
        int64_t i = 0;
        for (; i + W <= n; i += W) store(to + i, T::read(from + i));
        if (i < n) store_some(to + i, T::read_some(from + i, n - i), n - i);
    }

    template <class T>
    static void row_back(const float* from, typename T::Number* to, int64_t n) {
        int64_t i = 0;
        for (; i + W <= n; i += W) T::write(to + i, load(from + i));
        if (i < n) T::write_some(to + i, load_some(from + i, n - i), n - i);
    }

    template <class T>
    void read(const TrPackedAttention& a, int64_t first, int64_t count, int64_t head) {
        typedef typename T::Number Number;
        keys = count, padded = whole(count);
        const Number *ks = static_cast<const Number*>(a.k) + head * width, *vs = static_cast<const Number*>(a.v) + head * width;
        std::fill(kt, kt + padded * width, 0.0f);
        std::fill(vt, vt + padded * width, 0.0f);
        for (int64_t s = 0; s < count; s++) {
            row<T>(ks + (first + s) * a.ldk, k + s * width, width);
            row<T>(vs + (first + s) * a.ldv, v + s * width, width);
            for (int64_t d = 0; d < width; d++) kt[d * padded + s] = k[s * width + d], vt[d * padded + s] = v[s * width + d];
        }
    }

    // to[s] = sum over d of x[d] * t[d][s], all keys. Eight sums side by side: one would wait for itself.
    void products(const float* x, const float* t, float* to) const {
        for (int64_t s = 0; s < padded; s += W) {
            floats sums[8] = {};
            int64_t d = 0;
            for (; d + 8 <= width; d += 8) {
#pragma GCC unroll 8
                for (int j = 0; j < 8; j++) sums[j] = fma(splat(x[d + j]), load(t + (d + j) * padded + s), sums[j]);
            }
            for (; d < width; d++) sums[0] = fma(splat(x[d]), load(t + d * padded + s), sums[0]);
            store(to + s, ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7])));
        }
    }

    // to[d] = sum over the first `seen` keys of x[s] * from[s][d].
    void mix(const float* x, const float* from, int64_t seen, float* to) const {
        int64_t d = 0;
        for (; d + 4 * W <= width; d += 4 * W) {
            floats sums[4] = {};
            for (int64_t s = 0; s < seen; s++) {
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) sums[j] = fma(splat(x[s]), load(from + s * width + d + j * W), sums[j]);
            }
            for (int j = 0; j < 4; j++) store(to + d + j * W, sums[j]);
        }
        for (; d < width; d += W) {
            const int64_t n = std::min<int64_t>(W, width - d);
            floats sums{};
            for (int64_t s = 0; s < seen; s++) sums = fma(splat(x[s]), load_some(from + s * width + d, n), sums);
            store_some(to + d, sums, n);
        }
    }

    // The attention weights of query `q` over the first `seen` keys, in p.
    void weigh(int64_t seen, float scale) {
        products(q, kt, p);
        float highest = p[0];
        for (int64_t s = 1; s < seen; s++) highest = std::max(highest, p[s]);
        floats total{};
        for (int64_t s = 0; s < padded; s += W) {
            floats e = exp((load(p + s) - splat(highest)) * splat(scale));
            if (s + W > seen) {
                float some[W] = {};
                if (s < seen) store_some(some, e, seen - s);
                e = load(some);
            }
            total = total + e;
            store(p + s, e);
        }
        const floats inverse = splat(1 / sum(total));
        for (int64_t s = 0; s < padded; s += W) store(p + s, load(p + s) * inverse);
    }

    // to[d] += x * from[d]
    static void add(float x, const float* from, float* to, int64_t n) {
        int64_t i = 0;
        for (; i + W <= n; i += W) store(to + i, fma(splat(x), load(from + i), load(to + i)));
        if (i < n) store_some(to + i, fma(splat(x), load_some(from + i, n - i), load_some(to + i, n - i)), n - i);
    }
};

// Calls work(sentence, head) for this thread's share.
template <class Work>
void each_head(const TrPackedAttention& a, const Member& member, Work work) {
    const Part part(a.sentences * a.H, member);
    for (int64_t i = part.begin; i < part.end; i++) work(i / a.H, i % a.H);
}

int64_t longest(const TrPackedAttention& a) {
    int64_t most = 1;
    for (int64_t s = 0; s < a.sentences; s++) most = std::max<int64_t>(most, a.k_starts[s + 1] - a.k_starts[s]);
    return most;
}

template <class T>
void attend(const TrPackedAttention& a, Member& member) {
    typedef typename T::Number Number;
    Head head(a, longest(a), member);
    const int64_t width = a.D_head;
    each_head(a, member, [&](int64_t sentence, int64_t h) {
        const int64_t first = a.k_starts[sentence], keys = a.k_starts[sentence + 1] - first;
        head.read<T>(a, first, keys, h);
        const int64_t begin = a.q_starts[sentence], end = a.q_starts[sentence + 1];
        for (int64_t i = begin; i < end; i++) {
            Head::row<T>(static_cast<const Number*>(a.q) + i * a.ldq + h * width, head.q, width);
            const int64_t seen = a.causal ? i - begin + 1 : keys;
            head.weigh(seen, a.scale);
            head.mix(head.p, head.v, seen, head.dy);
            Head::row_back<T>(head.dy, static_cast<Number*>(a.y) + i * a.ldy + h * width, width);
        }
    });
}

template <class T>
void attend_back(const TrPackedAttention& a, Member& member) {
    typedef typename T::Number Number;
    Head head(a, longest(a), member);
    const int64_t width = a.D_head;
    each_head(a, member, [&](int64_t sentence, int64_t h) {
        const int64_t first = a.k_starts[sentence], keys = a.k_starts[sentence + 1] - first;
        head.read<T>(a, first, keys, h);
        std::fill(head.dk, head.dk + keys * width, 0.0f);
        std::fill(head.dv, head.dv + keys * width, 0.0f);
        const int64_t begin = a.q_starts[sentence], end = a.q_starts[sentence + 1];
        for (int64_t i = begin; i < end; i++) {
            Head::row<T>(static_cast<const Number*>(a.q) + i * a.ldq + h * width, head.q, width);
            Head::row<T>(static_cast<const Number*>(a.y) + i * a.ldy + h * width, head.dy, width);
            const int64_t seen = a.causal ? i - begin + 1 : keys;
            head.weigh(seen, a.scale);
            head.products(head.dy, head.vt, head.dp);
            floats total{};
            for (int64_t s = 0; s < head.padded; s += W) total = fma(load(head.p + s), load(head.dp + s), total);
            const floats mean = splat(sum(total));
            for (int64_t s = 0; s < head.padded; s += W)
                store(head.dp + s, load(head.p + s) * (load(head.dp + s) - mean) * splat(a.scale));
            head.mix(head.dp, head.k, seen, head.dq);
            for (int64_t s = 0; s < seen; s++) {
                Head::add(head.dp[s], head.q, head.dk + s * width, width);
                Head::add(head.p[s], head.dy, head.dv + s * width, width);
            }
            Head::row_back<T>(head.dq, static_cast<Number*>(a.dq) + i * a.ld_dq + h * width, width);
        }
        for (int64_t s = 0; s < keys; s++) {
            Head::row_back<T>(head.dk + s * width, static_cast<Number*>(a.dk) + (first + s) * a.ld_dk + h * width, width);
            Head::row_back<T>(head.dv + s * width, static_cast<Number*>(a.dv) + (first + s) * a.ld_dv + h * width, width);
        }
    });
}

}  // namespace

void tr_packed_attention(const TrPackedAttention* a, int32_t back, int32_t threads) {
    with_team(threads, [=](Member& member) {
        member.shared_calls = member.own_calls = 0;
        with_type(a->type, [&](auto type) {
            if (back) attend_back<decltype(type)>(*a, member);
            else attend<decltype(type)>(*a, member);
        });
    });
}

void tr_train_norm(const float* x, const float* gamma, const float* beta, float eps, int64_t rows, int64_t width,
                   int32_t type, void* y, float* mean, float* inverse, int32_t threads) {
    with_team(threads, [=](Member& member) {
        member.shared_calls = member.own_calls = 0;
        const Part part(rows, member);
        with_type(type, [&](auto kind) {
            typedef decltype(kind) T;
            for (int64_t m = part.begin; m < part.end; m++) {
                const float* from = x + m * width;
                floats sums{};
                int64_t i = 0;
                for (; i + W <= width; i += W) sums = sums + load(from + i);
                if (i < width) sums = sums + load_some(from + i, width - i);
                const float middle = sum(sums) / float(width);
                floats squares{};
                for (i = 0; i + W <= width; i += W) {
                    const floats off = load(from + i) - splat(middle);
                    squares = fma(off, off, squares);
                }
                if (i < width) {
                    const floats off = load_some(from + i, width - i, middle) - splat(middle);
                    squares = fma(off, off, squares);
                }
                const float factor = 1 / std::sqrt(sum(squares) / float(width) + eps);
                mean[m] = middle, inverse[m] = factor;
                auto value = [&](floats v, floats g, floats b) { return fma((v - splat(middle)) * splat(factor), g, b); };
                auto* to = static_cast<typename T::Number*>(y) + m * width;
                for (i = 0; i + W <= width; i += W) T::write(to + i, value(load(from + i), load(gamma + i), load(beta + i)));
                if (i < width) {
                    const int64_t n = width - i;
                    T::write_some(to + i, value(load_some(from + i, n), load_some(gamma + i, n), load_some(beta + i, n)), n);
                }
            }
        });
    });
}

void tr_train_norm_back(const void* dy, int32_t type, const float* x, const float* gamma, const float* mean,
                        const float* inverse, int64_t rows, int64_t width, float* dx, float* dgamma, float* dbeta,
                        int32_t threads) {
    with_team(threads, [=](Member& member) {
        member.shared_calls = member.own_calls = 0;
        const int64_t wide = whole(width);
        float* sums = reinterpret_cast<float*>(member.shared(size_t(2 * wide) * size_t(member.count) * 4));
        float* mine = sums + 2 * wide * member.index;
        std::fill(mine, mine + 2 * wide, 0.0f);
        const Part part(rows, member);
        with_type(type, [&](auto kind) {
            typedef decltype(kind) T;
            for (int64_t m = part.begin; m < part.end; m++) {
                const auto* grad = static_cast<const typename T::Number*>(dy) + m * width;
                const float* from = x + m * width;
                const floats middle = splat(mean[m]), factor = splat(inverse[m]);
                floats total{}, along{};
                auto each = [&](auto work) {
                    int64_t i = 0;
                    for (; i + W <= width; i += W) work(i, T::read(grad + i), load(from + i), load(gamma + i), int64_t(W));
                    if (i < width) {
                        const int64_t n = width - i;
                        work(i, T::read_some(grad + i, n), load_some(from + i, n, mean[m]), load_some(gamma + i, n), n);
                    }
                };
                each([&](int64_t i, floats g, floats v, floats weight, int64_t) {
                    const floats normed = (v - middle) * factor, weighted = g * weight;
                    total = total + weighted;
                    along = fma(weighted, normed, along);
                    store(mine + i, fma(g, normed, load(mine + i)));
                    store(mine + wide + i, load(mine + wide + i) + g);
                });
                const floats average = splat(sum(total) / float(width)), slope = splat(sum(along) / float(width));
                each([&](int64_t i, floats g, floats v, floats weight, int64_t n) {
                    const floats normed = (v - middle) * factor;
                    const floats change = (g * weight - average - normed * slope) * factor;
                    if (n == W) store(dx + m * width + i, change);
                    else store_some(dx + m * width + i, change, n);
                });
            }
        });
        member.barrier();
        if (member.index == 0)
            for (int64_t i = 0; i < width; i++) {
                float g = 0, b = 0;
                for (int t = 0; t < member.count; t++) g += sums[2 * wide * t + i], b += sums[2 * wide * t + wide + i];
                dgamma[i] = g, dbeta[i] = b;
            }
    });
}

void tr_train_residual(const void* y, int32_t type, const float* residual, int64_t total, uint32_t seed,
                       int32_t threshold, float* out, int32_t threads) {
    const Dropout dropout(seed, threshold);
    with_team(threads, [=, &dropout](Member& member) {
        with_type(type, [&](auto kind) {
            typedef decltype(kind) T;
            const auto* from = static_cast<const typename T::Number*>(y);
            dropped(dropout, total, member, [&](int64_t i, int64_t n, floats keep) {
                if (n == W) store(out + i, fma(T::read(from + i), keep, load(residual + i)));
                else store_some(out + i, fma(T::read_some(from + i, n), keep, load_some(residual + i, n)), n);
            });
        });
    });
}

void tr_train_residual_back(const float* grad, int64_t total, uint32_t seed, int32_t threshold, void* dy, int32_t type,
                            int32_t threads) {
    const Dropout dropout(seed, threshold);
    with_team(threads, [=, &dropout](Member& member) {
        with_type(type, [&](auto kind) {
            typedef decltype(kind) T;
            auto* to = static_cast<typename T::Number*>(dy);
            dropped(dropout, total, member, [&](int64_t i, int64_t n, floats keep) {
                if (n == W) T::write(to + i, load(grad + i) * keep);
                else T::write_some(to + i, load_some(grad + i, n) * keep, n);
            });
        });
    });
}

void tr_train_relu(void* y, int32_t type, int64_t total, uint32_t seed, int32_t threshold, int32_t threads) {
    const Dropout dropout(seed, threshold);
    with_team(threads, [=, &dropout](Member& member) {
        with_type(type, [&](auto kind) {
            typedef decltype(kind) T;
            auto* at = static_cast<typename T::Number*>(y);
            dropped(dropout, total, member, [&](int64_t i, int64_t n, floats keep) {
                const floats v = n == W ? T::read(at + i) : T::read_some(at + i, n);
                const floats kept = v < splat(0) ? floats{} : v * keep;  // NaN stays NaN
                if (n == W) T::write(at + i, kept);
                else T::write_some(at + i, kept, n);
            });
        });
    });
}

void tr_train_relu_back(const void* y, void* grad, int32_t type, int64_t total, int32_t threshold, int32_t threads) {
    with_team(threads, [=](Member& member) {
        const floats scale = splat(256.0f / float(256 - threshold));
        const Part part((total + W - 1) / W, member);
        with_type(type, [&](auto kind) {
            typedef decltype(kind) T;
            const auto* out = static_cast<const typename T::Number*>(y);
            auto* at = static_cast<typename T::Number*>(grad);
            for (int64_t b = part.begin; b < part.end; b++) {
                const int64_t i = b * W, n = std::min<int64_t>(W, total - i);
                const floats v = n == W ? T::read(out + i) : T::read_some(out + i, n);
                const floats g = n == W ? T::read(at + i) : T::read_some(at + i, n);
                const floats passed = v > splat(0) ? g * scale : floats{};  // dropped and negative ones gave 0
                if (n == W) T::write(at + i, passed);
                else T::write_some(at + i, passed, n);
            }
        });
    });
}

void tr_train_loss(void* logits, int32_t type, int64_t rows, int64_t V, const int64_t* target, float smoothing,
                   float scale, double* losses, int32_t threads) {
    with_team(threads, [=](Member& member) {
        member.shared_calls = member.own_calls = 0;
        float* e = reinterpret_cast<float*>(member.own(size_t(whole(V)) * 4));
        const Part part(rows, member);
        with_type(type, [&](auto kind) {
            typedef decltype(kind) T;
            for (int64_t m = part.begin; m < part.end; m++) {
                auto* at = static_cast<typename T::Number*>(logits) + m * V;
                floats highest = splat(-std::numeric_limits<float>::infinity()), sums{};
                int64_t i = 0;
                for (; i + W <= V; i += W) {
                    const floats v = T::read(at + i);
                    highest = max(highest, v);
                    sums = sums + v;
                    store(e + i, v);
                }
                float top = largest(highest), total = sum(sums);
                for (; i < V; i++) {
                    const float v = T::read_some(at + i, 1)[0];
                    top = std::max(top, v), total += v, e[i] = v;
                }
                const float chosen = e[target[m]];
                for (int64_t j = V; j < whole(V); j++) e[j] = -std::numeric_limits<float>::infinity();
                floats mass{};
                for (i = 0; i < V; i += W) {
                    const floats p = exp(load(e + i) - splat(top));
                    mass = mass + p;
                    store(e + i, p);
                }
                const float z = sum(mass), log_z = std::log(z) + top;
                losses[m] = double(log_z) - (1 - double(smoothing)) * chosen - double(smoothing) * (total / float(V));
                const float share = scale / z, even = scale * smoothing / float(V);
                e[target[m]] -= (1 - smoothing) * z;
                for (i = 0; i + W <= V; i += W) T::write(at + i, fma(load(e + i), splat(share), splat(-even)));
                if (i < V) T::write_some(at + i, fma(load(e + i), splat(share), splat(-even)), V - i);
            }
        });
    });
}
