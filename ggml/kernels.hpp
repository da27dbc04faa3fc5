// What the kernels of the CPU backend take for granted. Other backends may do what it cannot: so this is asked
// where a graph is computed, not where it is built. ggml_backend_supports_op says little of it.

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace check {

// Blocks are whole and lie along the first axis.
inline bool whole_blocks(const ggml_tensor * t) {
    const int64_t block = ggml_blck_size(t->type);
    return block == 1 || (t->nb[0] == ggml_type_size(t->type) && t->ne[0] % block == 0);
}

// The elements of a row follow one another.
inline bool dense_row(const ggml_tensor * t) {
    return t->ne[0] == 1 || t->nb[0] == ggml_type_size(t->type);
}

// And the rows of a plane.
inline bool dense_plane(const ggml_tensor * t) {
    return dense_row(t) && (t->ne[1] == 1 || t->nb[1] == ggml_row_size(t->type, t->ne[0]));
}

// Row i begins at i * nb[1], through all planes. A tensor that ggml calls contiguous need not be
// like that, if it has one row in a plane.
inline bool even_rows(const ggml_tensor * t) {
    size_t step = t->nb[1] * t->ne[1];
    for (int i = 2; i < 4; ++i) {
        if (t->ne[i] != 1 && t->nb[i] != step) {
            return false;
        }
        step *= t->ne[i];
    }
    return dense_row(t);
}

// Strides are those of a new tensor, also of axes of one element.
inline bool plain_strides(const ggml_tensor * t) {
    return t->nb[0] == ggml_type_size(t->type) && t->nb[1] == ggml_row_size(t->type, t->ne[0]) &&
           t->nb[2] == t->nb[1] * t->ne[1] && t->nb[3] == t->nb[2] * t->ne[2];
}

inline bool same_strides(const ggml_tensor * a, const ggml_tensor * b) {
    for (int i = 0; i < 4; ++i) {
        if (a->ne[i] != 1 && a->nb[i] != b->nb[i]) {
            return false;
        }
    }
    return true;
}

template <class... T> bool typed(const ggml_tensor * t, T... types) {
    return ((t->type == types) || ...);
}

inline bool is_f32(const ggml_tensor * t) {
    return typed(t, GGML_TYPE_F32);
}

inline bool is_f32_or_f16(const ggml_tensor * t) {
    return typed(t, GGML_TYPE_F32, GGML_TYPE_F16);
}

inline bool is_float(const ggml_tensor * t) {
    return typed(t, GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16);
}

// The stride of the first axis is that of a new tensor: kernels ask that of one element as well.
inline bool packed(const ggml_tensor * t) {
    return t->nb[0] == ggml_type_size(t->type);
}

template <class... T> bool packed(const ggml_tensor * t, const T *... more) {
    return packed(t) && packed(more...);
}

inline bool packed_f32(const ggml_tensor * t) {
    return is_f32(t) && packed(t);
}

// Not transposed or permuted.
inline bool ordered(const ggml_tensor * t) {
    return t->nb[0] <= t->nb[1] && t->nb[1] <= t->nb[2] && t->nb[2] <= t->nb[3];
}

inline float float_param(const ggml_tensor * t, int i) {
    float value;
    std::memcpy(&value, t->op_params + i, sizeof value);
    return value;
}

// A convolution in which channels lie closest together; `channels`: the axis that they are on.
inline bool channels_first(const ggml_tensor * t, int channels) {
    const size_t element = ggml_type_size(t->type);
    const size_t pixel = element * t->ne[channels];
    return (t->ne[channels] == 1 || t->nb[channels] == element) && (t->ne[0] == 1 || t->nb[0] == pixel) &&
           (t->ne[1] == 1 || t->nb[1] == pixel * t->ne[0]) &&
           (channels == 3 || t->ne[3] == 1 || t->nb[3] == pixel * t->ne[0] * t->ne[1]);
}

// `n` floats from the beginning of `t` on can be read, although the tensor may have fewer: partial
// rotations read, and do not use, a factor for every pair of a row.
inline bool reads_floats(const ggml_tensor * t, int64_t n) {
    if (t->ne[0] >= n || !real_host_buffer(t) || !t->data) {
        return true;
    }
    ggml_backend_buffer_t buffer = buffer_of(t);
    const char * end = (const char *) ggml_backend_buffer_get_base(buffer) + ggml_backend_buffer_get_size(buffer);
    return n <= (end - (const char *) t->data) / (int64_t) sizeof(float);
}

// As the kernel computes where its last element comes from.
inline bool scales_inside(int64_t out, int64_t in, float scale) {
    return (int64_t) ((out - 1) / scale) < in;
}

// Floats that one step of RWKV_WKV7 reads and writes, without a remainder.
inline int64_t vector_step() {
#ifdef GGML_CFFI_LINKS_GGML_CPU
    if (has_cpu()) {
        if (ggml_cpu_has_sve() || ggml_cpu_has_riscv_v()) {
            return 1;
        }
        return ggml_cpu_has_avx512() ? 64 : ggml_cpu_has_neon() || ggml_cpu_has_wasm_simd() ? 16 : 32;
    }
#endif
#if defined(__x86_64__)
    return 64;
#else
    return 32;
#endif
}

inline bool copies(const ggml_tensor * from, const ggml_tensor * to, const ggml_tensor * shape) {
    if (from->type == to->type) {
        return copyable_blocks(from, to);
    }
    if (ggml_is_quantized(from->type)) {
        return has_to_float(from->type) && is_f32(to) && shape && packed_f32(shape) &&
               (shape->ne[0] % ggml_blck_size(from->type) == 0 || ggml_is_contiguous(to));
    }
    if (from->type == GGML_TYPE_I32 || to->type == GGML_TYPE_I32) {
        return is_f32(from) || is_f32(to);
    }
    if (!is_float(from) || is_float(to)) {
        return is_float(from);
    }
    // what is quantised goes through a buffer as long as a row of the result
    return ggml_is_quantized(to->type) && has_from_float(to->type) && ggml_is_contiguous(to) && packed(from) &&
           from->ne[0] <= to->ne[0] && from->ne[0] % ggml_blck_size(to->type) == 0;
}

// F32, F16, BF16, or one of the latter two to F32.
inline bool maps(const ggml_tensor * from, const ggml_tensor * to) {
    return is_float(from) && (from->type == to->type || is_f32(to)) && packed(from, to);
}

inline bool combines(const ggml_tensor * a, const ggml_tensor * b, const ggml_tensor * to) {
    return maps(a, to) && (is_f32(b) || (b->type == a->type && to->type == a->type));
}

inline bool adds(const ggml_tensor * a, const ggml_tensor * b, const ggml_tensor * to) {
    if (!ggml_is_quantized(a->type)) {
        return combines(a, b, to);
    }
    return has_to_float(a->type) && has_from_float(to->type) && ggml_are_same_shape(a, b) && packed(a) &&
           packed_f32(b) && ordered(to);
}

inline bool adds_one(const ggml_tensor * a, const ggml_tensor * one, const ggml_tensor * to) {
    if (ggml_is_quantized(a->type)) {
        return is_f32(one) && has_to_float(a->type) && has_from_float(a->type) && a->ne[3] == 1 && packed(a) &&
            ordered(to);
    }
    return is_float(a) && (is_f32(one) || one->type == a->type) && packed(a, to);
}

// What ggml_set and ggml_acc write lies in the tensor; `room`: so much of it must be left at the end.
inline bool writes_inside(const ggml_tensor * to, const ggml_tensor * b, size_t room) {
    size_t end = to->op_params[3] + room;
    for (int i = 0; i < 4; ++i) {
        const size_t step = i ? to->op_params[i - 1] : ggml_type_size(to->type);
        end += (b->ne[i] ? b->ne[i] - 1 : 0) * step;
    }
    return end <= ggml_nbytes(to);
}

inline bool writes_rows_apart(const ggml_tensor * to, const ggml_tensor * b) {
    const size_t nb[4] = { ggml_type_size(to->type), (size_t) to->op_params[0], (size_t) to->op_params[1],
                           (size_t) to->op_params[2] };
    return ggml_is_empty(b) || !overlaps_itself(to->type, b->ne, nb);
}

// Rows of the other matrix are converted to this type, if they are of F32, or are of it.
inline bool dot_type(const ggml_tensor * a, const ggml_tensor * b) {
#ifdef GGML_CFFI_LINKS_GGML_CPU
    if (has_cpu()) {
        const ggml_type type = ggml_get_type_traits_cpu(a->type)->vec_dot_type;
        return b->type == type || (is_f32(b) && has_from_float(type));
    }
#endif
    return is_f32(b) || (ggml_is_quantized(a->type)
                             ? typed(b, GGML_TYPE_Q8_0, GGML_TYPE_Q8_1, GGML_TYPE_Q8_K)
                             : b->type == a->type);
}

inline bool multiplies(const ggml_tensor * a, const ggml_tensor * b, const ggml_tensor * to) {
    // with the hint that it is a Hadamard matrix, `a` is not looked at
    if (to->op == GGML_OP_MUL_MAT && to->op_params[1] == 1) {
        return packed_f32(b) && to->ne[0] == b->ne[0] && (b->ne[0] & (b->ne[0] - 1)) == 0;
    }
    return has_dot_product(a) && dot_type(a, b) && packed(a, b);
}

inline bool multiplies_out(const ggml_tensor * a, const ggml_tensor * b, const ggml_tensor * to) {
    if (!is_f32(b) || !is_f32(to) || !packed(a)) {
        return false;
    }
    return is_f32(a) || ((a->type == GGML_TYPE_F16 || (ggml_is_quantized(a->type) && has_to_float(a->type))) &&
                         a->ne[2] == b->ne[2] && a->ne[3] == b->ne[3]);
}

inline bool has_rows(const ggml_tensor * t) {
    return is_float(t) || t->type == GGML_TYPE_I32 || (ggml_is_quantized(t->type) && has_to_float(t->type));
}

inline bool masks(const ggml_tensor * a, const ggml_tensor * to) {
    return packed_f32(a) && to->op_params[0] >= 0 && (to->view_src || ggml_is_contiguous(a)) &&
           (to->ne[3] == 1 || to->nb[3] == to->nb[2] * to->ne[2]);
}

inline bool rotates(const ggml_tensor * a, const ggml_tensor * positions, const ggml_tensor * factors,
                    const ggml_tensor * to) {
    const int32_t * p = to->op_params;
    const int32_t   n_dims = p[1], mode = p[2];
    if (!is_f32_or_f16(a) || !packed(a, to) || positions->type != GGML_TYPE_I32 || !dense_row(positions) ||
        to->ne[0] % 2 || !rope_dims(to, n_dims, mode) || !rope_sections(p + 11, mode)) {
        return false;
    }
    switch (mode) { // bits: pairs lie apart, sections, sections for images, interleaved sections
        case 8: case 24: case 40:
            if ((int64_t) p[11] + p[12] + p[13] + p[14] > to->ne[0]) {
                return false;
            }
            break;
        case 0: case 2:
            break;
        default:
            return false;
    }
    return !factors || (is_f32(factors) && factors->ne[0] >= n_dims / 2 && dense_row(factors) &&
                        reads_floats(factors, to->ne[0] / 2));
}

// One patch and what comes out of it fit into the memory that kernels work in.
inline bool convolves(const ggml_tensor * kernel, const ggml_tensor * data, int64_t patch, int64_t channels) {
    return is_f32_or_f16(kernel) && ggml_is_contiguous(kernel) && is_f32(data) &&
           patch * (int64_t) ggml_type_size(kernel->type) + channels * (int64_t) sizeof(float) <= 16 * 1024 * 1024;
}

inline bool convolves_back(const ggml_tensor * kernel, const ggml_tensor * data) {
    return is_f32_or_f16(kernel) && is_f32(data) && packed(kernel, data);
}

// The rows of all planes follow one another, as do the elements of a row.
inline bool rows(const ggml_tensor * t) {
    return ggml_is_contiguous_1(t);
}

inline bool unary(const ggml_tensor * a, const ggml_tensor * to) {
    switch (ggml_get_unary_op(to)) {
        case GGML_UNARY_OP_GELU: case GGML_UNARY_OP_GELU_ERF: case GGML_UNARY_OP_GELU_QUICK: case GGML_UNARY_OP_SILU:
            return is_f32_or_f16(a) && to->type == a->type && dense_row(a) && dense_row(to);
        case GGML_UNARY_OP_XIELU:
            return maps(a, to) && rows(a) && rows(to);
        default:
            return maps(a, to);
    }
}

inline bool gates(const ggml_tensor * a, const ggml_tensor * b, const ggml_tensor * to) {
    if (ggml_get_glu_op(to) == GGML_GLU_OP_SWIGLU_OAI ? !is_f32(a) : !is_f32_or_f16(a)) {
        return false;
    }
    return rows(a) && rows(to) && (!b || (b->type == a->type && rows(b)));
}

inline bool attends(const ggml_tensor * q, const ggml_tensor * k, const ggml_tensor * v, const ggml_tensor * sinks,
                    const ggml_tensor * to) {
    return is_f32(q) && packed(q, k, v) && has_dot_product(k) && dot_type(k, q) && (is_float(v) ||
        (ggml_is_quantized(v->type) && has_to_float(v->type))) &&
           (to->op_params[3] == 0 || to->op_params[3] == 10) && (!sinks || dense_row(sinks));
}

// Many queries are taken against tiles of 64 keys. The keys that the last tile lacks get no weight, but they get it
// before the scores are capped: tanh makes a finite score of it again. Only a mask takes it away for good.
inline bool weighs_missing_keys(const ggml_tensor * node) {
    if (node->op != GGML_OP_FLASH_ATTN_EXT || node->src[3]) {
        return false;
    }
    const ggml_tensor * k = node->src[1];
    const int64_t tile = 64;
    return float_param(node, 2) != 0 && node->src[0]->ne[1] >= tile && k->ne[1] % tile != 0 && is_f32_or_f16(k) &&
           k->type == node->src[2]->type;
}

inline bool convolves_depthwise(const ggml_tensor * result, const ggml_tensor * kernel, const ggml_tensor * data) {
    if (!is_f32(data) || !is_f32(result) || !is_f32_or_f16(kernel) || kernel->ne[3] != data->ne[2]) {
        return false;
    }
    return ggml_is_contiguous(data) ? ggml_is_contiguous(kernel) && ggml_is_contiguous(result)
                                    : ggml_is_contiguous_channels(data) && channels_first(data, 2) &&
                                          channels_first(kernel, 3) && kernel->nb[0] >= kernel->nb[2] &&
                                          kernel->nb[1] >= kernel->nb[0];
}

inline bool scales_up(const ggml_tensor * result, const ggml_tensor * a) {
    const int64_t mode = result->op_params[0];
    float         scale[4];
    if (!is_f32(a) || (mode & 0xFF) > 2) {
        return false;
    }
    for (int i = 0; i < 4; ++i) {
        scale[i] = (float) result->ne[i] / a->ne[i];
        if (i < 2 && mode >> 8 & 1 && result->ne[i] > 1 && a->ne[i] > 1) { // corners are aligned
            scale[i] = (float) (result->ne[i] - 1) / (a->ne[i] - 1);
        }
    }
    for (int i = (mode & 0xFF) == GGML_SCALE_MODE_NEAREST ? 0 : 2; i < 4; ++i) {
        if (!scales_inside(result->ne[i], a->ne[i], scale[i])) {
            return false;
        }
    }
    return true;
}

// What a kernel asserts of its types, layouts and shapes -- with more than one thread an assertion
// cannot be caught -- and what it needs besides, so that it stays inside its tensors and computes
// what it should: that stands behind "also:". What ggml's builders assert is not asked again. `s`
// are the node's sources, `sources` of which are not NULL.
struct kernel {
    const char * op; // by name: a release may lack some
    int          sources;
    bool (*takes)(const ggml_tensor * n, ggml_tensor * const * s);
};

#define GGML_CFFI_KERNEL(op, sources, condition)                                                   \
    { op, sources, [](const ggml_tensor * n, ggml_tensor * const * s) -> bool {                    \
         (void) n, (void) s;                                                                       \
         return condition;                                                                         \
     } }

inline const kernel kernels[] = {
    GGML_CFFI_KERNEL("DUP", 1, copies(s[0], n, s[1])),
    GGML_CFFI_KERNEL("CPY", 1, copies(s[0], n, s[1])),
    GGML_CFFI_KERNEL("CONT", 1, copies(s[0], n, s[1])),
    GGML_CFFI_KERNEL("ADD", 2, adds(s[0], s[1], n)),
    GGML_CFFI_KERNEL("SUB", 2, combines(s[0], s[1], n)),
    GGML_CFFI_KERNEL("MUL", 2, combines(s[0], s[1], n)),
    GGML_CFFI_KERNEL("DIV", 2, combines(s[0], s[1], n)),
    GGML_CFFI_KERNEL("ADD_ID", 3, packed_f32(s[0]) && packed_f32(s[1]) && packed_f32(n) &&
                     typed(s[2], GGML_TYPE_I32)),
    GGML_CFFI_KERNEL("ADD1", 2, adds_one(s[0], s[1], n)),
    GGML_CFFI_KERNEL("ACC", 2, is_f32(s[0]) && packed_f32(s[1]) && ggml_is_contiguous(s[0]) &&
                     ggml_is_contiguous(n) && writes_inside(n, s[1], 1) && writes_rows_apart(n, s[1])),
    GGML_CFFI_KERNEL("SET", 2, typed(s[0], GGML_TYPE_F32, GGML_TYPE_I32) && ggml_is_contiguous(s[0]) &&
                     ggml_is_contiguous(n) && packed(s[1]) && writes_inside(n, s[1], 0) &&
                     /* also: */ s[1]->type == n->type && writes_rows_apart(n, s[1])),
    GGML_CFFI_KERNEL("SQR", 1, maps(s[0], n)),
    GGML_CFFI_KERNEL("SQRT", 1, maps(s[0], n)),
    GGML_CFFI_KERNEL("LOG", 1, maps(s[0], n)),
    GGML_CFFI_KERNEL("SIN", 1, maps(s[0], n)),
    GGML_CFFI_KERNEL("COS", 1, maps(s[0], n)),
    GGML_CFFI_KERNEL("UNARY", 1, unary(s[0], n)),
    GGML_CFFI_KERNEL("GLU", 1, gates(s[0], s[1], n)),
    GGML_CFFI_KERNEL("SUM", 1, is_float(s[0]) &&
                     /* also: */ dense_row(s[0])),
    GGML_CFFI_KERNEL("SUM_ROWS", 1, packed_f32(s[0])),
    GGML_CFFI_KERNEL("CUMSUM", 1, packed_f32(s[0])),
    GGML_CFFI_KERNEL("MEAN", 1, is_f32(s[0]) &&
                     /* also: */ dense_row(s[0])),
    GGML_CFFI_KERNEL("ARGMAX", 1, is_f32(s[0]) &&
                     /* also: */ dense_row(s[0])),
    // the kernel finds the axes of a row by its number with the extents of other axes: right where there are two of
    // them, or a third of the same length
    GGML_CFFI_KERNEL("COUNT_EQUAL", 2, typed(s[0], GGML_TYPE_I32) && typed(s[1], GGML_TYPE_I32) &&
                     /* also: */ s[0]->ne[3] == 1 && (s[0]->ne[2] == 1 || s[0]->ne[2] == s[0]->ne[1])),
    GGML_CFFI_KERNEL("REPEAT", 1, typed(s[0], GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_I16,
                     GGML_TYPE_I32) && packed(s[0])),
    GGML_CFFI_KERNEL("REPEAT_BACK", 1, packed_f32(s[0])),
    GGML_CFFI_KERNEL("CONCAT", 2, !ggml_is_quantized(s[0]->type) || packed(s[0], s[1])),
    GGML_CFFI_KERNEL("LEAKY_RELU", 1, is_f32_or_f16(s[0]) &&
                     /* also: */ even_rows(s[0])),
    GGML_CFFI_KERNEL("SILU_BACK", 2, is_f32_or_f16(s[0]) &&
                     /* also: */ s[0]->type == s[1]->type && even_rows(s[0]) && even_rows(s[1])),
    GGML_CFFI_KERNEL("NORM", 1, is_f32(s[0]) && float_param(n, 0) >= 0),
    GGML_CFFI_KERNEL("RMS_NORM", 1, packed_f32(s[0]) && float_param(n, 0) >= 0),
    GGML_CFFI_KERNEL("RMS_NORM_BACK", 2, packed_f32(s[0]) && packed(s[1]) &&
                     /* also: */ is_f32(s[1])),
    GGML_CFFI_KERNEL("GROUP_NORM", 1, packed_f32(s[0])),
    GGML_CFFI_KERNEL("L2_NORM", 1, is_f32(s[0]) && float_param(n, 0) >= 0),
    GGML_CFFI_KERNEL("MUL_MAT", 2, multiplies(s[0], s[1], n)),
    GGML_CFFI_KERNEL("MUL_MAT_ID", 3, multiplies(s[0], s[1], n)),
    GGML_CFFI_KERNEL("OUT_PROD", 2, multiplies_out(s[0], s[1], n)),
    GGML_CFFI_KERNEL("SCALE", 1, is_f32(s[0]) && ggml_is_contiguous(s[0]) && ggml_is_contiguous(n) &&
                     /* also: */ even_rows(s[0]) && even_rows(n)),
    GGML_CFFI_KERNEL("GET_ROWS", 1, has_rows(s[0]) &&
                     /* also: */ dense_row(s[0])),
    GGML_CFFI_KERNEL("GET_ROWS_BACK", 2, is_f32_or_f16(s[0]) && packed(s[0]) &&
                     /* also: */ dense_row(s[1]) && s[0]->ne[1] >= ggml_nelements(s[1])),
    GGML_CFFI_KERNEL("SET_ROWS", 2, is_f32_or_f16(s[0]) && typed(s[1], GGML_TYPE_I64, GGML_TYPE_I32) &&
                     /* also: */ has_from_float(n->type)),
    GGML_CFFI_KERNEL("DIAG", 1, packed_f32(s[0])),
    GGML_CFFI_KERNEL("DIAG_MASK_INF", 1, masks(s[0], n)),
    GGML_CFFI_KERNEL("DIAG_MASK_ZERO", 1, masks(s[0], n)),
    GGML_CFFI_KERNEL("SOFT_MAX", 1, is_f32(s[0]) &&
                     /* also: */ (!s[2] || dense_row(s[2]))),
    GGML_CFFI_KERNEL("SOFT_MAX_BACK", 2, is_f32(s[0]) && float_param(n, 1) == 0 && ggml_is_contiguous(s[0]) &&
                     ggml_is_contiguous(s[1]) && ggml_is_contiguous(n) &&
                     /* also: */ is_f32(s[1]) && even_rows(s[0]) && even_rows(s[1])),
    GGML_CFFI_KERNEL("CLAMP", 1, is_f32_or_f16(s[0]) && packed(s[0], n) &&
                     /* also: */ even_rows(s[0])),
    GGML_CFFI_KERNEL("ROPE", 2, rotates(s[0], s[1], s[2], n)),
    GGML_CFFI_KERNEL("ROPE_BACK", 2, rotates(s[0], s[1], s[2], n)),
    GGML_CFFI_KERNEL("IM2COL", 2, is_f32_or_f16(n) && (is_f32(s[1]) || (s[1]->type == GGML_TYPE_F16 &&
                     n->type == GGML_TYPE_F16)) && packed(s[1]) &&
                     /* also: */ (n->op_params[6] == 1 ? dense_plane(s[1]) : dense_row(s[1])) && permutable(s[1])),
    GGML_CFFI_KERNEL("IM2COL_BACK", 2, is_f32(s[0]) && is_f32_or_f16(s[1])),
    GGML_CFFI_KERNEL("IM2COL_3D", 2, is_f32_or_f16(n) && packed_f32(s[1])),
    GGML_CFFI_KERNEL("COL2IM_1D", 1, is_float(s[0]) && ggml_is_contiguous(s[0])),
    GGML_CFFI_KERNEL("CONV_TRANSPOSE_1D", 2, convolves_back(s[0], s[1]) && s[0]->ne[3] == 1 &&
                     s[1]->ne[2] == 1 && s[1]->ne[3] == 1),
    GGML_CFFI_KERNEL("CONV_2D", 2, convolves(s[0], s[1], s[0]->ne[0] * s[0]->ne[1] * s[0]->ne[2], s[0]->ne[3]) &&
                     /* also: */ is_f32(n)),
    GGML_CFFI_KERNEL("CONV_3D", 2, convolves(s[0], s[1],
                     s[0]->ne[0] * s[0]->ne[1] * s[0]->ne[2] * n->op_params[9], n->op_params[11])),
    GGML_CFFI_KERNEL("CONV_2D_DW", 2, convolves_depthwise(n, s[0], s[1])),
    GGML_CFFI_KERNEL("CONV_TRANSPOSE_2D", 2, convolves_back(s[0], s[1]) &&
                     /* also: */ dense_plane(s[0]) && s[1]->ne[3] == 1),
    GGML_CFFI_KERNEL("POOL_1D", 1, (n->op_params[0] == GGML_OP_POOL_MAX || n->op_params[0] == GGML_OP_POOL_AVG) &&
                     /* also: */ is_f32_or_f16(s[0]) && even_rows(s[0])),
    GGML_CFFI_KERNEL("POOL_2D", 1, (n->op_params[0] == GGML_OP_POOL_MAX || n->op_params[0] == GGML_OP_POOL_AVG) &&
                     /* also: */ is_f32_or_f16(s[0]) && planes(s[0])),
    GGML_CFFI_KERNEL("POOL_2D_BACK", 2, (n->op_params[0] == GGML_OP_POOL_MAX ||
                     n->op_params[0] == GGML_OP_POOL_AVG) &&
                     /* also: */ all_f32(s[0], s[1]) && ggml_is_contiguous(s[0]) && ggml_is_contiguous(s[1]) &&
                                ggml_are_same_shape(s[1], n)),
    GGML_CFFI_KERNEL("UPSCALE", 1, scales_up(n, s[0])),
    GGML_CFFI_KERNEL("PAD", 1, is_f32(s[0])),
    GGML_CFFI_KERNEL("ROLL", 1, is_f32(s[0])),
    GGML_CFFI_KERNEL("PAD_REFLECT_1D", 1, is_f32(s[0])),
    GGML_CFFI_KERNEL("FILL", 1, is_f32_or_f16(s[0])),
    GGML_CFFI_KERNEL("TRI", 1, is_f32(s[0]) && ggml_is_contiguous(s[0])),
    GGML_CFFI_KERNEL("TIMESTEP_EMBEDDING", 1, packed_f32(s[0])),
    GGML_CFFI_KERNEL("ARGSORT", 1, is_f32(s[0]) && n->op_params[0] >= 0 && n->op_params[0] <= 1 &&
                     /* also: */ even_rows(s[0])),
    GGML_CFFI_KERNEL("TOP_K", 1, is_f32(s[0]) &&
                     /* also: */ even_rows(s[0])),
    GGML_CFFI_KERNEL("FLASH_ATTN_EXT", 3, attends(s[0], s[1], s[2], s[4], n)),
    GGML_CFFI_KERNEL("SSM_CONV", 2, packed_f32(s[0]) && packed(s[1]) &&
                     s[0]->nb[1] == s[0]->ne[0] * sizeof(float) &&
                     /* also: */ is_f32(s[1]) && ggml_is_contiguous(s[1])),
    GGML_CFFI_KERNEL("SSM_SCAN", 7, packed(s[0], s[1], s[2], s[3], s[4], s[5], s[6]) &&
                     s[4]->ne[1] > 0 && s[1]->ne[1] % s[4]->ne[1] == 0 &&
                     /* also: */ all_f32(s[0], s[1], s[2], s[3], s[4], s[5]) && plain_strides(s[0])),
    GGML_CFFI_KERNEL("WIN_PART", 1, is_f32(s[0]) &&
                     /* also: */ ggml_is_contiguous(s[0])),
    GGML_CFFI_KERNEL("WIN_UNPART", 1, is_f32(s[0]) &&
                     /* also: */ ggml_is_contiguous(s[0])),
    GGML_CFFI_KERNEL("GET_REL_POS", 1, typed(s[0], GGML_TYPE_F16, GGML_TYPE_BF16) &&
                     /* also: */ s[0]->type == n->type && ggml_is_contiguous(s[0])),
    GGML_CFFI_KERNEL("ADD_REL_POS", 3, is_f32(s[0])),
    GGML_CFFI_KERNEL("RWKV_WKV6", 3, is_f32(s[0])),
    GGML_CFFI_KERNEL("GATED_LINEAR_ATTN", 3, is_f32(s[0])),
    GGML_CFFI_KERNEL("RWKV_WKV7", 3, is_f32(s[0]) &&
                     /* also: */ s[2]->ne[0] % vector_step() == 0),
    GGML_CFFI_KERNEL("SOLVE_TRI", 2, all_f32(s[0], s[1])),
    GGML_CFFI_KERNEL("GATED_DELTA_NET", 6, is_f32(s[0]) && ggml_is_contiguous_rows(s[0]) &&
                     ggml_is_contiguous_rows(s[1]) && ggml_is_contiguous_rows(s[2]) &&
                     ggml_is_contiguous(s[3]) && ggml_is_contiguous(s[4]) && ggml_is_contiguous(s[5])),
    GGML_CFFI_KERNEL("LIGHTNING_INDEXER", 4, packed_f32(s[0]) && packed(s[1]) && has_rows(s[1]) &&
                     s[1]->type != GGML_TYPE_I32 && packed_f32(s[2]) && s[3]->type == GGML_TYPE_F16 &&
                     packed(s[3])),
    GGML_CFFI_KERNEL("DSV4_HC_COMB", 3, all_f32(s[0], s[1], s[2]) && n->op_params[1] > 0),
    GGML_CFFI_KERNEL("DSV4_HC_PRE", 2, all_f32(s[0], s[1])),
    GGML_CFFI_KERNEL("DSV4_HC_POST", 4, all_f32(s[0], s[1], s[2], s[3])),
    GGML_CFFI_KERNEL("CROSS_ENTROPY_LOSS", 2, packed_f32(s[0]) && packed_f32(s[1]) &&
                     /* also: */ even_rows(s[0]) && even_rows(s[1])),
    GGML_CFFI_KERNEL("CROSS_ENTROPY_LOSS_BACK", 3, is_f32(s[0]) && ggml_is_contiguous(s[0]) &&
                     ggml_is_contiguous(s[1]) && ggml_is_contiguous(s[2]) &&
                     /* also: */ all_f32(s[1], s[2]) && even_rows(s[1]) && even_rows(s[2])),
    GGML_CFFI_KERNEL("OPT_STEP_ADAMW", 5, packed_f32(s[0]) &&
                     /* also: */ same_strides(s[0], s[1]) && same_strides(s[0], s[2]) &&
                                same_strides(s[0], s[3]) && ggml_is_contiguous(s[4])),
    GGML_CFFI_KERNEL("OPT_STEP_SGD", 3, packed_f32(s[0]) &&
                     /* also: */ same_strides(s[0], s[1]) && ggml_is_contiguous(s[2])),
};

#undef GGML_CFFI_KERNEL

inline const kernel * kernel_of(ggml_op op) {
    static const std::array<const kernel *, GGML_OP_COUNT> table = [] {
        std::array<const kernel *, GGML_OP_COUNT> found{};
        for (int i = 0; i < GGML_OP_COUNT; ++i) {
            for (const kernel & k : kernels) {
                if (std::strcmp(ggml_op_name((ggml_op) i), k.op) == 0) {
                    found[i] = &k;
                }
            }
        }
        return found;
    }();
    return (int) op >= 0 && (int) op < GGML_OP_COUNT ? table[op] : nullptr;
}

inline bool cpu_takes(const ggml_tensor * node) {
    if (!whole_blocks(node)) {
        return false;
    }
    for (const ggml_tensor * src : node->src) {
        if (src && !whole_blocks(src)) {
            return false;
        }
    }
    const kernel * k = kernel_of(node->op);
    for (int i = 0; k && i < k->sources; ++i) {
        if (!node->src[i]) {
            return true; // another release's: nothing is known about it
        }
    }
    return !k || (k->takes(node, node->src) && !weighs_missing_keys(node));
}

// Where none is marked, all are computed.
inline bool marks_nodes(ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        if (ggml_graph_node(graph, i)->flags & flag_compute) {
            return true;
        }
    }
    return false;
}

