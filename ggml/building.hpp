// Tensor objects made in C++: what the operations of `ops` and Context.tensor do for operands and
// shapes that need no second look. Everything else they leave to Python, which says what is wrong.

#include <structmember.h>

#include <cfloat>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <mutex>

namespace ggml_cffi {

// ---- a context's lock, and where its next tensors are made

enum made_as : int { as_leaf, as_input, as_result, n_made_as }; // context.py knows these numbers

// Python's Context has one. An arena has room for `left` calls more; none once it is closed.
struct room {
    PyObject_HEAD
    std::recursive_timed_mutex mutex;
    PyObject *                 arena[n_made_as];
    Py_ssize_t                 left[n_made_as];
    bool                       is_shut; // what is described here is freed, or about to be
};

// With the GIL; false, with an exception, where a signal came while another thread had the lock.
static bool enter(room * r) {
    while (!r->mutex.try_lock()) {
        PyThreadState * saved = PyEval_SaveThread();
        const bool      locked = r->mutex.try_lock_for(std::chrono::milliseconds(50));
        PyEval_RestoreThread(saved);
        if (locked) {
            return true;
        }
        if (PyErr_CheckSignals()) {
            return false;
        }
    }
    return true;
}

static PyObject * room_new(PyTypeObject * type, PyObject *, PyObject *) {
    auto * r = (room *) PyType_GenericAlloc(type, 0);
    if (r) {
        new (&r->mutex) std::recursive_timed_mutex;
    }
    return (PyObject *) r;
}

static void forget_arenas(room * r) {
    for (int i = 0; i < n_made_as; ++i) {
        PyObject * old = r->arena[i];
        r->left[i] = 0;
        r->arena[i] = nullptr;
        Py_XDECREF(old);
    }
}

static PyObject * room_shut(PyObject * self, PyObject *) {
    ((room *) self)->is_shut = true;
    forget_arenas((room *) self);
    Py_RETURN_NONE;
}

static void room_dealloc(PyObject * self) {
    PyTypeObject * type = Py_TYPE(self);
    forget_arenas((room *) self);
    ((room *) self)->mutex.~recursive_timed_mutex();
    ((freefunc) PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject * room_enter(PyObject * self, PyObject *) {
    if (!enter((room *) self)) {
        return nullptr;
    }
    Py_INCREF(self);
    return self;
}

static PyObject * room_exit(PyObject * self, PyObject *) {
    ((room *) self)->mutex.unlock();
    Py_RETURN_NONE;
}

// In a forked child, where a thread of the parent's may have had the lock.
static PyObject * room_renew(PyObject * self, PyObject *) {
    new (&((room *) self)->mutex) std::recursive_timed_mutex;
    forget_arenas((room *) self);
    Py_RETURN_NONE;
}

static bool is_kind(int kind) {
    if (kind < 0 || kind >= n_made_as) {
        PyErr_SetString(PyExc_ValueError, "no such kind of tensor");
        return false;
    }
    return true;
}

static PyObject * room_open(PyObject * self, PyObject * arguments) {
    int        kind;
    PyObject * arena;
    Py_ssize_t left;
    if (!PyArg_ParseTuple(arguments, "iOn", &kind, &arena, &left) || !is_kind(kind)) {
        return nullptr;
    }
    auto *     r = (room *) self;
    PyObject * old = r->arena[kind];
    Py_INCREF(arena);
    r->arena[kind] = arena;
    r->left[kind] = left;
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

// The arena for one call more, a new reference; null, without an exception, where there is none.
static PyObject * take(room * r, int kind) {
    if (r->left[kind] <= 0) {
        return nullptr;
    }
    --r->left[kind];
    Py_INCREF(r->arena[kind]);
    return r->arena[kind];
}

static PyObject * room_take(PyObject * self, PyObject * arguments) {
    int kind;
    if (!PyArg_ParseTuple(arguments, "i", &kind) || !is_kind(kind)) {
        return nullptr;
    }
    if (PyObject * arena = take((room *) self, kind)) {
        return arena;
    }
    Py_RETURN_NONE;
}

static PyMethodDef room_methods[] = {
    { "__enter__", room_enter, METH_NOARGS, nullptr },
    { "__exit__", room_exit, METH_VARARGS, nullptr },
    { "open", room_open, METH_VARARGS, nullptr },
    { "take", room_take, METH_VARARGS, nullptr },
    { "shut", room_shut, METH_NOARGS, nullptr },
    { "renew", room_renew, METH_NOARGS, nullptr },
    { nullptr, nullptr, 0, nullptr },
};
static PyType_Slot room_slots[] = {
    { Py_tp_new, (void *) room_new },
    { Py_tp_dealloc, (void *) room_dealloc },
    { Py_tp_methods, room_methods },
    { 0, nullptr },
};
static PyType_Spec room_spec = { "ggml_cffi._gen._ggml.Room", sizeof(room), 0, Py_TPFLAGS_DEFAULT, room_slots };
static PyTypeObject * room_type = nullptr;

// ---- Python's Tensor

// What tensor.py's Tensor is derived from: its attributes where C++ has them at hand.
struct tensor_base {
    PyObject_HEAD
    PyObject * handle;
    PyObject * context;
    PyObject * room; // the context's lock
    Py_ssize_t ndim;
    // Where its home keeps the array that numpy() gave views of, and under which key; null before that. The pointers
    // tell whether the tensor is still there.
    PyObject *   views;
    PyObject *   key;
    const void * data;
    const void * buffer;
};

// The class, and the ctype of its handles: tensor.py says them once.
static struct {
    PyTypeObject *            type;
    struct _cffi_ctypedescr * pointer;
    PyObject *                null; // as a handle
} tensors;

// Keeps the exception that is on its way, as its caller may be a destructor.
static void forget_view(tensor_base * t) {
    PyObject * const views = t->views, *const key = t->key;
    t->views = t->key = nullptr;
    if (views) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        if (PyDict_DelItem(views, key)) {
            PyErr_Clear(); // its home has forgotten it
        }
        Py_DECREF(views);
        Py_DECREF(key);
        PyErr_Restore(type, value, trace);
    }
}

static int tensor_traverse(PyObject * self, visitproc visit, void * arg) {
    auto * t = (tensor_base *) self;
    Py_VISIT(Py_TYPE(self)); // a class made at run time: since Python 3.9 its own tp_traverse does
    Py_VISIT(t->handle);
    Py_VISIT(t->context);
    Py_VISIT(t->room);
    Py_VISIT(t->views);
    return 0;
}

static int tensor_clear(PyObject * self) {
    auto * t = (tensor_base *) self;
    forget_view(t); // before the context, whose memory it keeps
    Py_CLEAR(t->handle);
    Py_CLEAR(t->context);
    Py_CLEAR(t->room);
    return 0;
}

static void tensor_dealloc(PyObject * self) {
    PyTypeObject * type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    tensor_clear(self);
    ((freefunc) PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static const ggml_tensor * behind(const tensor_base * t) {
    return t->handle ? (const ggml_tensor *) _cffi_to_c_pointer(t->handle, tensors.pointer) : nullptr;
}

// The tensor, to be read before the GIL is given up: whoever frees it shuts the room with the GIL. Null, with an
// exception, where that has happened. A home of another kind is kept by who has the object.
static const ggml_tensor * described(PyObject * self) {
    auto *     t = (tensor_base *) self;
    const bool gone = t->room && Py_TYPE(t->room) == room_type && ((room *) t->room)->is_shut;
    const ggml_tensor * tensor = gone ? nullptr : behind(t);
    if (!tensor && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_ValueError, gone ? "the Tensor's Context is closed" : "the Tensor has no handle");
    }
    return tensor;
}

static PyObject * tensor_ne(PyObject * self, void *) {
    const ggml_tensor * t = described(self);
    return t ? Py_BuildValue("LLLL", t->ne[0], t->ne[1], t->ne[2], t->ne[3]) : nullptr;
}

static PyObject * tensor_nb(PyObject * self, void *) {
    const ggml_tensor * t = described(self);
    return t ? Py_BuildValue("nnnn", t->nb[0], t->nb[1], t->nb[2], t->nb[3]) : nullptr;
}

static PyObject * tensor_kind(PyObject * self, void *) {
    const ggml_tensor * t = described(self);
    return t ? PyLong_FromLong(t->type) : nullptr;
}

static PyObject * tensor_made_by(PyObject * self, void *) {
    const ggml_tensor * t = described(self);
    return t ? PyLong_FromLong(t->op) : nullptr;
}

static PyObject * tensor_label(PyObject * self, void *) {
    const ggml_tensor * t = described(self);
    return t ? PyBytes_FromString(t->name) : nullptr;
}

static PyObject * tensor_has_place(PyObject * self, void *) {
    const ggml_tensor * t = described(self);
    return t ? PyBool_FromLong(t->data || check::buffer_of(t)) : nullptr;
}

static PyGetSetDef tensor_facts[] = {
    { "_ne", tensor_ne, nullptr, nullptr, nullptr },
    { "_nb", tensor_nb, nullptr, nullptr, nullptr },
    { "_kind", tensor_kind, nullptr, nullptr, nullptr },
    { "_made_by", tensor_made_by, nullptr, nullptr, nullptr },
    { "_label", tensor_label, nullptr, nullptr, nullptr },
    { "_has_place", tensor_has_place, nullptr, nullptr, nullptr },
    { nullptr, nullptr, nullptr, nullptr, nullptr },
};

// Another view of the array that its home keeps; None where it keeps none, or the tensor has moved.
static PyObject * tensor_again(PyObject * self, PyObject *) {
    static PyObject * const view = PyUnicode_InternFromString("view");
    auto *                  t = (tensor_base *) self;
    PyObject * const        array = t->views ? PyDict_GetItemWithError(t->views, t->key) : nullptr;
    if (!array) {
        if (PyErr_Occurred()) {
            return nullptr;
        }
        Py_RETURN_NONE;
    }
    Py_INCREF(array); // from here on nobody frees the context, and the tensor with it
    const ggml_tensor * tensor = behind(t);
    PyObject *          found = nullptr;
    if (tensor && tensor->data == t->data && check::buffer_of(tensor) == t->buffer) {
        found = PyObject_CallMethodObjArgs(array, view, nullptr);
    } else if (!PyErr_Occurred()) {
        Py_INCREF(Py_None);
        found = Py_None;
    }
    Py_DECREF(array);
    return found;
}

// Let its home keep the array, in a dictionary, until that is emptied or the object goes.
static PyObject * tensor_remember(PyObject * self, PyObject * arguments) {
    PyObject *views, *array;
    if (!PyArg_ParseTuple(arguments, "O!O", &PyDict_Type, &views, &array)) {
        return nullptr;
    }
    auto *              t = (tensor_base *) self;
    const ggml_tensor * tensor = behind(t);
    PyObject *          key = PyLong_FromVoidPtr(self);
    if (!tensor && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_ValueError, "the Tensor has no handle");
    }
    if (!tensor || !key) {
        Py_XDECREF(key);
        return nullptr;
    }
    forget_view(t);
    if (PyDict_SetItem(views, key, array)) {
        Py_DECREF(key);
        return nullptr;
    }
    Py_INCREF(views);
    PyObject * const old_views = t->views, *const old_key = t->key; // a signal's handler's
    t->views = views;
    t->key = key;
    t->data = tensor->data;
    t->buffer = check::buffer_of(tensor);
    Py_XDECREF(old_views);
    Py_XDECREF(old_key);
    Py_RETURN_NONE;
}

static PyMethodDef tensor_methods[] = {
    { "_again", tensor_again, METH_NOARGS, nullptr },
    { "_remember", tensor_remember, METH_VARARGS, nullptr },
    { nullptr, nullptr, 0, nullptr },
};
static PyMemberDef tensor_members[] = {
    { "_handle", T_OBJECT_EX, offsetof(tensor_base, handle), 0, nullptr },
    { "_context", T_OBJECT_EX, offsetof(tensor_base, context), 0, nullptr },
    { "_room", T_OBJECT_EX, offsetof(tensor_base, room), 0, nullptr },
    { "_ndim", T_PYSSIZET, offsetof(tensor_base, ndim), 0, nullptr },
    { nullptr, 0, 0, 0, nullptr },
};
static PyType_Slot tensor_slots[] = {
    { Py_tp_traverse, (void *) tensor_traverse },
    { Py_tp_clear, (void *) tensor_clear },
    { Py_tp_dealloc, (void *) tensor_dealloc },
    { Py_tp_members, tensor_members },
    { Py_tp_methods, tensor_methods },
    { Py_tp_getset, tensor_facts },
    { 0, nullptr },
};
static PyType_Spec tensor_spec = { "ggml_cffi._gen._ggml.TensorBase", sizeof(tensor_base), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, tensor_slots };
static PyTypeObject * tensor_base_type = nullptr;

static PyObject * set_tensor_class(PyObject *, PyObject * arguments) {
    PyObject * type, *pointer, *null;
    if (!PyArg_ParseTuple(arguments, "O!OO", &PyType_Type, &type, &pointer, &null)) {
        return nullptr;
    }
    if (!PyType_IsSubtype((PyTypeObject *) type, tensor_base_type)) {
        PyErr_SetString(PyExc_TypeError, "no class derived from TensorBase");
        return nullptr;
    }
    Py_INCREF(type);
    Py_INCREF(pointer);
    Py_INCREF(null);
    tensors.pointer = (struct _cffi_ctypedescr *) pointer;
    tensors.null = null;
    tensors.type = (PyTypeObject *) type;
    Py_RETURN_NONE;
}

static PyObject * new_tensor(PyObject * handle, PyObject * context, PyObject * room, Py_ssize_t ndim) {
    auto * made = (tensor_base *) PyType_GenericAlloc(tensors.type, 0);
    if (made) {
        Py_INCREF(handle);
        Py_INCREF(context);
        Py_INCREF(room);
        made->handle = handle;
        made->context = context;
        made->room = room;
        made->ndim = ndim;
    }
    return (PyObject *) made;
}

// ---- operations

constexpr int max_arguments = 24;

// A function of capi's that makes a tensor, and the function of Python's that it stands in for.
struct operation {
    PyObject_HEAD
    PyObject *  function;
    PyCFunction code;
    PyObject *  code_self;
    PyObject *  python;   // the same in Python, called where this one cannot
    PyObject *  failed;   // (why, *arguments): raises, for a call that has failed
    PyObject *  names;    // of the parameters, `ctx` last
    PyObject *  defaults; // by name
    int         n;        // parameters but `ctx`
    int         n_positional;
    char        kinds[max_arguments]; // t tensor, n tensor or None, i integer, f float, b bool
    int         axes;                 // of the result; -1: as many as it takes, and as the operands have
    PyObject *  default_of[max_arguments + 1]; // borrowed; null where there is none
    PyMethodDef definition;                    // with a name and a text that are never freed
};

static void operation_dealloc(PyObject * self) {
    auto *         o = (operation *) self;
    PyTypeObject * type = Py_TYPE(self);
    Py_XDECREF(o->function);
    Py_XDECREF(o->python);
    Py_XDECREF(o->failed);
    Py_XDECREF(o->names);
    Py_XDECREF(o->defaults);
    ((freefunc) PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyType_Slot operation_slots[] = {
    { Py_tp_dealloc, (void *) operation_dealloc },
    { 0, nullptr },
};
static PyType_Spec operation_spec = {
    "ggml_cffi._gen._ggml.Operation", sizeof(operation), 0, Py_TPFLAGS_DEFAULT, operation_slots
};
static PyTypeObject * operation_type = nullptr;

// What is known of the operands of one call; they have these.
struct operands {
    PyObject * room = nullptr; // the same for all of them
    PyObject * context = nullptr;
    Py_ssize_t ndim = 0; // the largest
};

// A number in the range of a float, as far as it can be told at a glance.
static bool is_single(PyObject * value) {
    if (PyFloat_Check(value)) {
        return std::fabs(PyFloat_AsDouble(value)) <= FLT_MAX;
    }
    int overflow = 0;
    return PyLong_CheckExact(value) && PyLong_AsLongLongAndOverflow(value, &overflow) != -1 && !overflow;
}

// What C is to be given for an argument, a new reference; null, with or without an exception, where
// that is not plain.
static PyObject * as_given(char kind, PyObject * value, operands & found) {
    if ((kind == 'i' && PyLong_Check(value)) || (kind == 'f' && is_single(value)) ||
        (kind == 'b' && (value == Py_True || value == Py_False))) {
        Py_INCREF(value);
        return value;
    }
    if (kind == 'n' && value == Py_None) {
        Py_INCREF(tensors.null);
        return tensors.null;
    }
    if ((kind != 't' && kind != 'n') || Py_TYPE(value) != tensors.type) {
        return nullptr;
    }
    auto * t = (tensor_base *) value;
    if (!t->handle || !t->context || !t->room || (found.room && t->room != found.room)) {
        return nullptr;
    }
    found.room = t->room;
    found.context = t->context;
    found.ndim = std::max(found.ndim, t->ndim);
    Py_INCREF(t->handle);
    return t->handle;
}

// A tuple for n arguments, with the first one to come. Whoever asks the collector sees it from now on.
static PyObject * new_arguments(Py_ssize_t n) {
    PyObject * given = PyTuple_New(n);
    if (given) {
        Py_INCREF(Py_None);
        PyTuple_SetItem(given, 0, Py_None);
    }
    return given;
}

// Call `code` with the arena as the first of `given`. Null without an exception: no room, or somebody else
// has `given` in his hands. `called`: an exception is of the call itself.
static PyObject * call_in(room * r, int kind, PyCFunction code, PyObject * self, PyObject * given, bool & called) {
    called = false;
    if (!enter(r)) {
        return nullptr;
    }
    PyObject * handle = nullptr;
    if (PyObject * arena = take(r, kind)) {
        if (PyTuple_SetItem(given, 0, arena)) {
            PyErr_Clear();
        } else {
            called = true;
            handle = code(self, given);
        }
    }
    r->mutex.unlock();
    return handle;
}

// What each parameter is given: borrowed references, `ctx` last. False, without an exception, where
// the call is not one that the signature allows.
static bool bind(const operation * o, PyObject * const * arguments, Py_ssize_t n, PyObject * keywords,
                 PyObject ** values) {
    if (n > o->n_positional) {
        return false;
    }
    std::copy(arguments, arguments + n, values);
    std::fill(values + n, values + o->n + 1, nullptr);
    const Py_ssize_t n_keywords = keywords ? PyTuple_Size(keywords) : 0;
    for (Py_ssize_t k = 0; k < n_keywords; ++k) {
        PyObject * const name = PyTuple_GetItem(keywords, k);
        int              i = o->n;
        while (i >= 0 && PyTuple_GetItem(o->names, i) != name) { // both are interned
            --i;
        }
        if (i < 0 || values[i]) {
            return false;
        }
        values[i] = arguments[n + k];
    }
    for (int i = 0; i <= o->n; ++i) {
        values[i] = values[i] ? values[i] : o->default_of[i];
        if (!values[i]) {
            return false;
        }
    }
    return true;
}

static PyObject * call_python(const operation * o, PyObject * const * arguments, Py_ssize_t n, PyObject * keywords) {
    const Py_ssize_t n_keywords = keywords ? PyTuple_Size(keywords) : 0;
    PyObject *       given = PyTuple_New(n);
    PyObject *       named = n_keywords ? PyDict_New() : nullptr;
    bool             complete = given && (named || !n_keywords);
    for (Py_ssize_t i = 0; given && i < n; ++i) {
        Py_INCREF(arguments[i]);
        PyTuple_SetItem(given, i, arguments[i]);
    }
    for (Py_ssize_t k = 0; complete && k < n_keywords; ++k) {
        complete = PyDict_SetItem(named, PyTuple_GetItem(keywords, k), arguments[n + k]) == 0;
    }
    PyObject * made = complete ? PyObject_Call(o->python, given, named) : nullptr;
    Py_XDECREF(given);
    Py_XDECREF(named);
    return made;
}

// Raise what `failed` makes of the Failed that is on its way.
static void tell_failed(const operation * o, PyObject * const * values) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject * why = value ? PyObject_GetAttrString(value, "args") : nullptr;
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    PyObject * told = why ? PyTuple_New(o->n + 1) : nullptr;
    if (!told) {
        Py_XDECREF(why);
        return;
    }
    PyTuple_SetItem(told, 0, why);
    for (int i = 0; i < o->n; ++i) {
        Py_INCREF(values[i]);
        PyTuple_SetItem(told, i + 1, values[i]);
    }
    Py_XDECREF(PyObject_CallObject(o->failed, told)); // it raises
    Py_DECREF(told);
}

static PyObject * operate(PyObject * self, PyObject * const * arguments, Py_ssize_t n, PyObject * keywords) {
    auto *     o = (operation *) self;
    operands   found;
    PyObject * values[max_arguments + 1];
    PyObject * handle = nullptr;
    bool       called = false;
    if (tensors.type && bind(o, arguments, n, keywords, values) && values[o->n] == Py_None) {
        PyObject * given = new_arguments(o->n + 1);
        bool       plain = given;
        for (int i = 0; plain && i < o->n; ++i) {
            PyObject * one = as_given(o->kinds[i], values[i], found);
            plain = one && PyTuple_SetItem(given, i + 1, one) == 0;
        }
        if (plain && found.room && Py_TYPE(found.room) == room_type) {
            handle = call_in((room *) found.room, as_result, o->code, o->code_self, given, called);
        }
        Py_XDECREF(given);
    }
    if (handle) {
        Py_ssize_t ndim = o->axes;
        if (ndim < 0) {
            const auto * made = (const struct ggml_tensor *) _cffi_to_c_pointer(handle, tensors.pointer);
            ndim = made ? std::max(found.ndim, (Py_ssize_t) ggml_cffi_n_axes(made)) : -1;
        }
        PyObject * tensor = ndim < 0 ? nullptr : new_tensor(handle, found.context, found.room, ndim);
        Py_DECREF(handle);
        return tensor;
    }
    if (PyObject * type = PyErr_Occurred()) {
        if (type == failed_class) {
            tell_failed(o, values);
            return nullptr;
        }
        if (!called || (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_OverflowError) &&
                        !PyErr_ExceptionMatches(PyExc_AttributeError))) {
            return nullptr; // an interrupt, what a signal's function raised, no memory
        }
        PyErr_Clear();
    }
    return call_python(o, arguments, n, keywords);
}

// A C string that is never freed: its function may be somewhere for as long as the process lives.
static const char * kept_text(const char * text) {
    char * copy = (char *) std::malloc(std::strlen(text) + 1);
    return copy ? std::strcpy(copy, text) : nullptr;
}

// operation(function, python, failed, names, defaults, kinds, axes, n_positional, name, text, module)
static PyObject * make_operation(PyObject *, PyObject * arguments) {
    PyObject *   function, *python, *failed, *names, *defaults, *module;
    const char * kinds, *name, *text;
    int          axes, n_positional;
    if (!PyArg_ParseTuple(arguments, "OOOO!O!siissO", &function, &python, &failed, &PyTuple_Type, &names,
                          &PyDict_Type, &defaults, &kinds, &axes, &n_positional, &name, &text, &module)) {
        return nullptr;
    }
    const size_t n = std::strlen(kinds);
    if (n > max_arguments || (size_t) PyTuple_Size(names) != n + 1 || n_positional < 0 || n_positional > (int) n ||
        !PyCFunction_GetFunction(function) || !(PyCFunction_GetFlags(function) & METH_VARARGS)) {
        PyErr_SetString(PyExc_ValueError, "no operation");
        return nullptr;
    }
    auto * o = (operation *) PyType_GenericAlloc(operation_type, 0);
    if (!o) {
        return nullptr;
    }
    for (PyObject * one : { function, python, failed, names, defaults }) {
        Py_INCREF(one);
    }
    o->function = function;
    o->code = PyCFunction_GetFunction(function);
    o->code_self = PyCFunction_GetSelf(function);
    o->python = python;
    o->failed = failed;
    o->names = names;
    o->defaults = defaults;
    o->n = (int) n;
    o->n_positional = n_positional;
    std::memcpy(o->kinds, kinds, n);
    o->axes = axes;
    for (size_t i = 0; i <= n; ++i) {
        o->default_of[i] = PyDict_GetItem(defaults, PyTuple_GetItem(names, (Py_ssize_t) i));
    }
    o->definition = { kept_text(name), (PyCFunction) (void (*)()) operate, METH_FASTCALL | METH_KEYWORDS,
                      kept_text(text) };
    PyObject * made = o->definition.ml_name && o->definition.ml_doc
                          ? PyCFunction_NewEx(&o->definition, (PyObject *) o, module)
                          : PyErr_NoMemory();
    if (made) {
        Py_INCREF(o); // its definition is in it, and nothing tells when the last user of that is gone
    }
    Py_DECREF(o);
    return made;
}

// ---- leaves

// (context, room, kind, shape, dtype) of Context.tensor: the tensor; None where that is for Python to make or
// to refuse. `self`: what makes one of four extents, raising, and the types' numbers by their names.
static PyObject * make_leaf(PyObject * self, PyObject * const * arguments, Py_ssize_t n) {
    PyObject * function = PyTuple_GetItem(self, 0);
    PyObject * types = PyTuple_GetItem(self, 1);
    if (n != 5 || !function || !types) {
        PyErr_SetString(PyExc_TypeError, "five arguments are expected");
        return nullptr;
    }
    PyObject * const context = arguments[0];
    PyObject * const shape = arguments[3];
    const long       kind = PyLong_AsLong(arguments[2]);
    if (PyErr_Occurred() || !is_kind((int) kind)) {
        return nullptr;
    }
    if (Py_TYPE(arguments[1]) != room_type) {
        PyErr_SetString(PyExc_TypeError, "a Room is expected");
        return nullptr;
    }
    auto * const r = (room *) arguments[1];
    const Py_ssize_t ndim = PyTuple_CheckExact(shape) ? PyTuple_Size(shape) : -1;
    PyObject *       type = PyUnicode_CheckExact(arguments[4]) ? PyDict_GetItem(types, arguments[4]) : nullptr;
    PyObject *       given = type && ndim >= 0 && ndim <= GGML_MAX_DIMS ? new_arguments(6) : nullptr;
    PyObject *       handle = nullptr;
    bool             called = false;
    if (given) {
        long long size = 1;
        Py_INCREF(type);
        PyTuple_SetItem(given, 1, type);
        for (Py_ssize_t i = 0; i < GGML_MAX_DIMS; ++i) {
            PyObject * extent = i < ndim ? PyTuple_GetItem(shape, ndim - 1 - i) : nullptr;
            int        over = 0;
            long long  number = 1;
            if (extent) {
                number = PyLong_CheckExact(extent) ? PyLong_AsLongLongAndOverflow(extent, &over) : 0;
                Py_INCREF(extent);
            } else {
                extent = PyLong_FromLong(1);
            }
            if (!extent || PyTuple_SetItem(given, 2 + i, extent) || over || number <= 0 || size <= 0 ||
                __builtin_mul_overflow(size, number, &size) || size >= 1ll << 60) {
                size = 0;
            }
        }
        if (size > 0) {
            handle = call_in(r, (int) kind, PyCFunction_GetFunction(function), PyCFunction_GetSelf(function), given,
                             called);
        }
        Py_DECREF(given);
    }
    if (handle) {
        PyObject * tensor = new_tensor(handle, context, (PyObject *) r, ndim);
        Py_DECREF(handle);
        return tensor;
    }
    if (PyErr_Occurred() &&
        (!called || (!PyErr_ExceptionMatches(failed_class) && !PyErr_ExceptionMatches(PyExc_TypeError)))) {
        return nullptr;
    }
    PyErr_Clear();
    Py_RETURN_NONE;
}

static PyMethodDef leaf_definition = { "leaf", (PyCFunction) (void (*)()) make_leaf, METH_FASTCALL, nullptr };

// leaves(function, types): `make_leaf` with these
static PyObject * make_leaves(PyObject *, PyObject * arguments) {
    return PyCFunction_NewEx(&leaf_definition, arguments, nullptr);
}

static PyMethodDef tensor_class_definition = { "tensor_class", set_tensor_class, METH_VARARGS, nullptr };
static PyMethodDef operation_definition = { "operation", make_operation, METH_VARARGS, nullptr };
static PyMethodDef leaves_definition = { "leaves", make_leaves, METH_VARARGS, nullptr };

static bool add_builders(PyObject * module) {
    if (!room_type) {
        room_type = (PyTypeObject *) PyType_FromSpec(&room_spec);
    }
    if (!tensor_base_type) {
        tensor_base_type = (PyTypeObject *) PyType_FromSpec(&tensor_spec);
    }
    Py_XINCREF((PyObject *) tensor_base_type);
    if (!operation_type) {
        operation_type = (PyTypeObject *) PyType_FromSpec(&operation_spec);
    }
    Py_XINCREF((PyObject *) room_type); // add_to takes a reference
    return operation_type && add_to(module, "Room", (PyObject *) room_type) &&
           add_to(module, "TensorBase", (PyObject *) tensor_base_type) &&
           add_to(module, "tensor_class", PyCFunction_NewEx(&tensor_class_definition, nullptr, nullptr)) &&
           add_to(module, "operation", PyCFunction_NewEx(&operation_definition, nullptr, nullptr)) &&
           add_to(module, "leaves", PyCFunction_NewEx(&leaves_definition, nullptr, nullptr));
}

} // namespace ggml_cffi
