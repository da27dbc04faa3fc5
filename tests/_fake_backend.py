"""A backend with streams and events, made of Python functions, on top of the CPU backend.

It is what a GPU's backend is to ggml: work is queued and done when somebody waits for it. ggml's
structs of functions are private to it, so `require_layout` looks whether those of the CPU are as
written here.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _native import address, compile_library, compiler
from _release import PINNED, has, not_here

from ggml_cffi import _loader, capi, ffi
from ggml_cffi._gen import build_info

DEVICE = [
    "get_name",
    "get_description",
    "get_memory",
    "get_type",
    "get_props",
    "init_backend",
    "get_buffer_type",
    "get_host_buffer_type",
    "buffer_from_host_ptr",
    "supports_op",
    "supports_buft",
    "offload_op",
    "event_new",
    "event_free",
    "event_synchronize",
    "reg",
    "context",
]
BACKEND = [
    "guid",
    "get_name",
    "free",
    "set_tensor_async",
    "get_tensor_async",
    "set_tensor_2d_async",
    "get_tensor_2d_async",
    "cpy_tensor_async",
    "synchronize",
    "graph_plan_create",
    "graph_plan_free",
    "graph_plan_update",
    "graph_plan_compute",
    "graph_compute",
    "event_record",
    "event_wait",
    "graph_optimize",
    "device",
    "context",
]
BUFFER = [
    "free_buffer",
    "get_base",
    "init_tensor",
    "memset_tensor",
    "set_tensor",
    "get_tensor",
    "set_tensor_2d",
    "get_tensor_2d",
    "cpy_tensor",
    "clear",
    "reset",
    "buft",
    "context",
    "size",
    "usage",
]
BUFFER_TYPE = [
    "get_name",
    "alloc_buffer",
    "get_alignment",
    "get_max_size",
    "get_alloc_size",
    "is_host",
    "device",
    "context",
]
REG = ["api_version", "get_name", "get_device_count", "get_device", "get_proc_address", "context"]

_DEV, _BACK, _TENSOR = (
    "struct ggml_backend_device *",
    "struct ggml_backend *",
    "struct ggml_tensor *",
)
_BUFFER, _BUFT = "struct ggml_backend_buffer *", "struct ggml_backend_buffer_type *"
_EVENT, _REG = "struct ggml_backend_event *", "struct ggml_backend_reg *"
_TYPES = {
    "device.get_name": f"const char *({_DEV})",
    "device.get_description": f"const char *({_DEV})",
    "device.get_type": f"int({_DEV})",
    "device.get_props": f"void({_DEV}, struct ggml_backend_dev_props *)",
    "device.init_backend": f"void *({_DEV}, const char *)",
    "device.get_buffer_type": f"void *({_DEV})",
    "device.supports_buft": f"bool({_DEV}, {_BUFT})",
    "device.offload_op": f"bool({_DEV}, {_TENSOR})",
    "device.event_new": f"void *({_DEV})",
    "device.event_free": f"void({_DEV}, {_EVENT})",
    "device.event_synchronize": f"void({_DEV}, {_EVENT})",
    "backend.get_name": f"const char *({_BACK})",
    "backend.free": f"void({_BACK})",
    "backend.set_tensor_async": f"void({_BACK}, {_TENSOR}, const void *, size_t, size_t)",
    "backend.get_tensor_async": f"void({_BACK}, {_TENSOR}, void *, size_t, size_t)",
    "backend.cpy_tensor_async": f"bool({_BACK}, {_BACK}, {_TENSOR}, {_TENSOR})",
    "backend.synchronize": f"void({_BACK})",
    "backend.event_record": f"void({_BACK}, {_EVENT})",
    "backend.event_wait": f"void({_BACK}, {_EVENT})",
    "buffer.free_buffer": f"void({_BUFFER})",
    "buffer.reset": f"void({_BUFFER})",
    "buffer type.is_host": f"bool({_BUFT})",
    "buffer type.get_max_size": f"size_t({_BUFT})",
    "buffer type.alloc_buffer": f"void *({_BUFT}, size_t)",
    "reg.get_name": f"const char *({_REG})",
    "reg.get_device_count": f"size_t({_REG})",
    "reg.get_device": f"void *({_REG}, size_t)",
}

#: What the CPU does not have.
_MISSING = {
    "set_tensor_async",
    "get_tensor_async",
    "set_tensor_2d_async",
    "get_tensor_2d_async",
    "cpy_tensor_async",
    "synchronize",
    "graph_plan_update",
    "event_record",
    "event_wait",
    "graph_optimize",
    "get_host_buffer_type",
    "offload_op",
    "event_new",
    "event_free",
    "event_synchronize",
}

if not has("ggml_backend_tensor_set_2d"):  # nor have the structs what it calls
    for names in (BACKEND, BUFFER):
        names[:] = [name for name in names if "_2d" not in name]
    _MISSING = {name for name in _MISSING if "_2d" not in name}

_keep: list[Any] = []  # what ggml may hold for the life of the process


def _words(pointer: Any, names: list[str]) -> dict[str, int]:
    """A struct of pointers, by name."""
    return dict(zip(names, ffi.cast("uintptr_t *", pointer)[0 : len(names)], strict=True))


def _address(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))


def require_layout() -> None:
    """Leave the test where the structs are others; those of the pin are known."""
    if not layout_is_known():
        assert not PINNED
        not_here("the layout of ggml's private structs, as in _fake_backend.py")


def layout_is_known() -> bool:
    """Whether the CPU's structs have their pointers, and their gaps, where they are here."""
    cpu = capi.ggml_backend_cpu_init()
    try:
        dev = capi.ggml_backend_get_device(cpu)
        reg = capi.ggml_backend_dev_backend_reg(dev)
        backend, device = _words(cpu, BACKEND), _words(dev, DEVICE)
        registry = _words(reg, REG)
        missing = {name for name, value in {**backend, **device}.items() if not value}
        return (
            backend["device"] == _address(dev)
            and device["reg"] == _address(reg)
            and registry["api_version"] & 0xFFFFFFFF == 2
            and missing == _MISSING
        )
    finally:
        capi.ggml_backend_free(cpu)


