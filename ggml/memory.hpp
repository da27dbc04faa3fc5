// What is remembered of ggml's objects because ggml tells nobody: how many threads a backend computes
// with, which weights are partial sums, which graph a scheduler is allocated for or a plan computes,
// what an optimisation context evaluates; and how to clear up after an allocation that failed. The
// annotations' `after` and `require` call these.

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
#include <unordered_map>

namespace ggml_cffi {

// ---- threads of CPU backends: an abort in a kernel can only be caught where one thread computes

inline std::mutex threads_lock;
inline std::unordered_map<const void *, int> threads_table;

inline void note_threads(const void * backend, int n) {
    std::lock_guard<std::mutex> hold(threads_lock);
    threads_table[backend] = n;
}

inline void forget_threads(const void * backend) {
    std::lock_guard<std::mutex> hold(threads_lock);
    threads_table.erase(backend);
}

#ifdef GGML_CFFI_HAS_META
inline size_t n_children(ggml_backend_t backend) {
    return backend && ggml_backend_is_meta(backend) ? ggml_backend_meta_n_backends(backend) : 0;
}
inline ggml_backend_t child(ggml_backend_t backend, size_t i) { return ggml_backend_meta_simple_backend(backend, i); }
#else
inline size_t n_children(ggml_backend_t) { return 0; }
inline ggml_backend_t child(ggml_backend_t, size_t) { return nullptr; }
#endif

// A backend that has just been made: what was noted of one that lay at its address is void.
inline void fresh_backend(ggml_backend_t backend) {
    forget_threads(backend);
    for (size_t i = 0; i < n_children(backend); ++i) {
        forget_threads(child(backend, i));
    }
}

// The most threads that a computation may use. ggml gives a CPU backend GGML_DEFAULT_N_THREADS
// where nobody says otherwise; a meta backend uses its children's.
inline int threads_of(ggml_backend_t backend) {
    const size_t n = n_children(backend);
    int          most = 1;
    for (size_t i = 0; i < n; ++i) {
        most = std::max(most, threads_of(child(backend, i)));
    }
    if (n) {
        return most;
    }
    std::lock_guard<std::mutex> hold(threads_lock);
    auto found = threads_table.find(backend);
    return found == threads_table.end() ? GGML_DEFAULT_N_THREADS : found->second;
}

// A scheduler's, of all its backends.
inline int threads_of(ggml_backend_sched_t scheduler) {
    int most = 1;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(scheduler); ++i) {
        most = std::max(most, threads_of(ggml_backend_sched_get_backend(scheduler, i)));
    }
    return most;
}

// ---- weights that each device of a meta device holds a part of the sum of: ggml reads all of the
// caller's data whatever part of the tensor is to be written

inline std::mutex partial_lock;
inline std::unordered_map<const ggml_tensor *, bool> partial_table;
inline std::atomic<size_t> partial_count{0};

inline void note_partial(const ggml_tensor * tensor, bool partial) {
    if (!partial && partial_count == 0) {
        return;
    }
    std::lock_guard<std::mutex> hold(partial_lock);
    if (partial) {
        partial_table[tensor] = true;
    } else {
        partial_table.erase(tensor);
    }
    partial_count = partial_table.size();
}

inline bool whole_if_partial(const ggml_tensor * tensor, size_t offset, size_t size) {
    if (partial_count == 0) {
        return true;
    }
    std::lock_guard<std::mutex> hold(partial_lock);
    return !partial_table.count(tensor) || (offset == 0 && size == ggml_nbytes(tensor));
}

// ---- what ggml leaves behind when memory cannot be had, or was only measured

// A graph of no nodes, for as long as this lives.
struct empty_graph {
    ggml_context * const context;
    ggml_cgraph * const  graph;
    empty_graph()
        : context(ggml_init({ ggml_graph_overhead_custom(1, false) + 1024, nullptr, true })),
          graph(ggml_new_graph_custom(context, 1, false)) {}
    ~empty_graph() { ggml_free(context); }
    empty_graph(const empty_graph &) = delete;
};

// An allocator that failed, or only measured, has noted the graph as planned, with no buffers behind
// the plan: the next try would read NULL. Planning an empty graph makes it forget.
inline void forget_plan(ggml_gallocr_t allocator) {
    empty_graph empty;
    ggml_gallocr_reserve(allocator, empty.graph);
}

inline void forget_plan(ggml_backend_sched_t scheduler) {
    empty_graph empty;
    ggml_backend_sched_reserve(scheduler, empty.graph);
}

#ifdef GGML_CFFI_LINKS_GGML_CPU
// ggml frees a CPU backend's work buffer before it allocates a larger one: if that throws, the
// backend is left with the freed one. So try first. Throws std::bad_alloc.
inline bool can_work(ggml_backend_t backend, ggml_cgraph * graph) {
    if (ggml_backend_is_cpu(backend)) {
        const size_t size = ggml_graph_plan(graph, threads_of(backend), nullptr).work_size;
        if (size > (1u << 20)) {
            ::operator delete(::operator new(size));
        }
    }
    return true;
}
#else
inline bool can_work(ggml_backend_t, ggml_cgraph *) { return true; }
#endif

