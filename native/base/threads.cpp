#include "threads.h"

#include <vector>
#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <pthread.h>
#endif
#if defined(__linux__)
#include <link.h>

#include <cstring>
#endif

namespace bellmax {
namespace {

using Work = void (*)(void*);
using Parallel = void (*)(Work, void*, unsigned threads, unsigned flags);

std::atomic<bool> is_forked{false};

#if defined(__linux__)
// The entry of an OpenMP runtime for a parallel region: GCC's, which those of LLVM and Intel have as well.
int look_for_runtime(dl_phdr_info* library, std::size_t, void* found) {
    const char* name = library->dlpi_name;
    if (!std::strstr(name, "libgomp") && !std::strstr(name, "libomp") && !std::strstr(name, "libiomp")) return 0;
    void* handle = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) return 0;
    *static_cast<Parallel*>(found) = reinterpret_cast<Parallel>(dlsym(handle, "GOMP_parallel"));
    return *static_cast<Parallel*>(found) != nullptr;
}
#endif

Parallel runtime() {
    static const Parallel found = [] {
        Parallel parallel = nullptr;
#if defined(__linux__)
        dl_iterate_phdr(look_for_runtime, &parallel);
#endif
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork(nullptr, nullptr, [] { is_forked = true; });  // the threads stay behind
#endif
        return parallel;
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

}  // namespace bellmax
