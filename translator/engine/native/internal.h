// What the kernels' files share: one thread's place in a team, and the kernels by name. Nothing here is exported.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

#include "kernels.h"

struct Team;

// One thread's place in the team that runs a call. All of the team's threads make the same barrier and shared calls.
struct Member {
    int index, count;
    Team* team;
    int shared_calls = 0, own_calls = 0;  // since the program's call began

    // All of the team's threads get here before any goes on; well under a microsecond while they spin.
    void barrier();
    // 64-byte aligned scratch, the same address for all of the team; valid until the program's next call.
    char* shared(size_t bytes);
    // The same for this thread alone.
    char* own(size_t bytes);
};

void run_product(const TrProduct&, int64_t rows, Member&);
void run_norm(const TrNorm&, int64_t rows, Member&);
void run_cached(const TrCached&, int64_t rows, Member&);
void run_dense(const TrDense&, int64_t rows, Member&);
void run_embed(const TrEmbed&, int64_t rows, Member&);
void run_advance(const TrAdvance&, int64_t rows, Member&);

// LayerNorm of one row: mean, then the (biased) variance around it. gamma null: 1; beta null: 0. y may be x.
void norm_row(const float* x, const float* gamma, const float* beta, float eps, int64_t width, float* y);

// Calls work(member) on each thread of a team of `threads`, the caller's among them.
void with_team(int32_t threads, const std::function<void(Member&)>& work);

// This thread's part [begin, end) of `total` items.
struct Part {
    int64_t begin, end;
    Part(int64_t total, const Member& member)
        : begin(total * member.index / member.count), end(total * (member.index + 1) / member.count) {}
};
