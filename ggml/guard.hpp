// The guard: what stands between Python and ggml's abort().
//
// Every bound function is called through ggml_cffi::call, one instance per function address. It
// checks pointers and enums, enters a guarded region, and turns what leaves ggml other than by
// return (an abort, a C++ exception) into an error of the calling thread. The region ends where
// Python is entered from a callback, so that nothing unwinds through CPython's frames.

#include <algorithm>
#include <array>
#include <atomic>
#include <csetjmp>
#include <cxxabi.h>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <exception>
#include <mutex>
#include <new>
#include <string>
#include <tuple>
#include <type_traits>
#include <unistd.h>
#include <unwind.h>
#include <vector>

namespace ggml_cffi {

inline std::atomic<bool> user_abort{false};           // Python wants to hear of the end

// ---- abort

struct kernel_search {
    const void * region;
    bool         found;
};

inline bool is_cpu_library(const char * path) {
    const char * slash = std::strrchr(path, '/');
    return std::strstr(slash ? slash : path, "libggml-cpu");
}

inline _Unwind_Reason_Code find_kernel(_Unwind_Context * context, void * data) {
    if (_Unwind_GetCFA(context) > (uintptr_t) ((kernel_search *) data)->region) { // the stack grows downwards
        return _URC_END_OF_STACK;
    }
    Dl_info info;
    if (dladdr((void *) _Unwind_GetIP(context), &info) && info.dli_fname && is_cpu_library(info.dli_fname)) {
        ((kernel_search *) data)->found = true;
        return _URC_END_OF_STACK;
    }
    return _URC_NO_REASON;
}

// Whether the CPU backend's own code is running inside the guarded call: its other threads would then
// wait for this one in a barrier for ever.
inline bool in_kernel(const region * inside) {
    kernel_search search{inside, false};
    _Unwind_Backtrace(find_kernel, &search);
    return search.found;
}

struct free_search {
    const void * region;
    bool         found;
};

inline _Unwind_Reason_Code find_free(_Unwind_Context * context, void * data) {
    auto & search = *(free_search *) data;
    if (_Unwind_GetCFA(context) > (uintptr_t) search.region) { // the stack grows downwards
        return _URC_END_OF_STACK;
    }
    const auto * start = (const void *) _Unwind_GetRegionStart(context);
    search.found = std::find(std::begin(destructors), std::end(destructors), start) != std::end(destructors);
    return search.found ? _URC_END_OF_STACK : _URC_NO_REASON;
}

// Whether ggml is freeing something, somewhere inside the guarded call: in a destructor, perhaps,
// which no exception may leave.
inline bool is_freeing(const region * inside) {
    free_search search{inside, false};
    _Unwind_Backtrace(find_free, &search);
    return search.found;
}

inline void tell_python(const char * message);

// A thread that a computation needs cannot be started: no barrier waits for anybody yet, and those
// that were started before go on waiting for work.
inline bool is_about_a_thread_to_start(const char * message) {
    return std::strstr(message, "ggml-cpu") && std::strstr(message, "GGML_ASSERT(rc == 0) failed");
}

inline void on_abort(const char * message) {
    net::on_abort(message);
    region * inside = state.inside;
    if (inside && !(inside->how == leave::compute && inside->threads != 1 && in_kernel(inside) &&
                    !is_about_a_thread_to_start(message))) {
        const bool freeing = inside->how == leave::by_jump || is_freeing(inside);
        caught_aborts.fetch_add(!freeing || inside->jump, std::memory_order_relaxed);
        if (!freeing) {
            throw abort_error{message};
        }
        if (inside->jump) {
            details().message = message;
            longjmp(*inside->jump, 1);
        }
    }
    // Nobody can catch it: ggml ends the process when this returns, as it would without us, and
    // faulthandler prints Python's traceback. The first thread does; others that abort meanwhile
    // wait for the end.
    static std::atomic_flag ending = ATOMIC_FLAG_INIT;
    while (ending.test_and_set()) {
        pause();
    }
    if (user_abort && has_python()) {
        tell_python(message);
    } else {
        std::fprintf(stderr, "%s\n", message);
        std::fflush(stderr);
    }
}

// ---- a guarded call

template <auto F, class Traits> struct call;

// C may call a guarded function itself, having its address, inside of another guarded call: what
// callbacks raise afterwards is still of the outer call.
struct outer_serial {
    thread_state & s;
    const bool     nested;
    const uint64_t serial;
    explicit outer_serial(thread_state & of) : s(of), nested(of.inside), serial(of.serial) {}
    outer_serial(const outer_serial &) = delete;
    ~outer_serial() {
        if (nested) {
            s.serial = serial;
        }
    }
};

template <class R, class... A, R (*F)(A...), class Traits> struct call<F, Traits> {
    // GCC gives a forced unwind, which is no object, as a reference to nothing: no matter for UBSan.
    [[gnu::no_sanitize("null")]] static R now(A... a) {
        thread_state & s = state;
        const outer_serial kept(s);
        s.kind = no_error;
        s.serial = ++s.n_calls;
        const bool raised_before = s.raised;
        s.raised = false;
        region here{Traits::how, 1, nullptr, false};
        std::conditional_t<Traits::how == leave::compute, computation, no_computation> mine;
        region * const outer = s.inside;
        [[maybe_unused]] typename Traits::scope held; // up here, so that it ends after a jump as well
        jmp_buf jump;
        if constexpr (Traits::how == leave::by_jump || Traits::frees_inside) {
            here.jump = &jump;
            if (setjmp(jump)) {
                s.inside = outer;
                end_failures(s, raised_before);
                s.kind = aborted;
                s.index = here.running || Traits::frees_inside ? what_is_lost : nothing_lost;
                count_freed(here, false, a...);
                if constexpr (Traits::frees_inside) {
                    note_broken(std::get<0>(std::tuple<A...>(a...)), false);
                }
                return zero();
            }
        }
        s.inside = &here;
        try {
            // inside the region: what is required may be asked of ggml, which may abort over it
            if (!is_whole(here, a...) || !check(std::make_index_sequence<sizeof...(A)>{}, a...)) {
                s.inside = outer;
                end_failures(s, raised_before);
                return zero();
            }
            here.threads = Traits::threads(a...);
            Traits::before(a...);
            here.running = true;
            if constexpr (std::is_void_v<R>) {
                [[maybe_unused]] const uint64_t use = use_of_freed(a...);
                F(a...);
                count_freed(here, true, a...);
                end_use_of_freed(use, a...);
                Traits::after(a...);
                s.inside = outer;
                finish(s, raised_before);
            } else {
                R result = F(a...);
                if constexpr (Traits::makes != handle::none) {
                    made(Traits::makes, result);
                    note_made_of(result);
                }
                look_at(s, outer, result, a...);
                s.inside = outer;
                if (finish(s, raised_before)) {
                    take_back(s, result, a...);
                    return zero();
                }
                note_result(s, result);
                return result;
            }
        } catch (const abort_error & e) {
            fail(s, outer, raised_before, aborted, e.message.c_str());
            s.index = nothing_lost; // in a destructor it would have jumped
        } catch (const refused & e) {
            fail(s, outer, raised_before, not_allowed, e.message.c_str());
        } catch (const not_there & e) {
            fail(s, outer, raised_before, not_supported, e.message.c_str());
        } catch (const std::bad_alloc & e) {
            fail(s, outer, raised_before, out_of_memory, e.what());
            count_freed(here, false, a...);
        } catch (const std::exception & e) {
            fail(s, outer, raised_before, cpp_exception, e.what());
            count_freed(here, false, a...);
        } catch (const char * text) {
            fail(s, outer, raised_before, cpp_exception, text);
            count_freed(here, false, a...);
        } catch (abi::__forced_unwind &) {
            throw; // the thread is being cancelled
        } catch (...) {
            fail(s, outer, raised_before, cpp_exception, "an unknown C++ exception");
            count_freed(here, false, a...);
        }
        return zero();
    }

  private:
    static R zero() {
        if constexpr (!std::is_void_v<R>) {
            return R{};
        }
    }

    static constexpr lost what_is_lost = Traits::frees != handle::none ? freed_argument_lost
                                         : Traits::frees_inside        ? first_argument_lost
                                                                       : nothing_lost;

    // A function that frees has done so, or was left on the way.
    static void count_freed(const region & here, bool completely, A... a) {
        if constexpr (Traits::frees != handle::none) {
            if (here.running) {
                freed(Traits::frees, std::get<Traits::freed_argument>(std::tuple<A...>(a...)), completely,
                      !completely && Traits::how == leave::by_jump);
            }
        }
    }

    // What it frees needs its backend no more; what is lost does.
    static uint64_t use_of_freed(A... a) {
        if constexpr (Traits::frees != handle::none) {
            return use_of(as_user(std::get<Traits::freed_argument>(std::tuple<A...>(a...))));
        }
        return 0;
    }
    static void end_use_of_freed(uint64_t use, A... a) {
        if constexpr (Traits::frees != handle::none) {
            end_use(as_user(std::get<Traits::freed_argument>(std::tuple<A...>(a...))), use);
        }
    }

    // Not what an abort has left half freed: that is lost.
    static bool is_whole(region & here, A... a) {
        if constexpr (Traits::frees != handle::none || Traits::frees_inside) {
            const auto object = std::get<Traits::freed_argument>(std::tuple<A...>(a...));
            if constexpr (std::is_pointer_v<decltype(object)>) {
                if (is_broken(object)) {
                    state.kind = aborted;
                    state.index = what_is_lost;
                    details().message = "it is lost: an earlier abort has left it half freed";
                    here.running = true;
                    count_freed(here, false, a...);
                    return false;
                }
            }
        }
        return true;
    }

    // What `after` throws takes away what was made.
    template <class Result>
    static void look_at(thread_state & s, region * outer, const Result & result, A... a) {
        if constexpr (Traits::makes != handle::none) {
            try {
                Traits::after(result, a...);
            } catch (...) {
                s.inside = outer;
                take_back(s, result, a...);
                throw;
            }
        } else {
            Traits::after(result, a...);
        }
    }

    // A callback has raised, so nobody gets what was made.
    template <class Result> static void take_back(thread_state & s, const Result & result, A... a) {
        if constexpr (Traits::makes != handle::none) {
            if (is_something(result)) {
                const uint64_t serial = s.serial;
                Traits::undo(result, a...); // a guarded call
                s.serial = serial;
                s.kind = callback_raised;
            }
        }
    }

    // What raising.hpp may take for a failure: NULL, false, a status.
    template <class Result> static void note_result(thread_state & s, const Result & result) {
        if constexpr (std::is_pointer_v<Result>) {
            s.result = result != nullptr;
        } else if constexpr (std::is_same_v<Result, bool> || std::is_enum_v<Result>) {
            s.result = (int) result;
        }
    }

    static bool finish(thread_state & s, bool raised_before) {
        const bool raised = end_failures(s, raised_before);
        if (raised) {
            s.kind = callback_raised;
        }
        return raised;
    }

    static void fail(thread_state & s, region * outer, bool raised_before, int kind, const char * text) {
        s.inside = outer;
        end_failures(s, raised_before);
        s.kind = kind;
        details().message = text;
    }

    // Whether a callback has raised in this call, which ends here.
    static bool end_failures(thread_state & s, bool raised_before) {
        bool raised = s.raised;
        s.raised = raised_before;
        if (s.speaks) {
            net::end_exchange();
        }
        if (raised || (Traits::how == leave::compute && foreign_raised)) {
            raised = collect_failures(Traits::how == leave::compute) || raised;
        }
        return raised;
    }

    template <size_t... I> static bool check(std::index_sequence<I...>, A... a) {
        if (!(check_one<I>(a) && ...)) {
            return false;
        }
        if constexpr (Traits::has_requirements) {
            check::why.clear(); // of what another call has looked at, and not told
            if (const char * broken = Traits::require(a...)) {
                state.kind = not_allowed;
                details().message = broken;
                if (!check::why.empty()) {
                    details().message += ": " + check::why;
                    check::why.clear();
                }
                return false;
            }
        }
        return true;
    }

    template <size_t I, class T> static bool check_one(T value) {
        if constexpr (std::is_pointer_v<T>) {
            if constexpr ((Traits::nonnull >> I) & 1) {
                if (__builtin_expect(value == nullptr, 0)) {
                    state.kind = null_argument;
                    state.index = (int) I;
                    return false;
                }
            }
            if constexpr (std::is_same_v<T, ggml_backend_dev_t> || std::is_same_v<T, ggml_backend_reg_t> ||
                          std::is_same_v<T, ggml_backend_buffer_type_t>) {
                if (__builtin_expect(!is_loaded(value), 0)) {
                    state.kind = not_loaded;
                    state.index = (int) I;
                    return false;
                }
            }
        } else if constexpr (std::is_enum_v<T>) {
            if (__builtin_expect(!is_enumerator(value), 0)) {
                state.kind = bad_enumerator;
                state.index = (int) I;
                details().message = std::to_string((long long) value);
                return false;
            }
        }
        return true;
    }
};

template <uint64_t Nonnull, leave How, handle Makes = handle::none, handle Frees = handle::none, size_t Freed = 0>
struct traits {
    static constexpr uint64_t nonnull = Nonnull;
    static constexpr leave how = How;
    static constexpr handle makes = Makes; // the result is the caller's to free
    static constexpr handle frees = Frees; // the argument number Freed
    static constexpr size_t freed_argument = Freed;
    static constexpr bool frees_inside = false; // ggml may free something on the way
    static constexpr bool has_requirements = false;
    struct scope {}; // what is held meanwhile
    template <class... A> static int threads(A...) { return 1; }
    template <class... A> static void before(A...) {}
    template <class... A> static void after(A...) {}
    template <class... A> static void undo(A...) {} // frees the result
};

// ---- what C gets where Python cannot answer

// `nr` came after the meta device itself.
template <class State> auto set_first_repeat(State & s, int) -> decltype((void) s.nr) { s.nr[0] = 1; }
template <class State> void set_first_repeat(State &, long) {}

// The split state that never fails, for when Python cannot answer: all of the tensor on each device.
template <class State> State mirrored() {
    State s{};
    s.axis = (decltype(s.axis)) 10; // GGML_BACKEND_SPLIT_AXIS_MIRRORED
    s.n_segments = 1;
    set_first_repeat(s, 0);
    return s;
}

} // namespace ggml_cffi