inline std::vector<const ggml_tensor *> computed_nodes(ggml_cgraph * graph) {
    const bool marked = marks_nodes(graph);
    std::vector<const ggml_tensor *> nodes;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (!no_kernel(node) && (!marked || node->flags & flag_compute)) {
            nodes.push_back(node);
        }
    }
    return nodes;
}

// What is computed for a tensor, where there is no graph yet.
inline std::vector<const ggml_tensor *> computed_nodes(const ggml_tensor * result) {
    std::vector<const ggml_tensor *> nodes;
    for (const ggml_tensor * t : ancestry({ result })) {
        if (!no_kernel(t)) {
            nodes.push_back(t);
        }
    }
    return nodes;
}

// The CPU could compute it, if its operands lay as new tensors do.
inline bool takes_copies(const ggml_tensor * node) {
    ggml_tensor                           made = *node;
    std::array<ggml_tensor, GGML_MAX_SRC> copies;
    for (int i = 0; i < GGML_MAX_SRC; ++i) {
        if (ggml_tensor * src = made.src[i]) {
            copies[i] = *src;
            copies[i].nb[0] = ggml_type_size(src->type);
            copies[i].nb[1] = ggml_row_size(src->type, src->ne[0]);
            copies[i].nb[2] = copies[i].nb[1] * src->ne[1];
            copies[i].nb[3] = copies[i].nb[2] * src->ne[2];
            made.src[i] = &copies[i];
        }
    }
    return !node->view_src && cpu_takes(&made);
}

