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

struct Search {
    std::vector<float> maxima, ranked;  // of blocks
    std::vector<Choice> best;
};

// Leaves the k best of a row in `search.best`, in order. The largest numbers of k + n blocks are k numbers at least
// that are not banned, so what is smaller than all of these can't be among the k best.
void find_top(const float* row, int64_t V, int64_t k, const int64_t* banned, int64_t n, Search& search) {
    constexpr int64_t block = 8 * W;
    auto& [maxima, ranked, best] = search;
    auto is_banned = [&](int64_t id) { return std::find(banned, banned + n, id) != banned + n; };
    maxima.clear();
    for (int64_t begin = 0; begin < V; begin += block) {
        floats most = splat(NEVER);
        for (int64_t v = begin; v < std::min(begin + block, V); v += W) most = max(load_row(row, v, V), most);
        maxima.push_back(largest(most));
    }
    float least = NEVER;
    if (k + n <= int64_t(maxima.size())) {
        ranked = maxima;
        std::nth_element(ranked.begin(), ranked.begin() + (k + n - 1), ranked.end(), std::greater<float>());
        least = ranked[size_t(k + n - 1)];
    }
    best.clear();
    for (size_t i = 0; i < maxima.size(); i++) {
        if (maxima[i] < least) continue;
        const int64_t begin = int64_t(i) * block, end = std::min(begin + block, V);
        for (int64_t v = begin; v < end; v++)
            if (row[v] >= least && !is_banned(v)) best.push_back({row[v], v});  // NaN is not
    }
    if (int64_t(best.size()) > k) {
        std::nth_element(best.begin(), best.begin() + (k - 1), best.end());
        best.resize(size_t(k));
    }
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
            double* values, int64_t* ids, double* log_z, int32_t threads) {
    with_team(threads, [=](Member& member) {
        const Part part(M, member);
        Search search;
        for (int64_t m = part.begin; m < part.end; m++) {
            const float* row = logits + m * ld;
            log_z[m] = log_z_of(row, V);
            find_top(row, V, k, banned + m * n_banned, n_banned, search);
            for (int64_t i = 0; i < k; i++) {
                values[m * k + i] = double(search.best[size_t(i)].value) - log_z[m];
                ids[m * k + i] = search.best[size_t(i)].id;
            }
        }
    });
}