// ---- what _runtime.py, _callbacks.py and _loader.py call (declared in the cdef)

static int ggml_cffi_error(void) { return ggml_cffi::state.kind; }
static int ggml_cffi_error_index(void) { return ggml_cffi::state.index; }
static const char * ggml_cffi_error_text(void) { return ggml_cffi::details().message.c_str(); }

// What ggml logged as an error or a warning during this thread's last call, "" if nothing.
static const char * ggml_cffi_error_log(void) {
    ggml_cffi::thread_state & s = ggml_cffi::state;
    return s.log_serial == s.serial ? ggml_cffi::details().log.c_str() : "";
}

static void ggml_cffi_note_cut(const struct ggml_tensor * tensor, int axis, bool in_segments) {
    ggml_cffi::note_cut(tensor, axis, in_segments);
}

static void ggml_cffi_clear(void) { ggml_cffi::state.kind = ggml_cffi::no_error; }

// A Python function has raised what _callbacks.py keeps under this number. False: nobody will ask for
// it, since no guarded call and no computation led to the function.
static bool ggml_cffi_raise(uint64_t number) { return ggml_cffi::raise(number); }

// Whether something was raised in this guarded call before the present Python function was called.
static bool ggml_cffi_failing(void) {
    const ggml_cffi::python_entry * entry = ggml_cffi::state.entry;
    return entry && entry->raised_before;
}