inline bool no_kernel_for(const ggml_tensor * node) {
    why = with_operands(node);
    if (weighs_missing_keys(node)) {
        why += ": of capped scores without a mask it may weigh keys that are not there, as their number is no multiple "
               "of 64; a mask of zeros makes it right";
    } else if (takes_copies(node)) {
        why += ": of copies without gaps it could, which ggml_cont makes";
    }
    return false;
}

// This backend (NULL: the CPU without one) runs kernels of the CPU, or drives one that does.
inline bool on_cpu(ggml_backend_t backend) {
    if (!backend) {
        return true;
    }
#ifdef GGML_CFFI_HAS_META
    if (ggml_backend_is_meta(backend)) {
        for (size_t i = 0; i < ggml_backend_meta_n_backends(backend); ++i) {
            if (on_cpu(ggml_backend_meta_simple_backend(backend, i))) {
                return true;
            }
        }
        return false;
    }
#endif
    return ggml_backend_dev_type(ggml_backend_get_device(backend)) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

// The graph allocator may put the result of these operations over this operand, as it does with
// operations that are done element by element; but they read it once they have written.
inline const ggml_tensor * read_late(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_ADD_ID:
        case GGML_OP_SOFT_MAX_BACK:
            return node->src[1];
        case GGML_OP_SOFT_MAX:
            return node->src[2]; // the sinks
        default:
            return nullptr;
    }
}

