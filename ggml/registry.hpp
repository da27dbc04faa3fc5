// ggml's registry of backends: which are built in and which came in loadable modules, what lives of
// each, and what has been unloaded.
//
// A module's code stays in the process when its backend is unloaded: threads of a driver may run in it,
// and what `capi` has handed out (names, types, addresses of functions) points into it.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ggml_cffi {

using backends = std::vector<ggml_backend_reg_t>;

inline backends built_in; // set once, at import

inline bool is_in(const backends & all, ggml_backend_reg_t reg) {
    return std::find(all.begin(), all.end(), reg) != all.end();
}

inline fork_safe_mutex                        users_lock;
inline backends                               registered; // by address, not from a module
inline std::set<const void *>                 gone;       // devices and registries of what is unloaded
inline std::atomic<size_t>                    n_gone{0};
inline std::map<const void *, std::vector<ggml_backend_dev_t>> meta_devices; // ggml never frees one

// ---- what lives of the backends that are not built in

struct backend_user {
    const char * what;
    backends     of;
    uint64_t     number; // no two have ever had the same
};
inline std::unordered_map<const void *, backend_user> users_table;
inline std::atomic<bool>                              has_users{false};
inline uint64_t                                       last_user = 0;

inline void add(backends & all, ggml_backend_dev_t device) {
    ggml_backend_reg_t reg = device ? ggml_backend_dev_backend_reg(device) : nullptr;
    if (reg && !is_in(built_in, reg) && !is_in(all, reg)) {
        all.push_back(reg);
    }
}

// Those that a device belongs to, without those built in: several, perhaps, where it is a meta device.
inline backends backends_of(ggml_backend_dev_t device) {
    backends found;
#ifdef GGML_CFFI_HAS_META
    if (device && ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_META) {
        std::lock_guard<fork_safe_mutex> hold(users_lock);
        const auto                       meta = meta_devices.find(device);
        if (meta != meta_devices.end()) {
            for (ggml_backend_dev_t child : meta->second) {
                add(found, child);
            }
        }
        return found;
    }
#endif
    add(found, device);
    return found;
}
inline backends backends_of(ggml_backend_buffer_type_t type) { return backends_of(ggml_backend_buft_get_device(type)); }
inline backends backends_of(ggml_backend_t backend) { return backends_of(ggml_backend_get_device(backend)); }
inline backends backends_of(ggml_backend_buffer_t buffer) { return backends_of(ggml_backend_buffer_get_type(buffer)); }
template <class Each> backends backends_of(Each * const * all, size_t n) {
    backends found;
    for (size_t i = 0; i < n; ++i) {
        for (ggml_backend_reg_t reg : all && all[i] ? backends_of(all[i]) : backends()) {
            if (!is_in(found, reg)) {
                found.push_back(reg);
            }
        }
    }
    return found;
}
inline backends backends_of(ggml_backend_sched_t scheduler) {
    std::vector<ggml_backend_t> all(ggml_backend_sched_get_n_backends(scheduler));
    for (size_t i = 0; i < all.size(); ++i) {
        all[i] = ggml_backend_sched_get_backend(scheduler, (int) i);
    }
    return backends_of(all.data(), all.size());
}
inline backends backends_of(const char * name) {
    ggml_backend_reg_t reg = ggml_backend_reg_by_name(name);
    return reg && !is_in(built_in, reg) ? backends{ reg } : backends();
}

// `object` needs these from now on. Without memory to note it, unloading will not be refused for it: its
// code stays all the same.
inline void note_use(const void * object, const char * what, backends of) noexcept {
    if (!object || of.empty()) {
        return;
    }
    std::lock_guard<fork_safe_mutex> hold(users_lock);
    try {
        users_table.insert_or_assign(object, backend_user{ what, std::move(of), ++last_user });
        has_users = true;
    } catch (const std::bad_alloc &) {
    }
}

