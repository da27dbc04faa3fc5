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

// When a Python function is called: its computation may be in the midst of a backend's work then, or
// between two of its steps.
enum class entered { on_the_way, in_kernel, between_steps };

inline bool raise(uint64_t number);

// Stands for an exception that there is none of: Python could not be entered, or not left in order.
constexpr uint64_t unanswered = UINT64_MAX;

inline bool is_freeing(const region * inside);
namespace net {
inline void end_exchange();
inline void give_up(const std::string & message);
inline void on_abort(const char * message);
} // namespace net

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
    const entered              when;
    const unsigned             forks_before = n_forks;
    explicit python_entry(const void * key = nullptr, entered at = entered::on_the_way) : userdata(key), when(at) {
        thread_state & s = state;
        if (s.speaks) {
            net::end_exchange();
        }
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
    // Python is done, and has said that it ran to its end.
    void end(bool answered) {
        if (!answered && !failed()) {
            raise(unanswered);
        }
        if (when == entered::in_kernel && forks_before != n_forks) {
            leave_in_child();
        }
    }
    // Python has forked in the midst of a computation: in the child there is nobody whom the barriers
    // of its other threads wait for, and so this thread may leave it as it is.
    void leave_in_child() const {
        constexpr const char * message = "the process was forked in the midst of a computation of several threads";
        if (foreign()) {
            std::fprintf(stderr, "%s, on one that has no caller\n", message);
            std::fflush(stderr);
            _exit(EXIT_FAILURE);
        }
        if (outer->how == leave::compute && outer->threads != 1) {
            throw abort_error{ message };
        }
    }
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

// What a thread leaves unread when it ends: nobody will ask for it. Made after the thread's details,
// and so gone before them.
struct leavings {
    thread_details & mine = details();
    ~leavings() {
        if (!has_python()) {
            return; // nobody reads any more, and `dropped` may be gone
        }
        const auto drop = [](const std::vector<uint64_t> & numbers) {
            dropped.insert(dropped.end(), numbers.begin(), numbers.end());
        };
        try {
            std::lock_guard<fork_safe_mutex> hold(foreign_lock);
            for (const failure & f : mine.raised) {
                dropped.push_back(f.number);
            }
            drop(mine.failures);
            for (const kept_error & error : mine.kept) {
                drop(error.failures);
            }
        } catch (const std::bad_alloc &) {
            return; // then these exceptions stay
        }
    }
};

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
            static thread_local const leavings at_the_end;
            (void) at_the_end;
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

// What computations use: none of it may be freed. Backends, threads and schedulers compute; what is
// used in steps may be changed between them.
struct use_of {
    const void * object;
    bool         in_steps;
    bool operator==(const use_of & other) const { return object == other.object && in_steps == other.in_steps; }
};
inline std::vector<use_of> at_work;

// With computing_lock held.
inline bool used(const void * object) {
    return std::any_of(at_work.begin(), at_work.end(), [&](const use_of & use) { return use.object == object; });
}

// Schedulers whose eval callback was taken away while they were used. ggml calls it for each node
// without looking whether it is still there, so NULL has to wait.
inline std::vector<ggml_backend_sched_t> without_eval_callback;

// With computing_lock held: NULL has waited long enough where nothing is computed any more.
inline void take_eval_callbacks() {
    auto &     waiting = without_eval_callback;
    const auto ready = std::partition(waiting.begin(), waiting.end(), [](const void * s) { return used(s); });
    std::for_each(ready, waiting.end(),
                  [](ggml_backend_sched_t s) { ggml_backend_sched_set_eval_callback(s, nullptr, nullptr); });
    waiting.erase(ready, waiting.end());
}

// One on this thread: the callbacks that it calls. One inside a callback of another has its own.
struct computation {
    std::vector<const void *> outer;
    std::vector<use_of>       uses;                   // its part of at_work
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
        for (const use_of & use : uses) {
            at_work.erase(std::find(at_work.begin(), at_work.end(), use));
        }
        --n_computing;
        take_eval_callbacks();
    }
};
// In a child of a fork only the computations of the thread that forked are there.
inline void forget_other_threads() {
    n_computing = 0;
    at_work.clear();
    for (const computation * mine = details().computing; mine; mine = mine->before) {
        ++n_computing;
        at_work.insert(at_work.end(), mine->uses.begin(), mine->uses.end());
    }
    take_eval_callbacks();
}
inline bool computes_somewhere() {
    std::lock_guard<fork_safe_mutex> hold(computing_lock);
    return n_computing > 0;
}
struct no_computation {
    ~no_computation() {} // so that it is not an unused variable
};

