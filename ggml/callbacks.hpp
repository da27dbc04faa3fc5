// Into Python and back: what stands around each call of a Python function by ggml, which guarded call
// an exception comes out of, and the callbacks that are called on while they are being replaced.

#include <algorithm>
#include <atomic>
#include <new>
#include <string>
#include <vector>

namespace ggml_cffi {

// ---- exceptions on their way out

// What was raised on threads of ggml's own. The thread that computes calls each callback of its graph
// as well, and so knows which of these belong to its computation.
inline fork_safe_mutex foreign_lock;
inline std::vector<failure> foreign_failures;
inline std::vector<uint64_t> dropped;                 // numbers that nobody asked for
inline std::atomic<bool> foreign_raised{false};       // there are some

// Entered by every trampoline: the guard rests while Python runs, so that nothing unwinds through
// CPython's frames. What Python raises is of the guarded call that led here; on a thread of ggml's
// own there is none, and it waits for the computation to end.
struct python_entry {
    const void * const         userdata;
    region * const             outer = state.inside;
    const python_entry * const entry_before = state.entry;
    const bool                 raised_before = state.raised;
    const uint64_t             serial_before = state.serial;
    const uint64_t             log_before_serial = state.log_serial;
    std::string                log_before; // of the guarded call that led here
    const bool                 in_kernel; // called in the midst of a backend's work
    explicit python_entry(const void * key = nullptr, bool kernel = false) : userdata(key), in_kernel(kernel) {
        thread_state & s = state;
        s.inside = nullptr;
        s.entry = this;
        s.raised = false;
        if (log_before_serial == serial_before) {
            log_before.swap(details().log);
        }
    }
    python_entry(const python_entry &) = delete;
    bool foreign() const { return outer == nullptr; }
    bool failed() const { return state.raised; }
    ~python_entry() {
        thread_state & s = state;
        s.inside = outer;
        s.entry = entry_before;
        s.raised = raised_before || (s.raised && !foreign());
        s.serial = serial_before; // what is logged from here on is the outer call's again,
        if (log_before_serial == serial_before) { // with what was
            s.log_serial = log_before_serial;
            details().log.swap(log_before);
        }
        s.kind = no_error;        // and an error that Python has left unread is not
    }
};

// The computation on this thread has a callback with this userdata.
inline void note_called(const void * userdata) {
    const region * inside = state.inside;
    if (userdata && inside && inside->how == leave::compute) {
        auto & entered = details().entered;
        if (std::find(entered.begin(), entered.end(), userdata) == entered.end()) {
            entered.push_back(userdata);
        }
    }
}

// Whether a trampoline is not to call Python: it is gone, or something was raised in this call, after
// which nothing that follows is of use.
inline bool not_now(const void * userdata, bool even_after_failure = false) {
    if (!has_python()) {
        return true;
    }
    note_called(userdata);
    return state.raised && !even_after_failure;
}

inline bool raise(uint64_t number) {
    const python_entry * entry = state.entry;
    if (!entry || (entry->foreign() && !entry->userdata)) {
        return false;
    }
    state.raised = true;
    try {
        const failure what{ number, entry->serial_before, entry->userdata };
        if (entry->foreign()) {
            std::lock_guard<fork_safe_mutex> hold(foreign_lock);
            foreign_failures.push_back(what);
            foreign_raised = true;
        } else {
            details().raised.push_back(what);
        }
    } catch (const std::bad_alloc &) {
        return entry->outer != nullptr; // that something was raised is known, if not what
    }
    return true;
}

// Move what `mine` picks from `all` to this thread's failures.
template <class Mine> void take_failures(std::vector<failure> & all, Mine mine) {
    auto & failures = details().failures;
    auto   rest = std::stable_partition(all.begin(), all.end(), [&](const failure & f) { return !mine(f); });
    for (auto f = rest; f != all.end(); ++f) {
        failures.push_back(f->number);
    }
    all.erase(rest, all.end());
}

// The present guarded call ends: next_failure gives out what was raised in it, whatever else went
// wrong. False: nothing was.
inline bool collect_failures(bool computes) try {
    thread_details & d = details();
    if (!d.failures.empty()) {
        std::lock_guard<fork_safe_mutex> hold(foreign_lock);
        dropped.insert(dropped.end(), d.failures.begin(), d.failures.end());
        d.failures.clear();
    }
    d.failed_call = state.serial;
    take_failures(d.raised, [&](const failure & f) { return f.call == d.failed_call; });
    if (computes && foreign_raised) {
        std::lock_guard<fork_safe_mutex> hold(foreign_lock);
        take_failures(foreign_failures, [&](const failure & f) {
            return std::find(d.entered.begin(), d.entered.end(), f.userdata) != d.entered.end();
        });
        foreign_raised = !foreign_failures.empty();
    }
    return !d.failures.empty();
} catch (const std::bad_alloc &) {
    return true; // that something was raised is known, if not what
}

inline uint64_t next_failure() {
    auto & failures = details().failures;
    if (failures.empty() || details().failed_call != state.serial) {
        return 0;
    }
    const uint64_t number = failures.front();
    failures.erase(failures.begin());
    return number;
}

inline uint64_t next_dropped() {
    std::lock_guard<fork_safe_mutex> hold(foreign_lock);
    if (dropped.empty()) {
        return 0;
    }
    const uint64_t number = dropped.back();
    dropped.pop_back();
    return number;
}

// ---- computations

inline fork_safe_mutex computing_lock;
inline int n_computing = 0;                           // on all threads
inline std::vector<ggml_backend_sched_t> without_eval_callback;

inline std::vector<const void *> at_work;             // backends and schedulers that compute

// One on this thread: the callbacks that it calls. One inside a callback of another has its own.
struct computation {
    std::vector<const void *> outer;
    std::vector<const void *> uses;                   // its part of at_work
    computation * const       before = details().computing;
    computation() {
        outer.swap(details().entered);
        details().computing = this;
        std::lock_guard<fork_safe_mutex> hold(computing_lock);
        ++n_computing;
    }
    computation(const computation &) = delete;
    ~computation() {
        details().entered.swap(outer);
        details().computing = before;
        std::lock_guard<fork_safe_mutex> hold(computing_lock);
        for (const void * used : uses) {
            at_work.erase(std::find(at_work.begin(), at_work.end(), used));
        }
        if (--n_computing == 0) {
            for (ggml_backend_sched_t scheduler : without_eval_callback) {
                ggml_backend_sched_set_eval_callback(scheduler, nullptr, nullptr);
            }
            without_eval_callback.clear();
        }
    }
};
inline bool computes_somewhere() {
    std::lock_guard<fork_safe_mutex> hold(computing_lock);
    return n_computing > 0;
}
struct no_computation {
    ~no_computation() {} // so that it is not an unused variable
};

// With computing_lock held.
inline bool works(const void * object) { return std::find(at_work.begin(), at_work.end(), object) != at_work.end(); }

inline void begin_work(const void * object) {
    computation * mine = details().computing;
    mine->uses.reserve(mine->uses.size() + 1);
    at_work.push_back(object);
    mine->uses.push_back(object);
}

// The threads that CPU backends were given: several may have the same.
inline by_address<const void *> pools_table;

inline void note_pool(ggml_backend_t backend, const ggml_threadpool * pool) {
    if (pool) {
        pools_table.note(backend, pool);
    } else {
        pools_table.forget(backend);
    }
}

inline void forget_pools(ggml_backend_t backend) {
    pools_table.forget(backend);
    for (size_t i = 0; i < n_children(backend); ++i) {
        pools_table.forget(child(backend, i));
    }
}

// Whether this thread is inside of an operation or an abort callback that a computation has called.
inline bool called_in_kernel() {
    for (const python_entry * entry = state.entry; entry; entry = entry->entry_before) {
        if (entry->in_kernel) {
            return true;
        }
    }
    return false;
}

// A computation on these threads begins, unless they are in the midst of one.
inline bool idle(const ggml_threadpool * pool) {
    if (pool) {
        std::lock_guard<fork_safe_mutex> hold(computing_lock);
        if (called_in_kernel() && works(pool)) {
            check::why = "the threads are computing what this is called by";
            return false;
        }
        begin_work(pool);
    }
    return true;
}

// A computation on this backend begins, unless it is in the midst of one: a second one, inside of what
// the first has called, would free its work buffer.
inline bool idle(ggml_backend_t backend) {
    const auto pool = pools_table.find(backend);
    if (pool && !idle((const ggml_threadpool *) *pool)) {
        return false;
    }
    for (size_t i = 0; i < n_children(backend); ++i) {
        if (!idle(child(backend, i))) {
            return false;
        }
    }
    std::lock_guard<fork_safe_mutex> hold(computing_lock);
    if (called_in_kernel() && works(backend)) {
        check::why = "the backend is computing what this is called by";
        return false;
    }
    begin_work(backend);
    return true;
}

// What a scheduler is computing must not be planned anew meanwhile.
inline bool not_computing(ggml_backend_sched_t scheduler) {
    std::lock_guard<fork_safe_mutex> hold(computing_lock);
    if (works(scheduler)) {
        check::why = "the scheduler is computing what this is called by";
        return false;
    }
    return true;
}

inline bool backends_idle(ggml_backend_sched_t scheduler) {
    for (int i = 0; i < ggml_backend_sched_get_n_backends(scheduler); ++i) {
        if (!idle(ggml_backend_sched_get_backend(scheduler, i))) {
            return false;
        }
    }
    return true;
}

inline bool idle(ggml_backend_sched_t scheduler) {
    if (!not_computing(scheduler) || !backends_idle(scheduler)) {
        return false;
    }
    std::lock_guard<fork_safe_mutex> hold(computing_lock);
    begin_work(scheduler);
    return true;
}

// A step of training is a computation of its scheduler; between those of an epoch that is free.
inline bool idle(ggml_opt_context_t context) {
    ggml_backend_sched_t scheduler = scheduler_of(context);
    return !scheduler || idle(scheduler);
}
inline bool backends_idle(ggml_opt_context_t context) {
    ggml_backend_sched_t scheduler = scheduler_of(context);
    return !scheduler || backends_idle(scheduler);
}

// A scheduler got an eval callback, or that of nobody. ggml calls it for each node without looking
// whether it is still there, so NULL has to wait until nothing computes.
inline void note_eval_callback(ggml_backend_sched_t scheduler, bool nobody) {
    std::lock_guard<fork_safe_mutex> hold(computing_lock);
    auto & waiting = without_eval_callback;
    waiting.erase(std::remove(waiting.begin(), waiting.end(), scheduler), waiting.end());
    if (!nobody) {
        return;
    }
    if (n_computing == 0) {
        ggml_backend_sched_set_eval_callback(scheduler, nullptr, nullptr);
    } else {
        waiting.push_back(scheduler);
    }
}

} // namespace ggml_cffi
