"""Stage 4: IR + annotations + exported symbols → what is bound, and how each function looks.

After this stage nothing has to be decided: the emitters only write down.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from . import ir
from .annotations import AnnotationError, Annotations, Place, check_use

#: Enumerators that count the others: no argument may have their value.
SENTINEL = ("_COUNT",)
_FLOATS = ("float", "double")


@dataclass(frozen=True)
class Arg:
    """A C parameter, and what Python gives for it.

    `kind`: number, bool, enum, pointer, struct_pointer, struct, string, array, buffer, callback,
    and, not seen by Python: out, length, userdata.
    """

    name: str
    c_name: str
    type: ir.Type
    kind: str
    nullable: bool = False
    default: str | None = None
    op_default: str | None = None  # where it is a parameter of an operation on objects
    op_copy: bool = False  # ggml would write in this operand, and does not say so by its name
    length: str | int | None = None
    element: ir.Type | None = None
    unique: bool = False
    min_length: int = 0
    writes: bool = False
    tag: str = ""
    size: str | None = None
    callback: Callback | None = None
    holds: str | None = None  # the tensor whose numbers a buffer holds
    sized: str | None = None  # the parameter that says how many bytes are behind a pointer
    sized_fields: Mapping[str, str] = field(default_factory=dict)  # the same, of a struct's
    spread: bool = False  # a struct of parameters, by value and last: its fields are keywords

    @property
    def visible(self) -> bool:
        """Whether it is a parameter in Python."""
        return self.kind not in ("out", "length", "userdata")


@dataclass(frozen=True)
class Callback:
    """How a function takes a callback."""

    kind: str
    userdata: str | None
    lifetime: str
    slot: str | None = None


@dataclass(frozen=True)
class CallbackKind:
    """A function-pointer type that Python functions can stand for."""

    name: str
    type: ir.FunctionType
    userdata: int | None
    threads: str
    on_error: str
    note: str
    by_out: bool
    slots: tuple[str, ...] = ()
    gone: bool | None = None
    in_kernel: bool = False
    between_steps: bool = False


@dataclass(frozen=True)
class Bound:
    """A function as it is bound."""

    function: ir.Function
    args: tuple[Arg, ...]
    returns: str  # void, number, bool, enum, status, success, string, pointer, struct
    guard: str
    ownership: str = ""
    free: str = ""
    null: str = "error"
    reason: str = ""
    null_error: str = "GGMLError"
    require: tuple[str, ...] = ()
    threads: str = ""
    before: str = ""
    after: str = ""
    undo: str = ""
    scope: str = ""  # a C++ type: there is one of it while the function runs
    instead: str = ""  # a C++ function of the same type, which is called in its place
    releases: bool = False
    frees_inside: bool = False
    op: bool = True  # if it makes a tensor: whether it is an operation
    override: str = ""
    note: str = ""
    library: str = ""
    makes: str = ""  # the type of handle that the caller gets to free
    frees: str = ""  # or that this function frees,
    freed: int = 0  # the argument of this number
    give_back: tuple[str, ...] = ()  # what `free` is given to free the `result`

    @property
    def name(self) -> str:
        """Its name in C and in Python."""
        return self.function.name

    @property
    def visible(self) -> tuple[Arg, ...]:
        """The parameters in Python."""
        return tuple(arg for arg in self.args if arg.visible)

    @property
    def no_result(self) -> bool:
        """Whether NULL, or false, is a failure."""
        return self.returns == "success" or (
            self.returns in ("pointer", "string") and self.null == "error"
        )

    @property
    def fails(self) -> int:
        """Which results are failures, as ggml/raising.hpp numbers them."""
        return 2 if self.returns == "status" else int(self.no_result)

    @property
    def outs(self) -> tuple[Arg, ...]:
        """The parameters that C writes one result to."""
        return tuple(arg for arg in self.args if arg.kind == "out")


@dataclass(frozen=True)
class Binding:
    """All that the emitters need."""

    api: ir.Api
    bound: tuple[Bound, ...]
    skipped: Mapping[str, str]
    callbacks: tuple[CallbackKind, ...]
    absent: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    version: str = ""
    commit: str = ""
    pointers: tuple[ir.Typedef, ...] = ()  # function-pointer types that ggml hands out
    after_pointers: Mapping[str, str] = field(default_factory=dict)  # C++ to run after a call
    scopes_of_pointers: Mapping[str, str] = field(default_factory=dict)  # as `Bound.scope`
    modules: Mapping[str, str] = field(default_factory=dict)  # loadable library → its backend


def resolve(
    api: ir.Api,
    annotations: Annotations,
    exported: Mapping[str, Collection[str]],
    *,
    strict: bool,
    known: Mapping[str, str] | None = None,
    idle: Collection[str] = (),
    version: str = "",
    commit: str = "",
    modules: Mapping[str, str] | None = None,
) -> Binding:
    """Decide for every function.

    `exported`: library → symbols. `known`: the functions of the pin, with their declarations.
    `idle`: the annotation files of headers that are not bound here. `modules`: the libraries that
    are loadable modules, with the names of their backends.

    With `strict` a wrong or unused annotation, or a pointer without an owner, is an error; without
    it a note of the report.
    """
    notes: list[str] = []

    def complain(error: AnnotationError) -> None:
        if strict:
            raise error
        notes.append(str(error))

    for error in check_use(annotations, api, idle):
        complain(error)
    where = {symbol: library for library, symbols in exported.items() for symbol in symbols}
    bound: list[Bound] = []
    skipped: dict[str, str] = {}
    for name, function in api.functions.items():
        table = annotations.of(api, function)
        if not strict:
            table, lost = _fit(function, table, (known or {}).get(name, ""))
            notes.extend(lost)
        reason = _reason_to_skip(api, function, table, where)
        reason = reason or _unknown_callback(api, function, annotations)
        if reason:
            skipped[name] = reason
            continue
        try:
            bound.append(_bind(api, function, table, where[name], annotations))
        except AnnotationError as error:
            complain(error)
            skipped[name] = f"its annotation does not fit: {error}"
    bound = _with_handles(api, annotations, bound, complain)
    callbacks = _callbacks(api, annotations, bound, complain)
    pointers = tuple(
        api.typedefs[name]
        for name, (_, table) in annotations.callbacks.items()
        if name in api.typedefs and not table.get("used", True)
    )

    def of_pointers(key: str) -> dict[str, str]:
        tables = annotations.callbacks.items()
        return {name: table[key] for name, (_, table) in tables if key in table}

    absent = tuple(sorted(set(known or ()) - {b.name for b in bound} - set(_never(skipped))))
    return Binding(
        api, tuple(bound), skipped, callbacks, absent, tuple(notes), version, commit, pointers,
        modules=modules or {}, after_pointers=of_pointers("after"),
        scopes_of_pointers=of_pointers("scope"),
    )  # fmt: skip


def _fit(
    function: ir.Function, table: dict[str, Any], pinned: str
) -> tuple[dict[str, Any], list[str]]:
    """Leave out what is required of parameters that the pin has and this release lacks."""
    here = {param.name for param in function.params}
    gone = set(re.findall(r"(\w+)(?:\[\w*\])?[,)]", pinned)) - here
    kept, lost = [], []
    for text in table.get("require", ()):
        if gone & set(re.findall(r"\w+", text)):
            lost.append(f"{function.name}: no check of {text}")
        else:
            kept.append(text)
    return {**table, "require": kept}, lost


def _never(skipped: Mapping[str, str]) -> list[str]:
    """Those that no build binds: they are no missing feature."""
    return [name for name, why in skipped.items() if "variadic" in why or "va_list" in why]


def _reason_to_skip(
    api: ir.Api, function: ir.Function, table: Mapping[str, Any], where: Mapping[str, str]
) -> str:
    if function.type.variadic:
        return "variadic: C's ... has no safe counterpart"
    if any(ir.declare(api.resolve(p.type)) == "va_list" for p in function.params):
        return "takes a va_list"
    if function.name not in where:
        return f"declared in {function.where.header} but exported by no linkable library"
    return str(table.get("skip", ""))


def _unknown_callback(api: ir.Api, function: ir.Function, annotations: Annotations) -> str:
    """Why a function is left out whose callback would not be guarded."""
    for param in function.params:
        name = param.type.name if isinstance(param.type, ir.Named) else ""
        if name and api.function_pointer(param.type) and name not in annotations.callbacks:
            return f"the type of its callback, {name}, is not annotated"
    return ""


def _bind(
    api: ir.Api,
    function: ir.Function,
    table: Mapping[str, Any],
    library: str,
    annotations: Annotations,
) -> Bound:
    place = annotations.place(function)
    returns = _returns(api, function.returns, table)
    ownership = str(table.get("ownership", ""))
    head, _, of = ownership.partition(":")
    if of.isdigit() and int(of) < len(function.params):
        ownership = f"{head}:{function.params[int(of)].name}"
    if returns in ("pointer", "string") and not ownership and not table.get("override"):
        raise place.error(f"{function.name} returns a pointer: who owns it? (ownership)")
    if head == "owned" and not table.get("free"):
        raise place.error(f"{function.name}: an owned result needs `free`")
    args = _args(api, function, table, annotations)
    for arg in args:
        _check_operation(api, function, table, arg, place)
    return Bound(
        function=function,
        args=args,
        returns=returns,
        guard=table["guard"],
        ownership=ownership,
        free=table.get("free", "") if head == "owned" else "",
        null=table.get("null", "error"),
        reason=table.get("reason", ""),
        null_error=table.get("null_error", "GGMLError"),
        require=tuple(table.get("require", ())),
        threads=table.get("threads", ""),
        before=table.get("before", ""),
        after=table.get("after", ""),
        undo=table.get("undo", ""),
        scope=table.get("scope", ""),
        instead=table.get("instead", ""),
        releases=table.get("releases", False),
        frees_inside=table.get("frees_inside", False),
        op=table.get("op", True),
        override=table.get("override", ""),
        note=table.get("note", ""),
        library=library,
    )


def _check_operation(
    api: ir.Api, function: ir.Function, table: Mapping[str, Any], arg: Arg, place: Place
) -> None:
    if arg.op_default is None and not arg.op_copy:
        return
    makes_tensor = ir.declare(function.returns) == "struct ggml_tensor *"
    if not makes_tensor or not table.get("op", True):
        raise place.error(f"{function.name} is no operation: what is said of one is of no use")
    if arg.kind == "enum" and arg.op_default is not None:
        names = {value.name for value in api.enums[arg.tag].values}
        if arg.op_default not in names:
            raise place.error(f"{arg.tag} has no {arg.op_default!r}, the default of {arg.c_name}")


def _with_handles(
    api: ir.Api, annotations: Annotations, bound: list[Bound], complain: Any
) -> list[Bound]:
    """Name what the caller has to free, where it is made, where it is freed and with what."""
    byname = {b.name: b for b in bound}
    frees: dict[str, tuple[str, int]] = {}
    for maker in bound:
        free = byname.get(maker.free)
        if free is None or free.name in frees:
            continue
        wanted = api.resolve(maker.function.returns)
        for index, param in enumerate(free.function.params):
            found = api.resolve(param.type)
            if found == wanted:
                to = api.resolve(found.to) if isinstance(found, ir.Pointer) else found
                name = to.name if isinstance(to, ir.Tag) else free.name.removesuffix("_free")
                frees[free.name] = name, index
    done = []
    for b in bound:
        kind, index = frees.get(b.name, ("", 0))
        made, _ = frees.get(b.free, ("", 0))
        done.append(replace(b, makes=made, frees=kind, freed=index))
        if made:
            try:
                give_back = _give_back(api, annotations, b, byname[b.free], frees[b.free][1])
                done[-1] = replace(done[-1], give_back=give_back)
            except AnnotationError as error:
                complain(error)
    return done


def _give_back(
    api: ir.Api, annotations: Annotations, maker: Bound, free: Bound, freed: int
) -> tuple[str, ...]:
    """The arguments of `free` for what `maker` has made: besides it, some of the maker's own."""
    arguments = []
    for index, param in enumerate(free.function.params):
        same = [
            p.name for p in maker.function.params if api.resolve(p.type) == api.resolve(param.type)
        ]
        if index == freed:
            arguments.append("result")
        elif same:
            arguments.append(same[0])
        else:
            place = annotations.place(maker.function)
            raise place.error(f"{maker.name}: nothing to give {free.name} as {param.name}")
    return tuple(arguments)


