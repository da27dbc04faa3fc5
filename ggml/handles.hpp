// How many objects of ggml's the caller owns, and how many are lost: where ggml aborts while it frees
// one, what was not freed by then stays for good, and the handle must not be used again.
//
// The generator declares `handle`, with an enumerator for each type that the caller has to free.

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <unordered_map>

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

// What an abort has left half freed, and whether it counts as leaked already. Some of its destructors
// have run: nothing may use or free it any more.
inline std::atomic<size_t> n_broken{0};
inline fork_safe_mutex broken_lock;
inline std::unordered_map<const void *, bool> broken_table;

inline void note_broken(const void * object, bool counted) {
    std::lock_guard<fork_safe_mutex> hold(broken_lock);
    broken_table[object] = counted;
    n_broken = broken_table.size();
}

inline bool is_broken(const void * object) {
    if (n_broken == 0) {
        return false;
    }
    std::lock_guard<fork_safe_mutex> hold(broken_lock);
    return broken_table.count(object);
}

// The caller owns `value` from now on.
template <class T> void made(handle kind, const T & value) {
    if (is_something(value)) {
        counts_of(kind).live.fetch_add(1, std::memory_order_relaxed);
        if constexpr (std::is_pointer_v<T>) {
            if (n_broken) { // what lay there before is gone after all
                std::lock_guard<fork_safe_mutex> hold(broken_lock);
                broken_table.erase(value);
                n_broken = broken_table.size();
            }
        }
    }
}

// Something else has taken `n` of the caller's over.
inline void taken_over(handle kind, size_t n) {
    counts_of(kind).live.fetch_sub((int64_t) n, std::memory_order_relaxed);
}

// ggml was to free `value`, and has, or has given up on the way; half of it may be gone then.
template <class T> void freed(handle kind, const T & value, bool completely, bool half = false) {
    if (!is_something(value)) {
        return;
    }
    if constexpr (std::is_pointer_v<T>) {
        if (half) {
            std::lock_guard<fork_safe_mutex> hold(broken_lock);
            bool & counted = broken_table[value];
            n_broken = broken_table.size();
            if (counted) {
                return;
            }
            counted = true;
        }
    }
    counts_of(kind).live.fetch_sub(1, std::memory_order_relaxed);
    counts_of(kind).leaked.fetch_add(!completely, std::memory_order_relaxed);
}

} // namespace ggml_cffi