def _function(kind: str, name: str, function: Any) -> int:
    """The address of a Python function as C sees it, or of something of C."""
    if not isinstance(function, ffi.CData):
        function = ffi.callback(_TYPES[f"{kind}.{name}"], function)
        _keep.append(function)
    return _address(function)


def _struct(kind: str, names: list[str], base: Any, functions: dict[str, Any]) -> Any:
    """A copy of the struct at `base` in which these functions, or plain addresses, stand."""
    words = _words(base, names)
    words.update({name: _function(kind, name, f) for name, f in functions.items()})
    made = ffi.new("uintptr_t[]", list(words.values()))
    _keep.append(made)
    return made


def _string(text: str) -> Any:
    made = ffi.new("char[]", text.encode())
    _keep.append(made)
    return made


class Stream:
    """A backend whose work waits in a queue until somebody synchronises."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.queue: deque[Callable[[], object]] = deque()
        self.freed = 0
        self.cpu = capi.ggml_backend_cpu_init()
        functions = {
            "get_name": lambda backend: device.c_name,
            "free": self._free if device.stream_free is None else device.stream_free,
            "set_tensor_async": self._set,
            "get_tensor_async": self._get,
            "cpy_tensor_async": self._copy,
            "synchronize": lambda backend: self.run(),
            "event_record": self._record,
            "event_wait": self._wait,
            "device": device.pointer,
        }
        made = _struct("backend", BACKEND, self.cpu, functions)
        self.pointer = ffi.cast(_BACK, made)

    def run(self) -> None:
        while self.queue:
            self.queue.popleft()()

    def _free(self, backend: Any) -> None:
        self.freed += 1
        capi.ggml_backend_free(self.cpu)

    def _set(self, backend: Any, tensor: Any, data: Any, offset: int, size: int) -> None:
        self.queue.append(lambda: capi.ggml_backend_tensor_set(tensor, data, offset, size))

    def _get(self, backend: Any, tensor: Any, data: Any, offset: int, size: int) -> None:
        self.queue.append(lambda: capi.ggml_backend_tensor_get(tensor, data, offset, size))

    def _copy(self, source: Any, backend: Any, src: Any, dst: Any) -> bool:
        if capi.ggml_backend_get_device(source) != self.device.pointer:
            return False
        self.queue.append(lambda: capi.ggml_backend_tensor_copy(src, dst))
        return True

    def _record(self, backend: Any, event: Any) -> None:
        mark = self.device.events[_address(event)]
        mark.done, mark.stream = False, self
        self.queue.append(mark.reach)

    def _wait(self, backend: Any, event: Any) -> None:
        self.queue.append(self.device.events[_address(event)].wait)


class Mark:
    """What an event is: a place in the queue of a stream."""

    def __init__(self) -> None:
        self.done = True  # until it is recorded
        self.stream: Stream | None = None

    def reach(self) -> None:
        self.done = True

    def wait(self) -> None:
        while not self.done:
            assert self.stream is not None
            self.stream.queue.popleft()()


class FakeDevice:
    """A device of a registry of its own; `pointer` and `reg` are for capi."""

    def __init__(
        self,
        name: str = "Fake0",
        type: int = capi.GGML_BACKEND_DEVICE_TYPE_GPU,
        buffers: Any = None,
        stream_free: Any = None,
    ) -> None:
        """`buffers`: a buffer type of its own; it has that of the CPU else.

        `stream_free`: a C function that frees its streams instead of a Python function.
        """
        self.c_name, self.c_description = _string(name), _string(f"the {name} of the tests")
        self.type = type
        self.stream_free = stream_free
        self.events: dict[int, Mark] = {}
        self.streams: list[Stream] = []
        cpu = capi.ggml_backend_reg_dev_get(capi.ggml_backend_cpu_reg(), 0)
        reg = _struct(
            "reg",
            REG,
            capi.ggml_backend_cpu_reg(),
            {
                "get_name": lambda reg: self.c_reg_name,
                "get_device_count": lambda reg: 1,
                "get_device": lambda reg, index: self.pointer if index == 0 else ffi.NULL,
                "get_proc_address": ffi.NULL,
            },
        )
        self.c_reg_name = _string(name.rstrip("0123456789"))
        self.reg = ffi.cast(_REG, reg)
        functions = {
            "get_name": lambda dev: self.c_name,
            "get_description": lambda dev: self.c_description,
            "get_type": lambda dev: int(self.type),
            "get_props": self._props,
            "init_backend": self._init,
            "offload_op": lambda dev, op: op.op == capi.GGML_OP_MUL_MAT and op.ne[1] >= 32,
            "event_new": self._event_new,
            "event_free": lambda dev, event: self.events.pop(_address(event)) and None,
            "event_synchronize": lambda dev, event: self.events[_address(event)].wait(),
            "reg": self.reg,
        }
        if buffers is not None:
            functions["get_buffer_type"] = lambda dev: buffers
            functions["supports_buft"] = lambda dev, buft: buft == buffers
        self.pointer = ffi.cast(_DEV, _struct("device", DEVICE, cpu, functions))
        _keep.append(self)

    def stream(self) -> Stream:
        """A new stream; ggml_backend_free frees it."""
        made = Stream(self)
        self.streams.append(made)
        return made

    def _init(self, dev: Any, params: Any) -> Any:
        return self.stream().pointer

    def _props(self, dev: Any, props: Any) -> None:
        props.name, props.description = self.c_name, self.c_description
        props.type = int(self.type)
        props.memory_free, props.memory_total = 1 << 30, 1 << 31
        setattr(props.caps, "async", True)
        props.caps.events = True

    def _event_new(self, dev: Any) -> Any:
        made = ffi.new("void *[2]", [ffi.cast("void *", self.pointer), ffi.NULL])
        mark = Mark()
        _keep.append(made)
        self.events[_address(made)] = mark
        return made


def buffer_type(is_host: bool, max_size: int | None = None, buffer_free: Any = None) -> Any:
    """The CPU's buffer type, but host memory only if told so.

    `max_size`: the largest size of a buffer; `buffer_free`: a C function that frees its buffers.
    """
    require_layout()
    cpu = capi.ggml_backend_cpu_buffer_type()
    functions: dict[str, Any] = {"is_host": lambda buft: is_host}
    if max_size is not None:
        functions["get_max_size"] = lambda buft: max_size
    if buffer_free is not None:
        # ggml's own function, not the guarded one: the buffer is no handle of the caller's
        word = _words(cpu, BUFFER_TYPE)["alloc_buffer"]
        allocate = ffi.cast(f"void *(*)({_BUFT}, size_t)", word)

        def alloc_buffer(buft: Any, size: int) -> Any:
            made = allocate(buft, size)
            ffi.cast("uintptr_t *", made)[0] = _address(buffer_free)
            return made

        functions["alloc_buffer"] = alloc_buffer
    made = _struct("buffer type", BUFFER_TYPE, cpu, functions)
    return ffi.cast(_BUFT, made)


@contextmanager
def patched(buffer: Any, **functions: Any) -> Iterator[None]:
    """Put other functions, or a buffer type, into a buffer for a while."""
    require_layout()
    words = ffi.cast("uintptr_t *", buffer)
    before = _words(buffer, BUFFER)
    for name, function in functions.items():
        words[BUFFER.index(name)] = _function("buffer", name, function)
    yield
    for name in functions:
        words[BUFFER.index(name)] = before[name]


def on_free(buffer: Any, told: Callable[[Any], object]) -> None:
    """Have `told` called with the buffer when ggml frees it."""
    require_layout()
    words = ffi.cast("uintptr_t *", buffer)
    free_buffer = ffi.cast(f"void(*)({_BUFFER})", words[0])

    def free(self: Any) -> None:
        told(self)
        free_buffer(self)

    words[0] = _function("buffer", "free_buffer", free)


def event_of(device: Any) -> Any:
    """An event as a device would make it, for functions that must refuse it."""
    made = ffi.new("void *[2]", [ffi.cast("void *", device), ffi.NULL])
    _keep.append(made)
    return ffi.cast(_EVENT, made)


#: Functions of C that free nothing, because ggml gives up on the way.
POISON = r"""
static void (*give_up)(const char * file, int line, const char * format, ...);
void set_abort(void * function) { *(void **) &give_up = function; }
void poisoned_free(void * self) {
    give_up("poison.c", __LINE__, "what is at %p is poisoned", self);
}
"""


def poison(path: Any) -> Any:
    """The C function `poisoned_free`, of a library that is compiled to `path` unless it is there.

    It calls ggml_abort of the ggml that serves the package, as a backend's own function would.
    """
    poison = ctypes.CDLL(str(path)) if path.exists() else compile_library(POISON, path)
    base = ctypes.CDLL(str(_loader.library_files(build_info)["ggml-base"]))
    poison.set_abort(ctypes.cast(base.ggml_abort, ctypes.c_void_p))
    _keep.append(poison)
    return ffi.cast("void *", address(poison, "poisoned_free"))


#: A loadable backend: what ggml_backend_load looks for, with one device. It computes nothing, or,
#: once `compute_as` has told it of the CPU, as that does, in memory of its own and with events.
MODULE = r"""
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef void * any;
struct device { any functions[15]; any reg; any context; };
struct reg { int api_version; any functions[4]; any context; };
struct props { const char * name, * description; size_t free, total; int type; const char * id; };

