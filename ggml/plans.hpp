// What graph allocators and schedulers have planned, for which graphs, and which tensors they have put
// where. ggml takes a graph of as many nodes as the one before, and no larger ones, for the same, and leaves
// tensors with addresses of memory that it has freed.

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ggml_cffi {

// ---- graphs that are computed are not to be changed, nor freed

// Always true.
inline bool computed(const ggml_cgraph * graph) {
    if (graph) {
        std::lock_guard<fork_safe_mutex> hold(computing_lock);
        begin_work(graph);
    }
    return true;
}

inline bool may_change(const ggml_cgraph * graph) { return unused(graph); }

// No graph in its memory is computed, nor one with tensors that are.
inline bool may_go(ggml_context * context) {
    if (!context) {
        return true;
    }
    // held throughout: no graph at work goes meanwhile, for who frees its context asks here as well
    std::lock_guard<fork_safe_mutex> hold(computing_lock);
    if (at_work.empty()) {
        return true;
    }
    std::vector<ggml_cgraph *> graphs;
    {
        std::lock_guard<fork_safe_mutex> hold_graphs(graphs_lock);
        for (const use_of & use : at_work) {
            if (graphs_table.count(use.object)) {
                graphs.push_back((ggml_cgraph *) use.object);
            }
        }
    }
    const char * first = (const char *) ggml_get_mem_buffer(context);
    const char * end = first + ggml_get_mem_size(context);
    const auto   inside = [&](const void * object) { return (const char *) object >= first && (const char *) object < end; };
    for (ggml_cgraph * graph : graphs) {
        bool found = inside(graph);
        for (int i = 0; !found && i < ggml_graph_n_nodes(graph); ++i) {
            const ggml_tensor * node = ggml_graph_node(graph, i);
            found = inside(node) || std::any_of(std::begin(node->src), std::end(node->src), inside);
        }
        if (found) {
            check::why = "a computation that has not ended uses it";
            return false;
        }
    }
    return true;
}

// ---- what a plan depends on

struct fingerprint {
    uint64_t structure; // operations, who uses whose result, flags, what has memory already
    uint64_t sizes;     // types, extents and strides
    bool operator==(const fingerprint & other) const { return structure == other.structure && sizes == other.sizes; }
};

inline bool same_layout(const ggml_tensor * a, const ggml_tensor * b) {
    return a->type == b->type && !std::memcmp(a->ne, b->ne, sizeof a->ne) && !std::memcmp(a->nb, b->nb, sizeof a->nb);
}

// A graph as an allocator sees it.
class survey {
    const std::vector<ggml_backend_buffer_t> & own;
    by_tensor<uint32_t>                        numbers; // in the order in which they come
    uint32_t                                   count = 0;

    uint32_t add(const ggml_tensor * t) {
        const auto [known, fresh] = numbers.of(t);
        if (!fresh) {
            return known;
        }
        const uint32_t number = known = count++;
        const uint64_t viewed = t->view_src ? add(t->view_src) + 1ull : 0;
        const bool     has_data = t->data, has_buffer = t->buffer;
        print.structure = mixed(print.structure, viewed << 8 | (t->flags & 7) << 2 | has_buffer << 1 | has_data);
        for (int i = 0; i < GGML_MAX_DIMS; ++i) {
            print.sizes = mixed(print.sizes ^ t->nb[i], (uint64_t) t->ne[i]);
        }
        print.sizes = mixed(print.sizes, t->type);
        if (!has_data) {
            to_place.push_back(t);
        }
        if (has_buffer && !placed && std::find(own.begin(), own.end(), t->buffer) != own.end()) {
            placed = t;
        }
        return number;
    }

  public:
    fingerprint                      print{};
    std::vector<const ggml_tensor *> to_place;         // without memory
    const ggml_tensor *              placed = nullptr; // in one of the buffers

    survey(ggml_cgraph * graph, const std::vector<ggml_backend_buffer_t> & buffers)
        : own(buffers), numbers(2 * ggml_graph_n_nodes(graph)) {
        {
            std::lock_guard<fork_safe_mutex> hold(graphs_lock);
            const auto known = graphs_table.find(graph);
            if (known != graphs_table.end()) {
                print.structure = known->second.built;
                std::for_each(known->second.leaves.begin(), known->second.leaves.end(),
                              [this](const ggml_tensor * leaf) { add(leaf); });
            }
        }
        for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
            const ggml_tensor * node = ggml_graph_node(graph, i);
            // before the call: add() changes it, and arguments are evaluated in any order
            const uint64_t number = add(node);
            print.structure = mixed(print.structure, number << 32 | (uint32_t) node->op);
            for (uint64_t j = 0; j < GGML_MAX_SRC; ++j) {
                if (const ggml_tensor * src = node->src[j]) {
                    const uint64_t operand = j << 33 | (uint64_t) same_layout(node, src) << 32 | add(src);
                    print.structure = mixed(print.structure, operand);
                }
            }
        }
    }
};