inline bool may_write_over(const ggml_tensor * node) { return read_late(node); }

inline bool spares_operands(const ggml_tensor * node) {
    const ggml_tensor * second = read_late(node);
    if (!second || !second->data || !node->data || buffer_of(node) != buffer_of(second)) {
        return true;
    }
    const char * start = (const char *) node->data;
    const char * other = (const char *) second->data;
    if (start >= other + ggml_nbytes(second) || other >= start + ggml_nbytes(node)) {
        return true;
    }
    why = named(node) + " would write over " + named(second) +
          ", which it reads: it needs memory of its own, as ggml_set_output gives it in a graph allocator";
    return false;
}

// Where several of its elements share memory, threads would write there in any order, or twice.
inline bool writes_apart(const ggml_tensor * node) {
    if (!node->view_src || !overlaps_itself(node->type, node->ne, node->nb)) {
        return true;
    }
    why = named(node) + " would write into a view whose elements share memory: " + described(node);
    return false;
}

// The kernels of the CPU take these tensors and touch no more than them, if it is them.
inline bool cpu_can(ggml_cgraph * graph, ggml_backend_t backend = nullptr) {
    if (on_cpu(backend)) {
        for (const ggml_tensor * node : computed_nodes(graph)) {
            if (!cpu_takes(node)) {
                return no_kernel_for(node);
            }
            if (!spares_operands(node) || !writes_apart(node)) {
                return false;
            }
        }
    }
    return true;
}

