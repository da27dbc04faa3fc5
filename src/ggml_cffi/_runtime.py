"""What the generated capi functions call: conversions on the way in, errors on the way out.

The fast path of a wrapper never comes here but for strings, arrays and buffers.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from . import _requirements, errors
from ._loader import Failed, ffi, lib
from ._loader import raising as _raising

NULL = ffi.NULL
_CData = ffi.CData

# ggml_cffi::error_kind of ggml/state.hpp
_ABORTED, _NULL_ARGUMENT, _BAD_ENUMERATOR, _NOT_ALLOWED = 1, 2, 3, 4
_OUT_OF_MEMORY, _CPP_EXCEPTION, _CALLBACK_RAISED = 5, 6, 7
_NOT_LOADED, _NOT_SUPPORTED = 8, 9
_FREED_ARGUMENT_LOST, _FIRST_ARGUMENT_LOST = 1, 2

_DTYPES = {
    "bool": "?", "_Bool": "?", "int8_t": "i1", "uint8_t": "u1", "int16_t": "i2", "uint16_t": "u2",
    "int": "i4", "int32_t": "i4", "uint32_t": "u4", "int64_t": "i8", "uint64_t": "u8",
    "size_t": "u8", "float": "f4", "double": "f8", "ggml_fp16_t": "u2",
}  # fmt: skip

_INTEGERS = frozenset(
    ("char", "signed char", "unsigned char", "short", "unsigned short", "int", "unsigned int",
     "long", "unsigned long", "long long", "unsigned long long",
     *(name for name, code in _DTYPES.items() if code[0] in "iu"))
)  # fmt: skip

FLOAT_MAX = float(np.finfo(np.float32).max)

#: Parameters that name a file.
_FILES = ("fname", "filename", "path", "dir_path")

#: What ggml logs where it looks at the memory that it got.
_NO_MEMORY = "insufficient memory (attempted to allocate"

#: "file:line: text", and the assertion of an operation that a backend does not have.
_PLACE = re.compile(r"(.*?):(\d+): ")
_MISSING = re.compile(r"GGML_ASSERT\((?:\w+->)+iface\.(\w+)(?: != NULL)?\) failed")


class Spec(NamedTuple):
    """Facts about a bound function for its error messages."""

    visible: tuple[str, ...]
    c_args: tuple[str, ...]
    required: tuple[str, ...]
    plain: tuple[str, ...]
    enums: Mapping[str, str]
    reason: str
    error: str
    frees: str
    returns: str
    fails: int  # 1: NULL or false is a failure, 2: all but 0 is; else only what the guard says


class Kind(NamedTuple):
    """A callback kind: where its userdata stands, how its arguments reach Python."""

    userdata: int | None
    converters: tuple[str, ...]
    returns: str
    trampolines: tuple[str, ...]
    slots: Mapping[str, int]
    gone: bool | None


class Coverage(NamedTuple):
    """What of the headers is bound.

    `left_out` names each declared function that is not, with the reason; `absent` those that the
    default release has and this build lacks.
    """

    declared: tuple[str, ...]
    bound: tuple[str, ...]
    left_out: Mapping[str, str]
    absent: tuple[str, ...]


# ---- in


def string(value: object, function: str, name: str, nullable: bool) -> Any:
    """`value` as a C string: str as UTF-8, bytes and paths as they are."""
    if type(value) is str:
        try:
            data = value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise ValueError(
                f"{function}: {name} is {value!r}, which is no text: it has a lone surrogate"
            ) from None
    elif value is None:
        if nullable:
            return NULL
        raise ValueError(f"{function}: {name} must not be NULL or None")
    elif isinstance(value, _CData):
        return value
    elif isinstance(value, str | bytes | os.PathLike):
        data = os.fsencode(value)
    else:
        raise TypeError(f"{name} must be str, bytes or a path, not {type(value).__name__}")
    if 0 in data:
        raise ValueError(f"{function}: {name} contains a NUL character: {value!r}")
    return data


def text(value: Any) -> str | None:
    """A C string as str, NULL as None; bytes that are no UTF-8 are kept as surrogates."""
    if not value:
        return None
    data: bytes = ffi.string(value)
    return data.decode("utf-8", "surrogateescape")


def out(value: Any, kind: str) -> Any:
    """An out-parameter's pointer or string, NULL as None."""
    if kind == "string":
        return text(value)
    return value if value else None