def _returns(api: ir.Api, ctype: ir.Type, table: Mapping[str, Any]) -> str:
    kind = scalar_kind(api, ctype)
    if kind == "enum":
        resolved = api.resolve(ctype)
        assert isinstance(resolved, ir.Tag)
        return "status" if resolved.name == "ggml_status" else "enum"
    if kind == "bool" and table.get("success"):
        return "success"
    return kind


def scalar_kind(api: ir.Api, ctype: ir.Type) -> str:
    """void, number, bool, enum, string, pointer or struct."""
    resolved = api.resolve(ctype)
    if isinstance(resolved, ir.Prim):
        return {"void": "void", "bool": "bool"}.get(resolved.name, "number")
    if isinstance(resolved, ir.Tag):
        return "enum" if resolved.kind == "enum" else "struct"
    if isinstance(resolved, ir.Anonymous):
        return "struct"
    if isinstance(resolved, ir.Pointer):
        return "string" if resolved.to == ir.Prim("char", const=True) else "pointer"
    return "pointer"


def is_float(api: ir.Api, ctype: ir.Type) -> bool:
    """Whether `ctype` is float or double."""
    resolved = api.resolve(ctype)
    return isinstance(resolved, ir.Prim) and resolved.name in _FLOATS


def python_name(name: str) -> str:
    """`name`, or with an underscore where Python has the word for itself."""
    return name + "_" if keyword.iskeyword(name) else name


