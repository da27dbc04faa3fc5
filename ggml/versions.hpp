// Which context and which graph is which: at an address there is another one once that has been freed, or
// changed. What is remembered of one by its address is void then.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <new>
#include <optional>
#include <vector>

namespace ggml_cffi {

inline std::atomic<int64_t> remembered{0}; // entries of all tables

// ---- graphs

struct graph_record {
    uint64_t                         version;    // no two graphs have ever had the same
    uint64_t                         built = 0;  // in which steps: they decide the order of its leaves
    std::vector<const ggml_tensor *> leaves;     // that were put into it by themselves
};

inline fork_safe_mutex                      graphs_lock;
inline std::map<const void *, graph_record> graphs_table;
inline uint64_t                             last_version = 0;

// Without memory for the entry it is a graph that nothing is known of: that is no error.
inline void graph_made(const ggml_cgraph * graph, const ggml_cgraph * like = nullptr) noexcept {
    if (!graph) {
        return;
    }
    std::lock_guard<fork_safe_mutex> hold(graphs_lock);
    try {
        graph_record   made{ ++last_version };
        const auto     model = like ? graphs_table.find(like) : graphs_table.end();
        if (model != graphs_table.end()) {
            made.built = model->second.built;
            made.leaves = model->second.leaves;
        }
        remembered += graphs_table.insert_or_assign(graph, std::move(made)).second;
    } catch (const std::bad_alloc &) {
    }
}

inline void graph_cleared(const ggml_cgraph * graph) {
    std::lock_guard<fork_safe_mutex> hold(graphs_lock);
    const auto found = graphs_table.find(graph);
    if (found != graphs_table.end()) {
        found->second = { ++last_version };
    }
}

// One more step has built it, with this tensor last.
inline void graph_changed(ggml_cgraph * graph, const ggml_tensor * tensor = nullptr) noexcept {
    std::lock_guard<fork_safe_mutex> hold(graphs_lock);
    const auto found = graphs_table.find(graph);
    if (found == graphs_table.end()) {
        return;
    }
    graph_record & record = found->second;
    record.version = ++last_version;
    record.built = mixed(record.built, (uint64_t) ggml_graph_n_nodes(graph));
    if (tensor && tensor->op == GGML_OP_NONE && (record.leaves.empty() || record.leaves.back() != tensor)) {
        record.built = mixed(record.built, UINT64_MAX);
        try {
            record.leaves.push_back(tensor);
        } catch (const std::bad_alloc &) {
            record.built = mixed(record.built, record.version); // like no other
        }
    }
}

// 0 for a graph that nothing is known of, since C code has made it, or that is gone.
inline uint64_t version_of(const ggml_cgraph * graph) {
    std::lock_guard<fork_safe_mutex> hold(graphs_lock);
    const auto found = graphs_table.find(graph);
    return found == graphs_table.end() ? 0 : found->second.version;
}

// A graph as it is now.
struct graph_id {
    const ggml_cgraph * graph = nullptr;
    uint64_t            version = 0;
    int                 n_nodes = 0;
    bool operator==(const graph_id & other) const {
        return graph == other.graph && version == other.version && n_nodes == other.n_nodes;
    }
    bool operator!=(const graph_id & other) const { return !(*this == other); }
};

inline graph_id id_of(ggml_cgraph * graph) { return { graph, version_of(graph), ggml_graph_n_nodes(graph) }; }

// It is still there, and as it was. What nothing is known of is not looked at, for it may be gone.
inline bool is_still(const graph_id & id) { return version_of(id.graph) == id.version; }

// ---- contexts: where the caller's tensors are

struct known_context {
    char *         end; // of its memory
    ggml_context * context;
    uint64_t       number; // no two contexts have ever had the same
};

inline fork_safe_mutex                 contexts_lock;
inline std::map<char *, known_context> contexts_table; // by the first byte of its memory
inline uint64_t                        last_context = 0;

// Without memory for the entry, its tensors are not known for the caller's: that is no error.
inline void note_context(ggml_context * context) noexcept {
    if (context) {
        char * first = (char *) ggml_get_mem_buffer(context);
        std::lock_guard<fork_safe_mutex> hold(contexts_lock);
        try {
            const known_context known{ first + ggml_get_mem_size(context), context, ++last_context };
            remembered += contexts_table.insert_or_assign(first, known).second;
        } catch (const std::bad_alloc &) {
        }
    }
}

inline std::optional<known_context> context_of(const void * object) {
    std::lock_guard<fork_safe_mutex> hold(contexts_lock);
    const auto after = contexts_table.upper_bound((char *) object);
    if (after == contexts_table.begin() || (char *) object >= std::prev(after)->second.end) {
        return std::nullopt;
    }
    return std::prev(after)->second;
}

inline bool is_in_a_context(const ggml_tensor * tensor) { return context_of(tensor).has_value(); }

inline void forget_planned(const void * first, const void * end, uint64_t context); // in plans.hpp

// It goes, with its tensors and its graphs.
inline void forget_context(ggml_context * context) {
    if (!context) {
        return;
    }
    char *   first = (char *) ggml_get_mem_buffer(context);
    char *   end = first + ggml_get_mem_size(context);
    uint64_t number = 0;
    {
        std::lock_guard<fork_safe_mutex> hold(contexts_lock);
        const auto found = contexts_table.find(first);
        if (found != contexts_table.end()) {
            number = found->second.number;
            contexts_table.erase(found);
            --remembered;
        }
    }
    {
        std::lock_guard<fork_safe_mutex> hold(graphs_lock);
        const auto from = graphs_table.lower_bound(first), to = graphs_table.lower_bound(end);
        remembered -= (int64_t) std::distance(from, to);
        graphs_table.erase(from, to);
    }
    forget_planned(first, end, number);
}

} // namespace ggml_cffi
