// Runs every kernel on odd sizes with buffers that end where their numbers end, for the sanitizers to watch. Prints
// what went wrong: a result that is no number where all the inputs are, or that changes with the number of threads.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "kernels.h"

namespace {

std::atomic<int> failures{0};

void check(bool right, const char* what, int64_t a, int64_t b, int64_t c) {
    if (right) return;
    failures++;
    std::printf("%s (%ld, %ld, %ld)\n", what, long(a), long(b), long(c));
}

// Numbers between -1 and 1, on the heap.
std::vector<float> drawn(int64_t count) {
    thread_local uint32_t state = 1;
    std::vector<float> numbers(static_cast<size_t>(count));
    for (float& x : numbers) {
        state = state * 1664525 + 1013904223;
        x = float(state >> 8) / float(1 << 23) - 1;
    }
    return numbers;
}

struct Aligned {
    void operator()(char* block) const { ::operator delete(block, std::align_val_t(64)); }
};
using Block = std::unique_ptr<char, Aligned>;

template <class Structure>
void run(const Structure& what, TrKind kind, int64_t rows, int threads) {
    const TrCall calls[] = {{&what, kind}, {&what, kind}};
    tr_run(calls, 2, rows, threads);
}

// Runs with one thread and with three, and compares what is in y.
void twice(std::vector<float>& y, const std::function<void(int)>& call, const char* what, int64_t a, int64_t b,
           int64_t c) {
    call(1);
    const std::vector<float> alone = y;
    call(3);
    check(std::memcmp(alone.data(), y.data(), y.size() * sizeof(float)) == 0, what, a, b, c);
    for (float x : y)
        if (!std::isfinite(x)) return check(false, what, a, b, c);
}

void products() {
    const int64_t sizes[][3] = {{1, 1, 1},  {1, 3, 5},    {2, 17, 31}, {5, 33, 64},  {7, 64, 33},
                                {13, 1, 70}, {33, 100, 47}, {3, 129, 8}, {65, 40, 129}, {1, 257, 300}};
    for (const auto& [M, N, K] : sizes)
        for (int type : {TR_FLOAT32, TR_FLOAT16, TR_BFLOAT16, TR_INT8}) {
            auto w = drawn(N * K), b = drawn(N), x = drawn(M * (K + 3) - 3), gamma = drawn(K), beta = drawn(K);
            auto residual = drawn(M * N);
            std::vector<float> y(residual.size());
            Block block(static_cast<char*>(::operator new(size_t(tr_packed_bytes(type, N, K)), std::align_val_t(64))));
            check(tr_pack(type, N, K, w.data(), TR_FLOAT32, b.data(), block.get()) == 0, "pack", M, N, K);
            for (int kind = 0; kind < 3; kind++) {
                const TrProduct product{block.get(), x.data(), kind ? gamma.data() : nullptr,
                                        kind == 1 ? beta.data() : nullptr, kind == 2 ? residual.data() : nullptr,
                                        y.data(), K + 3, N, N, type, kind, int32_t(N), int32_t(K), 1, 1e-5f};
                twice(y, [&](int threads) { run(product, TR_PRODUCT, M, threads); }, "product", M, N, K);
            }
            w[size_t(N * K - 1)] = NAN;
            check(tr_pack(type, N, K, w.data(), TR_FLOAT32, nullptr, block.get()) == -1, "pack of NaN", M, N, K);
        }
    for (int source : {TR_FLOAT16, TR_BFLOAT16})
        for (int type : {TR_FLOAT32, TR_FLOAT16, TR_BFLOAT16, TR_INT8}) {
            const std::vector<uint16_t> w(19 * 37, 0x3c00);
            Block block(static_cast<char*>(::operator new(size_t(tr_packed_bytes(type, 19, 37)), std::align_val_t(64))));
            check(tr_pack(type, 19, 37, w.data(), source, nullptr, block.get()) == 0, "pack of halves", type, 19, 37);
        }
}

void norms() {
    for (int64_t width : {1, 3, 16, 31, 64, 100})
        for (int kind = 0; kind < 4; kind++) {
            auto x = drawn(5 * (width + 1) - 1), gamma = drawn(width), beta = drawn(width);
            std::vector<float> y(size_t(5 * width));
            const TrNorm norm{x.data(), kind & 1 ? gamma.data() : nullptr, kind & 2 ? beta.data() : nullptr, y.data(),
                              width + 1, width, int32_t(width), 1, 1e-5f};
            twice(y, [&](int threads) { run(norm, TR_NORM, 5, threads); }, "norm", width, kind, 0);
        }
}

// (rows, T, H, H_kv, keys, D_head)
const int64_t shapes[][6] = {{1, 1, 1, 1, 1, 1},  {3, 1, 6, 6, 17, 64}, {2, 5, 4, 2, 33, 32}, {4, 2, 3, 1, 7, 5},
                             {2, 3, 8, 8, 40, 16}, {1, 4, 2, 2, 130, 96}, {2, 1, 5, 5, 65, 23}};

void dense() {
    for (const auto& [rows, T, H, H_kv, S, width] : shapes)
        for (int kind = 0; kind < 4; kind++) {
            auto q = drawn(rows * T * H * width), k = drawn(rows * H_kv * S * width), v = drawn(rows * H_kv * S * width);
            std::vector<float> y(q.size());
            std::vector<uint8_t> visible(size_t(rows * S), 1);
            for (size_t i = 0; i < visible.size(); i += 3) visible[i] = 0;
            const TrDense call{q.data(), k.data(), v.data(), kind & 1 ? visible.data() : nullptr, y.data(), H * width,
                               H * width, H_kv * S * width, S * width, width, H_kv * S * width, S * width, width,
                               int32_t(H), int32_t(H_kv), int32_t(width), int32_t(T), int32_t(S), 1, kind / 2, 0.3f};
            twice(y, [&](int threads) { run(call, TR_DENSE, rows, threads); }, "dense", rows, T, S);
        }
}

void cached() {
    for (const auto& [rows, T, H, H_kv, slots, width] : shapes)
        for (bool ancestry : {false, true}) {
            auto q = drawn(rows * T * H * width), k = drawn(rows * T * H_kv * width), v = drawn(rows * T * H_kv * width);
            auto keys = drawn(rows * H_kv * slots * width), values = drawn(rows * H_kv * slots * width);
            std::vector<float> y(q.size());
            std::vector<int32_t> lengths, origin, home;
            for (int64_t r = 0; r < rows; r++) {
                lengths.push_back(int32_t(r ? (slots - T) / (r + 1) : slots - T));
                home.push_back(int32_t(rows - 1 - r));
                for (int64_t s = 0; s < slots; s++)
                    origin.push_back(s < lengths.back() ? int32_t((r + s) % rows) : home.back());
            }
            const TrCached call{q.data(), k.data(), v.data(), keys.data(), values.data(), lengths.data(),
                                ancestry ? origin.data() : nullptr, ancestry ? home.data() : nullptr, y.data(),
                                H * width, H_kv * width, H_kv * width, H * width, slots, slots, int32_t(H),
                                int32_t(H_kv), int32_t(width), int32_t(T), 0.3f};
            twice(y, [&](int threads) { run(call, TR_CACHED, rows, threads); }, "cached", rows, T, slots);
        }
}

void scores() {
    for (int64_t V : {1, 3, 16, 63, 300, 1001}) {
        auto logits = drawn(3 * (V + 1) - 1);
        std::vector<double> log_z(3);
        for (int threads : {1, 3}) tr_log_z(logits.data(), 3, V, V + 1, log_z.data(), threads);
        for (double z : log_z) check(std::isfinite(z), "log_z", V, 0, 0);
        const std::vector<int64_t> banned{0, V - 1, -1, 0, V / 2, 0};
        for (int64_t k : {int64_t(1), (V + 1) / 2, V}) {
            std::vector<double> values(size_t(3 * k));
            std::vector<int64_t> ids(size_t(3 * k));
            for (int threads : {1, 3}) {
                tr_top(logits.data(), 3, V, V + 1, int32_t(k), banned.data(), 2, values.data(), ids.data(),
                       log_z.data(), threads);
                tr_top(logits.data(), 3, V, V + 1, int32_t(k), nullptr, 0, values.data(), ids.data(),
                       log_z.data(), threads);
            }
            for (int64_t id : ids) check(id >= 0 && id < V, "top", V, k, id);
        }
    }
}

// Numbers as a training step keeps them: float, or bfloat16 in a uint16_t.
template <class Number>
std::vector<Number> kept(const std::vector<float>& x) {
    std::vector<Number> found;
    for (float number : x) {
        uint32_t bits;
        std::memcpy(&bits, &number, 4);
        if constexpr (sizeof(Number) == 2) found.push_back(Number(bits >> 16));
        else found.push_back(number);
    }
    return found;
}

template <class Number>
void widen(const std::vector<Number>& x, std::vector<float>& to) {
    to.resize(x.size());
    for (size_t i = 0; i < x.size(); i++) {
        const uint32_t bits = uint32_t(x[i]) << 16;
        if constexpr (sizeof(Number) == 2) std::memcpy(&to[i], &bits, 4);
        else to[i] = x[i];
    }
}

template <class Number>
void training_rows(int32_t type) {
    for (int64_t width : {1, 3, 16, 31, 64, 100}) {
        const int64_t rows = 5, total = rows * width;
        auto x = drawn(total), gamma = drawn(width), beta = drawn(width);
        std::vector<float> mean(size_t(rows), 0), inverse(size_t(rows), 0), dx(x.size()), dgamma(gamma), dbeta(beta), y;
        const auto dy = kept<Number>(drawn(total));
        std::vector<Number> out(x.size());
        twice(y, [&](int threads) {
            tr_train_norm(x.data(), gamma.data(), beta.data(), 1e-5f, rows, width, type, out.data(), mean.data(),
                          inverse.data(), threads);
            widen(out, y);
        }, "training norm", width, type, 0);
        twice(dx, [&](int threads) {
            tr_train_norm_back(dy.data(), type, x.data(), gamma.data(), mean.data(), inverse.data(), rows, width,
                               dx.data(), dgamma.data(), dbeta.data(), threads);
        }, "training norm back", width, type, 0);
        twice(dx, [&](int threads) {
            tr_train_residual(dy.data(), type, x.data(), total, 7, 50, dx.data(), threads);
        }, "training residual", width, type, 0);
        twice(y, [&](int threads) {
            tr_train_residual_back(x.data(), total, 7, 50, out.data(), type, threads);
            widen(out, y);
        }, "training residual back", width, type, 0);
        twice(y, [&](int threads) {
            auto passed = kept<Number>(x), grad = dy;
            tr_train_relu(passed.data(), type, total, 7, 50, threads);
            tr_train_relu_back(passed.data(), grad.data(), type, total, 50, threads);
            widen(grad, y);
        }, "training relu", width, type, 0);
        twice(y, [&](int threads) {
            auto logits = kept<Number>(x);
            const std::vector<int64_t> target{0, width - 1, width / 2, 0, width - 1};
            std::vector<double> losses(5);
            tr_train_loss(logits.data(), type, rows, width, target.data(), 0.1f, 0.5f, losses.data(), threads);
            widen(logits, y);
        }, "training loss", width, type, 0);
    }
}

template <class Number>
void training_attention(int32_t type) {
    const std::vector<int32_t> queries{0, 1, 4, 21, 54}, others{0, 2, 3, 36, 37};
    for (int64_t width : {1, 5, 16, 31, 64, 65})
        for (bool causal : {false, true}) {
            const int64_t H = 3, D = H * width, N = 54, N_keys = causal ? N : 37;
            const auto q = kept<Number>(drawn(N * D)), k = kept<Number>(drawn(N_keys * D));
            const auto v = kept<Number>(drawn(N_keys * D));
            std::vector<Number> out(q.size()), dq(q.size()), dk(k.size()), dv(v.size());
            TrPackedAttention call{q.data(), k.data(), v.data(), out.data(), dq.data(), dk.data(), dv.data(),
                                   queries.data(), causal ? queries.data() : others.data(), D, D, D, D, D, D, D, 4,
                                   type, int32_t(H), int32_t(width), causal, 0.3f};
            std::vector<float> y, part;
            twice(y, [&](int threads) {
                tr_packed_attention(&call, 0, threads);
                widen(out, y);
                tr_packed_attention(&call, 1, threads);
                for (const auto* slope : {&dq, &dk, &dv}) {
                    widen(*slope, part);
                    y.insert(y.end(), part.begin(), part.end());
                }
            }, "training attention", width, causal, type);
        }
}

void training() {
    training_rows<float>(TR_FLOAT32);
    training_rows<uint16_t>(TR_BFLOAT16);
    training_attention<float>(TR_FLOAT32);
    training_attention<uint16_t>(TR_BFLOAT16);
}

}  // namespace

int main() {
    check(tr_supports("generic") == 1 && tr_supports("nonsense") == 0 && tr_supports(tr_isa()) == 1, "isa", 0, 0, 0);
    const auto everything = {products, norms, dense, cached, scores, training};
    for (auto kernels : everything) kernels();
    std::vector<std::thread> callers;  // several at once
    for (auto kernels : {norms, dense, cached, training})
        callers.emplace_back([kernels] {
            for (int i = 0; i < 3; i++) kernels();
        });
    for (auto& caller : callers) caller.join();
    std::printf(failures ? "%d failures\n" : "all right\n", failures.load());
    return failures != 0;
}
