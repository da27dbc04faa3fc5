// What ggml makes of a graph to train it: gradients, and the steps of an optimiser. It shows them when they are
// made, or, where it trains by itself, never: so they are made once before, of copies, and looked at.

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace check {

inline bool is_parameter(const ggml_tensor * t) { return t->flags & GGML_TENSOR_FLAG_PARAM; }

// ggml leaves out the gradient of a softmax's sinks and of what is copied over, or dereferences what it takes for that;
// for that of the number that ADD1 adds to a row it takes the mean of a row where it is the sum.
inline bool can_differentiate(const std::unordered_set<const ggml_tensor *> & tensors) {
    std::vector<const ggml_tensor *> left_out;
    for (const ggml_tensor * t : tensors) {
        if (t->op == GGML_OP_SOFT_MAX && t->src[2]) {
            left_out.push_back(t->src[2]);
        } else if (t->op == GGML_OP_CPY && t->src[1] != t) { // a cast is its own
            left_out.push_back(t->src[1]);
        } else if (t->op == GGML_OP_ADD1 && ggml_nelements(t) > 1) {
            left_out.push_back(t->src[1]);
        }
    }
    for (const ggml_tensor * t : ancestry(left_out)) {
        if (is_parameter(t)) {
            why = named(t) + " is a parameter, and part of the sinks of a softmax, of what is copied over, or of the "
                  "number that ADD1 adds: ADD adds as well";
            return false;
        }
    }
    return true;
}

inline std::vector<const ggml_tensor *> nodes_of(ggml_cgraph * graph) {
    std::vector<const ggml_tensor *> nodes;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        nodes.push_back(ggml_graph_node(graph, i));
    }
    return nodes;
}

// Whether no gradient, a node from number `n` on, reads what an operation in place has written over since another one
// was computed with it.
inline bool overwrites_nothing(ggml_cgraph * graph, int n) {
    struct writing {
        int                 number;
        const ggml_tensor * node;
    };
    std::unordered_map<const ggml_tensor *, std::vector<writing>> writings; // by what they are views of
    for (int i = 0; i < n; ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (writes_into_another(node)) {
            writings[node->view_src].push_back({ i, node });
        }
    }
    if (writings.empty()) {
        return true;
    }
    std::unordered_map<const ggml_tensor *, int> first; // that made or read it
    for (int i = 0; i < n; ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (!is_view(node)) {
            first.emplace(node, i);
            for (const ggml_tensor * operand : node->src) {
                first.emplace(operand, i);
            }
        }
    }
    const auto apart = [](const ggml_tensor * a, const ggml_tensor * b) {
        return a->view_offs >= b->view_offs + ggml_nbytes(b) || b->view_offs >= a->view_offs + ggml_nbytes(a);
    };
    for (int i = n; i < ggml_graph_n_nodes(graph); ++i) {
        for (const ggml_tensor * operand : ggml_graph_node(graph, i)->src) {
            const auto used = first.find(operand);
            const auto over = operand ? writings.find(root_of(operand)) : writings.end();
            if (used == first.end() || over == writings.end()) {
                continue;
            }
            for (const writing & one : over->second) {
                if (one.number > used->second && !apart(one.node, operand)) {
                    why = named(one.node) + " writes over " + named(operand) +
                          ", which a gradient is computed from: an operation that is not in place does not";
                    return false;
                }
            }
        }
    }
    return true;
}

// What a kernel of the training reads once it has written is marked as an output, over which no allocator puts another
// result: the gradient of a softmax is computed from what the softmax was.
inline void keep_apart(std::vector<const ggml_tensor *> nodes) {
    const auto keep = [](const ggml_tensor * t) { ggml_set_output((ggml_tensor *) root_of(t)); };
    for (const ggml_tensor * t : ancestry(std::move(nodes))) {
        if (t->op == GGML_OP_SOFT_MAX) {
            keep(t);
        }
        const ggml_tensor * second = read_late(t);
        if (second && second->op != GGML_OP_NONE) {
            keep(second);
        }
    }
}

// How a graph is trained, as ggml_opt_params has it.
struct training {
    ggml_opt_loss_type      loss;
    ggml_opt_optimizer_type optimizer;
    bool                    gradients;   // else it is only evaluated
    bool                    accumulates; // gradients, in tensors of their own
    bool                    steps;

