// Graphs as the objects have them: in an order of computation, however deep, and copied, so that the
// same operations can be allocated on several devices.

#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

namespace ggml_cffi {

// A tensor that has memory of its own, and so is no part of what a graph computes.
inline bool stands_alone(const ggml_tensor * t) { return t->buffer || (t->data && !t->view_src); }

// All that `outputs` are made from, operands first; without recursion, which a deep graph's depth
// would be too much for.
inline std::vector<ggml_tensor *> in_order(ggml_tensor ** outputs, int n) {
    std::vector<ggml_tensor *> order;
    by_tensor<bool>            seen(2048); // and whether it is in `order` already
    std::vector<ggml_tensor *> todo;
    for (int i = 0; i < n; ++i) {
        todo.push_back(outputs[i]);
        while (!todo.empty()) {
            ggml_tensor * t = todo.back();
            if (const auto [done, fresh] = seen.of(t); !fresh) {
                todo.pop_back();
                if (!done) {
                    order.push_back(t);
                    done = true;
                }
                continue;
            }
            if (stands_alone(t)) {
                continue;
            }
            for (int s = GGML_MAX_SRC - 1; s >= 0; --s) {
                if (t->src[s] && !seen.has(t->src[s])) {
                    todo.push_back(t->src[s]);
                }
            }
            if (t->view_src && !seen.has(t->view_src)) {
                todo.push_back(t->view_src);
            }
        }
    }
    return order;
}

} // namespace ggml_cffi

// Tensors of `context` that point into `buffer`, which is about to go, stand unallocated again.
static void ggml_cffi_forget_buffer(struct ggml_context * context, struct ggml_backend_buffer * buffer) {
    ggml_cffi::forget_buffer(context, buffer);
}

// How many axes it takes to tell a tensor's shape: none for a single number. ggml's own count overlooks
// those of no elements.
static int ggml_cffi_n_axes(const struct ggml_tensor * tensor) {
    int n = GGML_MAX_DIMS;
    while (n > 0 && tensor->ne[n - 1] == 1) {
        --n;
    }
    return n;
}

// The tensors that `outputs` are made from, operands first: fills `order` up to `capacity` and gives
// how many there are.
static int64_t ggml_cffi_raw_order(struct ggml_tensor ** outputs, int n, struct ggml_tensor ** order, int64_t capacity) {
    const auto found = ggml_cffi::in_order(outputs, n);
    for (int64_t i = 0; i < capacity && i < (int64_t) found.size(); ++i) {
        order[i] = found[i];
    }
    return (int64_t) found.size();
}

// How many of them are results of operations.
static int64_t ggml_cffi_raw_n_nodes(struct ggml_tensor ** outputs, int n) {
    int64_t count = 0;
    for (const ggml_tensor * t : ggml_cffi::in_order(outputs, n)) {
        count += t->op != GGML_OP_NONE;
    }
    return count;
}

// Copies in `ctx`, which has room for them, of n tensors in that order; those with memory of their own
// stand for themselves.
static void ggml_cffi_raw_copy_tensors(struct ggml_context * ctx, struct ggml_tensor ** order, int64_t n,
                                   struct ggml_tensor ** copies) {
    std::unordered_map<const ggml_tensor *, ggml_tensor *> copy_of;
    for (int64_t i = 0; i < n; ++i) {
        const ggml_tensor * t = order[i];
        if (ggml_cffi::stands_alone(t)) {
            copy_of[t] = copies[i] = order[i];
        } else {
            ggml_tensor * c = copies[i] = ggml_new_tensor(ctx, t->type, GGML_MAX_DIMS, t->ne);
            copy_of[t] = c; // ggml_cast's result is an operand of itself
            std::memcpy(c->nb, t->nb, sizeof c->nb);
            std::memcpy(c->op_params, t->op_params, sizeof c->op_params);
            std::memcpy(c->name, t->name, sizeof c->name);
            c->op = t->op;
            c->flags = t->flags;
            for (int s = 0; s < GGML_MAX_SRC; ++s) {
                c->src[s] = t->src[s] ? copy_of.at(t->src[s]) : nullptr;
            }
            c->view_src = t->view_src ? copy_of.at(t->view_src) : nullptr;
            c->view_offs = t->view_offs;
            c->data = c->view_src && c->view_src->data ? (char *) c->view_src->data + c->view_offs : nullptr;
        }
    }
}

// Why a backend could not compute a graph that has memory, NULL where it can: of all that is asked then, what
// is known before. Good until the thread's next call.
static const char * ggml_cffi_raw_why_not(struct ggml_backend * backend, struct ggml_cgraph * graph) {
    static thread_local std::string reason;
    if (check::allocated(graph, backend) && check::supported(graph, backend) && check::cpu_can(graph, backend)) {
        return nullptr;
    }
    reason = std::exchange(check::why, {}); // it is of nothing that comes
    return reason.c_str();
}

// They are called as ggml's functions are: what there is no memory for is an error, and so is an abort.
#define GGML_CFFI_HELPER(function) ggml_cffi::call<&function, ggml_cffi::traits<0, ggml_cffi::leave::by_throw>>::now
#define ggml_cffi_order(...) GGML_CFFI_HELPER(ggml_cffi_raw_order)(__VA_ARGS__)
#define ggml_cffi_n_nodes(...) GGML_CFFI_HELPER(ggml_cffi_raw_n_nodes)(__VA_ARGS__)
#define ggml_cffi_why_not(...) GGML_CFFI_HELPER(ggml_cffi_raw_why_not)(__VA_ARGS__)
#define ggml_cffi_copy_tensors(...) GGML_CFFI_HELPER(ggml_cffi_raw_copy_tensors)(__VA_ARGS__)
