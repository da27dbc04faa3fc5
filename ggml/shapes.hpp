// What a function that makes a tensor has made: ggml computes extents and bytes without looking whether
// they fit, and a kernel would then write far behind a small buffer.

#include <algorithm>
#include <iterator>
#include <string>

namespace ggml_cffi {

// A tensor whose bytes cannot be counted is emptied: its context keeps it, and may yet be allocated.
inline void empty(ggml_tensor * t) {
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        t->ne[i] = 0;
    }
    t->op = GGML_OP_NONE;
    t->view_src = nullptr;
    std::fill(std::begin(t->src), std::end(t->src), nullptr);
}

// Whether it is none. `depth`: so far behind it are tensors that the same function has made; what was
// made of one without sense has none either.
inline bool is_unsound(ggml_tensor * t, int depth, std::string & first) {
    bool unsound = false;
    for (int i = 0; depth > 0 && i < GGML_MAX_SRC; ++i) {
        if (t->src[i] && t->src[i] != t) {
            unsound |= is_unsound(t->src[i], depth - 1, first);
        }
    }
    if (!unsound && check::shape(t->type, t->ne[0], t->ne[1], t->ne[2], t->ne[3])) {
        return false;
    }
    if (first.empty()) {
        first = check::named(t) + " of " + check::described((const ggml_tensor *) t);
    }
    empty(t);
    return true;
}

inline void sound(ggml_tensor * t, int depth = 0) {
    std::string first;
    if (t && is_unsound(t, depth, first)) {
        throw refused{ "a result that can have memory: " + first };
    }
}

} // namespace ggml_cffi