    // `once`: the graph stays the same, and each evaluation has a step.
    training(ggml_opt_loss_type l, ggml_opt_optimizer_type o, ggml_opt_build_type build, bool once)
        : loss(l), optimizer(o), gradients(build >= GGML_OPT_BUILD_TYPE_GRAD),
          accumulates(gradients && !(once && build == GGML_OPT_BUILD_TYPE_OPT)), steps(build == GGML_OPT_BUILD_TYPE_OPT) {}
};

// A graph of copies with all that ggml_opt_build adds to it. It is never computed, and goes with this.
class rehearsal {
  public:
    rehearsal(const std::unordered_set<const ggml_tensor *> & tensors, size_t size)
        : size_(size), context_(ggml_init({ room(tensors.size()), nullptr, true })) {
        if (!context_) {
            throw std::bad_alloc();
        }
        for (const ggml_tensor * t : tensors) {
            copies_[t] = ggml_new_tensor(context_, t->type, GGML_MAX_DIMS, t->ne);
        }
        for (const auto & [t, copy] : copies_) {
            fill(*copy, *t);
        }
    }
    rehearsal(const rehearsal &) = delete;
    ~rehearsal() { ggml_free(context_); }

    ggml_cgraph * trained(const std::vector<const ggml_tensor *> & nodes, const ggml_tensor * outputs, const training & how) {
        ggml_cgraph * forward = copied(nodes);
        add_loss(forward, copies_.at(outputs), how.loss);
        n_forward_ = ggml_graph_n_nodes(forward);
        return how.gradients ? differentiated(forward, how) : forward;
    }

    // The graph as it is, with losses and parameters of its own, and the gradients.
    ggml_cgraph * differentiated(const std::vector<const ggml_tensor *> & nodes) {
        ggml_cgraph * graph = copied(nodes);
        ggml_build_backward_expand(context_, graph, nullptr);
        return graph;
    }

    int n_forward() const { return n_forward_; } // nodes of what was trained, and its loss

  private:
    ggml_cgraph * copied(const std::vector<const ggml_tensor *> & nodes) {
        ggml_cgraph * graph = ggml_new_graph_custom(context_, size_, true);
        for (const ggml_tensor * node : nodes) {
            ggml_build_forward_expand(graph, copies_.at(node));
        }
        return graph;
    }

    // Nodes of the graph, with gradients that are made of a handful of operations each, and a few more.
    size_t room(size_t n) const {
        return (32 * n + 64) * ggml_tensor_overhead() + 3 * ggml_graph_overhead_custom(size_, true);
    }

    void fill(ggml_tensor & copy, const ggml_tensor & t) const {
        const auto of = [this](const ggml_tensor * one) { return one ? copies_.at(one) : nullptr; };
        copy = t;
        copy.view_src = of(t.view_src);
        for (ggml_tensor *& operand : copy.src) {
            operand = of(operand);
        }
        if (t.op != GGML_OP_NONE && !buffer_of(&t)) {
            copy.data = nullptr; // it is given memory anew
        }
    }

    void add_loss(ggml_cgraph * graph, ggml_tensor * outputs, ggml_opt_loss_type kind) {
        ggml_tensor * loss = outputs;
        ggml_tensor * labels = ggml_dup_tensor(context_, outputs);
        if (kind == GGML_OPT_LOSS_TYPE_CROSS_ENTROPY) {
            loss = ggml_cross_entropy_loss(context_, outputs, labels);
            ggml_build_forward_expand(graph, ggml_argmax(context_, outputs));
        } else {
            if (kind == GGML_OPT_LOSS_TYPE_MEAN_SQUARED_ERROR) {
                loss = ggml_sqr(context_, ggml_sub(context_, outputs, labels));
            }
            loss = ggml_sum(context_, loss);
        }
        ggml_set_loss(loss);
        ggml_build_forward_expand(graph, loss);
    }