def _args(
    api: ir.Api, function: ir.Function, table: Mapping[str, Any], annotations: Annotations
) -> tuple[Arg, ...]:
    arrays = table.get("arrays", {})
    buffers = table.get("buffers", {})
    callbacks = table.get("callbacks", {})
    lengths = {value for value in arrays.values() if isinstance(value, str)}
    sizes = {value: key for key, value in buffers.items() if isinstance(value, str)}
    userdata = {c["userdata"] for c in callbacks.values() if "userdata" in c}
    defaults = dict(table.get("defaults", {}))
    op_defaults = dict(table.get("op_defaults", {}))
    args = []
    for param in function.params:
        name = param.name
        base: dict[str, Any] = {
            "name": python_name(name), "c_name": name, "type": param.type,
            "nullable": name in table.get("nullable", ()), "default": defaults.get(name),
            "op_default": op_defaults.get(name), "op_copy": name in table.get("op_copies", ()),
            "sized": table.get("sized", {}).get(name),
        }  # fmt: skip
        kind = scalar_kind(api, param.type)
        resolved = api.resolve(param.type)
        if name in table.get("out", ()):
            base["kind"] = "out"
            base["element"] = _pointee(resolved)
        elif name in callbacks:
            spec = callbacks[name]
            pointed = param.type.name if isinstance(param.type, ir.Named) else ""
            slot = None if "userdata" in spec else f"{function.name}.{name}"
            base["kind"] = "callback"
            base["callback"] = Callback(pointed, spec.get("userdata"), spec["lifetime"], slot)
        elif name in userdata:
            base["kind"] = "userdata"
        elif name in arrays:
            base.update(
                kind="array", length=arrays[name], element=_pointee(resolved),
                unique=name in table.get("unique", ()),
                min_length=table.get("min_length", {}).get(name, 0),
                writes=name in table.get("writes", ()),
            )  # fmt: skip
        elif name in lengths:
            base["kind"] = "length"
        elif name in buffers:
            base.update(
                kind="buffer",
                size=buffers[name],
                writes=name in table.get("writes", ()),
                holds=table.get("holds", {}).get(name),
            )
        elif isinstance(resolved, ir.Array) and resolved.size is not None:
            base.update(kind="array", length=resolved.size, element=resolved.of,
                        writes=name in table.get("writes", ()))  # fmt: skip
        elif kind == "enum":
            assert isinstance(resolved, ir.Tag)
            base.update(kind="enum", tag=resolved.name)
        elif kind == "pointer":
            base["kind"] = "struct_pointer" if _by_reference(api, resolved) else "pointer"
        else:
            base["kind"] = kind
        if name in sizes:
            base["default"] = base["default"] or "None"
        args.append(Arg(**base))
    if args and args[-1].kind == "struct":
        struct = api.struct_of(args[-1].type)
        if struct is not None and struct.name.endswith("_params"):
            names = {f"{args[-1].c_name}.{field.name}": field.name for field in struct.fields or ()}
            sized = {names[of]: size for of, size in table.get("sized", {}).items() if of in names}
            args[-1] = replace(args[-1], spread=True, sized_fields=sized)
    return _trailing_defaults(args)


