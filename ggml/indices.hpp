// The indices that a graph uses, where they are known before it is computed: ggml does not look at
// them, or aborts over them on one of several threads.

#include <cstdint>
#include <cstring>
#include <vector>

namespace check {

// The tensor of indices that a node reads, and what they have to be below.
struct index_use {
    const ggml_tensor * node;
    const ggml_tensor * ids;
    int64_t             limit;
    bool                blind = false;  // its kernel does not look at them
    const ggml_tensor * rows = nullptr; // of `ids`, a table, only these are used
};

inline index_use index_use_of(const ggml_tensor * node) {
    ggml_tensor * const * s = node->src;
    switch (node->op) {
        case GGML_OP_GET_ROWS:      return { node, s[1], s[0] ? s[0]->ne[1] : 0 };
        case GGML_OP_GET_ROWS_BACK: return { node, s[1], node->ne[1], true };
        case GGML_OP_SET_ROWS:      return { node, s[1], node->ne[1] };
        case GGML_OP_MUL_MAT_ID:    return { node, s[2], s[0] ? s[0]->ne[2] : 0, true };
        case GGML_OP_ADD_ID:        return { node, s[2], s[1] ? s[1]->ne[1] : 0 };
        case GGML_OP_SSM_SCAN:      return { node, s[6], s[0] ? s[0]->ne[3] : 0, true };
        default:                    return { node, nullptr, 0 };
    }
}

// Where the same numbers are already now, if the tensor is but a copy of others or has them in
// another shape.
inline const ggml_tensor * copied_from(const ggml_tensor * t) {
    while (t->src[0] && t->src[0]->type == t->type &&
           (t->op == GGML_OP_CONT || t->op == GGML_OP_DUP || t->op == GGML_OP_CPY ||
            (is_view(t) && t->op != GGML_OP_VIEW))) {
        t = t->src[0];
    }
    return t;
}

template <class T> bool indices_below(const index_use & use, const char * data) {
    const ggml_tensor * t = use.ids;
    for (int64_t i3 = 0; i3 < t->ne[3]; ++i3) {
        for (int64_t i2 = 0; i2 < t->ne[2]; ++i2) {
            for (int64_t i1 = 0; i1 < t->ne[1]; ++i1) {
                const char * row = data + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3];
                for (int64_t i0 = 0; i0 < t->ne[0]; ++i0) {
                    T index;
                    std::memcpy(&index, row + i0 * t->nb[0], sizeof index);
                    if (!in_range(index, use.limit)) {
                        why = "index " + std::to_string(index) + (t->name[0] ? std::string(" in '") + t->name + "'" : "") +
                              ", of " + named(use.node) + ", is not in 0 ... " + std::to_string(use.limit - 1);
                        return false;
                    }
                }
            }
        }
    }
    return true;
}

// What has put its numbers into a tensor, however they were copied, cut or arranged since.
inline const ggml_tensor * maker_of(const ggml_tensor * t) {
    while (t->src[0] && t->src[0]->type == t->type &&
           (is_view(t) || t->op == GGML_OP_CONT || t->op == GGML_OP_DUP || t->op == GGML_OP_CPY ||
            t->op == GGML_OP_REPEAT || t->op == GGML_OP_GET_ROWS)) {
        t = t->src[0];
    }
    return t;
}

// The highest number that an operation of known range can have put into a tensor of integers; -1 where
// that is not known.
inline int64_t highest(const ggml_tensor * t) {
    const ggml_tensor * maker = maker_of(t);
    const bool known = maker->op == GGML_OP_ARGSORT || maker->op == GGML_OP_ARGMAX ||
                       std::strcmp(ggml_op_name(maker->op), "TOP_K") == 0;
    return known && maker->src[0] ? maker->src[0]->ne[0] - 1 : -1;
}

// Floats that become indices in no known range: nobody has limited them to one.
inline bool unlimited_floats(const index_use & use) {
    const ggml_tensor * made = maker_of(use.ids);
    if (made->op != GGML_OP_CPY || !made->src[0] || made->src[0]->type != GGML_TYPE_F32) {
        return false;
    }
    const ggml_tensor * from = maker_of(made->src[0]);
    return from->op != GGML_OP_CLAMP || !(float_param(from, 0) > -1 && float_param(from, 1) < (float) use.limit);
}