// ---- allocators and schedulers

// The operands of a node: a scheduler puts copies of its own in their places.
struct operands_of {
    ggml_tensor *                           node;
    std::array<ggml_tensor *, GGML_MAX_SRC> src;
};
struct exchanged {
    ggml_tensor *node, *before, *now;
    int          number;
};

struct planner {
    int                                             n_buffers = 1;
    std::optional<fingerprint>                      planned;  // the graph that ggml has planned
    bool                                            plans = false; // it may have planned one
    bool                                            pending = false; // it is about to place this one:
    fingerprint                                     next{};
    graph_id                                        next_id;
    std::vector<const ggml_tensor *>                to_place;
    std::unordered_map<const void *, graph_id>      placed;   // graphs whose tensors have memory of it,
    std::map<uint64_t, ggml_context *>              contexts; // where these are, and
    std::vector<ggml_backend_buffer_t>              buffers;  // its buffers then,
    std::vector<size_t>                             sizes;    // and their sizes
    std::unordered_map<ggml_tensor *, ggml_backend_t> assigned; // by the user of a scheduler
    std::vector<operands_of>                           operands_before;
    std::vector<exchanged>                          replaced; // operands of the present graph
    uint64_t                                        turn = 0; // of those who use a scheduler

    bool has(const graph_id & id) const;
};

// Each is used by one thread at a time; the table is everybody's, and contexts go on any thread, which takes
// their tensors and graphs out of what is listed of them: lists are used with the lock held.
inline fork_safe_mutex                                            planners_lock;
inline std::unordered_map<const void *, std::shared_ptr<planner>> planners_table;
inline std::atomic<uint64_t>                                      last_turn{0};

inline bool planner::has(const graph_id & id) const {
    std::lock_guard<fork_safe_mutex> hold(planners_lock);
    const auto found = placed.find(id.graph);
    return found != placed.end() && found->second == id;
}

inline void note_planner(const void * key, int n_buffers) {
    if (key) {
        auto made = std::make_shared<planner>();
        made->n_buffers = n_buffers;
        std::lock_guard<fork_safe_mutex> hold(planners_lock);
        remembered += planners_table.insert_or_assign(key, std::move(made)).second;
    }
}

inline std::shared_ptr<planner> planner_of(const void * key) {
    std::lock_guard<fork_safe_mutex> hold(planners_lock);
    const auto found = planners_table.find(key);
    return found == planners_table.end() ? nullptr : found->second;
}

inline int n_buffers_of(const void * key) {
    const auto found = planner_of(key);
    return found ? found->n_buffers : 1;
}

