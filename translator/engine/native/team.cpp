// The threads that run a program, and the program. Teams are kept between calls; each caller has one to itself.
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "internal.h"

namespace {

void pause_a_little() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A number that threads wait to see changed: they spin for a moment, then sleep.
class Signal {
   public:
    uint64_t now() const { return value_.load(std::memory_order_acquire); }

    void set(uint64_t value) {
        value_.store(value);
        if (sleepers_.load() == 0) return;  // sequentially consistent with wait's: one of the two sees the other
        { std::lock_guard<std::mutex> lock(mutex_); }
        woken_.notify_all();
    }

    // Returns a value other than `old`.
    uint64_t wait(uint64_t old, std::chrono::microseconds spin) {
        uint64_t value = now();
        if (value != old) return value;
        const auto until = std::chrono::steady_clock::now() + spin;
        do {
            for (int i = 0; i < 32; i++) {
                if ((value = now()) != old) return value;
                pause_a_little();
            }
        } while (std::chrono::steady_clock::now() < until);
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        woken_.wait(lock, [&] { return (value = value_.load()) != old; });
        sleepers_.fetch_sub(1);
        return value;
    }

   private:
    std::atomic<uint64_t> value_{0};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable woken_;
};

// Blocks of memory that are kept and grow, one for each allocation that a call makes.
class Scratch {
   public:
    // Any number of threads may ask for the same block with the same size.
    char* block(int number, size_t bytes) {
        if (number >= blocks) std::abort();  // more than a kernel has reason to ask for
        Block& block = blocks_[number];
        if (block.bytes.load(std::memory_order_acquire) < bytes) {
            std::lock_guard<std::mutex> lock(mutex_);
            if (block.bytes.load() < bytes) {
                ::operator delete(block.data, std::align_val_t(64));
                block.data = static_cast<char*>(::operator new(bytes, std::align_val_t(64)));
                block.bytes.store(bytes, std::memory_order_release);
            }
        }
        return block.data;
    }

   private:
    static constexpr int blocks = 8;
    struct Block {
        char* data = nullptr;
        std::atomic<size_t> bytes{0};
    };
    Block blocks_[blocks];
    std::mutex mutex_;
};

const unsigned cores = std::max(1u, std::thread::hardware_concurrency());

}  // namespace

struct Team {
    // The turn in the upper bits, how many take part in it in the lower 16: one word, so that a thread late for a turn
    // that it has no part in can't mix two turns up.
    Signal start;
    Signal passed;  // barriers that all have reached
    std::atomic<int> arrived{0};
    const std::function<void(Member&)>* work = nullptr;
    Scratch shared;
    std::vector<Scratch*> own{new Scratch};
    uint64_t turn = 0;

    // How long to spin before sleeping: at a barrier, and for the next run, which a search asks for soon. Not at all
    // where threads outnumber the cores.
    static std::chrono::microseconds patience(int count, int microseconds) {
        return std::chrono::microseconds(unsigned(count) > cores ? 0 : microseconds);
    }

    // Starts threads until there are `count`, the caller's included; returns how many there are.
    int grow(int count) {
        sigset_t all, before;  // signals are the program's threads' business
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            while (int(own.size()) < count) {
                own.push_back(new Scratch);
                try {
                    std::thread(&Team::serve, this, int(own.size()) - 1, start.now()).detach();
                } catch (const std::system_error&) {  // the system has no more: fewer do the work
                    own.pop_back();
                    break;
                }
            }
        } catch (...) {}
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return std::min(count, int(own.size()));
    }

    void serve(int index, uint64_t seen) {
        for (;;) {
            seen = start.wait(seen, patience(int(seen & 0xffff), 200));
            const int count = int(seen & 0xffff);
            if (index < count) take_part(index, count);
        }
    }

    void take_part(int index, int count) {
        Member member{index, count, this};
        (*work)(member);
        member.barrier();
    }

    void run(int count, const std::function<void(Member&)>& what) {
        count = grow(count);
        work = &what;
        if (count > 1) start.set(++turn << 16 | uint64_t(count));
        take_part(0, count);
    }
};

void Member::barrier() {
    if (count > 1) {
        const uint64_t turn = team->passed.now();
        if (team->arrived.fetch_add(1) == count - 1) {
            team->arrived.store(0);
            team->passed.set(turn + 1);
        } else {
            team->passed.wait(turn, Team::patience(count, 50));
        }
    }
}

char* Member::shared(size_t bytes) { return team->shared.block(shared_calls++, bytes); }

char* Member::own(size_t bytes) { return team->own[size_t(index)]->block(own_calls++, bytes); }

namespace {

// The teams nobody uses at the moment. Never destroyed: threads sleep in them when the process ends.
struct Pool {
    std::mutex mutex;
    std::vector<Team*> idle;
};

Pool* pool = new Pool;

// A child process has none of its parent's threads: it begins anew, and what it leaves behind is the parent's.
const int forgets_when_forked = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });

}  // namespace

void with_team(int32_t threads, const std::function<void(Member&)>& work) {
    Team* team = nullptr;
    {
        std::lock_guard<std::mutex> lock(pool->mutex);
        if (!pool->idle.empty()) {
            team = pool->idle.back();
            pool->idle.pop_back();
        }
    }
    if (!team) team = new Team;
    team->run(std::max(1, std::min(threads, 0xffff)), work);
    std::lock_guard<std::mutex> lock(pool->mutex);
    pool->idle.push_back(team);
}

void tr_run(const TrCall* calls, int64_t count, int64_t rows, int32_t threads) {
    with_team(threads, [=](Member& member) {
        for (int64_t i = 0; i < count; i++) {
            if (i) member.barrier();
            member.shared_calls = member.own_calls = 0;
            const void* what = calls[i].what;
            switch (calls[i].kind) {
                case TR_PRODUCT: run_product(*static_cast<const TrProduct*>(what), rows, member); break;
                case TR_NORM: run_norm(*static_cast<const TrNorm*>(what), rows, member); break;
                case TR_CACHED: run_cached(*static_cast<const TrCached*>(what), rows, member); break;
                case TR_DENSE: run_dense(*static_cast<const TrDense*>(what), rows, member); break;
                case TR_ADVANCE: run_advance(*static_cast<const TrAdvance*>(what), rows, member); break;
                case TR_EMBED: run_embed(*static_cast<const TrEmbed*>(what), rows, member); break;
            }
        }
    });
}