// Whether all that has called Python on this thread was between two steps.
inline bool between_steps() {
    const python_entry * entry = state.entry;
    while (entry && entry->when == entered::between_steps) {
        entry = entry->entry_before;
    }
    return state.entry && !entry;
}

// With computing_lock held: it computes, and is not between two steps.
inline bool works(const void * object) {
    const bool between = between_steps();
    return std::any_of(at_work.begin(), at_work.end(), [&](const use_of & use) {
        return use.object == object && !(use.in_steps && between);
    });
}

inline void begin_work(const void * object, bool in_steps = false) {
    computation * mine = details().computing;
    mine->uses.reserve(mine->uses.size() + 1);
    at_work.push_back({ object, in_steps });
    mine->uses.push_back({ object, in_steps });
}

// The computation that begins uses these until it ends.
template <class... Objects> void use(Objects... objects) {
    std::lock_guard<fork_safe_mutex> hold(computing_lock);
    for (const void * object : { (const void *) objects... }) {
        if (object) {
            begin_work(object, true);
        }
    }
}

// Whether it may be freed.
inline bool unused(const void * object) {
    std::lock_guard<fork_safe_mutex> hold(computing_lock);
    if (used(object)) {
        check::why = "a computation that has not ended uses it";
        return false;
    }
    return true;
}

// Threads that were made: how many forks before. The child of a fork has none of those of its parent.
inline by_address<unsigned> pool_table;

inline void note_threads_made(const ggml_threadpool * pool) {
    if (pool) {
        pool_table.note(pool, n_forks);
    }
}

inline bool of_this_process(const ggml_threadpool * pool) {
    if (pool && pool_table.find(pool).value_or(n_forks) != n_forks) {
        check::why = "its threads are those of the process that was forked";
        return false;
    }
    return true;
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
        if (entry->when == entered::in_kernel) {
            return true;
        }
    }
    return false;
}

// A computation on these threads begins, unless they are in the midst of one.
inline bool idle(const ggml_threadpool * pool) {
    if (pool) {
        if (!of_this_process(pool)) {
            return false;
        }
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
    if (scheduler && !idle(scheduler)) {
        return false;
    }
    std::lock_guard<fork_safe_mutex> hold(computing_lock);
    begin_work(context);
    return true;
}
inline bool not_computing(ggml_opt_context_t context) {
    ggml_backend_sched_t scheduler = scheduler_of(context);
    return !scheduler || not_computing(scheduler);
}
inline bool backends_idle(ggml_opt_context_t context) {
    ggml_backend_sched_t scheduler = scheduler_of(context);
    return !scheduler || backends_idle(scheduler);
}

// A scheduler gets another eval callback: what waits must not take that away.
inline void replace_eval_callback(ggml_backend_sched_t scheduler) {
    std::lock_guard<fork_safe_mutex> hold(computing_lock);
    auto & waiting = without_eval_callback;
    waiting.erase(std::remove(waiting.begin(), waiting.end(), scheduler), waiting.end());
}

// It got that of nobody: NULL comes in its place as soon as it may.
inline void end_eval_callback(ggml_backend_sched_t scheduler) {
    std::lock_guard<fork_safe_mutex> hold(computing_lock);
    without_eval_callback.push_back(scheduler);
    take_eval_callbacks();
}

} // namespace ggml_cffi

// Whether a computation uses it, so that freeing it is refused.
static bool ggml_cffi_in_use(const void * object) {
    std::lock_guard<ggml_cffi::fork_safe_mutex> hold(ggml_cffi::computing_lock);
    return ggml_cffi::used(object);
}