static const char * name(any self) { return "Loaded0"; }
static const char * description(any self) { return "a module of the tests"; }
static void memory(any self, size_t * free, size_t * total) { *free = 1; *total = 2; }
static int type(any self) { return 3; }
static void properties(any self, struct props * p) {
    p->name = name(self);
    p->description = description(self);
    p->type = type(self);
}
static bool no(any self, any what) { return false; }
static any null(any self) { return NULL; }

static struct device device, * cpu;
void compute_as(any other) { cpu = other; }
static any init_backend(any self, any params) {
    any * made = ((any (*)(any, any)) cpu->functions[5])(cpu, params);
    made[DEVICE_OF_BACKEND] = &device;
    return made;
}
static any buffer_type(any self) {
    static any made[8];
    memcpy(made, ((any (*)(any)) cpu->functions[6])(cpu), sizeof made);
    made[6] = &device;
    return made;
}
static any new_event(any self) {
    any * made = calloc(2, sizeof(any));
    made[0] = self;
    return made;
}
static void free_event(any self, any event) { free(event); }

static const char * reg_name(any self) { return "Loaded"; }
static size_t count(any self) { return 1; }
static any get(any self, size_t index) { return index == 0 ? &device : NULL; }
static struct reg reg;

int ggml_backend_score(void) { return SCORE; }
any ggml_backend_init(void) {
    any of_reg[] = { reg_name, count, get };
    any of_device[] = {
        name, description, memory, type, properties, null, null, null, null, no, no,
    };
    memcpy(reg.functions, of_reg, sizeof of_reg);
    memcpy(device.functions, of_device, sizeof of_device);
    if (cpu) {
        memcpy(device.functions + 2, cpu->functions + 2, 10 * sizeof(any));
        device.functions[5] = init_backend;
        device.functions[6] = buffer_type;
        device.functions[12] = new_event;
        device.functions[13] = free_event;
        device.context = cpu->context;
    }
    reg.api_version = API;
    device.reg = &reg;
    return &reg;
}
"""


def compile_module(made: Path, api: int = 2, score: int = 1, *options: str) -> Path:
    """Compile a loadable backend to this file."""
    of_backend = BACKEND.index("device")
    facts = [f"-DAPI={api}", f"-DSCORE={score}", f"-DDEVICE_OF_BACKEND={of_backend}"]
    command = [str(compiler()), "-shared", "-fPIC", "-w", *facts, "-o", str(made)]
    command += ["-x", "c", "-", "-x", "none", *options]
    subprocess.run(command, input=MODULE, text=True, check=True)
    return made


def let_compute(path: Path) -> None:
    """Tell a module, before ggml loads it, of the CPU: it computes as that does."""
    cpu = capi.ggml_backend_dev_by_name("CPU")
    ctypes.CDLL(str(path)).compute_as(ctypes.c_void_p(_address(cpu)))
