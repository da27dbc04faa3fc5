#pragma once
#include <stdint.h>

struct toy_value {
    int kind;
    union {
        int64_t whole;
        double  real;
    };
    struct { uint8_t low : 4, high : 4; } nibbles;
};

typedef struct { float x, y; } toy_point;

int toy_kind(const struct toy_value * value);
toy_point toy_middle(toy_point a, toy_point b);
