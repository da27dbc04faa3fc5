#pragma once

typedef int (*toy_binary_t)(int a, int b);

// The function that adds.
toy_binary_t toy_adder(void);
int toy_apply(toy_binary_t function, int a, int b);
int toy_apply_unnamed(int (*function)(int, int), int a, int b);
