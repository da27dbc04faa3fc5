"""What the headers say, as frozen values: types, functions, structs, enums, constants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Prim:
    """A type that C or the C library names: ``int``, ``size_t``, ``bool``, ``void``, ``FILE``."""

    name: str
    const: bool = False


@dataclass(frozen=True)
class Named:
    """A typedef of the headers, by its name."""

    name: str
    const: bool = False


@dataclass(frozen=True)
class Tag:
    """``struct x``, ``union x`` or ``enum x``."""

    kind: str
    name: str
    const: bool = False


@dataclass(frozen=True)
class Pointer:
    """A pointer to an object or to a function."""

    to: Type
    const: bool = False


@dataclass(frozen=True)
class Array:
    """An array; `length` is the C expression, None for ``[]``, `size` its value where known."""

    of: Type
    length: str | None
    size: int | None = None


@dataclass(frozen=True)
class Anonymous:
    """A struct or union without a tag, where it is used."""

    kind: str
    fields: tuple[Param, ...]


@dataclass(frozen=True)
class FunctionType:
    """The type of a function."""

    returns: Type
    params: tuple[Param, ...]
    variadic: bool = False


Type = Prim | Named | Tag | Pointer | Array | Anonymous | FunctionType


@dataclass(frozen=True)
class Param:
    """A parameter or a field."""

    name: str
    type: Type
    bits: int | None = None


@dataclass(frozen=True)
class Where:
    """Where a declaration stands, and what the header says beside it."""

    header: str = ""
    line: int = 0
    comment: str = ""
    param_comments: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Function:
    """A function that a header declares."""

    name: str
    type: FunctionType
    where: Where = Where()
    deprecated: str | None = None

    @property
    def params(self) -> tuple[Param, ...]:
        """The parameters of its type."""
        return self.type.params

    @property
    def returns(self) -> Type:
        """The result of its type."""
        return self.type.returns


@dataclass(frozen=True)
class Struct:
    """A struct or union; `fields` is None where the headers keep it opaque."""

    kind: str
    name: str
    fields: tuple[Param, ...] | None
    where: Where = Where()


@dataclass(frozen=True)
class Enumerator:
    """A name of an enum; `value` is the parser's reading, the compiler decides."""

    name: str
    value: int | None


@dataclass(frozen=True)
class Enum:
    """An enum; `name` is empty where it has no tag."""

    name: str
    values: tuple[Enumerator, ...]
    where: Where = Where()


@dataclass(frozen=True)
class Typedef:
    """A typedef."""

    name: str
    type: Type
    where: Where = Where()


@dataclass(frozen=True)
class Constant:
    """A macro or a ``static const``: `kind` is int, string or variable (then `type`)."""

    name: str
    kind: str
    type: Type | None = None
    header: str = ""


@dataclass(frozen=True)
class Api:
    """All that was parsed, in the order of the headers."""

    functions: dict[str, Function] = field(default_factory=dict)
    structs: dict[str, Struct] = field(default_factory=dict)
    enums: dict[str, Enum] = field(default_factory=dict)
    typedefs: dict[str, Typedef] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    order: tuple[tuple[str, str], ...] = ()

    def resolve(self, ctype: Type) -> Type:
        """`ctype` with its outermost typedefs followed."""
        while isinstance(ctype, Named):
            const = ctype.const
            ctype = self.typedefs[ctype.name].type
            if const and isinstance(ctype, Prim | Tag | Pointer | Named):
                ctype = type(ctype)(**{**ctype.__dict__, "const": True})
        return ctype

    def function_pointer(self, ctype: Type) -> FunctionType | None:
        """The function type that `ctype` points to, if it does."""
        resolved = self.resolve(ctype)
        if isinstance(resolved, Pointer):
            target = self.resolve(resolved.to)
            if isinstance(target, FunctionType):
                return target
        return None

    def struct_of(self, ctype: Type) -> Struct | None:
        """The struct that `ctype` is, by value."""
        resolved = self.resolve(ctype)
        if isinstance(resolved, Tag) and resolved.kind in ("struct", "union"):
            return self.structs.get(resolved.name)
        return None

    def enumerators(self) -> Iterator[tuple[Enum, Enumerator]]:
        """Every name of every enum."""
        for enum in self.enums.values():
            for value in enum.values:
                yield enum, value


def declare(ctype: Type, name: str = "") -> str:
    """C's declaration of `name` as `ctype`; the type's spelling without a name."""
    if isinstance(ctype, Prim | Named):
        return _spaced(("const " if ctype.const else "") + ctype.name, name)
    if isinstance(ctype, Tag):
        return _spaced(f"{'const ' if ctype.const else ''}{ctype.kind} {ctype.name}", name)
    if isinstance(ctype, Anonymous):
        fields = " ".join(f"{declare_field(f)};" for f in ctype.fields)
        return _spaced(f"{ctype.kind} {{ {fields} }}", name)
    if isinstance(ctype, Pointer):
        inner = "*" + ("const " if ctype.const and name else "const" if ctype.const else "") + name
        if isinstance(ctype.to, FunctionType | Array):
            inner = f"({inner})"
        return declare(ctype.to, inner)
    if isinstance(ctype, Array):
        return declare(ctype.of, f"{name}[{ctype.length or ''}]")
    params = ", ".join(declare(p.type, p.name) for p in ctype.params) or "void"
    if ctype.variadic:
        params += ", ..."
    return declare(ctype.returns, f"{name}({params})")


def declare_field(param: Param) -> str:
    """C's declaration of a field, with its width where it is a bit-field."""
    text = declare(param.type, param.name)
    return text if param.bits is None else f"{text} : {param.bits}"


def _spaced(base: str, name: str) -> str:
    return f"{base} {name}" if name else base