// The next of the numbers raised in the call that has just ended, first one first; then 0.
static uint64_t ggml_cffi_next_failure(void) { return ggml_cffi::next_failure(); }

// The next number that nobody asked for in time; then 0.
static uint64_t ggml_cffi_next_dropped(void) { return ggml_cffi::next_dropped(); }

static int ggml_cffi_n_handles(void) { return (int) ggml_cffi::handle::n_handles; }
static const char * ggml_cffi_handle_name(int kind) { return ggml_cffi::handle_names[kind]; }
static int64_t ggml_cffi_live_handles(int kind) { return ggml_cffi::handle_table.at(kind).live; }
static int64_t ggml_cffi_leaked_handles(int kind) { return ggml_cffi::handle_table.at(kind).leaked; }
static uint64_t ggml_cffi_caught_aborts(void) { return ggml_cffi::caught_aborts; }
static int ggml_cffi_n_buffers(struct ggml_gallocr * galloc) {
    return ggml_cffi::n_buffers_of(galloc);
}
static int64_t ggml_cffi_remembered(void) { return ggml_cffi::remembered; }


static void ggml_cffi_set_user_abort(bool wanted) { ggml_cffi::user_abort = wanted; }

static void ggml_cffi_py_abort(const char * message);

inline void ggml_cffi::tell_python(const char * message) {
    python_entry entry;
    ggml_cffi_py_abort(message);
}

