// Room for one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#ifndef BELLMAX_ARCH
#error "compile with -DBELLMAX_ARCH=baseline or avx2"
#endif

namespace bellmax {

// Memory that begins where a line of the cache does. A thread keeps some of what it gives back: in threads that take
// and give all the time the allocator would return pages and ask for them again.
void* take_memory(std::size_t bytes);
void give_memory(void* data) noexcept;

// Each instruction set has its own copy of whatever is inline: the linker must not take one for the other.
inline namespace BELLMAX_ARCH {

struct GiveBack {
    void operator()(void* data) const { give_memory(data); }
};

// Numbers that begin where a line of the cache does, so that no vector lies across two.
template <class T>
using Array = std::unique_ptr<T[], GiveBack>;

template <class T>
Array<T> scratch(std::int64_t size) {
    static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);
    return Array<T>(static_cast<T*>(take_memory(static_cast<std::size_t>(size) * sizeof(T))));
}

template <class T>
__attribute__((noinline)) Array<T> filled(std::int64_t size, T value) {
    Array<T> array = scratch<T>(size);
    for (std::int64_t n = 0; n < size; ++n) array[static_cast<std::size_t>(n)] = value;
    return array;
}

template <class T>
Array<T> zeros(std::int64_t size) {
    return filled<T>(size, T{});
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

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