inline void forget_planned(const void * first, const void * end, uint64_t context) {
    std::lock_guard<fork_safe_mutex> hold(planners_lock);
    for (auto & [key, p] : planners_table) {
        p->contexts.erase(context);
        for (auto one = p->placed.begin(); one != p->placed.end();) {
            one = one->first >= first && one->first < end ? p->placed.erase(one) : std::next(one);
        }
        const auto drop = [&](auto & list, auto tensor) {
            list.erase(std::remove_if(list.begin(), list.end(), [&](const auto & one) {
                const void * t = tensor(one);
                return t >= first && t < end;
            }), list.end());
        };
        drop(p->to_place, [](const ggml_tensor * t) { return t; });
        drop(p->operands_before, [](const operands_of & one) { return one.node; });
        drop(p->replaced, [](const exchanged & one) { return one.node; });
        for (auto one = p->assigned.begin(); one != p->assigned.end();) {
            const void * t = one->first;
            one = t >= first && t < end ? p->assigned.erase(one) : std::next(one);
        }
    }
}

inline void clear(ggml_tensor * t) {
    t->buffer = nullptr;
    t->data = nullptr;
    t->extra = nullptr;
}

// Its memory is gone, or about to go: the tensors that are there stand unallocated, and views of them,
// but for those that are new.
inline void unplace(planner & p, const std::vector<const ggml_tensor *> & fresh = {}) {
    std::lock_guard<fork_safe_mutex> hold(planners_lock);
    std::vector<const ggml_tensor *> kept = fresh;
    std::sort(kept.begin(), kept.end());
    std::vector<const ggml_tensor *> gone;
    std::vector<ggml_tensor *>       views; // that no allocator has seen
    for (const auto & [number, context] : p.contexts) {
        for (ggml_tensor * t = ggml_get_first_tensor(context); t; t = ggml_get_next_tensor(context, t)) {
            if (std::binary_search(kept.begin(), kept.end(), t)) {
                continue;
            }
            if (t->buffer && std::find(p.buffers.begin(), p.buffers.end(), t->buffer) != p.buffers.end()) {
                clear(t);
                gone.push_back(t);
            } else if (t->view_src && t->data && !t->buffer) {
                views.push_back(t);
            }
        }
    }
    if (!views.empty()) {
        std::sort(gone.begin(), gone.end());
        for (ggml_tensor * t : views) {
            if (std::binary_search(gone.begin(), gone.end(), t->view_src)) {
                clear(t);
            }
        }
    }
    p.placed.clear();
    p.contexts.clear();
    p.buffers.clear();
    p.sizes.clear();
}

// The user's operands are in their places again.
inline void give_operands_back(planner & p) {
    std::lock_guard<fork_safe_mutex> hold(planners_lock);
    for (const exchanged & e : p.replaced) {
        if (e.node->src[e.number] == e.now) {
            e.node->src[e.number] = e.before;
        }
    }
    p.replaced.clear();
}

inline std::vector<size_t> sizes_of(ggml_gallocr_t allocator, int n) {
    std::vector<size_t> sizes;
    for (int i = 0; i < n; ++i) {
        sizes.push_back(ggml_gallocr_get_buffer_size(allocator, i));
    }
    return sizes;
}

inline std::vector<size_t> sizes_of(ggml_backend_sched_t scheduler, int n) {
    std::vector<size_t> sizes;
    for (int i = 0; i < n; ++i) {
        sizes.push_back(ggml_backend_sched_get_buffer_size(scheduler, ggml_backend_sched_get_backend(scheduler, i)));
    }
    return sizes;
}

inline void note_operands(planner & p, ggml_cgraph * graph) {
    std::vector<operands_of> operands;
    for (int i = 0; p.n_buffers > 1 && i < ggml_graph_n_nodes(graph); ++i) {
        operands_of one{ ggml_graph_node(graph, i), {} };
        std::copy(std::begin(one.node->src), std::end(one.node->src), one.src.begin());
        operands.push_back(one);
    }
    std::lock_guard<fork_safe_mutex> hold(planners_lock);
    p.operands_before.swap(operands);
}

inline void note_replaced(planner & p) {
    std::lock_guard<fork_safe_mutex> hold(planners_lock);
    for (const operands_of & one : p.operands_before) {
        for (int j = 0; j < GGML_MAX_SRC; ++j) {
            if (one.node->src[j] != one.src[j]) {
                p.replaced.push_back({ one.node, one.src[j], one.node->src[j], j });
            }
        }
    }
    p.operands_before.clear();
}

