// What a search asks of logits: the log of the sum of exponentials, and the k largest.
#include <algorithm>
#include <vector>

#include "internal.h"
#include "simd.h"

namespace {

typedef float half_floats __attribute__((vector_size(2 * W)));
typedef double doubles __attribute__((vector_size(4 * W)));

constexpr float NEVER = -std::numeric_limits<float>::infinity();

// W numbers of a row from v on, `NEVER` behind its end.
floats load_row(const float* row, int64_t v, int64_t V) {
    return v + W <= V ? load(row + v) : load_some(row + v, V - v, NEVER);
}

double log_z_of(const float* row, int64_t V) {
    floats most = splat(NEVER);
    for (int64_t v = 0; v < V; v += W) most = max(load_row(row, v, V), most);
    const float top = largest(most);
    most = splat(top == NEVER ? 0 : top);
    doubles total[2] = {};
    for (int64_t v = 0; v < V; v += W) {
        const floats e = exp(load_row(row, v, V) - most);
        half_floats half[2];
        std::memcpy(half, &e, sizeof e);
        for (int i = 0; i < 2; i++) total[i] = total[i] + __builtin_convertvector(half[i], doubles);
    }
    double sum = 0;
    for (int i = 0; i < W; i++) sum += total[i * 2 / W][i % (W / 2)];
    return double(most[0]) + std::log(sum);
}

struct Choice {
    float value;
    int64_t id;
    bool operator<(const Choice& other) const {
        return value > other.value || (value == other.value && id < other.id);
    }
};

// The k best of a row, in order. A block whose largest is no better than the k-th so far is passed over at a glance.
void top_of(const float* row, int64_t V, int64_t k, const int64_t* banned, int64_t n_banned, std::vector<Choice>& best) {
    constexpr int64_t block = 8 * W;
    auto is_banned = [&](int64_t id) { return std::find(banned, banned + n_banned, id) != banned + n_banned; };
    const size_t most = size_t(2 * k + 32);
    bool enough = false;
    float least = NEVER;  // what a number has to exceed once there are enough
    best.clear();
    auto keep_best = [&] {
        std::nth_element(best.begin(), best.begin() + (k - 1), best.end());
        best.resize(size_t(k));
        least = best.back().value;
        enough = true;
    };
    for (int64_t begin = 0; begin < V; begin += block) {
        const int64_t end = std::min(begin + block, V);
        if (enough) {
            floats largest_here = splat(NEVER);
            for (int64_t v = begin; v < end; v += W) largest_here = max(load_row(row, v, V), largest_here);
            if (!(largest(largest_here) > least)) continue;
        }
        for (int64_t v = begin; v < end; v++) {
            if (std::isnan(row[v]) || (enough && row[v] <= least) || is_banned(v)) continue;
            best.push_back({row[v], v});
            if (best.size() == most) keep_best();
        }
    }
    if (int64_t(best.size()) > k) keep_best();
    std::sort(best.begin(), best.end());
    // Too few: what is no number first, then what is banned.
    for (bool forbidden : {false, true})
        for (int64_t v = 0; v < V && int64_t(best.size()) < k; v++)
            if (is_banned(v) == forbidden && (forbidden || std::isnan(row[v]))) best.push_back({NEVER, v});
}

}  // namespace

void tr_log_z(const float* logits, int64_t M, int64_t V, int64_t ld, double* log_z, int32_t threads) {
    with_team(threads, [=](Member& member) {
        const Part part(M, member);
        for (int64_t m = part.begin; m < part.end; m++) log_z[m] = log_z_of(logits + m * ld, V);
    });
}

void tr_top(const float* logits, int64_t M, int64_t V, int64_t ld, int32_t k, const int64_t* banned, int32_t n_banned,
            float* values, int64_t* ids, int32_t threads) {
    with_team(threads, [=](Member& member) {
        const Part part(M, member);
        std::vector<Choice> best;
        for (int64_t m = part.begin; m < part.end; m++) {
            top_of(logits + m * ld, V, k, banned + m * n_banned, n_banned, best);
            for (int64_t i = 0; i < k; i++) {
                values[m * k + i] = best[size_t(i)].value;
                ids[m * k + i] = best[size_t(i)].id;
            }
        }
    });
}
