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

// Throws for a tensor that is none, after emptying it. `depth`: so far behind it are tensors that the
// same function has made.
inline void sound(ggml_tensor * t, int depth = 0) {
    if (!t) {
        return;
    }
    if (!check::shape(t->type, t->ne[0], t->ne[1], t->ne[2], t->ne[3])) {
        const std::string would_be = check::named(t) + " of " + check::described((const ggml_tensor *) t);
        empty(t);
        throw refused{ "a result that can have memory: " + would_be };
    }
    for (int i = 0; depth > 0 && i < GGML_MAX_SRC; ++i) {
        if (t->src[i] != t) {
            sound(t->src[i], depth - 1);
        }
    }
}

} // namespace ggml_cffi