    ggml_cgraph * differentiated(ggml_cgraph * forward, const training & how) {
        const int                  n = ggml_graph_n_nodes(forward);
        std::vector<ggml_tensor *> sums(n);
        for (int i = 0; i < n; ++i) {
            const ggml_tensor * node = ggml_graph_node(forward, i);
            if (node->flags & GGML_TENSOR_FLAG_LOSS || (how.accumulates && is_parameter(node))) {
                sums[i] = ggml_new_tensor(context_, GGML_TYPE_F32, GGML_MAX_DIMS, node->ne);
            }
        }
        ggml_cgraph * graph = ggml_graph_dup(context_, forward, true);
        ggml_build_backward_expand(context_, graph, sums.data());
        const bool    adamw = how.optimizer == GGML_OPT_OPTIMIZER_TYPE_ADAMW;
        ggml_tensor * params = how.steps ? ggml_new_tensor_1d(context_, GGML_TYPE_F32, adamw ? 7 : 2) : nullptr;
        for (int i = 0; how.steps && i < n; ++i) {
            ggml_tensor * node = ggml_graph_node(graph, i);
            ggml_tensor * gradient = ggml_graph_get_grad(graph, node);
            if (gradient && is_parameter(node)) {
                ggml_tensor * made = adamw ? adamw_step(node, gradient, params) : ggml_opt_step_sgd(context_, node, gradient, params);
                ggml_build_forward_expand(graph, ggml_format_name(made, "step for %s", node->name));
            }
        }
        return graph;
    }

    ggml_tensor * adamw_step(ggml_tensor * parameter, ggml_tensor * gradient, ggml_tensor * params) {
        const auto moment = [&] { return ggml_new_tensor(context_, GGML_TYPE_F32, GGML_MAX_DIMS, parameter->ne); };
        ggml_tensor * m = moment();
        ggml_tensor * v = moment();
        return ggml_opt_step_adamw(context_, parameter, gradient, m, v, params);
    }

    size_t                                                 size_; // of graphs, in nodes
    ggml_context *                                         context_;
    std::unordered_map<const ggml_tensor *, ggml_tensor *> copies_;
    int                                                    n_forward_ = 0;
};

// The gradients that ggml adds to a graph.
inline bool can_differentiate(ggml_cgraph * graph) {
    const auto nodes = nodes_of(graph);
    const auto tensors = ancestry(nodes);
    if (!can_differentiate(tensors)) {
        return false;
    }
    if (std::none_of(nodes.begin(), nodes.end(), writes_into_another)) {
        return true;
    }
    rehearsal made(tensors, ggml_graph_size(graph));
    return overwrites_nothing(made.differentiated(nodes), (int) nodes.size());
}

// ggml has the gradients, and what computes them reads them as they lie. `nodes`: those of a graph; `size`: how many
// there is room for, with gradients and steps.
inline bool can_train(ggml_backend_sched_t sched, std::vector<const ggml_tensor *> nodes, const ggml_tensor * outputs,
                      size_t size, const training & how) {
    nodes.push_back(outputs);
    const auto tensors = ancestry(nodes);
    if (how.gradients && !can_differentiate(tensors)) {
        return false;
    }
    rehearsal     made(tensors, size);
    ggml_cgraph * graph = made.trained(nodes, outputs, how);
    const size_t  count = how.gradients ? ancestry(nodes_of(graph)).size() : 0;
    if (count > size) { // of a copy of the graph, ggml has the leaves in the room for its nodes
        why = "it has " + std::to_string(count) + " tensors, with gradients and steps, and ggml has room for " +
              std::to_string(size);
        return false;
    }
    if (how.gradients && !overwrites_nothing(graph, made.n_forward())) {
        return false;
    }
    for (const ggml_tensor * node : computed_nodes(graph)) {
        if (!cpu_can(sched, { node }, lies_on_cpu)) {
            why = "the CPU cannot compute " + why;
            if (node->view_src) { // a step, or what is added to a gradient
                why += "; a parameter lies as it is used, that of a product with a row for each of its results: x @ w.T, "
                       "ggml_mul_mat(w, x)";
            }
            return false;
        }
    }
    return true;
}

// ggml makes one graph for all evaluations; `once`: with a step in each.
inline bool can_train(ggml_backend_sched_t sched, const ggml_tensor * outputs, ggml_opt_loss_type loss,
                      ggml_opt_optimizer_type optimizer, bool once, ggml_opt_build_type build = GGML_OPT_BUILD_TYPE_OPT) {
    return can_train(sched, {}, outputs, GGML_DEFAULT_GRAPH_SIZE, { loss, optimizer, build, once });
}

inline bool can_train(const ggml_opt_params & params) {
    return !params.outputs || !params.ctx_compute ||
           can_train(params.backend_sched, params.outputs, params.loss_type, params.optimizer, params.opt_period == 1,
                     params.build_type);
}

} // namespace check
