// Room for one call, and a loop over threads that an exception leaves as it leaves a plain loop.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace bellmax {

template <class T>
std::unique_ptr<T[]> scratch(std::int64_t size) {
    return std::unique_ptr<T[]>(new T[static_cast<std::size_t>(size)]);
}

template <class T>
std::unique_ptr<T[]> zeros(std::int64_t size) {
    return std::unique_ptr<T[]>(new T[static_cast<std::size_t>(size)]());
}

// Asks for large pages before a large result is first touched: page by page, that costs more than the arithmetic.
inline void prefer_large_pages(void* data, std::int64_t bytes) {
#if defined(__linux__)
    constexpr std::uintptr_t page = 2 << 20;
    const std::uintptr_t first = (reinterpret_cast<std::uintptr_t>(data) + page - 1) / page * page;
    const std::uintptr_t last = (reinterpret_cast<std::uintptr_t>(data) + std::uintptr_t(bytes)) / page * page;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

// The number of this thread in a parallel loop.
inline int this_thread() {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// The only exception that kernels raise is want of memory; it must not cross the border of a parallel region.
template <class Body>
void parallel_for(std::int64_t count, int threads, Body body) {
    bool failed = false;
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (count > 1)
    for (std::int64_t n = 0; n < count; ++n) {
        try {
            body(n);
        } catch (const std::bad_alloc&) {
#pragma omp atomic write
            failed = true;
        }
    }
    if (failed) throw std::bad_alloc();
}

}  // namespace bellmax
