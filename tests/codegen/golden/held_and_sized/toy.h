#pragma once
#include <stdbool.h>
#include <stddef.h>

struct toy_params { size_t size; void * memory; bool quiet; };
typedef float (*toy_scale_t)(float x);

struct toy_thing * toy_thing_in(struct toy_params params);
void toy_wrap(void * pointer, size_t size);
void toy_table_use(int n);
void toy_table_free(void);
bool toy_write(const char * path);
