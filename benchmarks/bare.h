// The few functions of ggml that calls.py measures: for cffi's cdef and for the C compiler. The
// loops below are bare.c's; each gives the nanoseconds that n calls took.

struct ggml_context;
struct ggml_tensor;
struct ggml_init_params { size_t mem_size; void * mem_buffer; bool no_alloc; };
const char * ggml_version(void);
struct ggml_context * ggml_init(struct ggml_init_params params);
void ggml_free(struct ggml_context * ctx);
void ggml_reset(struct ggml_context * ctx);
struct ggml_tensor * ggml_new_tensor_2d(struct ggml_context * ctx, int type, int64_t ne0, int64_t ne1);
struct ggml_tensor * ggml_set_name(struct ggml_tensor * tensor, const char * name);
struct ggml_tensor * ggml_mul_mat(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b);
int64_t ggml_nelements(const struct ggml_tensor * tensor);
const char * ggml_get_name(const struct ggml_tensor * tensor);
void ggml_unravel_index(const struct ggml_tensor * tensor, int64_t i, int64_t * i0, int64_t * i1, int64_t * i2, int64_t * i3);

int64_t loop_mul_mat(int64_t n, struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b);
int64_t loop_nelements(int64_t n, struct ggml_tensor * a);
int64_t loop_get_name(int64_t n, struct ggml_tensor * a);
int64_t loop_unravel_index(int64_t n, struct ggml_tensor * a);
int64_t loop_init(int64_t n, size_t mem_size);
