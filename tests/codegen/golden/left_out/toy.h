#pragma once
#include <stdarg.h>

int toy_log(const char * format, ...);
int toy_vlog(const char * format, va_list arguments);
int toy_private(int a);
int toy_silly(int a);
int toy_kept(int a);
static inline int toy_helper(int a) { return a + 1; }
extern int toy_private(int a);
