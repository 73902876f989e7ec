// Threads: a loop over work that they share, a queue that they take from in turn, and a way to wait for each other. An
// exception leaves each as it leaves a plain loop, and numbers too small for their format are 0 inside: they are slow,
// and their digits are lost anyhow.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#ifndef BELLMAX_ARCH
#error "compile with -DBELLMAX_ARCH=baseline or avx2"
#endif

namespace bellmax {

// Calls work(data) on up to so many threads at once, and returns when all are done. The threads belong to the OpenMP
// runtime that torch has loaded: a second pool would compete with it for the cores.
void run_on_threads(int threads, void (*work)(void*), void* data);

// Lets other threads run, at once or for a millisecond. (The header of std::thread takes longer to compile than some
// kernels.)
void give_way();
void sleep_briefly();

// Thrown in every thread of a kernel that is interrupted.
struct Interrupted {};

// The interrupts of one call of a kernel. It exists while the kernel runs, on the thread that called it. Threads that
// help attach to it.
class InterruptCheck {
    InterruptCheck* const outer;  // a signal handler may call a kernel
    std::atomic<bool> is_interrupted{false};
    std::int64_t next_poll;

public:
    InterruptCheck();
    InterruptCheck(const InterruptCheck&) = delete;
    virtual ~InterruptCheck();

    // True if a signal handler raised an exception. Called on the calling thread only.
    virtual bool poll() = 0;

    static InterruptCheck* of_this_thread();
    static void attach(InterruptCheck* check);  // this thread
    bool is_caller() const;
    void check();
};

// Throws Interrupted if the kernel that this thread works for is interrupted. The calling thread polls every 100 ms.
void check_interrupt();

// Calls check_interrupt() about once per 2^20 units of work: every millisecond, if a unit takes a nanosecond.
class Pace {
    static constexpr std::int64_t between = 1 << 20;
    std::int64_t left = between;

public:
    void spend(std::int64_t work) {
        if ((left -= work) > 0) return;
        left = between;
        check_interrupt();
    }
};

inline namespace BELLMAX_ARCH {

class FlushDenormals {
#if defined(__SSE2__)
    unsigned before = _mm_getcsr();

public:
    FlushDenormals() { _mm_setcsr(before | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(before); }
#elif defined(__aarch64__)
    std::uint64_t before;

public:
    FlushDenormals() {
        asm volatile("mrs %0, fpcr" : "=r"(before));
        asm volatile("msr fpcr, %0" : : "r"(before | (std::uint64_t(1) << 24)));
    }
    ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(before)); }
#else
public:
    FlushDenormals() {}
    ~FlushDenormals() {}
#endif
    FlushDenormals(const FlushDenormals&) = delete;
};

// Spin-wait hint to the CPU.
inline void pause_briefly() {
#if defined(__SSE2__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// The first exception of several threads.
class Failure {
    std::atomic<bool> taken{false}, kept{false};
    std::exception_ptr first;

public:
    void keep() {
        if (taken.exchange(true)) return;
        first = std::current_exception();
        kept.store(true, std::memory_order_release);
    }
    bool has_any() const { return kept.load(std::memory_order_acquire); }
    void rethrow() const {
        if (has_any()) std::rethrow_exception(first);
    }
};

// body(n, slot) for n < count. Slot t < threads has n = t, t + threads, …, in every run the same.
template <class Body>
void parallel_for(std::int64_t count, int threads, Body body) {
    struct Loop {
        Body& body;
        std::int64_t count;
        int slots;
        InterruptCheck* const check = InterruptCheck::of_this_thread();
        std::atomic<int> next{0}, done{0};
        Failure failure{};

        void work() {
            const FlushDenormals guard;
            InterruptCheck* const before = InterruptCheck::of_this_thread();
            InterruptCheck::attach(check);
            try {
                for (int slot = next++; slot < slots; slot = next++) {
                    for (std::int64_t n = slot; n < count && !failure.has_any(); n += slots) {
                        check_interrupt();
                        body(n, slot);
                    }
                    ++done;
                }
                if (check && check->is_caller()) wait();
            } catch (...) {
                failure.keep();
            }
            InterruptCheck::attach(before);
        }
        // The calling thread waits here and not at the barrier, where it would see no interrupt.
        void wait() const {
            for (int turns = 0; done < slots && !failure.has_any(); ++turns) {
                check_interrupt();
                if (turns > 2000) {
                    sleep_briefly();
                } else if (turns > 200) {
                    give_way();
                } else {
                    pause_briefly();
                }
            }
        }
    };
    Loop region{body, count, int(std::min<std::int64_t>(std::max(threads, 1), count))};
    if (region.slots > 1) {
        run_on_threads(region.slots, [](void* data) { static_cast<Loop*>(data)->work(); }, &region);
    } else {
        region.work();
    }
    region.failure.rethrow();
}

// body(n, own) for n < count, each thread taking the next one, so that no thread waits for a body that has not begun.
// make() returns the working memory of a thread.
template <class Make, class Body>
void take_turns(std::int64_t count, int threads, Make make, Body body) {
    std::atomic<std::int64_t> next{0};
    parallel_for(std::min<std::int64_t>(threads, count), threads, [&](std::int64_t, int) {
        auto own = make();
        for (std::int64_t n = next++; n < count; n = next++) {
            check_interrupt();
            body(n, own);
        }
    });
}

// How far each of several neighbors is. Those who wait fail with one that has failed, since it will never come.
class Progress {
    struct alignas(64) Counter {
        std::atomic<std::int64_t> done{0};
    };
    std::unique_ptr<Counter[]> counters;
    Failure failure;

public:
    explicit Progress(std::int64_t count) : counters(new Counter[static_cast<std::size_t>(count)]) {}

    void report(std::int64_t n, std::int64_t done) {
        counters[static_cast<std::size_t>(n)].done.store(done, std::memory_order_release);
    }
    void wait(std::int64_t n, std::int64_t done) const {
        for (int spins = 0; counters[static_cast<std::size_t>(n)].done.load(std::memory_order_acquire) < done;
             ++spins) {
            failure.rethrow();
            if (spins > 1000) {
                check_interrupt();
                give_way();
            } else {
                pause_briefly();
            }
        }
    }
    // Runs body(), and tells those who wait if it throws.
    template <class Body>
    void guard(Body body) {
        try {
            body();
        } catch (...) {
            failure.keep();
            throw;
        }
    }
};

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
