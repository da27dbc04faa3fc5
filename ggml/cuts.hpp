// How a meta device has cut its tensors, and which reads and writes of them it can do: over others
// ggml aborts, over some after a part is done. The annotations' `require` call these.

#include <optional>
#include <string>

namespace ggml_cffi {

// The answer about a tensor that is not whole on each device.
struct cut {
    ggml_backend_buffer_t buffer;
    int                   axis;        // one of its own, or PARTIAL
    bool                  in_segments; // several, or one that stands several times
};

// What is read or written: so many pieces, so far apart.
struct pieces {
    size_t offset, size, n = 1, stride = 0;
};

#ifdef GGML_CFFI_HAS_META

inline by_address<cut> cuts_table;

inline void note_cut(const ggml_tensor * tensor, int axis, bool in_segments) {
    if (axis == GGML_BACKEND_SPLIT_AXIS_MIRRORED) {
        cuts_table.forget(tensor);
    } else {
        cuts_table.note(tensor, { tensor->buffer, axis, in_segments });
    }
}

inline void forget_cuts(ggml_backend_buffer_t buffer) {
    cuts_table.forget_if([buffer](const cut & one) { return one.buffer == buffer; });
}

inline bool on_meta_device(const ggml_tensor * t) { return ggml_backend_buffer_is_meta(check::buffer_of(t)); }

// How a tensor, or what it is a view of, is cut. Of what is asked for, not of results: ggml follows a
// cut through operations. An answer about another tensor that lay at the address is void.
inline std::optional<cut> cut_of(const ggml_tensor * t) {
    ggml_backend_buffer_t buffer = check::buffer_of(t);
    if (ggml_backend_buffer_get_usage(buffer) == GGML_BACKEND_BUFFER_USAGE_COMPUTE) {
        return std::nullopt;
    }
    const std::optional<cut> found = cuts_table.find(check::root_of(t));
    return found && found->buffer == buffer ? found : std::nullopt;
}

inline bool cannot(const ggml_tensor * t, const std::optional<cut> & how, const std::string & why) {
    check::why = "'" + std::string(t->name) + "', " + check::described(t);
    if (t->view_src) {
        check::why += ", a view of '" + std::string(t->view_src->name) + "'";
    }
    if (how && how->axis == GGML_BACKEND_SPLIT_AXIS_PARTIAL) {
        check::why += ", partial";
    } else if (how) {
        check::why += ", split along axis " + std::to_string(how->axis) + (how->in_segments ? " in segments" : "");
    }
    check::why += ": " + why;
    return false;
}

// Whole slices across the cut. Of views ggml keeps what it knows only until other graphs are computed,
// and dereferences NULL then.
inline bool whole_slices(const ggml_tensor * t, const cut & how, const pieces & p) {
    if (t->view_src) {
        return cannot(t, how, "ggml forgets its views, so read and write what it is a view of");
    }
    if (how.axis == GGML_BACKEND_SPLIT_AXIS_PARTIAL) {
        return (p.n == 1 && p.offset == 0 && p.size == ggml_nbytes(t)) || cannot(t, how, "it is written as a whole only");
    }
    const size_t unit = how.axis + 1 < GGML_MAX_DIMS ? t->nb[how.axis + 1] : ggml_nbytes(t);
    if (p.offset % unit || p.size % unit || (p.n > 1 && p.stride % unit)) {
        std::string text = std::to_string(p.size) + " bytes from byte " + std::to_string(p.offset) + " on";
        text += p.n > 1 ? ", every " + std::to_string(p.stride) : "";
        return cannot(t, how, text + ", where ggml can do multiples of " + std::to_string(unit) + " only");
    }
    return true;
}

inline bool meta_reads(const ggml_tensor * t, const pieces & p) {
    if (!p.size || !p.n || !on_meta_device(t)) {
        return true;
    }
    const std::optional<cut> how = cut_of(t);
    if (how && how->axis == GGML_BACKEND_SPLIT_AXIS_PARTIAL) {
        return cannot(t, how, "each device has an addend of it, and ggml adds none up on reading");
    }
    return !how || whole_slices(t, *how, p);
}

inline bool meta_writes(const ggml_tensor * t, const pieces & p) {
    if (!p.size || !p.n || !on_meta_device(t)) {
        return true;
    }
    const std::optional<cut> how = cut_of(t);
    return !how || whole_slices(t, *how, p);
}

// All of another tensor, which is in host memory then.
inline bool meta_takes_copy(const ggml_tensor * src, const ggml_tensor * dst) {
    return src == dst || meta_writes(dst, { 0, ggml_nbytes(dst) });
}

// ggml looks at the offset and the layout of what is not even cut.
inline bool meta_moves_async(ggml_backend_t backend, const ggml_tensor * t, const pieces & p) {
    const bool meta = ggml_backend_is_meta(backend);
    if (!p.n || (!meta && !on_meta_device(t))) {
        return true;
    }
    if (!meta || !on_meta_device(t)) {
        return cannot(t, std::nullopt, "it is not on the backend's device");
    }
    const std::optional<cut> how = cut_of(t);
    if (p.offset || (p.n > 1 && p.stride)) {
        return cannot(t, how, "asynchronously ggml begins at its first byte only, not at others");
    }
    if (!ggml_is_contiguous(t)) {
        return cannot(t, how, "it is not contiguous, and asynchronously ggml moves nothing else");
    }
    if (how && (how->in_segments || how->axis == GGML_BACKEND_SPLIT_AXIS_PARTIAL)) {
        return cannot(t, how, "ggml does not move it asynchronously");
    }
    return !how || whole_slices(t, *how, p);
}

inline bool meta_fills(const ggml_tensor * t, size_t size) {
    return !size || !on_meta_device(t) || cannot(t, cut_of(t), "ggml cannot fill it: write the bytes, or clear the buffer");
}

// ggml gives all tensors of the context memory anew, and what they had is out of reach.
inline bool meta_gives_first(ggml_context * ctx, ggml_backend_buffer_type_t kind) {
    if (!ggml_backend_buft_is_meta(kind)) {
        return true;
    }
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        if ((t->buffer || t->data) && !t->view_src) {
            check::why = "'" + std::string(t->name) + "' has, or had, memory: a meta device gives it to all tensors of a context, and once";
            return false;
        }
    }
    return true;
}

#else // a release without meta devices

inline void note_cut(const ggml_tensor *, int, bool) {}
inline void forget_cuts(ggml_backend_buffer_t) {}
inline bool meta_reads(const ggml_tensor *, const pieces &) { return true; }
inline bool meta_writes(const ggml_tensor *, const pieces &) { return true; }
inline bool meta_takes_copy(const ggml_tensor *, const ggml_tensor *) { return true; }
inline bool meta_moves_async(ggml_backend_t, const ggml_tensor *, const pieces &) { return true; }
inline bool meta_fills(const ggml_tensor *, size_t) { return true; }
inline bool meta_gives_first(ggml_context *, ggml_backend_buffer_type_t) { return true; }

#endif

} // namespace ggml_cffi
