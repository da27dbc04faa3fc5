// Predicates that the annotations' `require` expressions use: what must hold before a call because
// ggml itself neither checks it nor aborts over it.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_set>
#include <vector>

// Predicates over arguments. They never abort, write nothing, and take pointers that are not NULL
// unless they say otherwise.
namespace check {

// Newer releases mark the nodes that are computed with it, older ones have no such flag.
constexpr int flag_compute = 16; // GGML_TENSOR_FLAG_COMPUTE

// What a predicate found, or the arguments it was asked about; the guard adds it to the
// expression's text.
inline thread_local std::string why;

inline std::string named(const ggml_tensor * t) {
    return std::string(ggml_op_desc(t)) + (t->name[0] ? std::string(" '") + t->name + "'" : "");
}

inline std::string described(const ggml_tensor * t) {
    std::string text = std::string(ggml_type_name(t->type)) + "[";
    for (int i = 0; i < 4; ++i) {
        text += (i ? "," : "") + std::to_string(t->ne[i]);
    }
    return text + (ggml_is_contiguous(t) ? "]" : "] with gaps or permuted");
}

template <class T> std::string described(T value) {
    if constexpr (std::is_same_v<T, bool>) {
        return value ? "true" : "false";
    } else if constexpr (std::is_enum_v<T>) {
        return std::to_string((long long) value);
    } else if constexpr (std::is_arithmetic_v<T>) {
        return std::to_string(value);
    } else {
        return "";
    }
}

// Adds an argument to what is told of a failed requirement.
template <class T> void tell(const char * name, T value) {
    std::string text;
    if constexpr (std::is_convertible_v<T, const ggml_tensor *>) {
        text = value ? described((const ggml_tensor *) value) : "NULL";
    } else {
        text = described(value);
    }
    if (!text.empty()) {
        why += (why.empty() ? "" : ", ") + std::string(name) + " = " + text;
    }
}

// The buffer that holds a tensor's data: a view's own field is set late.
inline ggml_backend_buffer_t buffer_of(const ggml_tensor * t) {
    return t->view_src ? t->view_src->buffer : t->buffer;
}

// By name, so that releases without a meta device compile as well.
inline bool is_meta(const char * name) {
    return std::strncmp(name, "Meta(", 5) == 0;
}

inline bool in_meta_buffer(const ggml_tensor * t) {
    ggml_backend_buffer_t buffer = buffer_of(t);
    return buffer && is_meta(ggml_backend_buffer_name(buffer));
}

// A meta buffer over host memory calls itself host memory but has made-up addresses.
inline bool real_host_buffer(const ggml_tensor * t) {
    ggml_backend_buffer_t buffer = buffer_of(t);
    return buffer && ggml_backend_buffer_is_host(buffer) && !in_meta_buffer(t);
}

// The data can be read and written by the CPU through its address.
inline bool data_in_host_memory(const ggml_tensor * t) {
    return t->data && (!buffer_of(t) || real_host_buffer(t));
}

// In memory of the CPU's that keeps weights in an order of its own: what is written is put in order, if
// ggml has one for the weight, and nothing is read back.
inline bool reordered(const ggml_tensor * t) {
    ggml_backend_buffer_t buffer = buffer_of(t);
    if (!buffer || ggml_backend_buffer_is_host(buffer)) {
        return false;
    }
    ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer));
    return device && ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

inline bool is_put_in_order(const ggml_tensor * t) {
    return !t->view_src && t->extra;
}

inline bool can_set(const ggml_tensor * t, size_t offset, size_t size) {
    return !reordered(t) || (is_put_in_order(t) && offset == 0 && size == ggml_nbytes(t));
}

// ggml copies through an address wherever a buffer says that it is host memory.
inline bool can_copy(const ggml_tensor * src, const ggml_tensor * dst) {
    return src == dst || (!in_meta_buffer(src) && (!in_meta_buffer(dst) || real_host_buffer(src)) &&
                          !reordered(src) && (!reordered(dst) || is_put_in_order(dst)));
}

inline bool in_range(int64_t i, int64_t n) {
    return i >= 0 && i < n;
}

