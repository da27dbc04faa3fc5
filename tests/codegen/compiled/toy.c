#include "toy.h"

#include <stdlib.h>
#include <string.h>

struct toy_range toy_widen(struct toy_range range, struct toy_params params) {
    range.first -= params.from;
    range.last += params.wide ? 100 : 1;
    return range;
}

struct toy_range toy_bounds(toy_bounds_t bounds, void * data, int n) { return bounds(n, data); }

enum toy_kind toy_kind(const struct toy_value * value) { return value->kind; }

enum toy_kind toy_next_kind(enum toy_kind kind) {
    return kind == TOY_KIND_PLAIN ? TOY_KIND_FANCY : TOY_KIND_LAST;
}

double toy_sum(const struct toy_value * value) {
    double sum = value->nibbles.low + value->nibbles.high;
    for (int i = 0; i < TOY_DIMS + 1; ++i) sum += value->ne[i];
    return sum + (value->kind == TOY_KIND_FANCY ? value->real : (double) value->whole);
}

int toy_subtract(int amount, int from) { return from - amount; }
int64_t toy_product(const int64_t ne[TOY_DIMS]) { return ne[0] * ne[1] * ne[2]; }
int toy_old(int a) { return a; }

const char * toy_greet(const char * name) {
    static char text[64];
    if (!name) return NULL;
    strcpy(text, "Hi ");
    strncat(text, name, 32);
    return text;
}

int toy_divide(int a, int b, int * rest) {
    *rest = a % b;
    return a / b;
}

float toy_mean(const float * values, size_t n) {
    float sum = 0;
    for (size_t i = 0; i < n; ++i) sum += values[i];
    return sum / n;
}

size_t toy_count(const char ** names, size_t n) {
    size_t sum = 0;
    for (size_t i = 0; i < n; ++i) sum += strlen(names[i]);
    return sum;
}

void toy_double(void * data, size_t size) {
    for (size_t i = 0; i < size; ++i) ((uint8_t *) data)[i] *= 2;
}

int toy_walk(int steps, toy_visit_t visit, void * user_data) {
    int step = 0;
    while (step < steps && visit(step, step % 2 ? "odd" : "even", user_data)) ++step;
    return step;
}

struct toy_machine { toy_visit_t visit; void * user_data; };

struct toy_machine * toy_machine_new(toy_visit_t visit, void * user_data) {
    struct toy_machine * machine = malloc(sizeof *machine);
    machine->visit = visit;
    machine->user_data = user_data;
    return machine;
}

bool toy_machine_step(struct toy_machine * machine, int step) {
    return machine->visit(step, "step", machine->user_data);
}

void toy_machine_free(struct toy_machine * machine) { free(machine); }

static toy_bell_t the_bell;
void toy_set_bell(toy_bell_t bell) { the_bell = bell; }
void toy_ring(int times) { if (the_bell) the_bell(times); }

static int add(int a, int b) { return a + b; }
toy_binary_t toy_adder(void) { return add; }
int toy_apply(toy_binary_t function, int a, int b) { return function(a, b); }

enum ggml_status toy_status(int code) { return (enum ggml_status) code; }
bool toy_save(const char * path) { return strlen(path) > 1; }

int toy_check(int a) {
    GGML_ASSERT(a < 10 && "small numbers only");
    return a;
}
