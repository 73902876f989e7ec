#include "memory.h"

namespace bellmax {
namespace {

constexpr std::size_t line = 64, smallest = 1 << 10;
constexpr int classes = 11, most = 8, most_of_large = 2, first_large = 7;  // up to 1 MB, 5 MB in all for a thread

// Blocks that a thread has given back, by size: twice the one before.
struct Pool {
    void* blocks[classes][most];
    int count[classes] = {};
    bool is_alive = true;

    ~Pool() {
        is_alive = false;
        for (int k = 0; k < classes; ++k) {
            for (int n = 0; n < count[k]; ++n) ::operator delete(blocks[k][n], std::align_val_t(line));
        }
    }
};
thread_local Pool pool;

#if defined(__SANITIZE_ADDRESS__)
constexpr bool keeps = false;  // so that the sanitizer sees a use after a return
#else
constexpr bool keeps = true;
#endif

int class_of(std::size_t bytes) {
    int k = 0;
    while (k < classes && (smallest << k) < bytes) ++k;
    return k;
}

}  // namespace

void* take_memory(std::size_t bytes) {
    const int k = class_of(bytes);
    if (k < classes && pool.is_alive && pool.count[k] > 0) {
        return static_cast<char*>(pool.blocks[k][--pool.count[k]]) + line;
    }
    const std::size_t size = k < classes && keeps ? smallest << k : bytes;
    void* const block = ::operator new(size + line, std::align_val_t(line));
    *static_cast<int*>(block) = k;
    return static_cast<char*>(block) + line;
}

void give_memory(void* data) noexcept {
    if (!data) return;
    void* const block = static_cast<char*>(data) - line;
    const int k = *static_cast<int*>(block);
    if (keeps && k < classes && pool.is_alive && pool.count[k] < (k < first_large ? most : most_of_large)) {
        pool.blocks[k][pool.count[k]++] = block;
    } else {
        ::operator delete(block, std::align_val_t(line));
    }
}

}  // namespace bellmax
