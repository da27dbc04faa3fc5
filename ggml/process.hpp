// What concerns the process as a whole: its forks, and its end.

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <pthread.h>
#include <unistd.h>

namespace ggml_cffi {

// ---- forks: the child has none of the other threads, and so nobody who releases what they held

// A mutex that no thread holds while the process forks: the child finds it free, and what it guards
// whole. Of static storage only; who holds one takes no other but one that is defined before it.
class fork_safe_mutex {
    std::mutex                             mutex;
    fork_safe_mutex * const                next;
    static inline fork_safe_mutex *        all = nullptr;

  public:
    fork_safe_mutex() : next(all) { all = this; }
    void lock() { mutex.lock(); }
    void unlock() { mutex.unlock(); }
    static void lock_all() {
        for (fork_safe_mutex * each = all; each; each = each->next) {
            each->lock();
        }
    }
    static void unlock_all() {
        for (fork_safe_mutex * each = all; each; each = each->next) {
            each->unlock();
        }
    }
};

inline std::atomic<unsigned> n_forks{0};              // that led to this process

// What many threads may use at once, or one alone change. The child of a fork has only what the thread
// has that forked.
template <class Tag> struct shared_use {
    static inline pthread_rwlock_t       lock = PTHREAD_RWLOCK_INITIALIZER;
    static inline thread_local unsigned mine = 0;     // how often this thread uses it

    struct user {
        user() {
            if (mine++ == 0) {
                pthread_rwlock_rdlock(&lock);
            }
        }
        user(const user &) = delete;
        ~user() {
            if (--mine == 0) {
                pthread_rwlock_unlock(&lock);
            }
        }
    };
    struct alone {
        const bool others = mine == 0; // this thread uses it itself: not to be waited for
        alone() {
            if (others) {
                pthread_rwlock_wrlock(&lock);
            }
        }
        alone(const alone &) = delete;
        ~alone() {
            if (others) {
                pthread_rwlock_unlock(&lock);
            }
        }
    };
    static bool used_here() { return mine > 0; }
    static void renew() {
        lock = PTHREAD_RWLOCK_INITIALIZER;
        if (mine) {
            pthread_rwlock_rdlock(&lock);
        }
    }
};

// The tables that ggml_quantize_init makes, and ggml_quantize_free frees.
using quantisation_tables = shared_use<struct of_quantisation>;
using quantises = quantisation_tables::user;
using frees_quantisation_tables = quantisation_tables::alone;

// ggml's registry of backends, which it does not guard itself; who changes it may look at it as well.
using registry = shared_use<struct of_registry>;
using reads_registry = registry::user;
struct changes_registry {
    const registry::alone held;
    changes_registry() { ++registry::mine; }
    changes_registry(const changes_registry &) = delete;
    ~changes_registry() { --registry::mine; }
};

inline bool not_quantising() { return !quantisation_tables::used_here(); }

// ggml's own mutex, around what it initialises once; declared in none of its headers.
extern "C" {
__attribute__((weak)) void ggml_critical_section_start(void);
__attribute__((weak)) void ggml_critical_section_end(void);
}

inline void before_fork() {
    if (ggml_critical_section_start) {
        ggml_critical_section_start();
    }
    fork_safe_mutex::lock_all();
}

inline void after_fork() {
    fork_safe_mutex::unlock_all();
    if (ggml_critical_section_start) {
        ggml_critical_section_end();
    }
}

inline void forget_other_threads();
namespace net {
inline void let_go_in_child();
}

inline void after_fork_in_child() {
    ++n_forks;
    quantisation_tables::renew();
    registry::renew();
    after_fork();
    forget_other_threads();
    net::let_go_in_child();
}

// ---- the end

// Whether there is a Python to call: until the interpreter, after its atexit functions, takes itself
// down. A thread that calls it all the same a moment later is ended by it.
inline bool has_python() { return Py_IsInitialized(); }

inline bool computes_somewhere();

// Threads that compute (daemons) go on until the process ends, and use what exit() is about to
// destroy: ggml looks at a static table for each operation. So nothing is destroyed then. Python is
// done, and has written what it had to write.
inline void leave_to_threads(int status, void *) {
    if (computes_somewhere()) {
        std::fflush(nullptr);
        _exit(status);
    }
}

// exit() goes backwards: registered last, when Python is done, it comes before all that is destroyed.
inline void register_end() { on_exit(leave_to_threads, nullptr); }

// Whether all could be registered: Python has room for 32.
inline bool prepare_process() {
    return pthread_atfork(before_fork, after_fork, after_fork_in_child) == 0 && Py_AtExit(register_end) == 0;
}

} // namespace ggml_cffi
