"""C types as Python annotations, for the stubs."""

from __future__ import annotations

from .. import ir
from ..resolve import Arg, Binding, Bound, CallbackKind, is_float, scalar_kind


def value(binding: Binding, ctype: ir.Type) -> str:
    """What Python sees where C has a value of `ctype`."""
    api = binding.api
    kind = scalar_kind(api, ctype)
    if kind == "void":
        return "None"
    if kind == "bool":
        return "bool"
    if kind == "number":
        return "float" if is_float(api, ctype) else "int"
    resolved = api.resolve(ctype)
    if kind == "enum":
        assert isinstance(resolved, ir.Tag)
        return f"enums.{resolved.name}"
    if kind == "struct":
        return _struct(binding, ctype)
    return pointer(binding, resolved)


def pointer(binding: Binding, ctype: ir.Type) -> str:
    """A pointer (or array) as an opaque handle, by what it points to."""
    api = binding.api
    if isinstance(ctype, ir.Array):
        return f"types.Array[{element(binding, ctype.of)}]"
    if not isinstance(ctype, ir.Pointer):
        return "types.VoidP"
    target = api.resolve(ctype.to)
    if isinstance(target, ir.FunctionType):
        return "types.FunctionP"
    if scalar_kind(api, ctype.to) == "struct":
        return _struct(binding, ctype.to)
    if isinstance(target, ir.Prim) and target.name == "void":
        return "types.VoidP"
    if isinstance(target, ir.Prim) and target.name == "FILE":
        return "types.File"
    return f"types.Array[{element(binding, ctype.to)}]"


def _struct(binding: Binding, ctype: ir.Type) -> str:
    """A struct by its tag, or by the typedef that names it."""
    while isinstance(ctype, ir.Named):
        target = binding.api.typedefs[ctype.name].type
        if isinstance(target, ir.Anonymous):
            return f"types.{ctype.name}"
        ctype = target
    return f"types.{ctype.name}" if isinstance(ctype, ir.Tag) else "types.Struct"


def element(binding: Binding, ctype: ir.Type) -> str:
    """An element of an array."""
    if ir.declare(binding.api.resolve(ctype)).replace("const ", "") == "char":
        return "bytes"
    if scalar_kind(binding.api, ctype) in ("enum", "status"):
        return "int"
    if scalar_kind(binding.api, ctype) == "string":
        return "types.Array[bytes]"
    return value(binding, ctype)


def argument(binding: Binding, bound: Bound, arg: Arg) -> str:
    """What a visible parameter takes."""
    text = _argument(binding, arg)
    sized = arg.default == "None" and not arg.nullable
    return f"{text} | None" if arg.nullable or sized else text


def _argument(binding: Binding, arg: Arg) -> str:
    if arg.kind == "enum":
        return f"enums.{arg.tag} | int"
    if arg.kind == "string":
        return "types.String"
    if arg.kind == "struct":
        return f"{value(binding, arg.type)} | None"
    if arg.kind == "buffer":
        return "types.WritableBuffer" if arg.writes else "types.ReadableBuffer"
    if arg.kind == "callback":
        assert arg.callback is not None
        kind = next((k for k in binding.callbacks if k.name == arg.callback.kind), None)
        return f"{callable_type(binding, kind)} | types.FunctionP" if kind else "types.FunctionP"
    if arg.kind == "array":
        assert arg.element is not None
        if scalar_kind(binding.api, arg.element) == "string":
            return "Sequence[types.String]"
        inner = element(binding, arg.element)
        numbers = inner in ("int", "float", "bool")
        if arg.writes:
            return f"types.NumberArray | types.Array[{inner}]"
        extra = " | types.NumberArray" if numbers else ""
        return f"Sequence[{inner}]{extra}"
    return value(binding, arg.type)


def callable_type(binding: Binding, kind: CallbackKind) -> str:
    """The Python function that stands for a callback: C's parameters without the userdata."""
    params = [
        "str" if scalar_kind(binding.api, p.type) == "string" else value(binding, p.type)
        for index, p in enumerate(kind.type.params)
        if index != kind.userdata
    ]
    return f"Callable[[{', '.join(params)}], {value(binding, kind.type.returns)}]"


def result(binding: Binding, bound: Bound) -> str:
    """What the Python function returns."""
    if bound.returns == "string":
        first: str | None = "str | None" if bound.null == "none" else "str"
    elif bound.returns == "status":
        first = "enums.ggml_status"
    elif bound.returns == "success" and not bound.outs:
        first = "bool"
    elif bound.returns in ("success", "void"):
        first = None
    else:
        first = value(binding, bound.function.returns)
        if bound.returns == "pointer" and bound.null == "none":
            first += " | None"
    outs = [out(binding, arg) for arg in bound.outs]
    parts = ([first] if first else []) + outs
    if not parts:
        return "None"
    return parts[0] if len(parts) == 1 else f"tuple[{', '.join(parts)}]"


def out(binding: Binding, arg: Arg) -> str:
    """An out-parameter's value."""
    assert arg.element is not None
    kind = scalar_kind(binding.api, arg.element)
    if kind == "string":
        return "str | None"
    text = value(binding, arg.element)
    return f"{text} | None" if kind == "pointer" else text
