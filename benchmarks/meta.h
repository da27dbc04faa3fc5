// The functions of ggml that meta.c uses, for cffi's cdef and for the C compiler.

const char * ggml_version(void);
size_t state_size(void);
void * make_meta_device(void ** devices, size_t n_devices);