// Asked before an object goes, and told afterwards: another may have got its address by then.
inline uint64_t use_of(const void * object) {
    if (!has_users) {
        return 0;
    }
    std::lock_guard<fork_safe_mutex> hold(users_lock);
    const auto                       found = users_table.find(object);
    return found == users_table.end() ? 0 : found->second.number;
}
inline void end_use(const void * object, uint64_t number) {
    if (number) {
        std::lock_guard<fork_safe_mutex> hold(users_lock);
        const auto                       found = users_table.find(object);
        if (found != users_table.end() && found->second.number == number) {
            users_table.erase(found);
            has_users = !users_table.empty();
        }
    }
}

// What the guard sees that the caller owns from now on; others are noted by the annotations.
template <class T> void note_made_of(const T &) {}
inline void note_made_of(const ggml_backend_t & made) {
    if (made) {
        note_use(made, "backend", backends_of(made));
    }
}
inline void note_made_of(const ggml_backend_buffer_t & made) {
    if (made) {
        note_use(made, "buffer", backends_of(made));
    }
}
inline void note_made_of(const struct ggml_backend_graph_copy & made) {
    if (made.buffer) {
        note_use(made.buffer, "graph copy", backends_of(made.buffer));
    }
}

template <class T> const void * as_user(const T & value) {
    if constexpr (std::is_pointer_v<T>) {
        return value;
    } else if constexpr (std::is_same_v<T, struct ggml_backend_graph_copy>) {
        return value.buffer;
    } else {
        return nullptr;
    }
}

// A buffer of several has taken them over.
inline void note_multi_buffer(ggml_backend_buffer_t made, ggml_backend_buffer_t * buffers, size_t n) {
    if (made) {
        note_use(made, "buffer", backends_of(buffers, n));
        for (size_t i = 0; i < n; ++i) {
            end_use(buffers[i], use_of(buffers[i]));
        }
    }
}

inline void note_meta_device(ggml_backend_dev_t made, ggml_backend_dev_t * devices, size_t n) {
    if (made) {
        {
            std::lock_guard<fork_safe_mutex> hold(users_lock);
            meta_devices[made].assign(devices, devices + n);
        }
        note_use(made, "meta device", backends_of(devices, n));
    }
}

// ---- functions of loadable modules (modules.hpp)

[[noreturn]] inline void no_such_function(const std::string & why) { throw not_there{ why }; }

inline ggml_backend_reg_t registered_as(const char * backend) {
    reads_registry held;
    return ggml_backend_reg_by_name(backend);
}

// ---- loading and unloading

inline bool is_gone(const void * object) {
    std::lock_guard<fork_safe_mutex> hold(users_lock);
    if (gone.count(object)) {
        return true;
    }
    const auto meta = meta_devices.find(object);
    return meta != meta_devices.end() && std::any_of(meta->second.begin(), meta->second.end(), [](const void * child) {
               return gone.count(child) > 0;
           });
}
inline bool is_loaded(ggml_backend_dev_t device) { return n_gone == 0 || !is_gone(device); }
inline bool is_loaded(ggml_backend_reg_t reg) { return n_gone == 0 || !is_gone(reg); }
inline bool is_loaded(ggml_backend_buffer_type_t type) {
    return n_gone == 0 || !type || is_loaded(ggml_backend_buft_get_device(type));
}
template <class Each> bool are_loaded(Each * const * all, size_t n) {
    return n_gone == 0 || std::all_of(all, all + n, [](Each * each) { return is_loaded(each); });
}

template <class Then> void with_devices(ggml_backend_reg_t reg, Then then) {
    for (size_t i = 0; i < ggml_backend_reg_dev_count(reg); ++i) {
        then(ggml_backend_reg_dev_get(reg, i));
    }
}

// One that is registered by its address is the caller's, whatever becomes of it here.
inline void note_registered(ggml_backend_reg_t reg) {
    std::lock_guard<fork_safe_mutex> hold(users_lock);
    if (!is_in(built_in, reg) && !is_in(registered, reg)) {
        registered.push_back(reg);
    }
}

// Modules have been loaded, perhaps anew.
inline void note_loaded() {
    if (n_gone == 0) {
        return;
    }
    for (size_t i = 0; i < ggml_backend_reg_count(); ++i) {
        ggml_backend_reg_t reg = ggml_backend_reg_get(i);
        with_devices(reg, [](ggml_backend_dev_t device) {
            std::lock_guard<fork_safe_mutex> hold(users_lock);
            gone.erase(device);
        });
        std::lock_guard<fork_safe_mutex> hold(users_lock);
        gone.erase(reg);
        n_gone = gone.size();
    }
}

