#pragma once
#include <stdint.h>

// A later release has uint32_t nr[4] in the struct as well, another parameter, and toy_new.
struct toy_state { int64_t ne[4]; };

int toy_old(struct toy_state * state);