// A meta device forgets the tensors of the graphs before: who reads one dereferences NULL.
inline bool forgets(const planner & p, const std::vector<const ggml_tensor *> & fresh) {
    return std::any_of(p.buffers.begin(), p.buffers.end(), [&fresh](ggml_backend_buffer_t buffer) {
        return check::is_meta(ggml_backend_buffer_name(buffer)) &&
               std::any_of(fresh.begin(), fresh.end(), [buffer](const ggml_tensor * t) { return t->buffer == buffer; });
    });
}

// ggml allocates a buffer anew where it has to be larger, and frees one that it measures only.
template <class Key>
void unplace_if_replaced(Key key, planner & p, const std::vector<const ggml_tensor *> & fresh = {}) {
    if (!p.buffers.empty() && (p.sizes != sizes_of(key, p.n_buffers) || forgets(p, fresh))) {
        unplace(p, fresh);
    }
}

inline void begin_placing(planner & p, const graph_id & id, const fingerprint & print,
                          std::vector<const ggml_tensor *> to_place) {
    p.next = print;
    p.next_id = id;
    std::lock_guard<fork_safe_mutex> hold(planners_lock);
    p.to_place = std::move(to_place);
    p.pending = p.plans = true;
}

// The graph's tensors have memory now, if ggml has got that far.
template <class Key> void end_placing(Key key, planner & p) {
    if (!p.pending) {
        return;
    }
    p.pending = false;
    note_replaced(p);
    unplace_if_replaced(key, p, p.to_place);
    known_context last{ nullptr, nullptr, 0 };
    char *        first = nullptr;
    const auto    sizes = sizes_of(key, p.n_buffers);
    std::lock_guard<fork_safe_mutex> hold(planners_lock);
    bool placed = false;
    for (const ggml_tensor * t : p.to_place) {
        placed = placed || t->buffer;
        if (t->buffer && !t->view_src && std::find(p.buffers.begin(), p.buffers.end(), t->buffer) == p.buffers.end()) {
            p.buffers.push_back(t->buffer);
        }
        if ((char *) t < first || (char *) t >= last.end) {
            const auto found = context_of(t);
            if (found) {
                last = *found;
                first = (char *) ggml_get_mem_buffer(last.context);
                p.contexts.emplace(last.number, last.context);
            }
        }
    }
    if (placed) {
        p.placed[p.next_id.graph] = p.next_id;
    }
    p.sizes = sizes;
    p.to_place.clear();
}

inline bool refuse(const std::string & why) {
    check::why = why;
    return false;
}

// An earlier result, or input, in memory that this graph is given as well.
inline bool refuse_placed(const ggml_tensor * t) {
    return refuse(check::named(t) + " has memory of it from another graph, which would be written over: "
                                    "give it memory of its own (ggml_backend_alloc_ctx_tensors)");
}

// ---- allocators

inline bool is_idle(planner & p) {
    std::lock_guard<fork_safe_mutex> hold_planners(planners_lock);
    std::lock_guard<fork_safe_mutex> hold(computing_lock);
    for (const auto & [graph, id] : p.placed) {
        if (used(graph)) {
            return refuse("a computation that has not ended uses its memory");
        }
    }
    return true;
}

inline bool may_free(ggml_gallocr_t allocator) {
    const auto p = allocator ? planner_of(allocator) : nullptr;
    return !p || is_idle(*p);
}

inline bool may_reserve(ggml_gallocr_t allocator, ggml_cgraph * graph) {
    const auto p = planner_of(allocator);
    if (p) {
        if (!is_idle(*p)) {
            return false;
        }
        end_placing(allocator, *p);
        p->planned.reset();
        p->plans = true;
        p->next = survey(graph, p->buffers).print;
    }
    return true;
}