// A flat index, of a tensor whose elements can be addressed.
inline bool element(const ggml_tensor * t, int64_t i) {
    return in_range(i, ggml_nelements(t));
}

inline bool element(const ggml_tensor * t, int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
    return in_range(i0, t->ne[0]) && in_range(i1, t->ne[1]) && in_range(i2, t->ne[2]) && in_range(i3, t->ne[3]);
}

// a * b, or -1 where it is negative or does not fit.
inline int64_t product(int64_t a, int64_t b) {
    int64_t result;
    return a < 0 || b < 0 || __builtin_mul_overflow(a, b, &result) ? -1 : result;
}

// No extent is negative, rows are whole blocks, and the bytes fit into an int64_t.
inline bool shape(ggml_type type, int64_t ne0, int64_t ne1 = 1, int64_t ne2 = 1, int64_t ne3 = 1) {
    const int64_t block = ggml_blck_size(type);
    if (ne0 < 0 || ne1 < 0 || ne2 < 0 || ne3 < 0 || block <= 0 || ne0 % block) {
        return false;
    }
    if (ne0 == 0 || ne1 == 0 || ne2 == 0 || ne3 == 0) {
        return ne0 < INT32_MAX && ne1 < INT32_MAX && ne2 < INT32_MAX && ne3 < INT32_MAX;
    }
    const int64_t row = product(ne0, (int64_t) ggml_type_size(type));
    return product(product(product(row, ne1), ne2), ne3) >= 0;
}

inline bool shape(ggml_type type, int n_dims, const int64_t * ne) {
    return n_dims < 1 || n_dims > 4 ||
           shape(type, ne[0], n_dims > 1 ? ne[1] : 1, n_dims > 2 ? ne[2] : 1, n_dims > 3 ? ne[3] : 1);
}

// Bytes from the first to behind the last element of a region with these extents and strides;
// SIZE_MAX where that does not fit.
inline size_t extent(ggml_type type, const int64_t (&ne)[4], const size_t (&nb)[4]) {
    size_t end = ggml_row_size(type, ne[0]);
    for (int i = 1; i < 4; ++i) {
        size_t step;
        if (ne[i] <= 0) {
            return 0;
        }
        if (__builtin_mul_overflow((size_t) (ne[i] - 1), nb[i], &step) || __builtin_add_overflow(end, step, &end)) {
            return SIZE_MAX;
        }
    }
    return ne[0] > 0 ? end : 0;
}

// A view with these extents and strides lies inside the tensor that holds the data of `a`.
inline bool view(const ggml_tensor * a, size_t offset, int64_t ne0, int64_t ne1 = 1, size_t nb1 = 0,
                 int64_t ne2 = 1, size_t nb2 = 0, int64_t ne3 = 1, size_t nb3 = 0) {
    if (!shape(a->type, ne0, ne1, ne2, ne3)) {
        return false;
    }
    const int64_t ne[4] = { ne0, ne1, ne2, ne3 };
    const size_t nb[4] = { 0, nb1, nb2, nb3 };
    const size_t bytes = extent(a->type, ne, nb);
    const size_t room = ggml_nbytes(a->view_src ? a->view_src : a);
    size_t start;
    return bytes == 0 || (!__builtin_add_overflow(offset, a->view_offs, &start) && start <= room && bytes <= room - start);
}

// Some elements, or blocks, share memory, or would but for steps that go in between each other's.
inline bool overlaps_itself(enum ggml_type type, const int64_t ne[4], const size_t nb[4]) {
    int axes[4] = { 0, 1, 2, 3 };
    std::sort(axes, axes + 4, [nb](int i, int j) { return nb[i] < nb[j]; });
    size_t end = ggml_type_size(type);
    for (int i : axes) {
        const int64_t n = i == 0 ? ne[0] / ggml_blck_size(type) : ne[i];
        if (n > 1) {
            if (nb[i] < end) {
                return true;
            }
            end += nb[i] * (size_t) (n - 1);
        }
    }
    return false;
}