// The rows that a node takes from a table of indices that is there; then these are looked up.
template <class Source> void look_up_rows(index_use & use, Source source) {
    const ggml_tensor * t = use.ids;
    if (t->op != GGML_OP_GET_ROWS || !t->src[0] || t->src[0]->type != t->type) {
        return;
    }
    const ggml_tensor * table = copied_from(t->src[0]);
    if (table->op == GGML_OP_NONE || table->op == GGML_OP_VIEW) {
        const ggml_tensor * rows = source(t, t->src[1]);
        use.ids = table;
        use.rows = rows ? copied_from(rows) : nullptr;
    }
}

inline bool index_type(const ggml_tensor * t) {
    return t->type == GGML_TYPE_I32 || t->type == GGML_TYPE_I64;
}

// What these nodes use as indices. Those that an operation of known range computes are judged by
// that: which of them there will be is not known yet. `source(node, ids)` gives the tensor that the
// indices of a node are to be looked for in, NULL for none.
template <class Source>
bool index_uses(const std::vector<const ggml_tensor *> & nodes, std::vector<index_use> & uses, Source source) {
    for (const ggml_tensor * node : nodes) {
        index_use use = index_use_of(node);
        use.ids = use.ids ? source(node, use.ids) : nullptr;
        if (!use.ids || ggml_is_empty(use.ids) || !index_type(use.ids)) {
            continue;
        }
        const int64_t most = highest(use.ids);
        if (most >= use.limit) {
            why = "indices up to " + std::to_string(most) + " that the graph computes, of " + named(node) +
                  ", are not all in 0 ... " + std::to_string(use.limit - 1);
            return false;
        }
        if (use.blind && unlimited_floats(use)) {
            why = "indices that the graph makes of floats, of " + named(node) +
                  ", which its kernel does not look at: ggml_clamp the floats to 0 ... " + std::to_string(use.limit - 1);
            return false;
        }
        use.ids = copied_from(use.ids);
        look_up_rows(use, source);
        if (most < 0 && (use.ids->op == GGML_OP_NONE || use.ids->op == GGML_OP_VIEW)) {
            uses.push_back(use);
        }
    }
    return true;
}

inline const ggml_tensor * own_indices(const ggml_tensor *, const ggml_tensor * ids) {
    return ids;
}

inline bool index_values(const index_use & use, const char * data) {
    return use.ids->type == GGML_TYPE_I32 ? indices_below<int32_t>(use, data) : indices_below<int64_t>(use, data);
}

// Of a table of indices, the rows that are used, if those can be told; else all of it.
inline bool table_values(const index_use & use, const char * data) {
    const ggml_tensor * rows = use.rows;
    const ggml_tensor * table = use.ids;
    const bool told = rows && rows->op == GGML_OP_NONE && rows->type == GGML_TYPE_I32 && rows->data &&
                      data_in_host_memory(rows) && ggml_is_contiguous(rows) && table->ne[2] == 1 && table->ne[3] == 1;
    if (!told) {
        return index_values(use, data);
    }
    ggml_tensor row = *table;
    row.ne[1] = 1;
    const index_use of_row{ use.node, &row, use.limit };
    const int64_t   n = ggml_nelements(rows);
    for (int64_t i = 0; i < n; ++i) {
        const int32_t number = ((const int32_t *) rows->data)[i];
        if (in_range(number, table->ne[1]) && !index_values(of_row, data + number * table->nb[1])) {
            return false;
        }
    }
    return true;
}

