#pragma once
#include <stddef.h>

void toy_memory(int device, size_t * free, size_t * total);
int toy_divide(int a, int b, int * rest);
void toy_label(int device, const char ** label);
