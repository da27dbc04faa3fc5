// A meta device whose split function is in C; it answers what `split` of meta.py does.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "meta.h"

enum { MAX_DEVICES = 16, MIRRORED = 10 };
struct state {
    int axis;
    int64_t ne[16 * MAX_DEVICES];
    uint32_t nr[16];
    uint32_t n_segments;
};
struct ggml_tensor {  // its first fields
    int type;
    void * buffer;
    int64_t ne[4];
};

typedef struct state (*split_function)(const struct ggml_tensor * tensor, void * userdata);

const char * ggml_get_name(const struct ggml_tensor * tensor);
void * ggml_backend_meta_device(void ** devices, size_t n_devices, split_function split, void * userdata);

static const char * const COLUMNS[] = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"};
static const char * const ROWS[] = {"o_proj", "down_proj"};

static int axis_of(const char * name) {
    for (size_t i = 0; i < sizeof COLUMNS / sizeof *COLUMNS; ++i) {
        if (strstr(name, COLUMNS[i])) {
            return 1;
        }
    }
    for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; ++i) {
        if (strstr(name, ROWS[i])) {
            return 0;
        }
    }
    return MIRRORED;
}

static struct state split(const struct ggml_tensor * tensor, void * userdata) {
    size_t n_devices = (size_t) (uintptr_t) userdata;
    struct state found = {.axis = axis_of(ggml_get_name(tensor)), .nr = {1}, .n_segments = 1};
    if (found.axis != MIRRORED) {
        for (size_t j = 0; j < n_devices; ++j) {
            found.ne[j] = tensor->ne[found.axis] / (int64_t) n_devices;
        }
    }
    return found;
}

size_t state_size(void) {
    return sizeof(struct state);
}

void * make_meta_device(void ** devices, size_t n_devices) {
    return ggml_backend_meta_device(devices, n_devices, split, (void *) (uintptr_t) n_devices);
}
