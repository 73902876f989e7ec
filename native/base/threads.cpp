#include "threads.h"

#include <chrono>
#include <string>
#include <thread>
#include <vector>
#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <pthread.h>
#endif
#if defined(__linux__)
#include <link.h>
#include <time.h>

#include <cstring>
#endif

namespace bellmax {
namespace {

using Work = void (*)(void*);
using Parallel = void (*)(Work, void*, unsigned threads, unsigned flags);

std::atomic<bool> is_forked{false};

#if defined(__linux__)
// Notes the OpenMP runtimes among the libraries that are loaded. None may be opened while these are walked through.
int note_runtime(dl_phdr_info* library, std::size_t, void* found) {
    const char* name = library->dlpi_name;
    const bool is_one = std::strstr(name, "libgomp") || std::strstr(name, "libomp") || std::strstr(name, "libiomp");
    if (is_one) static_cast<std::vector<std::string>*>(found)->emplace_back(name);
    return 0;
}

// The entry for a parallel region: GCC's, which the runtimes of LLVM and Intel have as well.
Parallel find_runtime() {
    std::vector<std::string> names;
    dl_iterate_phdr(note_runtime, &names);
    for (const std::string& name : names) {
        void* const handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
        void* const entry = handle ? dlsym(handle, "GOMP_parallel") : nullptr;
        if (entry) return reinterpret_cast<Parallel>(entry);
    }
    return nullptr;
}
#else
Parallel find_runtime() { return nullptr; }
#endif

thread_local InterruptCheck* attached = nullptr;
thread_local InterruptCheck* called = nullptr;  // of the innermost kernel that this thread called

// A clock that is cheap to read, to a few milliseconds.
std::int64_t milliseconds() {
#if defined(__linux__)
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return std::int64_t(now.tv_sec) * 1000 + now.tv_nsec / 1000000;
#else
    using namespace std::chrono;
    return duration_cast<std::chrono::milliseconds>(steady_clock::now().time_since_epoch()).count();
#endif
}

constexpr std::int64_t poll_interval = 100;  // milliseconds

Parallel runtime() {
    static const Parallel found = [] {
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork(nullptr, nullptr, [] { is_forked = true; });  // the threads stay behind
#endif
        return find_runtime();
    }();
    return found;
}

}  // namespace

void run_on_threads(int threads, Work work, void* data) {
    const Parallel parallel = runtime();
    if (threads <= 1 || is_forked) return work(data);
    if (parallel) return parallel(work, data, unsigned(threads), 0);
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back(work, data);
    work(data);
    for (std::thread& other : others) other.join();
}

void give_way() { std::this_thread::yield(); }
void sleep_briefly() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

InterruptCheck::InterruptCheck() : outer(called), next_poll(milliseconds() + poll_interval) {
    attached = called = this;
}

InterruptCheck::~InterruptCheck() { attached = called = outer; }

InterruptCheck* InterruptCheck::of_this_thread() { return attached; }
void InterruptCheck::attach(InterruptCheck* check) { attached = check; }
bool InterruptCheck::is_caller() const { return called == this; }

void InterruptCheck::check() {
    if (is_caller() && milliseconds() >= next_poll) {
        if (poll()) is_interrupted = true;
        next_poll = milliseconds() + poll_interval;
    }
    if (is_interrupted.load(std::memory_order_relaxed)) throw Interrupted();
}

void check_interrupt() {
    if (InterruptCheck* const check = attached) check->check();
}

}  // namespace bellmax
