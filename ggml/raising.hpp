// A failure leaves the very call that failed: capi's functions are those of lib once more, and tell by
// their `self` that they raise, and when. What Python runs between a call and the look at its error (a signal
// handler, a finaliser, a profiler) may make calls of its own, and those begin by forgetting the error.

#include <cerrno>
#include <string>
#include <vector>

namespace ggml_cffi {

// The exception. Its arguments: kind, index, message, log, a list of what callbacks raised, errno,
// where the guard has nothing to say the status that C returned, 0 for NULL and false, and the RPC worker
// that is to blame, with the reason in a second line, or nothing.
// _runtime.py makes of them what the caller gets to see.
static PyObject * failed_class = nullptr;

// Which results are failures of themselves: _runtime.py knows these numbers.
enum fails : int { by_guard, on_zero, on_nonzero, n_fails };

// The `self` of the functions that raise: an object for each of these.
static PyObject * raising_self[n_fails];

static inline bool failed(PyObject * self) {
    if (self == raising_self[on_zero]) {
        return state.kind || !state.result;
    }
    if (self == raising_self[by_guard]) {
        return state.kind;
    }
    return self == raising_self[on_nonzero] && (state.kind || state.result);
}

static PyObject * as_text(const std::string & text) {
    return PyUnicode_DecodeUTF8(text.data(), (Py_ssize_t) text.size(), "surrogateescape");
}

// What callbacks raised, by number: _callbacks.py puts it there.
static PyObject * raised_by_number = nullptr;

// The exceptions of these numbers, which are then nowhere else: a failure that is lost on its way, over
// an interrupt perhaps, takes them with it.
static PyObject * take_raised(const std::vector<uint64_t> & numbers) {
    PyObject * taken = PyList_New(0);
    for (size_t i = 0; taken && i < numbers.size(); ++i) {
        PyObject * number = PyLong_FromUnsignedLongLong(numbers[i]);
        PyObject * error = number ? PyDict_GetItemWithError(raised_by_number, number) : nullptr;
        if (error && (PyList_Append(taken, error) || PyDict_DelItem(raised_by_number, number))) {
            error = nullptr;
        }
        Py_XDECREF(number);
        if (!error && PyErr_Occurred()) {
            Py_DECREF(taken);
            return nullptr;
        }
    }
    return taken;
}

// The call that has just ended on this thread has failed. All is taken from the thread before Python
// is asked for memory: that may run the collector, and so calls of its own.
static PyObject * raise_failed() {
    thread_state &        s = state;
    thread_details &      d = details();
    const int             kind = s.kind, index = s.index, result = kind ? 0 : s.result;
    std::string           message, log, worker;
    std::vector<uint64_t> failures;
    message.swap(d.message);
    if (s.log_serial == s.serial) {
        log.swap(d.log);
    }
    if (d.failed_call == s.serial) {
        failures.swap(d.failures);
    }
    if (d.worker_serial == s.serial) {
        worker.swap(d.worker);
    }
    s.kind = no_error;
    _cffi_restore_errno(); // as the function left it
    const int  code = errno;
    PyObject * arguments = Py_BuildValue(
        "(iiNNNiiN)", kind, index, as_text(message), as_text(log), take_raised(failures), code, result, as_text(worker));
    if (arguments) {
        PyErr_SetObject(failed_class, arguments);
        Py_DECREF(arguments);
    }
    return nullptr;
}

// raising(function, fails): a function of lib as one that raises. It, its definition and its name stay for
// the life of the process: nothing tells when the last user of a definition is gone.
static PyObject * make_raising(PyObject *, PyObject * arguments) {
    PyObject * function;
    int        when;
    if (!PyArg_ParseTuple(arguments, "Oi", &function, &when)) {
        return nullptr;
    }
    if (when < 0 || when >= n_fails) {
        PyErr_SetString(PyExc_ValueError, "no such kind of failure");
        return nullptr;
    }
    PyCFunction code = PyCFunction_GetFunction(function);
    if (!code) {
        return nullptr;
    }
    PyObject * name = PyObject_GetAttrString(function, "__name__");
    PyObject * bytes = name ? PyUnicode_AsUTF8String(name) : nullptr;
    Py_XDECREF(name);
    if (!bytes) {
        return nullptr;
    }
    auto * definition = new (std::nothrow)
        PyMethodDef{ PyBytes_AsString(bytes), code, PyCFunction_GetFlags(function), nullptr };
    if (!definition) {
        Py_DECREF(bytes);
        return PyErr_NoMemory();
    }
    return PyCFunction_NewEx(definition, raising_self[when], nullptr);
}

static PyMethodDef raising_definition = { "raising", make_raising, METH_VARARGS, nullptr };

static bool add_to(PyObject * module, const char * name, PyObject * made) {
    const bool added = made && PyObject_SetAttrString(module, name, made) == 0;
    Py_XDECREF(made);
    return added;
}

static bool add_builders(PyObject * module); // building.hpp

// The module as cffi makes it, with `Failed`, `raised`, `raising` and what building.hpp adds.
static PyObject * init(const char * name, Py_ssize_t version, const struct _cffi_type_context_s * context) {
    PyObject * module = _cffi_init(name, version, context);
    if (!module) {
        return nullptr;
    }
    if (!failed_class) {
        failed_class = PyErr_NewException("ggml_cffi._gen._ggml.Failed", nullptr, nullptr);
    }
    if (!raised_by_number) {
        raised_by_number = PyDict_New();
    }
    bool complete = failed_class && raised_by_number;
    for (PyObject *& self : raising_self) {
        if (!self) {
            self = PyObject_CallObject((PyObject *) &PyBaseObject_Type, nullptr);
        }
        complete = complete && self;
    }
    Py_XINCREF(failed_class); // add_to takes a reference
    Py_XINCREF(raised_by_number);
    if (!add_to(module, "Failed", failed_class) || !add_to(module, "raised", raised_by_number) || !complete ||
        !add_to(module, "raising", PyCFunction_NewEx(&raising_definition, nullptr, nullptr)) ||
        !add_builders(module)) {
        Py_DECREF(module);
        return nullptr;
    }
    return module;
}

} // namespace ggml_cffi

// cffi's text, which comes after this one, calls these. Each of its functions ends its call so, with
// `self` at hand, before it looks at the result.
#define _cffi_init ggml_cffi::init
#undef Py_END_ALLOW_THREADS
#define Py_END_ALLOW_THREADS      \
    PyEval_RestoreThread(_save);  \
    }                             \
    if (__builtin_expect(ggml_cffi::failed(self), 0)) return ggml_cffi::raise_failed();

// What fails: _loader.py asks for it once, as a cffi with another macro would never raise.
static void ggml_cffi_fail(void) { ggml_cffi::state.kind = ggml_cffi::not_allowed; }