// The region of `a` that ggml_set and ggml_acc write `b` to: `a` as contiguous memory, strides and
// offset stored as 32-bit numbers. Threads write its rows in any order.
inline bool window(const ggml_tensor * a, const ggml_tensor * b, size_t nb1, size_t nb2, size_t nb3, size_t offset) {
    const int64_t ne[4] = { b->ne[0], b->ne[1], b->ne[2], b->ne[3] };
    const size_t nb[4] = { 0, nb1, nb2, nb3 };
    const size_t bytes = extent(a->type, ne, nb);
    const size_t room = ggml_nbytes(a);
    for (int i = 1; i < 4; ++i) {
        if (ne[i] > 1 && nb[i] > INT32_MAX) {
            return false;
        }
    }
    const size_t steps[4] = { ggml_type_size(a->type), nb1, nb2, nb3 };
    if (!ggml_is_empty(b) && overlaps_itself(a->type, ne, steps)) {
        why = "the rows of " + described(b) + " would overlap there";
        return false;
    }
    return offset <= INT32_MAX && offset <= room && bytes <= room - offset;
}

// Every row lies inside the tensor when rows are counted through with nb[1] alone.
inline bool plain_rows(const ggml_tensor * t) {
    const int64_t rows = ggml_nrows(t);
    return ggml_nelements(t) == 0 ||
           (rows <= INT32_MAX && t->ne[0] <= INT32_MAX && t->nb[0] == ggml_type_size(t->type) &&
            (size_t) (rows - 1) * t->nb[1] + ggml_row_size(t->type, t->ne[0]) <= ggml_nbytes(t));
}

// Matrices of these types are no operands of a product: the CPU calls a function that is not there.
inline bool has_dot_product(const ggml_tensor * t) {
    switch (t->type) {
        case GGML_TYPE_I8: case GGML_TYPE_I16: case GGML_TYPE_I32: case GGML_TYPE_I64: case GGML_TYPE_F64:
        case GGML_TYPE_Q8_1: case GGML_TYPE_Q8_K:
            return false;
        default:
            return true;
    }
}

// The CPU's own functions can be asked: where it is a loadable module, it may not be loaded.
inline bool has_cpu() {
#ifdef GGML_CFFI_HAS_MODULES
    ggml_cffi::reads_registry held;
    return ggml_backend_reg_by_name("CPU") != nullptr;
#else
    return true;
#endif
}

// Rows of this type can be converted to float at all.
inline bool has_to_float(ggml_type type) {
    return !ggml_is_quantized(type) || ggml_get_type_traits(type)->to_float;
}

// The CPU converts rows of float to this type. The IQ types need to be prepared for it first, which
// no kernel does.
inline bool has_from_float(ggml_type type) {
#ifdef GGML_CFFI_LINKS_GGML_CPU
    if (has_cpu()) {
        return ggml_get_type_traits_cpu(type)->from_float;
    }
#endif
    switch (type) {
        case GGML_TYPE_I8: case GGML_TYPE_I16: case GGML_TYPE_I64: case GGML_TYPE_F64:
        case GGML_TYPE_IQ2_XXS: case GGML_TYPE_IQ2_XS: case GGML_TYPE_IQ2_S: case GGML_TYPE_IQ3_XXS:
        case GGML_TYPE_IQ3_S: case GGML_TYPE_IQ1_S: case GGML_TYPE_IQ1_M:
            return false;
        default:
            return true;
    }
}

// Only float becomes integers.
inline bool convertible(ggml_type from, ggml_type to) {
    if (from != to && !has_to_float(from)) {
        return false;
    }
    switch (to) {
        case GGML_TYPE_I8: case GGML_TYPE_I16: case GGML_TYPE_I64: case GGML_TYPE_F64:
            return from == to;
        case GGML_TYPE_I32:
            return from == to || from == GGML_TYPE_F32;
        default:
            return true;
    }
}

// Blocks are copied as a whole only where both sides are contiguous or have the same shape.
inline bool copyable_blocks(const ggml_tensor * a, const ggml_tensor * b) {
    return !ggml_is_quantized(a->type) || a->type != b->type || (ggml_is_contiguous(a) && ggml_is_contiguous(b)) ||
           (ggml_are_same_shape(a, b) && a->nb[0] == ggml_type_size(a->type) && b->nb[0] == a->nb[0]);
}

