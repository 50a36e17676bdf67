// What a search asks of logits: the log of the sum of exponentials, and the k largest.
#include <algorithm>
#include <vector>

#include "internal.h"
#include "simd.h"

void tr_log_z(const float* logits, int64_t M, int64_t V, int64_t ld, double* log_z, int32_t threads) {
    with_team(threads, [=](Member& member) {
        const Part part(M, member);
        for (int64_t m = part.begin; m < part.end; m++) {
            const float* row = logits + m * ld;
            float most = -std::numeric_limits<float>::infinity();
            for (int64_t v = 0; v < V; v++) most = row[v] > most ? row[v] : most;
            double total = 0;
            for (int64_t v = 0; v < V; v++) total += std::exp(double(row[v]) - double(most));
            log_z[m] = double(most) + std::log(total);
        }
    });
}

void tr_top(const float* logits, int64_t M, int64_t V, int64_t ld, int32_t k, const int64_t* banned, int32_t n_banned,
            float* values, int64_t* ids, int32_t threads) {
    with_team(threads, [=](Member& member) {
        const Part part(M, member);
        std::vector<std::pair<float, int64_t>> all;
        const float never = -std::numeric_limits<float>::infinity();
        for (int64_t m = part.begin; m < part.end; m++) {
            const float* row = logits + m * ld;
            all.clear();
            for (int64_t v = 0; v < V; v++) all.push_back({std::isnan(row[v]) ? never : row[v], v});
            for (int32_t i = 0; i < n_banned; i++) {
                const int64_t id = banned[m * n_banned + i];
                if (id >= 0 && id < V) all[size_t(id)] = {never, V + id};
            }
            std::sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.first > b.first || (a.first == b.first && a.second < b.second); });
            for (int32_t i = 0; i < k; i++) {
                values[m * k + i] = all[size_t(i)].first;
                ids[m * k + i] = all[size_t(i)].second % V;
            }
        }
    });
}
