#include "threads.h"

#include <string>
#include <thread>
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

}  // namespace bellmax
