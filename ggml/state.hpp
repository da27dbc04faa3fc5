// What the guard knows of each thread: the guarded call that it is in, and what went wrong there.

#include <csetjmp>
#include <cstdint>
#include <string>
#include <vector>

namespace ggml_cffi {

// What went wrong in the last call of this thread; _runtime.py reads these numbers.
enum error_kind : int {
    no_error = 0,
    aborted = 1,
    null_argument = 2,
    bad_enumerator = 3,
    not_allowed = 4,
    out_of_memory = 5,
    cpp_exception = 6,
    callback_raised = 7,
    not_loaded = 8,
    not_supported = 9,
};

// What an abort has left half freed; _runtime.py reads these numbers.
enum lost : int { nothing_lost = 0, freed_argument_lost = 1, first_argument_lost = 2 };

// How a function may be left when ggml aborts inside it.
enum class leave { by_throw, compute, by_jump };

struct abort_error {
    std::string message;
};

// What the guard itself finds wrong with what a function has made or done.
struct refused {
    std::string message;
};

// A function that a loadable backend would have.
struct not_there {
    std::string message;
};

// A guarded region; there is a place to jump to where no exception may leave ggml, or not always.
struct region {
    leave     how;
    int       threads;
    jmp_buf * jump;
    volatile bool running; // the function itself, after what is checked; volatile: read after a jump
};

struct python_entry;
struct computation;

// What a thread needs at every call: plain data, which costs nothing to reach.
struct thread_state {
    region *     inside = nullptr;     // the innermost guarded region, null outside and in Python
    int          kind = no_error;
    int          index = -1;           // which argument; after an abort, what is lost
    int          result = 0;           // of the last call: whether not NULL or false; a status
    bool         raised = false;       // a callback of the present call failed
    bool         speaks = false;       // a message to an RPC worker, or its answer, is under way
    const python_entry * entry = nullptr; // the innermost Python function that ggml has called
    uint64_t     serial = 0;           // the present, or else the last, guarded call
    uint64_t     n_calls = 0;          // so far
    uint64_t     log_serial = 0;       // the call that `log` belongs to
};
static thread_local thread_state state;

// What a Python function raised: a number under which _callbacks.py keeps the exception.
struct failure {
    uint64_t     number;
    uint64_t     call;     // the guarded call that led to the function
    const void * userdata; // of the function
};

// What went wrong in a call, put aside while others are made.
struct kept_error {
    int                   kind;
    int                   index;
    uint64_t              serial;
    uint64_t              log_serial;
    uint64_t              failed_call;
    uint64_t              worker_serial;
    std::string           message;
    std::string           log;
    std::string           worker;
    std::vector<uint64_t> failures;
};

// And what it needs when something went wrong, or in a computation.
struct thread_details {
    std::string               message;
    std::string               log;     // what ggml complained of during that call
    std::string               worker;  // the RPC worker that it failed over, and why, in two lines;
    uint64_t                  worker_serial = 0; // the call
    computation *             computing = nullptr; // the innermost
    std::vector<const void *> entered; // callbacks, by userdata, that the present computation called
    std::vector<failure>      raised;  // in guarded calls that have not ended
    std::vector<uint64_t>     failures; // the numbers of those in the call that ended last,
    uint64_t                  failed_call = 0; // which is this one
    std::vector<kept_error>   kept;
};
inline thread_details & details() {
    static thread_local thread_details mine;
    return mine;
}

} // namespace ggml_cffi

// The garbage collector may run between a call of lib and the look at its error: what it frees must not
// take that away. Errors are given back in the opposite order.
static void ggml_cffi_keep_error(void) {
    using namespace ggml_cffi;
    thread_details & d = details();
    d.kept.push_back({ state.kind, state.index, state.serial, state.log_serial, d.failed_call, d.worker_serial, {}, {},
                       {}, {} });
    d.kept.back().worker.swap(d.worker);
    d.kept.back().message.swap(d.message);
    d.kept.back().log.swap(d.log);
    d.kept.back().failures.swap(d.failures);
}

static void ggml_cffi_give_back_error(void) {
    using namespace ggml_cffi;
    thread_details & d = details();
    kept_error &     error = d.kept.back();
    state.kind = error.kind;
    state.index = error.index;
    state.serial = error.serial;
    state.log_serial = error.log_serial;
    d.failed_call = error.failed_call;
    d.worker_serial = error.worker_serial;
    d.worker.swap(error.worker);
    d.message.swap(error.message);
    d.log.swap(error.log);
    d.failures.swap(error.failures);
    d.kept.pop_back();
}