// The file that a backend's registry lies in, "" where it is no library's.
inline std::string file_of(ggml_backend_reg_t reg) {
    Dl_info info;
    return reg && dladdr((const void *) reg, &info) && info.dli_fname ? info.dli_fname : "";
}

// Nothing of it lives, and it can go.
inline bool can_unload(ggml_backend_reg_t reg) {
    if (is_in(built_in, reg)) {
        check::why = std::string(ggml_backend_reg_name(reg)) + " is built in, not a loadable module";
        return false;
    }
    std::map<std::string, size_t> live;
    {
        std::lock_guard<fork_safe_mutex> hold(users_lock);
        for (const auto & [object, user] : users_table) {
            live[user.what] += is_in(user.of, reg);
        }
    }
    std::string text;
    for (const auto & [what, n] : live) {
        if (n) {
            text += (text.empty() ? "" : ", ") + std::to_string(n) + " " + what + (n > 1 ? "s" : "");
        }
    }
    if (!text.empty()) {
        check::why = std::string(ggml_backend_reg_name(reg)) + " still has " + text;
        return false;
    }
    return true;
}

// It is about to be unloaded.
inline void note_unloaded(ggml_backend_reg_t reg) {
    backends now;
    for (size_t i = 0; i < ggml_backend_reg_count(); ++i) {
        now.push_back(ggml_backend_reg_get(i));
    }
    {
        std::lock_guard<fork_safe_mutex> hold(users_lock);
        const auto                       own = std::find(registered.begin(), registered.end(), reg);
        if (own != registered.end()) {
            registered.erase(own);
            return;
        }
    }
    if (!is_in(now, reg)) {
        return;
    }
    const std::string file = file_of(reg);
    if (!file.empty()) {
        dlopen(file.c_str(), RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE); // never closed: it stays
    }
    with_devices(reg, [](ggml_backend_dev_t device) {
        std::lock_guard<fork_safe_mutex> hold(users_lock);
        gone.insert(device);
    });
    std::lock_guard<fork_safe_mutex> hold(users_lock);
    gone.insert(reg);
    n_gone = gone.size();
}

} // namespace ggml_cffi

// ---- what _loader.py, device.py and loading.py call

// Once, before any module is loaded.
static void ggml_cffi_note_built_in(void) {
    static bool noted = false;
    if (std::exchange(noted, true)) {
        return;
    }
    ggml_cffi::reads_registry held;
    for (size_t i = 0; i < ggml_backend_reg_count(); ++i) {
        ggml_cffi::built_in.push_back(ggml_backend_reg_get(i));
    }
}

// All devices and all backends, as they are at one moment. Gives how many there are; `room` may be too small.
static size_t ggml_cffi_devices(struct ggml_backend_device ** devices, size_t room) {
    ggml_cffi::reads_registry held;
    const size_t              n = ggml_backend_dev_count();
    for (size_t i = 0; i < n && i < room; ++i) {
        devices[i] = ggml_backend_dev_get(i);
    }
    return n;
}
static size_t ggml_cffi_backends(struct ggml_backend_reg ** backends, size_t room) {
    ggml_cffi::reads_registry held;
    const size_t              n = ggml_backend_reg_count();
    for (size_t i = 0; i < n && i < room; ++i) {
        backends[i] = ggml_backend_reg_get(i);
    }
    return n;
}

// The file that a backend came in, NULL where that is not known; it stays until the thread's next question.
static const char * ggml_cffi_file_of(struct ggml_backend_reg * reg) {
    static thread_local std::string file;
    file = ggml_cffi::file_of(reg);
    return file.empty() ? nullptr : file.c_str();
}
static bool ggml_cffi_is_loaded(struct ggml_backend_device * device) { return ggml_cffi::is_loaded(device); }

// A meta device that nobody can use any more.
static void ggml_cffi_end_use(const void * object) { ggml_cffi::end_use(object, ggml_cffi::use_of(object)); }
