#pragma once
#include <stddef.h>

struct toy_thing;

float toy_mean(const float * values, size_t n_values);
int toy_adopt(struct toy_thing ** things, size_t n, const char ** names);
void toy_vector(float * vector);