def struct(value: object, name: str, fields: Mapping[str, object] | None = None) -> Any:
    """A struct by value as it was given; keywords beside it are an error.

    Only a struct will do: of a tuple or a dict cffi leaves the fields undefined that it lacks.
    """
    if not isinstance(value, _CData):
        raise TypeError(f"{name} must be a struct, not {type(value).__name__}")
    given = [field for field, item in (fields or {}).items() if item is not ...]
    if given:
        raise TypeError(f"both a struct and the keywords {', '.join(given)} were given")
    return value


def handle(value: object) -> object:
    """A pointer as it is: for ``void *`` cffi would take bytes too, by their address."""
    if value is None or isinstance(value, _CData):
        return value
    raise TypeError("must be a cdata pointer")


def behind(value: Any, size: Any, function: str, name: str, of: str) -> None:
    """Look whether a C array has the `size` bytes of `of`, another argument.

    What is behind a bare pointer, only the caller knows.
    """
    if isinstance(value, _CData) and ffi.typeof(value).kind == "array" and size is not ...:
        have = ffi.sizeof(value)
        if whole(of, size) > have:
            raise ValueError(f"{function}: {name} has {have} bytes, fewer than the {size} of {of}")


def reference(value: Any, nullable: bool) -> Any:
    """A pointer to a struct; a struct itself is taken by its address."""
    if value is None:
        return NULL if nullable else value
    if not isinstance(value, _CData):
        raise TypeError(f"a struct or a pointer to one is expected, not {type(value).__name__}")
    if ffi.typeof(value).kind in ("struct", "union"):
        return ffi.addressof(value)
    return value


def _is_null(value: object) -> bool:
    return value is None or (isinstance(value, _CData) and value == NULL)


def array(
    element: str,
    value: Any,
    function: str,
    name: str,
    *,
    nullable: bool = False,
    unique: bool = False,
    minimum: int = 0,
    fixed: int | None = None,
    writes: bool = False,
) -> tuple[Any, int]:
    """A C array and its length, from a sequence or, for numbers, a NumPy array."""
    if _is_null(value):
        if nullable:
            return NULL, 0
        raise ValueError(f"{function}: {name} must not be NULL or None")
    if isinstance(value, _CData):
        kind = ffi.typeof(value).kind
        if kind != "array":
            raise TypeError(f"{name} is a bare pointer: its length is not known; give a sequence")
        if ffi.typeof(value).item is not ffi.typeof(element):
            raise TypeError(f"{name} must be an array of {element}, not {ffi.typeof(value).cname}")
        length = len(value)
        pointer = value
    elif isinstance(value, np.ndarray):
        pointer, length = _from_numpy(element, value, function, name, writes)
    elif writes:
        raise TypeError(
            f"{name} is written to: it must be a NumPy array or cdata, not {type(value).__name__}"
        )
    elif isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a sequence, not {type(value).__name__}")
    else:
        pointer, length = _from_sequence(element, value, function, name, unique)
    if fixed is not None and length != fixed:
        raise ValueError(f"{function}: {name} must have {fixed} elements, not {length}")
    if length < minimum:
        raise ValueError(
            f"{function}: {name} must have at least {minimum} element{'s' * (minimum > 1)}"
        )
    return pointer, length


def _from_sequence(
    element: str, value: Sequence[Any], function: str, name: str, unique: bool
) -> tuple[Any, int]:
    items: list[Any] = list(value)
    if element.replace(" ", "").replace("const", "") == "char*":
        # the C array keeps pointers only; the strings live as long as it does
        encoded = [string(item, function, f"{name}[{i}]", False) for i, item in enumerate(items)]
        strings = [ffi.from_buffer("char[]", data + b"\0") for data in encoded]
        made = ffi.new(f"{element}[]", strings)
        return ffi.gc(made, lambda _, keep=strings: None), len(items)
    if "*" in element or (element.endswith("_t") and element not in _DTYPES):
        for index, item in enumerate(items):
            if _is_null(item):
                raise ValueError(f"{function}: {name}[{index}] must not be NULL or None")
        if unique:
            for index, item in enumerate(items):
                first = items.index(item)
                if first != index:
                    raise ValueError(
                        f"{function}: {name}[{first}] and {name}[{index}] are the same object"
                    )
    elif _DTYPES.get(element, "f")[0] in "iu":
        items = [
            item if item.__class__ is int else whole(f"{name}[{i}]", item)
            for i, item in enumerate(items)
        ]
    try:
        return ffi.new(f"{element}[]", items), len(items)
    except (TypeError, OverflowError):
        for index, item in enumerate(items):
            why = _refusal(ffi.typeof(element), item)
            if why is not None:
                raise type(why)(f"{name}[{index}] is {item!r}: {why}") from None
        raise


