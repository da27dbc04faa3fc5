// What ggml makes of a graph to train it: gradients, and the steps of an optimiser. It shows them when they are
// made, or, where it trains by itself, never: so they are made once before, of copies, and looked at.

#include <cstring>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace check {

inline bool is_parameter(const ggml_tensor * t) { return t->flags & GGML_TENSOR_FLAG_PARAM; }

// ggml leaves out the gradient of a softmax's sinks and of what is copied over, or dereferences what it takes for that.
inline bool can_differentiate(const std::unordered_set<const ggml_tensor *> & tensors) {
    std::vector<const ggml_tensor *> left_out;
    for (const ggml_tensor * t : tensors) {
        if (t->op == GGML_OP_SOFT_MAX && t->src[2]) {
            left_out.push_back(t->src[2]);
        } else if (t->op == GGML_OP_CPY && t->src[1] != t) { // a cast is its own
            left_out.push_back(t->src[1]);
        }
    }
    for (const ggml_tensor * t : ancestry(left_out)) {
        if (is_parameter(t)) {
            why = named(t) + " is a parameter, and part of the sinks of a softmax or of what is copied over";
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

inline bool can_differentiate(ggml_cgraph * graph) { return can_differentiate(ancestry(nodes_of(graph))); }

// What a kernel of the training reads once it has written is marked as an output, over which no allocator puts another
// result: the gradient of a softmax is computed from what the softmax was.
inline void keep_apart(std::vector<const ggml_tensor *> nodes) {
    const auto keep = [](const ggml_tensor * t) { ggml_set_output((ggml_tensor *) (t->view_src ? t->view_src : t)); };
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
        ggml_cgraph * forward = ggml_new_graph_custom(context_, size_, true);
        for (const ggml_tensor * node : nodes) {
            ggml_build_forward_expand(forward, copies_.at(node));
        }
        add_loss(forward, copies_.at(outputs), how.loss);
        return how.gradients ? differentiated(forward, how) : forward;
    }

  private:
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
};

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
