// The functions of ggml that graph_build.c uses, for cffi's cdef and for the C compiler.

const char * ggml_version(void);
int64_t build_transformer(int n_layers, int64_t * n_nodes);