def single(name: str, value: Any) -> float:
    """`value` as a C float; a number that is too large for one is not made infinite."""
    number = float(value)
    if math.isfinite(number) and not -FLOAT_MAX <= number <= FLOAT_MAX:
        raise OverflowError(f"{name} is {value!r}: too large for a C float")
    return number


def whole(name: str, value: Any) -> int:
    """`value` as an integer, if it is one: cffi would cut off what a NumPy float has more."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}: an integer is required") from None


def _from_numpy(
    element: str, value: Any, function: str, name: str, writes: bool
) -> tuple[Any, int]:
    wanted = _DTYPES.get(element)
    if wanted is None:
        raise TypeError(f"{name} must be a sequence of {element}, not a NumPy array")
    _check_content(value, name)
    dtype = np.dtype(wanted)
    if value.ndim == 0:
        raise TypeError(f"{name} must be a sequence, not a 0-dimensional array")
    if writes:
        wrong = (
            f"of {value.dtype}" if value.dtype != dtype
            else "not contiguous" if not value.flags.c_contiguous
            else "" if value.flags.writeable else "read-only"
        )  # fmt: skip
        if wrong:
            raise ValueError(
                f"{function}: {name} is {wrong}; it is written to and must be a writable, "
                f"contiguous array of {dtype}"
            )
    else:
        integers = value.dtype.kind in "iu" and dtype.kind in "iu"  # their values are checked below
        if not integers and not np.can_cast(value.dtype, dtype, "same_kind"):
            raise TypeError(f"{name} must be an array of {dtype}, not {value.dtype}")
        converted = np.ascontiguousarray(value, dtype=dtype)
        if dtype.kind in "iu" and not np.array_equal(converted, value):
            raise OverflowError(f"{name} has values that do not fit {dtype}")
        value = converted
    made = ffi.from_buffer(f"{element}[]", value, require_writable=writes)
    return made, len(made)  # not `size`, which a subclass may have any of


def length(function: str, arrays: tuple[tuple[str, object, int], ...]) -> int:
    """The one length of arrays that share it in C; an array that is None does not count."""
    given = [(name, count) for name, value, count in arrays if value is not None]
    for name, count in given[1:]:
        if count != given[0][1]:
            raise ValueError(
                f"{function}: {given[0][0]} has {given[0][1]} elements and {name} {count}; "
                "they must have the same number"
            )
    return given[0][1] if given else 0


def buffer(
    value: Any,
    size: int | None,
    function: str,
    name: str,
    *,
    nullable: bool,
    writes: bool,
    holds: Any = None,
) -> tuple[Any, int]:
    """The address of a buffer, and how many bytes of it are meant.

    `holds`: the tensor whose numbers they are; a NumPy array must be of its type, or of bytes.
    """
    if _is_null(value):
        if nullable:
            return NULL, size or 0
        raise ValueError(f"{function}: {name} must not be NULL or None")
    if isinstance(value, _CData):
        if ffi.typeof(value).kind == "array":
            return value, _fitting(size, ffi.sizeof(value), function, name)
        if size is None:
            raise TypeError(f"{name} is a bare pointer: the size must be given")
        return value, whole("size", size)
    _check_content(value, name)
    if holds is not None and isinstance(value, np.ndarray):
        _check_type(value.dtype, holds, name)
    try:
        view = ffi.from_buffer("char[]", value, require_writable=writes)
    except (TypeError, BufferError) as error:
        raise TypeError(f"{name}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{function}: {name}: {error}") from None
    return view, _fitting(size, len(view), function, name)


def _check_content(value: Any, name: str) -> None:
    """A buffer holds plain bytes of this machine: no Python objects, no foreign byte order."""
    if isinstance(value, np.ndarray):
        dtype = value.dtype
        if dtype.hasobject or dtype.kind in "SUMm":
            raise TypeError(f"{name} is an array of {dtype}, which is not numbers")
        if not dtype.isnative:
            raise TypeError(f"{name} is an array of {dtype}, of foreign byte order")
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(f"{name} is a masked array; its mask would be lost")
    elif isinstance(value, memoryview) and "O" in value.format:
        raise TypeError(f"{name} is a buffer of Python objects")


#: Which NumPy types hold a tensor's numbers as they are; of other types arrays hold raw bytes.
_TENSOR_DTYPES = {
    "F32": ("f4",), "F16": ("f2", "u2"), "BF16": ("u2",), "F64": ("f8",),
    "I8": ("i1",), "I16": ("i2",), "I32": ("i4",), "I64": ("i8",),
}  # fmt: skip
_BY_TYPE = {getattr(lib, f"GGML_TYPE_{name}"): kinds for name, kinds in _TENSOR_DTYPES.items()}


def _check_type(dtype: np.dtype[Any], tensor: Any, name: str) -> None:
    """An array of another type than its tensor would be taken for garbage, without an error."""
    if dtype.itemsize == 1 or dtype.kind == "V" or not (isinstance(tensor, _CData) and tensor):
        return
    if ffi.typeof(tensor) is not _TENSOR:
        return  # cffi says what it is
    wanted = _BY_TYPE.get(tensor.type, ())
    if dtype.str[1:] not in wanted:
        words = text(lib.ggml_type_name(tensor.type))
        raise TypeError(f"{name} is an array of {dtype}, but the tensor is of type {words}")


def _fitting(size: int | None, have: int, function: str, name: str) -> int:
    """The bytes meant: all by default, never more than there are."""
    if size is None:
        return have
    size = whole("size", size)
    if size > have:
        raise ValueError(f"{function}: {name} has {have} bytes, fewer than the {size} asked for")
    return size


def deprecated(function: str, hint: str) -> None:
    """Warn in the name of the caller of a deprecated function."""
    warnings.warn(f"{function} is deprecated: {hint}", DeprecationWarning, stacklevel=3)


# ---- errors


def spec(function: str) -> Spec:
    """The facts of a bound function."""
    from ._gen.tables import SPECS

    found: Spec = SPECS[function]
    return found


def bad_argument(function: str, values: tuple[Any, ...], error: Exception) -> Exception:
    """The exception for arguments that cffi or a conversion did not take."""
    facts = spec(function)
    types = dict(zip(facts.c_args, ffi.typeof(ffi.addressof(lib, function)).args, strict=True))
    for name, value in zip(facts.visible, values, strict=True):
        if value is None and name in facts.required:
            return ValueError(f"{function}: {name} must not be NULL or None")
    if re.split(r"\W", str(error), maxsplit=1)[0] in facts.visible:
        return type(error)(f"{function}: {error}")  # a conversion of ours, which names it
    for name in facts.plain:
        value = values[facts.visible.index(name)]
        if value is None or _converted(value, types[name]):
            continue
        # cffi does not say which argument it was: try each by itself
        why = _refusal(types[name], _by_pointer(value, types[name]))
        if why is not None:
            return _bad_field(function, types[name], value) or type(why)(
                f"{function}: {name} is {value!r}: {_hint(facts, name, value, types[name]) or why}"
            )
    for name in facts.plain:
        kind = types[name].kind
        if values[facts.visible.index(name)] is None and kind in ("primitive", "enum"):
            return TypeError(f"{function}: {name} is None: a number is required")
    return type(error)(f"{function}: {error}")


def _hint(facts: Spec, name: str, value: object, ctype: Any) -> str:
    """What is to be given instead: an object's pointer, an enumerator for its name."""
    pointer = getattr(value, "handle", None) if ctype.kind == "pointer" else None
    if isinstance(pointer, _CData) and ffi.typeof(pointer) is ctype:
        return "capi takes its pointer, .handle"
    tag = facts.enums.get(name)
    if tag and isinstance(value, str):
        from . import enums

        ending = f"_{value}".lower()
        members = getattr(enums, tag).__members__
        found = [f"capi.{member}" for member in members if member.lower().endswith(ending)]
        return f"capi takes a {tag}" + (f", {found[0]}" if len(found) == 1 else "")
    return ""


