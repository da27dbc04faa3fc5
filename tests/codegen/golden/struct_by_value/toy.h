#pragma once
#include <stddef.h>
#include <stdbool.h>

struct toy_params {
    size_t size;  // bytes
    bool   quick;
    void * base;
};

struct toy_range { int first, last; };

// Widens a range by what the parameters say.
struct toy_range toy_widen(struct toy_range range, struct toy_params params);
bool toy_contains(const struct toy_range * range, int value);