// The indices that lie in memory already. `wanted`: an index tensor without memory has no values
// either, and none will come. `fetch`: those that the CPU cannot read are got from their device.
inline bool present_indices(const index_use & use, bool wanted, bool fetch) {
    const ggml_tensor * root = root_of(use.ids);
    if (!root->data) {
        if (wanted) {
            why = named(use.node) + " needs indices, and the tensor of them has not been allocated";
        }
        return !wanted;
    }
    if (data_in_host_memory(root)) {
        return !use.ids->data || table_values(use, (const char *) use.ids->data);
    }
    if (!fetch || !buffer_of(root) || !ggml_is_contiguous(root)) {
        return true;
    }
    std::vector<char> copy(ggml_nbytes(root));
    ggml_backend_tensor_get(root, copy.data(), 0, copy.size());
    return index_values(use, copy.data() + use.ids->view_offs);
}

// Calls `look` with each use of indices that are there before a graph is computed. What the graph
// computes otherwise than by an operation of known range is not known yet.
template <class Source, class Look> bool indices(ggml_cgraph * graph, Source source, Look look) {
    std::vector<index_use> uses;
    if (!index_uses(computed_nodes(graph), uses, source)) {
        return false;
    }
    if (uses.empty()) {
        return true;
    }
    std::unordered_set<const ggml_tensor *> written;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (writes_into_another(node)) {
            written.insert(node->view_src);
        }
    }
    index_use last{};
    for (const index_use & use : uses) {
        const ggml_tensor * root = root_of(use.ids);
        const bool looked = use.ids == last.ids && use.limit == last.limit && use.rows == last.rows;
        if (looked || root->op != GGML_OP_NONE || written.count(root)) {
            continue;
        }
        last = use;
        if (!look(use)) {
            return false;
        }
    }
    return true;
}

// The indices of a graph that is computed by one backend (NULL: the CPU without one).
inline bool indices(ggml_cgraph * graph, ggml_backend_t backend = nullptr) {
    return indices(graph, own_indices, [backend](const index_use & use) {
        return present_indices(use, false, in_meta_buffer(root_of(use.ids)) && backend && on_cpu(backend));
    });
}

// The places inside one datum that a view of a batch of data reads.
inline std::vector<size_t> places_in_datum(const ggml_tensor * ids, size_t datum) {
    std::unordered_set<size_t> places;
    for (int64_t i = 0; i < ggml_nelements(ids); ++i) {
        size_t  offset = ids->view_offs;
        int64_t rest = i;
        for (int axis = 0; axis < 4; ++axis) {
            offset += (size_t) (rest % ids->ne[axis]) * ids->nb[axis];
            rest /= ids->ne[axis];
        }
        places.insert(offset % datum);
    }
    return { places.begin(), places.end() };
}

// A batch is made of any of the data, in any order: so all of them are looked at.
inline bool indices_of_data(index_use use, const ggml_tensor * inputs, const ggml_tensor * data) {
    if (!data->data || data->type != inputs->type || data->ne[0] != inputs->ne[0] || !ggml_is_contiguous(inputs)) {
        return true; // ggml itself refuses that
    }
    ggml_tensor column = *use.ids;
    column.ne[0] = 1;
    column.ne[1] = data->ne[1];
    column.ne[2] = column.ne[3] = 1;
    column.nb[1] = data->nb[1];
    const std::vector<size_t> places = places_in_datum(use.ids, inputs->nb[1]);
    use.ids = &column;
    return std::all_of(places.begin(), places.end(), [&](size_t place) {
        return index_values(use, (const char *) data->data + place);
    });
}

// Those of what an optimisation context evaluates; the backward pass uses the same. With a data set,
// `inputs` will hold its data.
template <class Source>
bool indices(const ggml_tensor * outputs, const ggml_tensor * inputs, ggml_opt_dataset_t dataset, Source source) {
    std::vector<index_use> uses;
    if (!outputs || !inputs) {
        return true;
    }
    if (!index_uses(computed_nodes(outputs), uses, source)) {
        return false;
    }
    for (const index_use & use : uses) {
        const ggml_tensor * root = root_of(use.ids);
        if (root->op != GGML_OP_NONE) {
            continue;
        }
        if (root == inputs && dataset ? !indices_of_data(use, inputs, ggml_opt_dataset_data(dataset))
                                      : !present_indices(use, true, false)) {
            return false;
        }
    }
    return true;
}

} // namespace check
