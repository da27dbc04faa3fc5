#pragma once

#define TOY_DEPRECATED(func, hint) func __attribute__((deprecated(hint)))

TOY_DEPRECATED(int toy_old(int a), "use toy_new " "instead");
__attribute__((unused)) int toy_new(int a);
int toy_bare(int a) __attribute__((deprecated));
