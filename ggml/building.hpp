// Tensor objects made in C++: what the operations of `ops` and Context.tensor do for operands and
// shapes that need no second look. Everything else they leave to Python, which says what is wrong.

#include <cfloat>
#include <chrono>
#include <cmath>
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

static PyObject * room_shut(PyObject * self, PyObject *) {
    auto * r = (room *) self;
    for (int i = 0; i < n_made_as; ++i) {
        PyObject * old = r->arena[i];
        r->left[i] = 0;
        r->arena[i] = nullptr;
        Py_XDECREF(old);
    }
    Py_RETURN_NONE;
}

static void room_dealloc(PyObject * self) {
    PyTypeObject * type = Py_TYPE(self);
    Py_XDECREF(room_shut(self, nullptr));
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
    return room_shut(self, nullptr);
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

enum { slot_handle, slot_context, slot_ndim, slot_room, n_slots };

// The class, its slots, and the ctype of its handles: tensor.py says them once.
static struct {
    PyTypeObject *            type;
    PyObject *                slots[n_slots];
    descrgetfunc              get;
    descrsetfunc              set;
    struct _cffi_ctypedescr * pointer;
    PyObject *                null; // as a handle
} tensors;

static PyObject * set_tensor_class(PyObject *, PyObject * arguments) {
    PyObject * type, *pointer, *null, *slots[n_slots];
    if (!PyArg_ParseTuple(arguments, "OOOOOOO", &type, &slots[slot_handle], &slots[slot_context], &slots[slot_ndim],
                          &slots[slot_room], &pointer, &null)) {
        return nullptr;
    }
    for (int i = 0; i < n_slots; ++i) {
        Py_INCREF(slots[i]);
        tensors.slots[i] = slots[i];
    }
    Py_INCREF(type);
    Py_INCREF(pointer);
    Py_INCREF(null);
    tensors.null = null;
    tensors.get = (descrgetfunc) PyType_GetSlot(Py_TYPE(slots[0]), Py_tp_descr_get);
    tensors.set = (descrsetfunc) PyType_GetSlot(Py_TYPE(slots[0]), Py_tp_descr_set);
    tensors.pointer = (struct _cffi_ctypedescr *) pointer;
    tensors.type = (PyTypeObject *) type;
    Py_RETURN_NONE;
}

static PyObject * get_slot(PyObject * tensor, int slot) {
    return tensors.get(tensors.slots[slot], tensor, (PyObject *) tensors.type);
}

static PyObject * new_tensor(PyObject * handle, PyObject * context, PyObject * room, long ndim) {
    PyObject * number = PyLong_FromLong(ndim);
    PyObject * made = number ? PyType_GenericAlloc(tensors.type, 0) : nullptr;
    if (made && (tensors.set(tensors.slots[slot_handle], made, handle) ||
                 tensors.set(tensors.slots[slot_context], made, context) ||
                 tensors.set(tensors.slots[slot_room], made, room) ||
                 tensors.set(tensors.slots[slot_ndim], made, number))) {
        Py_CLEAR(made);
    }
    Py_XDECREF(number);
    return made;
}

// ---- operations

constexpr int max_arguments = 24;

// A function of capi's that makes a tensor, and what Python does where this one cannot.
struct operation {
    PyObject_HEAD
    PyObject *   function;
    PyCFunction  code;
    PyObject *   code_self;
    PyObject *   slow;   // (ctx, *arguments): the same in Python
    PyObject *   failed; // (why, *arguments): raises, for a call that has failed
    int          n;
    char         kinds[max_arguments]; // t tensor, n tensor or None, i integer, f float, b bool
    int          axes;                 // of the result; -1: as many as it takes, and as the operands have
};

static void operation_dealloc(PyObject * self) {
    auto *         o = (operation *) self;
    PyTypeObject * type = Py_TYPE(self);
    Py_XDECREF(o->function);
    Py_XDECREF(o->slow);
    Py_XDECREF(o->failed);
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

// What is known of the operands of one call: new references.
struct operands {
    PyObject * room = nullptr; // the same for all of them
    PyObject * context = nullptr;
    long       ndim = 0; // the largest
    ~operands() {
        Py_XDECREF(room);
        Py_XDECREF(context);
    }
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
    PyObject * room = get_slot(value, slot_room);
    if (!found.room) {
        found.room = room;
        found.context = get_slot(value, slot_context);
    } else {
        Py_XDECREF(room); // the tensor has it
    }
    if (!room || room != found.room || !found.context) {
        return nullptr;
    }
    PyObject * ndim = get_slot(value, slot_ndim);
    if (!ndim) {
        return nullptr;
    }
    found.ndim = std::max(found.ndim, PyLong_AsLong(ndim));
    Py_DECREF(ndim);
    return get_slot(value, slot_handle);
}

// Call `code` with the arena before `given`, which it takes. Null without an exception: no room.
static PyObject * call_in(room * r, int kind, PyCFunction code, PyObject * self, PyObject * given) {
    if (!enter(r)) {
        return nullptr;
    }
    PyObject * handle = nullptr;
    if (PyObject * arena = take(r, kind)) {
        PyTuple_SetItem(given, 0, arena);
        handle = code(self, given);
    }
    r->mutex.unlock();
    return handle;
}

// (ctx, *arguments) of an operation.
static PyObject * operate(PyObject * self, PyObject * const * arguments, Py_ssize_t n) {
    auto *     o = (operation *) self;
    operands   found;
    PyObject * handle = nullptr;
    PyObject * given = nullptr;
    if (n == o->n + 1 && arguments[0] == Py_None && tensors.type && (given = PyTuple_New(n))) {
        bool plain = true;
        for (Py_ssize_t i = 1; plain && i < n; ++i) {
            PyObject * one = as_given(o->kinds[i - 1], arguments[i], found);
            plain = one && PyTuple_SetItem(given, i, one) == 0;
        }
        if (plain && found.room && Py_TYPE(found.room) == room_type) {
            handle = call_in((room *) found.room, as_result, o->code, o->code_self, given);
        }
        Py_DECREF(given);
    }
    if (handle) {
        long ndim = o->axes;
        if (ndim < 0) {
            const auto * made = (const struct ggml_tensor *) _cffi_to_c_pointer(handle, tensors.pointer);
            ndim = made ? std::max(found.ndim, (long) ggml_cffi_n_axes(made)) : -1;
        }
        PyObject * tensor = ndim < 0 ? nullptr : new_tensor(handle, found.context, found.room, ndim);
        Py_DECREF(handle);
        return tensor;
    }
    PyObject * type = PyErr_Occurred();
    if (type == failed_class) {
        PyObject *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyErr_NormalizeException(&type, &value, &trace);
        PyObject * why = value ? PyObject_GetAttrString(value, "args") : nullptr;
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        PyObject * told = why ? PyTuple_New(n) : nullptr;
        if (told) {
            PyTuple_SetItem(told, 0, why);
            for (Py_ssize_t i = 1; i < n; ++i) {
                Py_INCREF(arguments[i]);
                PyTuple_SetItem(told, i, arguments[i]);
            }
            PyObject * nothing = PyObject_CallObject(o->failed, told);
            Py_DECREF(told);
            Py_XDECREF(nothing); // it raises
        } else {
            Py_XDECREF(why);
        }
        return nullptr;
    }
    if (type && !PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_OverflowError) &&
        !PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return nullptr; // an interrupt, no memory
    }
    PyErr_Clear();
    PyObject * all = PyTuple_New(n);
    for (Py_ssize_t i = 0; all && i < n; ++i) {
        Py_INCREF(arguments[i]);
        PyTuple_SetItem(all, i, arguments[i]);
    }
    PyObject * tensor = all ? PyObject_CallObject(o->slow, all) : nullptr;
    Py_XDECREF(all);
    return tensor;
}

static PyMethodDef operate_definition = { "operation", (PyCFunction) (void (*)()) operate, METH_FASTCALL, nullptr };

// operation(function, slow, failed, kinds, axes)
static PyObject * make_operation(PyObject *, PyObject * arguments) {
    PyObject *   function, *slow, *failed;
    const char * kinds;
    int          axes;
    if (!PyArg_ParseTuple(arguments, "OOOsi", &function, &slow, &failed, &kinds, &axes)) {
        return nullptr;
    }
    const size_t n = std::strlen(kinds);
    if (n > max_arguments || !(PyCFunction_GetFlags(function) & METH_VARARGS)) {
        PyErr_SetString(PyExc_ValueError, "no operation");
        return nullptr;
    }
    auto * o = (operation *) PyType_GenericAlloc(operation_type, 0);
    if (!o) {
        return nullptr;
    }
    Py_INCREF(function);
    Py_INCREF(slow);
    Py_INCREF(failed);
    o->function = function;
    o->code = PyCFunction_GetFunction(function);
    o->code_self = PyCFunction_GetSelf(function);
    o->slow = slow;
    o->failed = failed;
    o->n = (int) n;
    std::memcpy(o->kinds, kinds, n);
    o->axes = axes;
    PyObject * made = PyCFunction_NewEx(&operate_definition, (PyObject *) o, nullptr);
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
    PyObject *       given = type && ndim >= 0 && ndim <= GGML_MAX_DIMS ? PyTuple_New(6) : nullptr;
    PyObject *       handle = nullptr;
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
            handle = call_in(r, (int) kind, PyCFunction_GetFunction(function), PyCFunction_GetSelf(function), given);
        }
        Py_DECREF(given);
    }
    if (handle) {
        PyObject * tensor = new_tensor(handle, context, (PyObject *) r, (long) ndim);
        Py_DECREF(handle);
        return tensor;
    }
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(failed_class) && !PyErr_ExceptionMatches(PyExc_TypeError)) {
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
    if (!operation_type) {
        operation_type = (PyTypeObject *) PyType_FromSpec(&operation_spec);
    }
    Py_XINCREF((PyObject *) room_type); // add_to takes a reference
    return operation_type && add_to(module, "Room", (PyObject *) room_type) &&
           add_to(module, "tensor_class", PyCFunction_NewEx(&tensor_class_definition, nullptr, nullptr)) &&
           add_to(module, "operation", PyCFunction_NewEx(&operation_definition, nullptr, nullptr)) &&
           add_to(module, "leaves", PyCFunction_NewEx(&leaves_definition, nullptr, nullptr));
}

} // namespace ggml_cffi