// The same for a fresh copy of `a`, in its own shape or in another one.
inline bool copyable_blocks(const ggml_tensor * a, bool same_shape) {
    return !ggml_is_quantized(a->type) || ggml_is_contiguous(a) ||
           (same_shape && a->nb[0] == ggml_type_size(a->type));
}

// Blocks lie along the first axis: with another one there, not even the number of bytes is right.
inline bool first_axis_can_move(const ggml_tensor * t) {
    return ggml_blck_size(t->type) == 1;
}

// ggml_permute goes through 32-bit extents and strides.
inline bool permutable(const ggml_tensor * t) {
    for (int i = 0; i < 4; ++i) {
        if (t->ne[i] > INT32_MAX || (t->ne[i] > 1 && t->nb[i] > INT32_MAX)) {
            return false;
        }
    }
    return true;
}

inline bool not_empty(const ggml_tensor * t) {
    return !ggml_is_empty(t);
}

// The kernels of some operations read all their sources as float.
template <class... T> bool all_f32(const T *... t) {
    return ((t->type == GGML_TYPE_F32) && ...);
}

template <class T> bool no_null(T * const * items, long long n) {
    for (long long i = 0; i < n; ++i) {
        if (!items[i]) {
            return false;
        }
    }
    return true;
}

// An object of this many bytes still fits into a context; ggml_new_buffer and ggml_new_graph do
// not look whether they got one.
inline bool room(const ggml_context * ctx, size_t bytes) {
    const size_t header = ggml_tensor_overhead() - sizeof(ggml_tensor);
    const size_t left = ggml_get_mem_size(ctx) - ggml_used_mem(ctx);
    return bytes <= SIZE_MAX / 2 && GGML_PAD(bytes, GGML_MEM_ALIGN) + header <= left;
}

inline bool room_for_graphs(const ggml_context * ctx, size_t size, bool grads, size_t n = 1) {
    return size <= INT32_MAX &&
           n * ggml_graph_overhead_custom(size, grads) <= ggml_get_mem_size(ctx) - ggml_used_mem(ctx);
}

// The tensor was made in this context.
inline bool made_in(const ggml_context * ctx, const ggml_tensor * t) {
    const uintptr_t start = (uintptr_t) ggml_get_mem_buffer(ctx);
    return (uintptr_t) t > start && (uintptr_t) t < start + ggml_used_mem(ctx);
}

// The extent of a convolution's result; 0 where there is none.
inline int64_t conv_output(int64_t input, int64_t kernel, int stride, int padding, int dilation) {
    const int64_t room = input + 2 * (int64_t) padding - (int64_t) dilation * (kernel - 1) - 1;
    return stride <= 0 || room < 0 ? 0 : room / stride + 1;
}

// ggml doubles a padding as an int, and multiplies the others as 64-bit numbers.
inline bool padded(int64_t kernel, int64_t padding, int dilation) {
    return padding >= INT32_MIN / 2 && padding <= INT32_MAX / 2 && product(std::abs((int64_t) dilation), kernel) >= 0;
}

inline bool is_int(int64_t n) {
    return n >= INT32_MIN && n <= INT32_MAX;
}

// Of a pooling's result; 0 where there is none, or where ggml, which computes it in floats, would find
// another one.
inline int64_t pool_output(int64_t input, int kernel, int stride, double padding) {
    if (kernel <= 0 || stride <= 0 || input > INT32_MAX || input + 2 * padding < kernel) {
        return 0;
    }
    const int64_t exact = (int64_t) ((input + 2 * padding - kernel) / stride + 1);
    const float   found = (input + 2 * (float) padding - kernel) / stride + 1;
    return (int64_t) found == exact ? exact : 0;
}

// The windows of ggml_win_part are counted as ints.
inline bool windows(const ggml_tensor * a, int w) {
    const int64_t n1 = (a->ne[1] + w - 1) / w, n2 = (a->ne[2] + w - 1) / w;
    return a->ne[1] <= INT32_MAX - w && a->ne[2] <= INT32_MAX - w && product(n1, n2) <= INT32_MAX;
}

