// The transformer of graph_build.py in plain C: the same tensors and operations, in the same order.
// Time is the thread's own.

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "graph_build.h"

struct ggml_context;
struct ggml_tensor;
struct ggml_cgraph;
struct ggml_init_params { size_t mem_size; void * mem_buffer; bool no_alloc; };

typedef struct ggml_tensor * tensor;
typedef struct ggml_context * context;

context ggml_init(struct ggml_init_params params);
void ggml_free(context ctx);
tensor ggml_new_tensor_1d(context ctx, int type, int64_t ne0);
tensor ggml_new_tensor_2d(context ctx, int type, int64_t ne0, int64_t ne1);
tensor ggml_set_name(tensor a, const char * name);
tensor ggml_get_rows(context ctx, tensor a, tensor b);
tensor ggml_rms_norm(context ctx, tensor a, float eps);
tensor ggml_mul(context ctx, tensor a, tensor b);
tensor ggml_add(context ctx, tensor a, tensor b);
tensor ggml_mul_mat(context ctx, tensor a, tensor b);
tensor ggml_silu(context ctx, tensor a);
tensor ggml_reshape_3d(context ctx, tensor a, int64_t ne0, int64_t ne1, int64_t ne2);
tensor ggml_rope_ext(context ctx, tensor a, tensor b, tensor c, int n_dims, int mode, int n_ctx_orig,
                     float freq_base, float freq_scale, float ext_factor, float attn_factor,
                     float beta_fast, float beta_slow);
tensor ggml_permute(context ctx, tensor a, int axis0, int axis1, int axis2, int axis3);
tensor ggml_cont(context ctx, tensor a);
tensor ggml_cont_2d(context ctx, tensor a, int64_t ne0, int64_t ne1);
tensor ggml_soft_max_ext(context ctx, tensor a, tensor mask, float scale, float max_bias);
struct ggml_cgraph * ggml_new_graph_custom(context ctx, size_t size, bool grads);
void ggml_build_forward_expand(struct ggml_cgraph * graph, tensor a);
int ggml_graph_n_nodes(struct ggml_cgraph * graph);
size_t ggml_tensor_overhead(void);
size_t ggml_graph_overhead_custom(size_t size, bool grads);

enum { F32 = 0, I32 = 26 };
enum { WIDTH = 64, HEADS = 4, HEAD = 16, HIDDEN = 192, VOCABULARY = 256, TOKENS = 8 };

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t) t.tv_sec * 1000000000 + t.tv_nsec;
}

static tensor norm(context ctx, tensor x, tensor weight) {
    return ggml_mul(ctx, ggml_rms_norm(ctx, x, 1e-6f), weight);
}

static tensor rope(context ctx, tensor x, tensor positions) {
    return ggml_rope_ext(ctx, x, positions, NULL, HEAD, 0, 0, 10000.0f, 1.0f, 0.0f, 1.0f, 32.0f, 1.0f);
}

static tensor heads(context ctx, tensor weight, tensor x) {
    return ggml_reshape_3d(ctx, ggml_mul_mat(ctx, weight, x), HEAD, HEADS, TOKENS);
}

static tensor layer(context ctx, tensor x, tensor positions, tensor mask) {
    tensor attn_norm = ggml_new_tensor_1d(ctx, F32, WIDTH);
    tensor wq = ggml_new_tensor_2d(ctx, F32, WIDTH, WIDTH);
    tensor wk = ggml_new_tensor_2d(ctx, F32, WIDTH, WIDTH);
    tensor wv = ggml_new_tensor_2d(ctx, F32, WIDTH, WIDTH);
    tensor wo = ggml_new_tensor_2d(ctx, F32, WIDTH, WIDTH);
    tensor ffn_norm = ggml_new_tensor_1d(ctx, F32, WIDTH);
    tensor gate = ggml_new_tensor_2d(ctx, F32, WIDTH, HIDDEN);
    tensor up = ggml_new_tensor_2d(ctx, F32, WIDTH, HIDDEN);
    tensor down = ggml_new_tensor_2d(ctx, F32, HIDDEN, WIDTH);

    tensor h = norm(ctx, x, attn_norm);
    tensor q = ggml_permute(ctx, rope(ctx, heads(ctx, wq, h), positions), 0, 2, 1, 3);
    tensor k = ggml_permute(ctx, rope(ctx, heads(ctx, wk, h), positions), 0, 2, 1, 3);
    tensor v = ggml_cont(ctx, ggml_permute(ctx, heads(ctx, wv, h), 1, 2, 0, 3));
    tensor scores = ggml_soft_max_ext(ctx, ggml_mul_mat(ctx, k, q), mask, 0.25f, 0.0f);
    tensor mixed = ggml_permute(ctx, ggml_mul_mat(ctx, v, scores), 0, 2, 1, 3);
    x = ggml_add(ctx, x, ggml_mul_mat(ctx, wo, ggml_cont_2d(ctx, mixed, WIDTH, TOKENS)));
    h = norm(ctx, x, ffn_norm);
    tensor hidden = ggml_mul(ctx, ggml_silu(ctx, ggml_mul_mat(ctx, gate, h)), ggml_mul_mat(ctx, up, h));
    return ggml_add(ctx, x, ggml_mul_mat(ctx, down, hidden));
}

int64_t build_transformer(int n_layers, int64_t * n_nodes) {
    int64_t start = now();
    size_t n = 8 + 48 * (size_t) n_layers;
    struct ggml_init_params params = { n * ggml_tensor_overhead() + ggml_graph_overhead_custom(n, false), NULL, true };
    context ctx = ggml_init(params);
    tensor tokens = ggml_set_name(ggml_new_tensor_1d(ctx, I32, TOKENS), "tokens");
    tensor positions = ggml_set_name(ggml_new_tensor_1d(ctx, I32, TOKENS), "positions");
    tensor mask = ggml_set_name(ggml_new_tensor_2d(ctx, F32, TOKENS, TOKENS), "mask");
    tensor embedding = ggml_new_tensor_2d(ctx, F32, WIDTH, VOCABULARY);
    tensor output_norm = ggml_new_tensor_1d(ctx, F32, WIDTH);
    tensor x = ggml_get_rows(ctx, embedding, tokens);
    for (int i = 0; i < n_layers; ++i) {
        x = layer(ctx, x, positions, mask);
    }
    x = ggml_mul_mat(ctx, embedding, norm(ctx, x, output_norm));
    struct ggml_cgraph * graph = ggml_new_graph_custom(ctx, n, false);
    ggml_build_forward_expand(graph, x);
    *n_nodes = ggml_graph_n_nodes(graph);
    ggml_free(ctx);
    return now() - start;
}
