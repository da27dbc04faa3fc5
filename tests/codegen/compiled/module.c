// A backend without devices that ggml loads at run time, as one built with GGML_BACKEND_DL.

#include <stddef.h>

static const char * name(void * self) { return "BLAS"; }
static size_t       count(void * self) { return 0; }

static struct {
    int    api_version;
    void * get_name;
    void * get_device_count;
    void * others[2];
    void * context;
} reg = { 2, name, count, { NULL, NULL }, NULL };

void * ggml_backend_init(void) { return &reg; }

int toy_of_a_module(int a) { return 2 * a; }