// The CPU has its result or its weights in its memory.
inline bool lies_on_cpu(const ggml_tensor * node) {
    if (real_host_buffer(node)) {
        return true;
    }
    for (const ggml_tensor * src : node->src) {
        if (src && real_host_buffer(src) &&
            ggml_backend_buffer_get_usage(buffer_of(src)) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS) {
            return true;
        }
    }
    return false;
}

// `tied(node)`: whether the scheduler leaves it to the CPU, whatever other backends can do.
template <class Tied>
bool cpu_can(ggml_backend_sched_t sched, const std::vector<const ggml_tensor *> & nodes, const Tied & tied) {
    for (const ggml_tensor * node : nodes) {
        if (!spares_operands(node) || !writes_apart(node)) {
            return false;
        }
        if (cpu_takes(node)) {
            continue;
        }
        bool other = false;
        for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
            ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
            other = other || (!on_cpu(backend) && ggml_backend_supports_op(backend, node));
        }
        if (!other || tied(node)) {
            return no_kernel_for(node);
        }
    }
    return true;
}

// A scheduler keeps an operation where its result or its weights are, or where the user wants it.
template <class Graph> bool cpu_can(ggml_backend_sched_t sched, Graph * graph) {
    return cpu_can(sched, computed_nodes(graph), [sched](const ggml_tensor * node) {
        ggml_backend_t chosen = ggml_backend_sched_get_tensor_backend(sched, (ggml_tensor *) node);
        return lies_on_cpu(node) || (chosen && on_cpu(chosen));
    });
}

// Every tensor that is in a buffer can be read by one of the scheduler's backends.
inline bool reachable(ggml_backend_sched_t sched, ggml_cgraph * graph) {
    auto read = [sched](const ggml_tensor * t) {
        if (!t || !t->data || !buffer_of(t)) {
            return true;
        }
        for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
            if (can_read(t, ggml_backend_sched_get_backend(sched, i))) {
                return true;
            }
        }
        return false;
    };
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (!read(node) || !std::all_of(std::begin(node->src), std::end(node->src), read)) {
            return false;
        }
    }
    return true;
}

// The tensors of a graph can be copied to a backend; those of a meta device cannot.
inline bool can_copy_to(ggml_backend_t backend, ggml_cgraph * graph) {
    const bool to_meta = is_meta(ggml_backend_dev_name(ggml_backend_get_device(backend)));
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (in_meta_buffer(node) || (to_meta && !real_host_buffer(node))) {
            return false;
        }
        for (const ggml_tensor * src : node->src) {
            if (src && (in_meta_buffer(src) || (to_meta && !real_host_buffer(src)))) {
                return false;
            }
        }
    }
    return true;
}

} // namespace check