inline void reserved(ggml_gallocr_t allocator, bool done) {
    if (!done) {
        forget_plan(allocator);
    }
    if (const auto p = planner_of(allocator)) {
        if (done) {
            p->planned = p->next;
        }
        unplace_if_replaced(allocator, *p);
    }
}

// All of its tensors do: another allocator may have taken theirs away.
inline bool has_memory(ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (!node->data || std::any_of(std::begin(node->src), std::end(node->src),
                                       [](const ggml_tensor * src) { return src && !src->data; })) {
            return false;
        }
    }
    return true;
}

// What ggml has planned is for this graph, once it is planned anew where need be.
inline bool is_planned_for(ggml_gallocr_t allocator, ggml_cgraph * graph) {
    const auto p = planner_of(allocator);
    if (!p) {
        return true;
    }
    if (!is_idle(*p)) {
        return false;
    }
    end_placing(allocator, *p);
    const graph_id id = id_of(graph);
    if (p->has(id) && has_memory(graph)) { // it stays where it is
        if (p->n_buffers == 1) {
            p->planned.reset(); // ggml may plan it anew, as one that has memory
        }
        return true;
    }
    survey found(graph, p->buffers);
    if (found.placed) {
        return refuse_placed(found.placed);
    }
    const bool same = p->planned && *p->planned == found.print;
    if (p->n_buffers > 1 && p->planned && p->planned->structure != found.print.structure) {
        return refuse("with several buffers, ggml_gallocr_reserve_n must come first: its graph was of another structure");
    }
    if (p->n_buffers == 1 ? !same : !p->planned) {
        if (p->plans) {
            forget_plan(allocator); // so that ggml plans anew, or says that it must be reserved
        }
        p->planned.reset();
    }
    begin_placing(*p, id, found.print, std::move(found.to_place));
    return true;
}

inline void allocated(ggml_gallocr_t allocator, bool done) {
    const auto p = planner_of(allocator);
    if (!done) {
        if (p) {
            p->planned.reset();
        }
        forget_plan(allocator);
    } else if (p && p->pending && p->n_buffers == 1) {
        p->planned = p->next;
    }
    if (p) {
        end_placing(allocator, *p);
    }
}

// The allocator goes, or the scheduler.
template <class Key> void forget_planner(Key key) {
    const auto p = key ? planner_of(key) : nullptr;
    if (p) {
        end_placing(key, *p);
        give_operands_back(*p);
        unplace(*p);
        std::lock_guard<fork_safe_mutex> hold(planners_lock);
        remembered -= (int64_t) planners_table.erase(key);
    }
}

// ---- schedulers

// Between two steps of a training it may be reset, and no more: what trains would not notice.
inline bool is_free(ggml_backend_sched_t scheduler) {
    std::lock_guard<fork_safe_mutex> hold(computing_lock);
    return !used(scheduler) || works(scheduler) || refuse("a training that has not ended uses the scheduler");
}

// Another user's turn.
inline void take_turn(planner & p) { p.turn = ++last_turn; }

// ggml is to plan the next graph anew, with the backends that the user has assigned tensors to.
inline void plan_anew(ggml_backend_sched_t scheduler, planner & p) {
    p.planned.reset();
    forget_plan(scheduler);
    std::lock_guard<fork_safe_mutex> hold(planners_lock);
    for (const auto & [tensor, backend] : p.assigned) {
        ggml_backend_sched_set_tensor_backend(scheduler, tensor, backend);
    }
}

inline void forget_assigned(planner & p) {
    std::lock_guard<fork_safe_mutex> hold(planners_lock);
    p.assigned.clear();
}

inline void note_assigned(ggml_backend_sched_t scheduler, ggml_tensor * tensor, ggml_backend_t backend) {
    if (const auto p = planner_of(scheduler)) {
        std::lock_guard<fork_safe_mutex> hold(planners_lock);
        p->assigned[tensor] = backend;
    }
}

inline void reset(ggml_backend_sched_t scheduler) {
    forget_graph(scheduler);
    if (const auto p = planner_of(scheduler)) {
        end_placing(scheduler, *p);
        forget_assigned(*p);
        give_operands_back(*p);
    }
}