// ggml_pool_2d makes an int of it.
inline bool padding(float p) {
    return p >= -(1 << 20) && p <= (1 << 20);
}

// The kernels of ggml_rope_*: whole pairs of a row, and sections where the mode has them.
inline bool rope_dims(const ggml_tensor * a, int n_dims, int mode) {
    return n_dims >= 0 && n_dims % 2 == 0 && n_dims <= a->ne[0] && a->ne[0] % 2 == 0 &&
           (mode != GGML_ROPE_TYPE_VISION || n_dims == a->ne[0] / 2);
}

// For images, all pairs of a row are turned, half of them by the second position. ggml asks for the factors of half.
inline bool rope_factors(const ggml_tensor * factors, const ggml_tensor * a, int mode) {
    return !factors || mode != GGML_ROPE_TYPE_VISION || factors->ne[0] >= a->ne[0] / 2;
}

inline bool rope_sections(const int * sections, int mode) {
    if (!(mode & GGML_ROPE_TYPE_MROPE)) {
        return true;
    }
    int64_t sum = 0;
    for (int i = 0; i < GGML_MROPE_SECTIONS; ++i) {
        if (sections[i] < 0) {
            return false;
        }
        sum += sections[i];
    }
    return sum > sections[3] && sum <= INT32_MAX;
}

// The kernels of ggml_pool_* step from plane to plane of a tensor with nb[2], or from row to row
// with nb[1].
inline bool planes(const ggml_tensor * t) {
    const int64_t ne[4] = { t->ne[0], t->ne[1], 1, 1 };
    const size_t nb[4] = { t->nb[0], t->nb[1], t->nb[2], t->nb[3] };
    return ggml_is_empty(t) ||
           (t->nb[0] == ggml_type_size(t->type) && extent(t->type, ne, nb) <= t->nb[2] &&
            (t->ne[3] == 1 || t->nb[3] == t->nb[2] * t->ne[2]));
}

// State-space operations cut the tokens into one equal part for each sequence.
inline bool equal_sequences(int64_t n_tokens, int64_t n_seqs) {
    return n_seqs > 0 && n_tokens >= n_seqs && n_tokens % n_seqs == 0;
}

inline std::string place_of(ggml_backend_buffer_t buffer) {
    ggml_backend_dev_t device = buffer ? ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer)) : nullptr;
    if (device) {
        const char * name = ggml_backend_dev_name(device);
        return is_meta(name) ? "a meta device" : name;
    }
    return buffer ? ggml_backend_buffer_name(buffer) : "the CPU";
}

inline std::string with_operands(const ggml_tensor * node) {
    std::string  text = named(node);
    const char * separator = " of ";
    for (const ggml_tensor * src : node->src) {
        if (src) {
            text += separator + described(src);
            separator = ", ";
        }
    }
    return text;
}

inline std::string named_in_memory(const ggml_tensor * t) {
    return t->op != GGML_OP_NONE ? named(t) : t->name[0] ? std::string("'") + t->name + "'" : "a tensor without a name";
}

// A kernel would dereference the data of an unallocated tensor, or an address that is none of its
// backend's. Reshapes and views are no kernels, IM2COL uses the shape of its first source only.
inline bool can_read(const ggml_tensor * t, ggml_backend_t backend) {
    if (ggml_is_empty(t)) {
        return true;
    }
    if (!t->data || (t->view_src && !t->view_src->data)) {
        why = named_in_memory(t) + " has no memory";
        return false;
    }
    ggml_backend_buffer_t buffer = buffer_of(t);
    const bool from_meta = in_meta_buffer(t) && !(backend && is_meta(ggml_backend_dev_name(ggml_backend_get_device(backend))));
    if (backend ? !from_meta && ggml_backend_supports_buft(backend, buffer ? ggml_backend_buffer_get_type(buffer)
                                                                           : ggml_backend_cpu_buffer_type())
                : data_in_host_memory(t)) {
        return true;
    }
    why = named_in_memory(t) + " has its memory on " + place_of(buffer) + ", not on " +
          (backend ? ggml_backend_name(backend) : "the CPU");
    return false;
}

