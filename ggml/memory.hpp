// What is remembered of ggml's objects because ggml tells nobody: how many threads a backend computes
// with, which graph a scheduler is allocated for or a plan computes, what an optimisation context
// evaluates; and how to clear up after an allocation that failed. The annotations' `before`, `after`
// and `require` call these.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <unordered_map>
#include <vector>

namespace ggml_cffi {

// What is known of objects, by their addresses. An entry goes before its object does: another thread
// may get the address at once.
template <class Value> class by_address {
    fork_safe_mutex                         lock;
    std::unordered_map<const void *, Value> entries;
    std::atomic<bool>                       used{false}; // where it is empty, a look-up needs no lock

  public:
    void note(const void * key, Value value) {
        std::lock_guard<fork_safe_mutex> hold(lock);
        remembered += entries.insert_or_assign(key, value).second;
        used = true;
    }
    void forget(const void * key) {
        if (used) {
            std::lock_guard<fork_safe_mutex> hold(lock);
            remembered -= (int64_t) entries.erase(key);
            used = !entries.empty();
        }
    }
    template <class Test> void forget_if(Test is_gone) {
        if (used) {
            std::lock_guard<fork_safe_mutex> hold(lock);
            for (auto entry = entries.begin(); entry != entries.end();) {
                const bool gone = is_gone(entry->second);
                entry = gone ? entries.erase(entry) : std::next(entry);
                remembered -= gone;
            }
            used = !entries.empty();
        }
    }
    std::optional<Value> find(const void * key) {
        if (!used) {
            return std::nullopt;
        }
        std::lock_guard<fork_safe_mutex> hold(lock);
        auto found = entries.find(key);
        return found == entries.end() ? std::nullopt : std::optional<Value>(found->second);
    }
};

// ---- threads of CPU backends: an abort in a kernel can only be caught where one thread computes

inline by_address<int> threads_table;

inline void note_threads(const void * backend, int n) { threads_table.note(backend, n); }

#ifdef GGML_CFFI_HAS_META
inline size_t n_children(ggml_backend_t backend) {
    return backend && ggml_backend_is_meta(backend) ? ggml_backend_meta_n_backends(backend) : 0;
}
inline ggml_backend_t child(ggml_backend_t backend, size_t i) { return ggml_backend_meta_simple_backend(backend, i); }
#else
inline size_t n_children(ggml_backend_t) { return 0; }
inline ggml_backend_t child(ggml_backend_t, size_t) { return nullptr; }
#endif

// A backend that goes, or has just been made: what was noted of one at its address is void.
inline void forget_threads(ggml_backend_t backend) {
    threads_table.forget(backend);
    for (size_t i = 0; i < n_children(backend); ++i) {
        threads_table.forget(child(backend, i));
    }
}

// Whether it computes elsewhere: on a GPU, or in another process.
inline bool computes_elsewhere(ggml_backend_t backend) {
    const ggml_backend_dev_t device = ggml_backend_get_device(backend);
    if (!device) {
        return false;
    }
    const auto type = ggml_backend_dev_type(device);
    return type != GGML_BACKEND_DEVICE_TYPE_CPU && type != GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

// The most threads of this process that a computation may use. ggml gives a CPU backend
// GGML_DEFAULT_N_THREADS where nobody says otherwise; a meta backend uses its children's.
inline int threads_of(ggml_backend_t backend) {
    const size_t n = n_children(backend);
    int          most = 1;
    for (size_t i = 0; i < n; ++i) {
        most = std::max(most, threads_of(child(backend, i)));
    }
    if (n) {
        return most;
    }
    return threads_table.find(backend).value_or(computes_elsewhere(backend) ? 1 : GGML_DEFAULT_N_THREADS);
}

// A scheduler's, of all its backends.
inline int threads_of(ggml_backend_sched_t scheduler) {
    int most = 1;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(scheduler); ++i) {
        most = std::max(most, threads_of(ggml_backend_sched_get_backend(scheduler, i)));
    }
    return most;
}

// ---- buffers

// Tensors of `context` that point into `buffer`, which is about to go, stand unallocated again.
inline void forget_buffer(ggml_context * context, ggml_backend_buffer_t buffer) {
    for (ggml_tensor * t = ggml_get_first_tensor(context); t; t = ggml_get_next_tensor(context, t)) {
        if (t->buffer == buffer) {
            t->buffer = nullptr;
            t->data = nullptr;
            t->extra = nullptr;
        }
    }
}

// Gives the tensors of a context memory by F. ggml tells them their buffer before all of it is there,
// and leaves them with it where that fails: they are then what they were.
template <auto F, class Where> inline ggml_backend_buffer_t allocate_all(ggml_context * context, Where where) {
    struct place {
        ggml_tensor *         tensor;
        ggml_backend_buffer_t buffer;
        void *                data;
        void *                extra;
    };
    std::vector<place> before;
    for (ggml_tensor * t = ggml_get_first_tensor(context); t; t = ggml_get_next_tensor(context, t)) {
        before.push_back({ t, t->buffer, t->data, t->extra });
    }
    const auto put_back = [&before] {
        for (const place & one : before) {
            one.tensor->buffer = one.buffer;
            one.tensor->data = one.data;
            one.tensor->extra = one.extra;
        }
    };
    try {
        const ggml_backend_buffer_t made = F(context, where);
        if (!made) {
            put_back();
        }
        return made;
    } catch (...) {
        put_back();
        throw;
    }
}

// ---- contexts that callers get by way of an address

// One that comes by way of an address that the caller gave.
inline void made_context(ggml_context * context) {
    made(handle::ggml_context, context);
    note_context(context);
}

// The caller does not get what it has an address for: nobody gets the result that belongs to it.
inline void free_context(ggml_context ** context) {
    if (context && *context) {
        forget_context(*context);
        freed(handle::ggml_context, *context, true);
        ggml_free(*context);
        *context = nullptr;
    }
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
// backend is left with the freed one. So try first. Throws std::bad_alloc. A child of a meta backend
// is tried with the work of the whole graph, more than its share needs: MemoryError comes a little early.
inline bool can_work(ggml_backend_t backend, ggml_cgraph * graph) {
    for (size_t i = 0; i < n_children(backend); ++i) {
        can_work(child(backend, i), graph);
    }
    if (check::has_cpu() && ggml_backend_is_cpu(backend)) {
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

// Which of its backends gets what of the graph is not known: any may get all.
inline bool can_work(ggml_backend_sched_t scheduler, ggml_cgraph * graph) {
    for (int i = 0; i < ggml_backend_sched_get_n_backends(scheduler); ++i) {
        can_work(ggml_backend_sched_get_backend(scheduler, i), graph);
    }
    return true;
}

// ggml_backend_sched_new does not look whether it got what it asks for: for each node of the largest
// graph, the tensors and places of as many inputs as a split can have, and its part of a hash table.
// So try first. Throws std::bad_alloc.
inline bool can_schedule(size_t n_backends, size_t graph_size, bool parallel) {
    const size_t inputs = 2 * 30, copies = parallel ? 4 : 1;
    const size_t hashed = 2 * (sizeof(void *) + sizeof(int) + n_backends * copies * sizeof(void *));
    const size_t listed = (inputs + 1) * 4 * sizeof(int);
    ::operator delete(::operator new(graph_size * (inputs * sizeof(ggml_tensor) + listed + hashed)));
    return true;
}

// ---- the data of a GGUF's tensors: ggml only has their addresses

// How much of them is read once the tensor has another type; -1 where that cannot be.
inline int64_t bytes_as(const gguf_context * ctx, int64_t tensor, ggml_type type) {
    const ggml_type now = gguf_get_tensor_type(ctx, tensor);
    const int64_t   n = gguf_get_tensor_size(ctx, tensor) / ggml_type_size(now) * ggml_blck_size(now);
    const int64_t   block = ggml_blck_size(type);
    return block > 0 ? check::product(n / block, (int64_t) ggml_type_size(type)) : -1;
}

// Before a tensor gets another type. Data that have too few bytes for it are not to be read any more:
// writing aborts until others are set.
inline void forget_short_data(gguf_context * ctx, const char * name, ggml_type type) {
    const int64_t tensor = gguf_find_tensor(ctx, name);
    if (tensor >= 0 && bytes_as(ctx, tensor, type) > (int64_t) gguf_get_tensor_size(ctx, tensor)) {
        gguf_set_tensor_data(ctx, name, nullptr);
    }
}

// Those that were read have tensors whose addresses ggml has set to nothing, not even to NULL.
inline by_address<bool> read_ggufs;

inline void note_read(const gguf_context * ctx) {
    if (ctx && gguf_get_n_tensors(ctx) > 0) {
        read_ggufs.note(ctx, true);
    }
}

inline bool has_data(const gguf_context * ctx) {
    if (read_ggufs.find(ctx)) {
        check::why = "it was read, and has no addresses of its tensors' data: only_meta, or another with gguf_add_tensor";
        return false;
    }
    return true;
}

// As gguf_write_to_file, which leaves its file open where it aborts.
inline bool write_gguf(const gguf_context * ctx, const char * fname, bool only_meta) {
    struct open_file {
        FILE * const file;
        ~open_file() {
            if (file) {
                std::fclose(file);
            }
        }
    } const out{ ggml_fopen(fname, "wb") };
    if (!out.file) {
        return gguf_write_to_file(ctx, fname, only_meta); // says why
    }
    return gguf_write_to_file_ptr(ctx, out.file, only_meta) && std::fflush(out.file) == 0;
}

// ---- what a scheduler is allocated for: given another graph, ggml computes the first one again

struct scheduled {
    graph_id id; // of no graph: of a training's own
    // The tensors of indices that nodes have: a scheduler puts copies of its own in their places.
    std::shared_ptr<const std::unordered_map<const ggml_tensor *, const ggml_tensor *>> ids;

    bool holds(ggml_cgraph * other) const { return id == id_of(other); }
};
inline by_address<scheduled> scheduled_table;

// Of a graph that a scheduler was allocated for before: such copies are called "backend#tensor#number",
// which may be cut off at the end. A tensor of the caller's may be called so as well.
inline bool is_copy(ggml_backend_sched_t scheduler, const ggml_tensor * t) {
    for (int i = 0; i < ggml_backend_sched_get_n_backends(scheduler); ++i) {
        const char * name = ggml_backend_name(ggml_backend_sched_get_backend(scheduler, i));
        const size_t length = std::strlen(name);
        if (std::strncmp(t->name, name, length) == 0 && t->name[length] == '#') {
            return !is_in_a_context(t);
        }
    }
    return false;
}

inline void forget_graph(ggml_backend_sched_t scheduler) { scheduled_table.forget(scheduler); }

// Said before the call, which may allocate and then abort. Always true.
inline bool note_graph(ggml_backend_sched_t scheduler, ggml_cgraph * graph) {
    const auto found = scheduled_table.find(scheduler);
    if (found && found->holds(graph)) {
        return true;
    }
    std::unordered_map<const ggml_tensor *, const ggml_tensor *> ids;
    for (const ggml_tensor * node : check::computed_nodes(graph)) {
        const ggml_tensor * used = check::index_use_of(node).ids;
        if (used && !is_copy(scheduler, used)) {
            ids[node] = used;
        }
    }
    scheduled_table.note(scheduler, { id_of(graph), std::make_shared<decltype(ids)>(std::move(ids)) });
    return true;
}

// The scheduler is reset, or allocated for this very graph as it is now.
inline bool reset_or_allocated_for(ggml_backend_sched_t scheduler, ggml_cgraph * graph) {
    const auto found = scheduled_table.find(scheduler);
    return !found || found->holds(graph);
}

// The CPU may be to compute a node, as far as that has been decided.
inline bool may_be_on_cpu(ggml_backend_sched_t scheduler, const ggml_tensor * node) {
    ggml_backend_t chosen = ggml_backend_sched_get_tensor_backend(scheduler, (ggml_tensor *) node);
    return !chosen || check::on_cpu(chosen);
}

// The indices of a graph that a scheduler is to compute. Those that lie on a device and that the CPU is to
// use are got from there, when all that may write them is done: the scheduler copies them as well.
inline bool indices(ggml_backend_sched_t scheduler, ggml_cgraph * graph) {
    const auto found = scheduled_table.find(scheduler);
    const auto source = [&](const ggml_tensor * node, const ggml_tensor * ids) -> const ggml_tensor * {
        if (found) {
            const auto before = found->ids->find(node);
            return before == found->ids->end() ? nullptr : before->second;
        }
        return is_copy(scheduler, ids) ? nullptr : ids;
    };
    return check::indices(graph, source, [&](const check::index_use & use) {
        const ggml_tensor * root = check::root_of(use.ids);
        const bool fetch = root->data && !check::data_in_host_memory(root) && may_be_on_cpu(scheduler, use.node);
        for (int i = 0; fetch && i < ggml_backend_sched_get_n_backends(scheduler); ++i) {
            ggml_backend_synchronize(ggml_backend_sched_get_backend(scheduler, i));
        }
        return check::present_indices(use, true, fetch);
    });
}

// ---- plans: `void *` in C, and their graphs cannot be had from them

struct graph_plan {
    graph_id graph;
    int      threads; // of the backend when it was made: it keeps them
};
inline by_address<graph_plan> plans_table;

inline void note_plan(const void * plan, ggml_cgraph * graph, ggml_backend_t backend) {
    if (plan) {
        plans_table.note(plan, { id_of(graph), threads_of(backend) });
    }
}

inline void forget_plan(const void * plan) { plans_table.forget(plan); }

// The graph of a plan, NULL for what is none.
inline ggml_cgraph * graph_of(const void * plan) {
    const auto found = plans_table.find(plan);
    return found ? (ggml_cgraph *) found->graph.graph : nullptr;
}

// Its graph is there, and has not been changed since it was made.
inline bool graph_is_as_planned(const void * plan) {
    const auto found = plans_table.find(plan);
    return !found || is_still(found->graph);
}

inline int threads_of_plan(const void * plan) {
    const auto found = plans_table.find(plan);
    return found ? found->threads : GGML_DEFAULT_N_THREADS;
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
    ggml_opt_build_type  build;       // the most that it is for
    int                  period;      // of the optimiser's steps, in evaluations
    check::training      how;
    bool                 ready = false; // allocated, and not evaluated since
    bool                 begun = false; // allocated, at some time
    uint64_t             turn = 0;    // of its scheduler, when it was
    int                  kind = -1;   // of graph that was allocated, -1 where that is not known
    bool                 backward = false; // it has a graph for the optimiser
    bool                 spent = false; // the graph that was given for one evaluation has had it
    graph_id             graph;       // that one, when it was given,
    graph_id             allocated;   // and when it was allocated, until it is evaluated
    int64_t              evaluations = 0;
    std::vector<ggml_tensor *>         bare;    // results of that graph without memory, while it is allocated
    std::vector<ggml_backend_buffer_t> buffers; // that the scheduler has had: no more than addresses
};
inline by_address<optimisation> optimisations_table;

inline void note_optimisation(ggml_opt_context_t context, const ggml_opt_params & params) {
    if (context) {
        const check::training how(params.loss_type, params.optimizer, params.build_type, false);
        optimisation made{ params.backend_sched, params.build_type, params.opt_period, how };
        made.backward = params.ctx_compute && params.build_type == GGML_OPT_BUILD_TYPE_OPT;
        optimisations_table.note(context, made);
    }
}

// Always true.
inline bool note_ready(ggml_opt_context_t context, bool ready) {
    if (auto found = optimisations_table.find(context)) {
        found->ready = ready;
        optimisations_table.note(context, *found);
    }
    return true;
}

inline void forget_optimisation(ggml_opt_context_t context) { optimisations_table.forget(context); }

inline ggml_backend_sched_t scheduler_of(ggml_opt_context_t context) {
    const auto found = optimisations_table.find(context);
    return found ? found->scheduler : nullptr;
}

// A graph that is given for one evaluation.
inline bool can_train(ggml_opt_context_t context, ggml_cgraph * graph, const ggml_tensor * outputs) {
    const auto found = optimisations_table.find(context);
    return !found || check::can_train(found->scheduler, check::nodes_of(graph), outputs, ggml_graph_size(graph), found->how);
}

inline int threads_of(ggml_opt_context_t context) {
    ggml_backend_sched_t scheduler = scheduler_of(context);
    return scheduler ? threads_of(scheduler) : GGML_DEFAULT_N_THREADS;
}

// Those of what is trained, by a scheduler that may have put copies of its own into the graph.
inline bool indices(ggml_backend_sched_t scheduler, const ggml_tensor * outputs, const ggml_tensor * inputs,
                    ggml_opt_dataset_t dataset) {
    const auto source = [scheduler](const ggml_tensor *, const ggml_tensor * ids) {
        return scheduler && is_copy(scheduler, ids) ? nullptr : ids;
    };
    return check::indices(outputs, inputs, dataset, source);
}

// The graph of a context without static graphs belongs to the caller, who may free it once it has
// been evaluated: until then, and always with static graphs, its indices are looked at.
inline bool indices(ggml_opt_context_t context, ggml_opt_dataset_t dataset = nullptr) {
    if (!ggml_opt_static_graphs(context)) {
        const auto found = optimisations_table.find(context);
        if (!found || !found->ready) {
            return true;
        }
    }
    return indices(scheduler_of(context), ggml_opt_outputs(context), ggml_opt_inputs(context), dataset);
}

} // namespace ggml_cffi