def _bad_field(function: str, ctype: Any, value: Any) -> Exception | None:
    """The exception for a keyword of a struct of parameters."""
    if ctype.kind != "struct" or not isinstance(value, tuple):
        return None
    for (name, field), item in zip(ctype.fields, value, strict=True):
        why = _refusal(field.type, item)
        if why is not None:
            return type(why)(f"{function}: {name} is {item!r}: {why}")
    return None


def _refusal(ctype: Any, value: Any) -> Exception | None:
    """Why a value is not taken for a C type, None if it is."""
    try:
        if ctype.kind == "enum" or ctype.cname in _INTEGERS:
            operator.index(value)
        elif ctype.kind == "pointer":
            handle(value)
        ffi.new(ffi.getctype(ctype, "[1]"), [value])
    except (TypeError, OverflowError) as why:
        return why
    return None


def _converted(value: object, ctype: Any) -> bool:
    """Whether the wrapper turns `value` into what cffi takes: strings and functions."""
    if isinstance(value, str | bytes | os.PathLike):
        return bool(ctype.cname == "char *")
    return callable(value) and not isinstance(value, _CData) and "(*)" in ctype.cname


def _by_pointer(value: object, ctype: Any) -> object:
    """A struct where C takes a pointer to one."""
    if ctype.kind != "pointer" or ctype.cname == "struct ggml_tensor *":
        return value
    return reference(value, False) if isinstance(value, _CData) else value


