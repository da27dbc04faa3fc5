#pragma once
#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TOY_DIMS   3
#define TOY_ANSWER (6 * 7)
#define TOY_NAME   "toy"

enum toy_kind {
    TOY_KIND_PLAIN = 1 << 1,
    TOY_KIND_FANCY = TOY_KIND_PLAIN | 1,
    TOY_KIND_LAST  = 98,
    TOY_KIND_COUNT,
};

struct toy_params { int from; bool wide; };
struct toy_range { int first, last; };
struct toy_value {
    enum toy_kind kind;
    union { int64_t whole; double real; };
    struct { uint8_t low : 4, high : 4; } nibbles;
    int64_t ne[TOY_DIMS + 1];
};
struct toy_machine;

typedef bool             (*toy_visit_t)(int step, const char * label, void * user_data);
typedef struct toy_range (*toy_bounds_t)(int n, void * data);
typedef void             (*toy_bell_t)(int times);
typedef int              (*toy_binary_t)(int a, int b);

GGML_API struct toy_range toy_widen(struct toy_range range, struct toy_params params);
GGML_API struct toy_range toy_bounds(toy_bounds_t bounds, void * data, int n);
GGML_API enum toy_kind toy_kind(const struct toy_value * value);
GGML_API enum toy_kind toy_next_kind(enum toy_kind kind);
GGML_API double toy_sum(const struct toy_value * value);
GGML_API int toy_subtract(int, int from);
GGML_API int64_t toy_product(const int64_t ne[TOY_DIMS]);
GGML_DEPRECATED(GGML_API int toy_old(int a), "use toy_new instead");

GGML_API const char * toy_greet(const char * name);
GGML_API int toy_divide(int a, int b, int * rest);
GGML_API float toy_mean(const float * values, size_t n);
GGML_API size_t toy_count(const char ** names, size_t n);
GGML_API void toy_double(void * data, size_t size);

GGML_API int toy_walk(int steps, toy_visit_t visit, void * user_data);
GGML_API struct toy_machine * toy_machine_new(toy_visit_t visit, void * user_data);
GGML_API bool toy_machine_step(struct toy_machine * machine, int step);
GGML_API void toy_machine_free(struct toy_machine * machine);
GGML_API void toy_set_bell(toy_bell_t bell);
GGML_API void toy_ring(int times);
GGML_API toy_binary_t toy_adder(void);
GGML_API int toy_apply(toy_binary_t function, int a, int b);

GGML_API enum ggml_status toy_status(int code);
GGML_API bool toy_save(const char * path);
GGML_API int toy_check(int a);
GGML_API void toy_not_there(void);

#ifdef __cplusplus
}
#endif