inline bool may_reserve(ggml_backend_sched_t scheduler, ggml_cgraph * graph) {
    if (!is_free(scheduler)) {
        return false;
    }
    if (const auto p = planner_of(scheduler)) {
        end_placing(scheduler, *p);
        give_operands_back(*p);
        take_turn(*p);
        p->planned.reset();
        p->next = survey(graph, p->buffers).print;
        note_operands(*p, graph);
    }
    return true;
}

inline void reserved(ggml_backend_sched_t scheduler, bool done) {
    if (!done) {
        forget_plan(scheduler);
    }
    if (const auto p = planner_of(scheduler)) {
        note_replaced(*p);
        if (done) {
            p->planned = p->next;
        }
        unplace_if_replaced(scheduler, *p);
    }
    reset(scheduler);
}

// The graph is only cut into what each backend is to compute; it is cut again when it is computed.
inline bool may_split(ggml_backend_sched_t scheduler, ggml_cgraph * graph) {
    if (!is_free(scheduler)) {
        return false;
    }
    if (const auto p = planner_of(scheduler)) {
        end_placing(scheduler, *p);
        give_operands_back(*p);
        note_operands(*p, graph);
    }
    return true;
}

inline void split(ggml_backend_sched_t scheduler) {
    if (const auto p = planner_of(scheduler)) {
        note_replaced(*p);
        give_operands_back(*p);
    }
}

// What ggml has planned is for this graph, once it is made to plan anew where need be. The graph before
// stands unallocated, and the same one does, which is put where it was.
inline bool is_planned_for(ggml_backend_sched_t scheduler, ggml_cgraph * graph) {
    const auto scheduled_for = scheduled_table.find(scheduler);
    const auto p = planner_of(scheduler);
    if (!p || (scheduled_for && scheduled_for->holds(graph))) {
        return true;
    }
    if (!is_free(scheduler)) {
        return false;
    }
    end_placing(scheduler, *p);
    give_operands_back(*p);
    const graph_id id = id_of(graph);
    if (p->has(id)) {
        unplace(*p);
    }
    survey found(graph, p->buffers);
    if (found.placed) {
        return refuse_placed(found.placed);
    }
    unplace(*p);
    if (!(p->planned && *p->planned == found.print)) {
        plan_anew(scheduler, *p);
    }
    begin_placing(*p, id, found.print, std::move(found.to_place));
    note_operands(*p, graph);
    take_turn(*p);
    return true;
}

inline void allocated(ggml_backend_sched_t scheduler, bool done) {
    const auto p = planner_of(scheduler);
    if (!done) {
        forget_graph(scheduler);
    } else if (p && p->pending) {
        p->planned = p->next;
    }
    if (p) {
        end_placing(scheduler, *p);
    }
}

// ggml allocates a graph in its computation, where it has yet to be. It is so before that where an
// operation may write over an operand that it reads afterwards: the scheduler's allocator decides it.
// Where that fails, so will the computation, with a status.
inline bool prepare(ggml_backend_sched_t scheduler, ggml_cgraph * graph) {
    const bool scheduled_before = scheduled_table.find(scheduler).has_value();
    if (!scheduled_before && !is_planned_for(scheduler, graph)) {
        return false;
    }
    note_graph(scheduler, graph);
    const auto nodes = check::computed_nodes(graph);
    if (std::none_of(nodes.begin(), nodes.end(), check::may_write_over)) {
        return true;
    }
    if (!scheduled_before) {
        const bool done = ggml_backend_sched_alloc_graph(scheduler, graph);
        allocated(scheduler, done);
        if (!done) {
            return true;
        }
    }
    return std::all_of(nodes.begin(), nodes.end(), check::spares_operands);
}

inline void computed(ggml_backend_sched_t scheduler, enum ggml_status status) {
    const auto p = planner_of(scheduler);
    if (p && p->pending) {
        if (status == GGML_STATUS_SUCCESS) {
            p->planned = p->next;
        }
        end_placing(scheduler, *p);
    }
}