static void ggml_cffi_py_log(int level, const char * text);

// ggml's log: errors and warnings are kept for the exception of the call that failed, all go to
// Python.
static void ggml_cffi_log(enum ggml_log_level level, const char * text, void *) {
    ggml_cffi::thread_state & s = ggml_cffi::state;
    static thread_local bool error_line = false;
    if (level != GGML_LOG_LEVEL_CONT) {
        error_line = level == GGML_LOG_LEVEL_ERROR || level == GGML_LOG_LEVEL_WARN;
    }
    if (error_line) {
        if (s.log_serial != s.serial) {
            ggml_cffi::details().log.clear();
            s.log_serial = s.serial;
        }
        ggml_cffi::details().log += text;
    }
    if (std::strstr(text, "RPC server version mismatch")) {
        ggml_cffi::net::give_up(text); // ggml would go on without the connection
    }
    if (ggml_cffi::has_python()) {
        ggml_cffi::python_entry entry;
        ggml_cffi_py_log((int) level, text);
    }
}

// Called once, at import. Whether the process could be prepared.
static bool ggml_cffi_install(void) {
    ggml_set_abort_callback(ggml_cffi::on_abort);
    ggml_log_set(ggml_cffi_log, nullptr);
    return ggml_cffi::prepare_process();
}
