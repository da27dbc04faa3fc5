// Functions of a backend that is a loadable module: there is nothing to link to, so each is looked up
// in the module that ggml has loaded, whichever suits the processor.

#include <dlfcn.h>
#include <string>

#define GGML_CFFI_HAS_MODULES

namespace ggml_cffi {

// Throws what the guard makes a NotSupportedError of.
[[noreturn]] inline void no_such_function(const std::string & why);

// The address of a function in the module that serves `reg`. Throws if there is no such module.
inline void * in_module(ggml_backend_reg_t reg, const char * backend, const char * function) {
    Dl_info info;
    if (!reg || !dladdr((const void *) reg, &info) || !info.dli_fname) { // a module's reg is its own data
        no_such_function(std::string("the backend ") + backend + " is a loadable module, and none is loaded");
    }
    void * module = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    void * found = module ? dlsym(module, function) : nullptr;
    if (module) {
        dlclose(module); // ggml holds it
    }
    if (!found) {
        no_such_function(std::string(info.dli_fname) + " has no " + function);
    }
    return found;
}

inline ggml_backend_reg_t registered_as(const char * backend); // in registry.hpp, both

// Looked up anew when another module has been loaded.
struct module_function {
    ggml_backend_reg_t of = nullptr;
    void *             address = nullptr;
    void * get(const char * backend, const char * function) {
        ggml_backend_reg_t reg = registered_as(backend);
        if (!reg || reg != of) {
            address = in_module(reg, backend, function);
            of = reg;
        }
        return address;
    }
};

} // namespace ggml_cffi
