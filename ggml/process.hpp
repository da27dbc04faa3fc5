// What concerns the process as a whole: its forks, and its end.

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <pthread.h>
#include <unistd.h>

namespace ggml_cffi {

// ---- forks: the child has none of the other threads, and so nobody who releases what they held

// A mutex that no thread holds while the process forks: the child finds it free, and what it guards
// whole. Of static storage only; nobody may hold two of them.
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

inline void after_fork_in_child() {
    after_fork();
    forget_other_threads();
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