// Somebody allocates graphs of his own on it: a training. Always true.
inline bool hand_over(ggml_backend_sched_t scheduler) {
    if (const auto p = planner_of(scheduler)) {
        end_placing(scheduler, *p);
        give_operands_back(*p);
        unplace(*p);
        forget_assigned(*p);
        plan_anew(scheduler, *p);
        take_turn(*p);
    }
    scheduled_table.note(scheduler, { {}, std::make_shared<decltype(scheduled::ids)::element_type>() });
    return true;
}

// ---- optimisation contexts

inline uint64_t turn_of(ggml_backend_sched_t scheduler) {
    const auto p = planner_of(scheduler);
    return p ? p->turn : 0;
}

// The graph for one evaluation of a context that has none of its own.
inline void note_prepared(ggml_opt_context_t context, ggml_cgraph * graph) {
    if (auto found = optimisations_table.find(context)) {
        found->graph = id_of(graph);
        found->spent = false;
        optimisations_table.note(context, *found);
    }
}

// ggml computes what the scheduler is allocated for, and allocates nothing where the context has had the
// same kind of graph before.
inline bool may_train(ggml_opt_context_t context, optimisation & now, int kind) {
    const bool own_graphs = ggml_opt_static_graphs(context);
    {
        std::lock_guard<fork_safe_mutex> hold(computing_lock);
        if (used(now.scheduler) && !works(now.scheduler) && !used(context)) {
            return refuse("a training that has not ended uses the scheduler");
        }
    }
    const bool same_turn = now.begun && now.turn == turn_of(now.scheduler);
    if (own_graphs && now.begun && !same_turn && (kind < 0 || now.kind < 0 || kind == now.kind)) {
        return refuse("its scheduler has been used for another graph since: it needs one of its own");
    }
    if (!own_graphs || !same_turn) {
        hand_over(now.scheduler);
        now.turn = turn_of(now.scheduler);
    } else if (!scheduled_table.find(now.scheduler)) {
        scheduled_table.note(now.scheduler, { {}, std::make_shared<decltype(scheduled::ids)::element_type>() });
    }
    now.begun = true;
    now.kind = -1;
    return true;
}

inline int kind_of(const optimisation & now, bool backward) {
    return now.period == 1 ? (backward ? GGML_OPT_BUILD_TYPE_OPT : GGML_OPT_BUILD_TYPE_FORWARD) : -1;
}

// Results of an earlier evaluation that are in another graph again have memory that the scheduler may have freed
// since, or given to others: they are to get it anew.
inline void forget_results(optimisation & now) {
    now.bare.clear();
    const auto had = [&now](const ggml_tensor * t) {
        return t->buffer && std::find(now.buffers.begin(), now.buffers.end(), t->buffer) != now.buffers.end();
    };
    for (const ggml_tensor * t : check::ancestry(check::nodes_of((ggml_cgraph *) now.graph.graph))) {
        auto * result = (ggml_tensor *) t;
        if (had(result)) {
            result->buffer = nullptr;
            result->data = nullptr;
        }
        if (!result->buffer) {
            now.bare.push_back(result);
        }
    }
}

inline void note_buffers(optimisation & now) {
    for (const ggml_tensor * t : now.bare) {
        if (t->buffer && std::find(now.buffers.begin(), now.buffers.end(), t->buffer) == now.buffers.end()) {
            now.buffers.push_back(t->buffer);
        }
    }
    now.bare.clear();
}

inline bool may_allocate(ggml_opt_context_t context, bool backward) {
    auto now = optimisations_table.find(context);
    if (!now || now->ready) { // ggml refuses that itself
        return true;
    }
    if (!ggml_opt_static_graphs(context)) {
        if (now->spent) {
            return refuse("its graph has been evaluated: ggml_opt_prepare_alloc gives it another one");
        }
        if (!now->graph.graph) { // ggml refuses that itself
            return true;
        }
        if (now->graph.version && !version_of(now->graph.graph)) {
            return refuse("the graph that it was given is gone");
        }
        forget_results(*now);
    }
    const bool done = may_train(context, *now, kind_of(*now, backward));
    if (done) {
        optimisations_table.note(context, *now);
    }
    return done;
}