def _trailing_defaults(args: list[Arg]) -> tuple[Arg, ...]:
    """Python takes defaults at the end only."""
    seen_without = False
    for index in range(len(args) - 1, -1, -1):
        arg = args[index]
        if not arg.visible or arg.spread:
            continue
        if seen_without and arg.default is not None:
            args[index] = replace(arg, default=None)
        seen_without = seen_without or arg.default is None
    return tuple(args)


def _pointee(ctype: ir.Type) -> ir.Type:
    if isinstance(ctype, ir.Pointer):
        return ctype.to
    assert isinstance(ctype, ir.Array)
    return ctype.of


def _by_reference(api: ir.Api, ctype: ir.Type) -> bool:
    """A pointer to a struct that Python code can own: `ffi.new` or a result by value."""
    if not isinstance(ctype, ir.Pointer):
        return False
    struct = api.struct_of(ctype.to)
    return struct is not None and struct.fields is not None and struct.name != "ggml_tensor"


def _is_userdata(api: ir.Api, function: ir.FunctionType, param: ir.Param) -> bool:
    if ir.declare(api.resolve(param.type)) != "void *":
        return False
    return "data" in param.name or len(function.params) == 1


def _callbacks(
    api: ir.Api, annotations: Annotations, bound: list[Bound], complain: Any
) -> tuple[CallbackKind, ...]:
    slots: dict[str, list[str]] = {}
    for function in bound:
        for arg in function.args:
            if arg.callback and arg.callback.slot:
                slots.setdefault(arg.callback.kind, []).append(arg.callback.slot)
    kinds = []
    for typedef in api.typedefs.values():
        pointed = api.function_pointer(ir.Named(typedef.name))
        if pointed is None:
            continue
        if typedef.name not in annotations.callbacks:
            place = Place("callbacks.toml", 1)
            complain(place.error(f"the function-pointer type {typedef.name} is not annotated"))
            continue
        place, table = annotations.callbacks[typedef.name]
        if not table.get("used", True):
            continue
        if "on_error" not in table and scalar_kind(api, pointed.returns) != "void":
            complain(place.error(f"what does C get when a {typedef.name} fails? (on_error)"))
            continue
        userdata = next(
            (i for i, p in enumerate(pointed.params) if _is_userdata(api, pointed, p)),
            None,
        )  # fmt: skip
        if userdata is None and typedef.name not in slots:
            continue  # nothing tells one Python function from another: hand-written, if at all
        kinds.append(
            CallbackKind(
                typedef.name, pointed, userdata, table.get("threads", "caller"),
                table.get("on_error", ""), table.get("note", ""),
                scalar_kind(api, pointed.returns) == "struct",
                tuple(slots.get(typedef.name, ())), table.get("gone"),
                table.get("in_kernel", False),
                table.get("between_steps", False),
            )
        )  # fmt: skip
    return tuple(kinds)
