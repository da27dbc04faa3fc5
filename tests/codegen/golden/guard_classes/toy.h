#pragma once
#include <stdbool.h>

enum ggml_status { GGML_STATUS_FAILED = -1, GGML_STATUS_SUCCESS = 0 };
struct toy_thing;

struct toy_thing * toy_thing_new(int size);
void toy_thing_free(struct toy_thing * thing);
enum ggml_status toy_run(struct toy_thing * thing, int n_threads);
bool toy_save(const struct toy_thing * thing, const char * path);
int toy_at(const struct toy_thing * thing, int index);