inline bool is_view(const ggml_tensor * t) {
    return t->op == GGML_OP_RESHAPE || t->op == GGML_OP_VIEW || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE;
}

// What has the memory of a tensor.
inline const ggml_tensor * root_of(const ggml_tensor * t) { return t->view_src ? t->view_src : t; }

// Into the memory of another tensor.
inline bool writes_into_another(const ggml_tensor * node) { return node->view_src && !is_view(node); }

inline bool no_kernel(const ggml_tensor * t) {
    return t->op == GGML_OP_NONE || is_view(t) || ggml_is_empty(t);
}

// ggml writes through made-up addresses where a meta device over host memory computes into a tensor
// that is no graph's own.
inline bool writes_in_place(const ggml_tensor * node) {
    const ggml_tensor * root = node->view_src;
    return root && root->op == GGML_OP_NONE && in_meta_buffer(root) && ggml_backend_buffer_is_host(root->buffer);
}

// All tensors that a graph's kernels touch are allocated, where `backend` (NULL: the CPU without a
// backend) can reach them.
inline bool allocated(ggml_cgraph * graph, ggml_backend_t backend = nullptr) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (no_kernel(node)) {
            continue;
        }
        if (!can_read(node, backend)) {
            return false;
        }
        if (writes_in_place(node)) {
            why = std::string(ggml_op_name(node->op)) + " '" + node->name + "' writes into '" + node->view_src->name +
                  "', which is static on a meta device over host memory";
            return false;
        }
        for (int j = node->op == GGML_OP_IM2COL ? 1 : 0; j < GGML_MAX_SRC; ++j) {
            const ggml_tensor * src = node->src[j];
            if (src && !can_read(src, backend)) {
                return false;
            }
        }
    }
    return true;
}

// The backend's device has all operations of the graph. An accelerator's list says what it does
// better than the CPU, not what it can do.
inline bool supported(ggml_cgraph * graph, ggml_backend_t backend) {
    if (ggml_backend_dev_type(ggml_backend_get_device(backend)) == GGML_BACKEND_DEVICE_TYPE_ACCEL) {
        return true;
    }
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (!no_kernel(node) && !ggml_backend_supports_op(backend, node)) {
            why = with_operands(node);
            return false;
        }
    }
    return true;
}

// ggml_backend_dev_buffer_from_host_ptr calls a function that not every device has.
inline bool takes_host_pointers(ggml_backend_dev_t device) {
    struct ggml_backend_dev_props props;
    ggml_backend_dev_get_props(device, &props);
    return props.caps.buffer_from_host_ptr;
}

inline bool fits(uintptr_t start, size_t size) {
    return size <= UINTPTR_MAX - start;
}

// ggml lays out a GGUF's tensors by the alignment of the file that it has read, or by its default, and
// readers take the one that the metadata say.
inline bool aligned_as_said(const gguf_context * ctx) {
    const int64_t key = gguf_find_key(ctx, "general.alignment");
    const bool    number = key >= 0 && gguf_get_kv_type(ctx, key) == GGUF_TYPE_UINT32;
    const size_t  said = number ? gguf_get_val_u32(ctx, key) : GGUF_DEFAULT_ALIGNMENT;
    const size_t  is = gguf_get_alignment(ctx);
    if (said != is) {
        why = "general.alignment would be " + std::to_string(said) + ", and the tensors are laid out by " +
              std::to_string(is);
    }
    return said == is;
}

// All that these tensors, which may be NULL, are made from, and they: by operations or as views.
inline std::unordered_set<const ggml_tensor *> ancestry(std::vector<const ggml_tensor *> left) {
    std::unordered_set<const ggml_tensor *> seen;
    while (!left.empty()) {
        const ggml_tensor * t = left.back();
        left.pop_back();
        if (t && seen.insert(t).second) {
            left.push_back(t->view_src);
            left.insert(left.end(), std::begin(t->src), std::end(t->src));
        }
    }
    return seen;
}

inline bool made_without(const ggml_tensor * tensor, const ggml_tensor * other) {
    return !ancestry({ tensor }).count(other);
}

} // namespace check