@functools.cache
def raising(function: str, fails: int) -> Callable[..., Any]:
    """A function of `lib` as one that raises `Failed`, of which `failed` makes what callers see.

    `fails` says which of its results are failures, as `Spec.fails` does.
    """
    made: Callable[..., Any] = _raising(getattr(lib, function), fails)
    return made


def call(function: str, *args: Any) -> Any:
    """Call the guarded C function of that name; raises as the generated functions do."""
    try:
        return raising(function, spec(function).fails)(*args)
    except (TypeError, OverflowError) as error:
        raise bad_argument(function, args, error) from None
    except Failed as failure:
        why = failure.args
    raise failed(function, args, why)


def failed(function: str, values: tuple[Any, ...], why: tuple[Any, ...]) -> BaseException:
    """The exception for a call that has failed; `why` are the arguments of `Failed`."""
    return _failure(function, spec(function), values, why)


def _failure(
    function: str, facts: Spec, values: tuple[Any, ...], why: tuple[Any, ...]
) -> BaseException:
    kind, index, message, log, found, errno, status, worker = why
    raised: list[BaseException] = found[:]
    found.clear()  # an exception refers to the frame that has `why`: no circle for the collector
    _callbacks_module().forget_unread()
    if kind == _CALLBACK_RAISED:
        return _first(raised) or errors.GGMLError(
            f"{function}: a Python function that it calls could not be run to its end: the "
            "recursion is too deep, or there is no memory"
        )
    if worker and kind in (0, _ABORTED):
        endpoint, _, reason = worker.partition("\n")
        text = f"{function}: the worker {endpoint} is lost: {reason}"
        return _after(raised, _with_cause(errors.RPCError(text, endpoint, reason), values))
    error = _described(kind, index, function, facts, values, errno, status, message, log.strip())
    return _after(raised, error)


def _first(raised: list[BaseException]) -> BaseException | None:
    """Which of the exceptions comes out: the first one, but no interrupt is lost over it."""
    interrupts = [error for error in raised if not isinstance(error, Exception)]
    return next(iter(interrupts or raised), None)


def _after(raised: list[BaseException], error: BaseException) -> BaseException:
    """The failure of a call, or an interrupt in a callback that it must not hide."""
    first = _first(raised)
    if first is None:
        return error
    if isinstance(first, Exception):
        error.__cause__ = first
        return error
    first.__context__ = error
    return first


def _described(
    kind: int,
    index: int,
    function: str,
    facts: Spec,
    values: tuple[Any, ...],
    errno: int,
    status: int,
    message: str,
    log: str,
) -> BaseException:
    if kind == _ABORTED:
        return _with_cause(_abort(function, message, log, _lost(index, facts, values)), values)
    if kind == _NULL_ARGUMENT:
        name = facts.c_args[index]
        return ValueError(f"{function}: {name} must not be NULL or None")
    if kind == _BAD_ENUMERATOR:
        name = facts.c_args[index]
        enum = facts.enums.get(name, "enumerator")
        number = int(message)
        number -= 1 << 32 if number > 0x7FFFFFFF else 0  # -1 in an enum that C has as unsigned
        return ValueError(f"{function}: {name} is {number}, which is no {enum}")
    if kind == _NOT_ALLOWED:
        error_type = IndexError if message.startswith("indices(") else ValueError
        return error_type(f"{function}: requires {_requirements.explained(message)}")
    if kind == _NOT_LOADED:
        name = facts.c_args[index]
        return ValueError(f"{function}: {name} belongs to a backend that has been unloaded")
    if kind == _NOT_SUPPORTED:
        return errors.NotSupportedError(f"{function}: {message}")
    if kind == _OUT_OF_MEMORY:
        return MemoryError(f"{function}: out of memory ({message})")
    if kind == _CPP_EXCEPTION:
        return _with_cause(errors.GGMLError(f"{function}: {message}"), values)
    if status:
        return _with_cause(_status(function, status, log), values)
    default = "returned false" if facts.returns == "success" else "returned NULL"
    reason = log.removeprefix(f"{function}: ") or facts.reason or default
    if errno and not log and set(_FILES) & set(facts.visible):
        reason += f" ({os.strerror(errno)})"
    for name, value in zip(facts.visible, values, strict=True):
        if name in _FILES and str(value) not in reason:
            reason += f": {value!r}" if isinstance(value, str | bytes) else f": {str(value)!r}"
    if _NO_MEMORY in log and facts.error == "GGMLError":
        why = errors.StatusMemoryError(f"{function}: {reason}", lib.GGML_STATUS_ALLOC_FAILED)
        return _with_cause(why, values)
    error = MemoryError if facts.error == "MemoryError" else getattr(errors, facts.error)
    return _with_cause(error(f"{function}: {reason}"), values)