inline void note_allocated(ggml_opt_context_t context, bool backward) {
    auto now = optimisations_table.find(context);
    if (!now) {
        return;
    }
    const bool first = now->evaluations == 0;
    now->ready = true;
    now->kind = kind_of(*now, backward);
    if (now->graph.graph) {
        now->allocated = id_of((ggml_cgraph *) now->graph.graph);
        now->backward = now->build == GGML_OPT_BUILD_TYPE_OPT &&
                        (first || (backward && (now->evaluations + 1) % now->period == 0));
        note_buffers(*now);
        if (backward && !first && now->build == GGML_OPT_BUILD_TYPE_OPT && now->evaluations % now->period == 0) {
            ggml_opt_reset(context, false); // ggml adds to the gradients of all steps before
        }
    }
    optimisations_table.note(context, *now);
}

inline bool may_evaluate(ggml_opt_context_t context) {
    const auto now = optimisations_table.find(context);
    if (!now || !now->begun) { // ggml refuses that itself
        return true;
    }
    if (now->turn != turn_of(now->scheduler)) {
        return refuse("its scheduler has been used for another graph since: it needs one of its own");
    }
    return !now->allocated.graph || is_still(now->allocated) || refuse("its graph has been changed since");
}

inline void note_evaluated(ggml_opt_context_t context) {
    if (auto now = optimisations_table.find(context)) {
        ++now->evaluations;
        if (now->allocated.graph) {
            now->spent = true; // ggml has dropped it, and one that was given meanwhile
            now->allocated = {};
            now->backward = false;
        }
        optimisations_table.note(context, *now);
    }
}

// The first graph of an epoch, and the last.
inline int first_kind(const optimisation & now, int64_t split) { return kind_of(now, split != 0); }
inline int last_kind(const optimisation & now, int64_t split, ggml_opt_dataset_t dataset) {
    return kind_of(now, split < 0 || split >= ggml_opt_dataset_data(dataset)->ne[1]);
}

inline bool may_train(ggml_opt_context_t context, int64_t split) {
    auto now = optimisations_table.find(context);
    if (!now || now->ready || !ggml_opt_static_graphs(context)) { // ggml refuses that itself
        return true;
    }
    const bool done = may_train(context, *now, first_kind(*now, split));
    if (done) {
        optimisations_table.note(context, *now);
    }
    return done;
}

inline void note_trained(ggml_opt_context_t context, int64_t split, ggml_opt_dataset_t dataset) {
    if (auto now = optimisations_table.find(context)) {
        now->kind = last_kind(*now, split, dataset);
        optimisations_table.note(context, *now);
    }
}

// The graph of the optimiser, which has the gradients, is there.
inline bool has_backward(ggml_opt_context_t context) {
    const auto now = optimisations_table.find(context);
    return !now || now->backward || refuse("it has no graph for the optimiser");
}

// ---- nodes that are computed

// Whether this release marks them.
inline bool marks_computed() {
    static const bool marks = [] {
        ggml_context * context = ggml_init({ 8192 + ggml_graph_overhead_custom(8, false), nullptr, true });
        ggml_tensor *  result = ggml_sqr(context, ggml_new_tensor_1d(context, GGML_TYPE_F32, 1));
        ggml_build_forward_expand(ggml_new_graph_custom(context, 8, false), result);
        const bool found = result->flags & check::flag_compute;
        ggml_free(context);
        return found;
    }();
    return marks;
}

// ggml_graph_add_node does not, and such a node would not be computed.
inline void mark_computed(ggml_tensor * node) {
    if (node->op != GGML_OP_NONE && marks_computed()) {
        node->flags |= check::flag_compute;
    }
}

} // namespace ggml_cffi
