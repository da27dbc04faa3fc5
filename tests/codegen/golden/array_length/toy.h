#pragma once
#include <stdint.h>

#define TOY_DIMS 4
enum { TOY_EXTRA = 2 };

struct toy_shape {
    int64_t ne[TOY_DIMS];
    char    name[TOY_DIMS * (TOY_EXTRA + 1)];
    int     grid[2][TOY_EXTRA << 1];
};

int64_t toy_product(const int64_t ne[TOY_DIMS]);
int64_t toy_open(const int64_t ne[]);
