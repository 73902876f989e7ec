// Room for one call, and a loop over threads that an exception leaves as it leaves a plain loop.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace bellmax {

template <class T>
std::unique_ptr<T[]> scratch(std::int64_t size) {
    return std::unique_ptr<T[]>(new T[static_cast<std::size_t>(size)]);
}

template <class T>
std::unique_ptr<T[]> zeros(std::int64_t size) {
    return std::unique_ptr<T[]>(new T[static_cast<std::size_t>(size)]());
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
