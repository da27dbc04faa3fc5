// How many objects of ggml's the caller owns, and how many are lost: where ggml aborts while it frees
// one, what was not freed by then stays for good, and the handle must not be used again.
//
// The generator declares `handle`, with an enumerator for each type that the caller has to free.

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace ggml_cffi {

struct handle_counts {
    std::atomic<int64_t> live{0};
    std::atomic<int64_t> leaked{0};
};
inline std::array<handle_counts, (size_t) handle::n_handles> handle_table;
inline std::atomic<uint64_t> caught_aborts{0};

inline handle_counts & counts_of(handle kind) { return handle_table[(size_t) kind]; }

// A result that stands for nothing is NULL, or a struct of zeros.
template <class T> bool is_something(const T & value) {
    if constexpr (std::is_pointer_v<T>) {
        return value != nullptr;
    } else {
        static const T nothing{};
        return std::memcmp(&value, &nothing, sizeof value) != 0;
    }
}

// The caller owns `value` from now on.
template <class T> void made(handle kind, const T & value) {
    if (is_something(value)) {
        counts_of(kind).live.fetch_add(1, std::memory_order_relaxed);
    }
}

// Something else has taken `n` of the caller's over.
inline void taken_over(handle kind, size_t n) {
    counts_of(kind).live.fetch_sub((int64_t) n, std::memory_order_relaxed);
}

// ggml was to free `value`, and has, or has given up on the way.
template <class T> void freed(handle kind, const T & value, bool completely) {
    if (is_something(value)) {
        counts_of(kind).live.fetch_sub(1, std::memory_order_relaxed);
        counts_of(kind).leaked.fetch_add(!completely, std::memory_order_relaxed);
    }
}

} // namespace ggml_cffi