// ---- what a scheduler is allocated for: given another graph, ggml computes the first one again

struct scheduled {
    const ggml_cgraph * graph;
    int                 n_nodes;
};
inline std::mutex scheduled_lock;
inline std::unordered_map<const void *, scheduled> scheduled_table;

// Said before the call, which may allocate and then abort. Always true.
inline bool note_graph(ggml_backend_sched_t scheduler, ggml_cgraph * graph) {
    std::lock_guard<std::mutex> hold(scheduled_lock);
    scheduled_table[scheduler] = { graph, ggml_graph_n_nodes(graph) };
    return true;
}

inline void forget_graph(ggml_backend_sched_t scheduler) {
    std::lock_guard<std::mutex> hold(scheduled_lock);
    scheduled_table.erase(scheduler);
}

// The scheduler is reset, or allocated for this very graph as it is now.
inline bool reset_or_allocated_for(ggml_backend_sched_t scheduler, ggml_cgraph * graph) {
    std::lock_guard<std::mutex> hold(scheduled_lock);
    auto found = scheduled_table.find(scheduler);
    return found == scheduled_table.end() ||
           (found->second.graph == graph && found->second.n_nodes == ggml_graph_n_nodes(graph));
}

// ---- plans: `void *` in C, and their graphs cannot be had from them

inline std::mutex plans_lock;
inline std::unordered_map<const void *, ggml_cgraph *> plans_table;

inline void note_plan(const void * plan, ggml_cgraph * graph) {
    if (plan) {
        std::lock_guard<std::mutex> hold(plans_lock);
        plans_table[plan] = graph;
    }
}

inline void forget_plan(const void * plan) {
    std::lock_guard<std::mutex> hold(plans_lock);
    plans_table.erase(plan);
}

// The graph of a plan, NULL for what is none.
inline ggml_cgraph * graph_of(const void * plan) {
    std::lock_guard<std::mutex> hold(plans_lock);
    auto found = plans_table.find(plan);
    return found == plans_table.end() ? nullptr : found->second;
}

inline bool indices(const void * plan, ggml_backend_t backend) {
    ggml_cgraph * graph = graph_of(plan);
    return !graph || check::indices(graph, backend);
}

// What a CPU backend takes for a plan is one; others say themselves that they have none.
inline bool is_plan(const void * plan, ggml_backend_t backend) {
    return graph_of(plan) || ggml_backend_dev_type(ggml_backend_get_device(backend)) != GGML_BACKEND_DEVICE_TYPE_CPU;
}

// ---- what an optimisation context computes with, and whether it is ready to

struct optimisation {
    ggml_backend_sched_t scheduler;
    bool                 ready; // allocated, and not evaluated since
};
inline std::mutex optimisations_lock;
inline std::unordered_map<const void *, optimisation> optimisations_table;

inline void note_scheduler(ggml_opt_context_t context, ggml_backend_sched_t scheduler) {
    if (context) {
        std::lock_guard<std::mutex> hold(optimisations_lock);
        optimisations_table[context] = { scheduler, false };
    }
}

// Always true.
inline bool note_ready(ggml_opt_context_t context, bool ready) {
    std::lock_guard<std::mutex> hold(optimisations_lock);
    auto found = optimisations_table.find(context);
    if (found != optimisations_table.end()) {
        found->second.ready = ready;
    }
    return true;
}

inline void forget_scheduler(ggml_opt_context_t context) {
    std::lock_guard<std::mutex> hold(optimisations_lock);
    optimisations_table.erase(context);
}

inline ggml_backend_sched_t scheduler_of(ggml_opt_context_t context) {
    std::lock_guard<std::mutex> hold(optimisations_lock);
    auto found = optimisations_table.find(context);
    return found == optimisations_table.end() ? nullptr : found->second.scheduler;
}

inline int threads_of(ggml_opt_context_t context) {
    ggml_backend_sched_t scheduler = scheduler_of(context);
    return scheduler ? threads_of(scheduler) : GGML_DEFAULT_N_THREADS;
}

// The graph of a context without static graphs belongs to the caller, who may free it once it has
// been evaluated: until then, and always with static graphs, its indices are looked at.
inline bool indices(ggml_opt_context_t context, ggml_opt_dataset_t dataset = nullptr) {
    if (!ggml_opt_static_graphs(context)) {
        std::lock_guard<std::mutex> hold(optimisations_lock);
        auto found = optimisations_table.find(context);
        if (found == optimisations_table.end() || !found->second.ready) {
            return true;
        }
    }
    return check::indices(ggml_opt_outputs(context), ggml_opt_inputs(context), dataset);
}

} // namespace ggml_cffi
