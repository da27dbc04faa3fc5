// Loops in C around the functions of bare.h, against which the bindings are measured. What a call
// gives goes to `sink`, so that no call is left out. Time is the thread's own, as in calls.py: what
// other processes take does not count.

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "bare.h"

static volatile int64_t sink;
static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t) t.tv_sec * 1000000000 + t.tv_nsec;
}

#define LOOP(...)                      \
    int64_t start = now();             \
    for (int64_t k = 0; k < n; ++k) {  \
        __VA_ARGS__                    \
    }                                  \
    return now() - start

int64_t loop_mul_mat(int64_t n, struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * b) {
    LOOP(sink = (intptr_t) ggml_mul_mat(ctx, a, b););
}
int64_t loop_nelements(int64_t n, struct ggml_tensor * a) {
    LOOP(sink = ggml_nelements(a););
}
int64_t loop_get_name(int64_t n, struct ggml_tensor * a) {
    LOOP(sink = (intptr_t) ggml_get_name(a););
}
int64_t loop_unravel_index(int64_t n, struct ggml_tensor * a) {
    int64_t i[4];
    LOOP(ggml_unravel_index(a, 11, &i[0], &i[1], &i[2], &i[3]); sink = i[0];);
}
int64_t loop_init(int64_t n, size_t mem_size) {
    struct ggml_init_params params = { mem_size, NULL, true };
    LOOP(struct ggml_context * ctx = ggml_init(params); sink = (intptr_t) ctx; ggml_free(ctx););
}