def _decode(value: Any) -> str:
    return text(value) or ""


def _lost(index: int, facts: Spec, values: tuple[Any, ...]) -> str:
    """The type of what an abort has left half freed; `index` is a `lost` of ggml/state.hpp."""
    if index == _FREED_ARGUMENT_LOST:
        return facts.frees
    if index == _FIRST_ARGUMENT_LOST and values and isinstance(values[0], _CData):
        return str(ffi.typeof(values[0]).item.cname.removeprefix("struct "))
    return ""


def _abort(function: str, message: str, log: str, lost: str) -> errors.GGMLError:
    missing = _MISSING.search(message)
    if missing:
        return errors.NotSupportedError(
            f"{function}: the backend has no {missing.group(1)} ({message})"
        )
    place = _PLACE.match(message)
    file, line = (place.group(1), int(place.group(2))) if place else (None, None)
    kind = errors.AbortMemoryError if _NO_MEMORY in log else errors.AbortError
    return kind(message, file, line, function, log, lost)


def _status(function: str, status: int, log: str) -> errors.StatusError:
    name = _decode(lib.ggml_status_to_string(status)) or str(status)
    message = f"{function}: {name}" + (f" ({log})" if log else "")
    if status == lib.GGML_STATUS_ALLOC_FAILED:
        return errors.StatusMemoryError(message, status=status)
    return errors.StatusError(message, status=status)


def _with_cause(error: BaseException, values: tuple[Any, ...]) -> BaseException:
    """Name the error that closed a meta device's latch as the cause of what followed from it."""
    error.__cause__ = _callbacks_module().latched_error(values)
    return error


def _callbacks_module() -> Any:
    """The callbacks, which need this module themselves."""
    from . import _callbacks

    return _callbacks


_TENSOR = ffi.typeof("struct ggml_tensor *")


def invoke(typedef: str, address: Any, *arguments: Any) -> Any:
    """Call a C function that ggml handed out, guarded; `typedef` names its type in the headers."""
    try:
        return raising(f"ggml_cffi_invoke_{typedef}", 0)(ffi.cast(typedef, address), *arguments)
    except Failed as failure:
        why = failure.args
    names = ("function", *(f"argument {i}" for i in range(1, len(arguments) + 1)))
    facts = Spec(names, names, (), (), {}, "", "GGMLError", "", "number", 0)
    raise _failure(typedef, facts, (address, *arguments), why)


def helper(function: str, *arguments: Any) -> Any:
    """Call a function of the extension's own, guarded as those of ggml are."""
    try:
        return raising(function, 0)(*arguments)
    except Failed as failure:
        why = failure.args
    names = tuple(f"argument {i}" for i in range(len(arguments)))
    facts = Spec(names, names, (), (), {}, "", "GGMLError", "", "number", 0)
    raise _failure(function, facts, arguments, why)


def absent(function: str) -> Callable[..., NoReturn]:
    """The stand-in for a function that the default release has and this build lacks."""

    def missing(*args: object, **kwargs: object) -> NoReturn:
        from ._gen.build_info import GGML_VERSION

        raise errors.NotSupportedError(f"{function} is not in this build (ggml {GGML_VERSION})")

    missing.__name__ = missing.__qualname__ = function
    missing.__doc__ = f"Raises NotSupportedError: this build has no ``{function}``."
    return missing
