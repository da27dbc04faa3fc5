"""Stage 2: pycparser's tree of the preprocessed text → the IR."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pycparser import c_ast, c_generator, c_parser
from pycparser.c_parser import ParseError as SyntaxFault

from . import ir
from .comments import locate
from .prefix import BuildError
from .preprocess import Macro, Preprocessed

#: Types that cffi and C++ know without our help.
BUILTIN = frozenset(
    ("bool", "size_t", "ptrdiff_t", "intptr_t", "uintptr_t", "int8_t", "int16_t", "int32_t",
     "int64_t", "uint8_t", "uint16_t", "uint32_t", "uint64_t", "FILE", "va_list")
)  # fmt: skip
_SIZES = {
    "char": 1, "bool": 1, "int8_t": 1, "uint8_t": 1, "int16_t": 2, "uint16_t": 2, "int": 4,
    "int32_t": 4, "uint32_t": 4, "float": 4, "int64_t": 8, "uint64_t": 8, "double": 8,
    "size_t": 8,
}  # fmt: skip

_INTEGER = re.compile(r"^[\s()0-9a-fA-FxXuUlL+\-*/<>|&~]*$")
_STRING = re.compile(r'^"(?:[^"\\]|\\.)*"$')


class ParseError(BuildError):
    """What the parser does not understand, or a declaration that the generator has no word for."""


def parse(source: Preprocessed, headers: Sequence[Path]) -> ir.Api:
    """Read what `headers` declare; other files' declarations only give names to the parser."""
    try:
        tree = c_parser.CParser().parse(source.text, filename="umbrella.h")
    except SyntaxFault as error:
        raise ParseError(str(error)) from None
    reader = _Reader({header.name for header in headers})
    for node in tree.ext:
        reader.declaration(node)
    api = reader.api()
    constants = {**_macro_constants(source.macros), **reader.constants}
    functions = {
        name: replace(function, deprecated=source.deprecated.get(name))
        for name, function in api.functions.items()
    }
    return locate(replace(api, functions=functions, constants=constants), headers)


class _Reader:
    """Walks the declarations and keeps what is ours."""

    def __init__(self, headers: set[str]) -> None:
        self.headers = headers
        self.functions: dict[str, ir.Function] = {}
        self.structs: dict[str, ir.Struct] = {}
        self.enums: dict[str, ir.Enum] = {}
        self.typedefs: dict[str, ir.Typedef] = {}
        self.constants: dict[str, ir.Constant] = {}
        self.order: list[tuple[str, str]] = []
        self.known_values: dict[str, int] = {}

    def api(self) -> ir.Api:
        return ir.Api(
            self.functions, self.structs, self.enums, self.typedefs, self.constants,
            tuple(self.order),
        )  # fmt: skip

    def declaration(self, node: c_ast.Node) -> None:
        where = getattr(node, "coord", None)
        file = str(getattr(where, "file", "") or "")
        if file not in self.headers:
            return
        header = ir.Where(file)
        if isinstance(node, c_ast.Typedef):
            if node.name in self.typedefs:
                return
            self.typedefs[node.name] = ir.Typedef(node.name, self.type(node.type, header), header)
            self.order.append(("typedef", node.name))
        elif isinstance(node, c_ast.Decl):
            self.type_declared = self.type(node.type, header)
            if isinstance(node.type, c_ast.FuncDecl):
                assert isinstance(self.type_declared, ir.FunctionType)
                if node.name not in self.functions:
                    self.functions[node.name] = ir.Function(node.name, self.type_declared, header)
                    self.order.append(("function", node.name))
            elif node.name and "static" in node.storage and "const" in node.quals:
                self.constants[node.name] = ir.Constant(
                    node.name, "variable", self.type_declared, header.header
                )
        elif isinstance(node, c_ast.FuncDef):
            return  # a static inline helper of a header has no symbol to bind
        elif not isinstance(node, c_ast.Pragma | c_ast.StaticAssert):
            raise ParseError(f"{node.coord}: {type(node).__name__} is not supported")

    def type(self, node: c_ast.Node, where: ir.Where) -> ir.Type:
        if isinstance(node, c_ast.TypeDecl):
            return self.plain(node.type, "const" in node.quals, where)
        if isinstance(node, c_ast.PtrDecl):
            return ir.Pointer(self.type(node.type, where), "const" in node.quals)
        if isinstance(node, c_ast.ArrayDecl):
            length = None if node.dim is None else c_generator.CGenerator().visit(node.dim)
            return ir.Array(self.type(node.type, where), length, self.evaluate(node.dim))
        if isinstance(node, c_ast.FuncDecl):
            return self.function_type(node, where)
        return self.plain(node, False, where)

    def plain(self, node: c_ast.Node, const: bool, where: ir.Where) -> ir.Type:
        if isinstance(node, c_ast.IdentifierType):
            name = " ".join(node.names)
            name = "bool" if name == "_Bool" else name
            known = name in self.typedefs and name not in BUILTIN
            return ir.Named(name, const) if known else ir.Prim(name, const)
        if isinstance(node, c_ast.Enum):
            self.enum(node, where)
            return ir.Tag("enum", node.name, const)
        kind = "struct" if isinstance(node, c_ast.Struct) else "union"
        if node.name is None:
            return ir.Anonymous(kind, self.fields(node, where))
        self.struct(kind, node, where)
        return ir.Tag(kind, node.name, const)

    def function_type(self, node: c_ast.FuncDecl, where: ir.Where) -> ir.FunctionType:
        params: list[ir.Param] = []
        variadic = False
        for number, param in enumerate(node.args.params if node.args else ()):
            if isinstance(param, c_ast.EllipsisParam):
                variadic = True
                continue
            ctype = self.type(param.type, where)
            if ctype == ir.Prim("void"):
                continue
            params.append(ir.Param(getattr(param, "name", None) or f"arg{number}", ctype))
        return ir.FunctionType(self.type(node.type, where), tuple(params), variadic)

    def fields(self, node: c_ast.Node, where: ir.Where) -> tuple[ir.Param, ...]:
        fields = []
        for decl in node.decls:
            bits = None if decl.bitsize is None else self.evaluate(decl.bitsize)
            fields.append(ir.Param(decl.name or "", self.type(decl.type, where), bits))
        return tuple(fields)

    def struct(self, kind: str, node: c_ast.Node, where: ir.Where) -> None:
        seen = self.structs.get(node.name)
        if seen is None:
            self.structs[node.name] = ir.Struct(kind, node.name, None, where)
            self.order.append(("struct", node.name))
        if node.decls is not None and (seen is None or seen.fields is None):
            fields = self.fields(node, where)
            self.structs[node.name] = ir.Struct(kind, node.name, fields, where)
            # cffi reads in order: the definition stands where it became complete
            self.order = [entry for entry in self.order if entry != ("struct", node.name)]
            self.order.append(("struct", node.name))

    def enum(self, node: c_ast.Enum, where: ir.Where) -> None:
        if node.values is None or (node.name and node.name in self.enums):
            return
        values = []
        following: int | None = 0
        for item in node.values.enumerators:
            if item.value is not None:
                following = self.evaluate(item.value)
            values.append(ir.Enumerator(item.name, following))
            if following is not None:
                self.known_values[item.name] = following
                following += 1
        name = node.name or f"@{values[0].name}"
        self.enums[name] = ir.Enum(node.name or "", tuple(values), where)
        self.order.append(("enum", name))

    def evaluate(self, node: c_ast.Node | None) -> int | None:
        """The value of a constant expression, None where it is beyond us."""
        if isinstance(node, c_ast.Constant) and node.type in ("int", "long int", "unsigned int"):
            return int(node.value.rstrip("uUlL"), 0)
        if isinstance(node, c_ast.ID):
            return self.known_values.get(node.name)
        if isinstance(node, c_ast.UnaryOp):
            if node.op == "sizeof":
                named = getattr(
                    getattr(getattr(node.expr, "type", None), "type", None), "names", []
                )
                return _SIZES.get(" ".join(named))
            value = self.evaluate(node.expr)
            if value is None:
                return None
            return {"-": -value, "+": value, "~": ~value}.get(node.op)
        if isinstance(node, c_ast.BinaryOp):
            left, right = self.evaluate(node.left), self.evaluate(node.right)
            if left is None or right is None or (node.op == "/" and right == 0):
                return None
            operations = {
                "+": left + right, "-": left - right, "*": left * right,
                "/": left // right if right else 0, "|": left | right, "&": left & right,
                "<<": left << right if 0 <= right < 64 else None,
                ">>": left >> right if 0 <= right < 64 else None,
            }  # fmt: skip
            return operations.get(node.op)
        return None


def _macro_constants(macros: Sequence[Macro]) -> Mapping[str, ir.Constant]:
    """The macros that are integers or strings; the compiler finds the values."""
    bodies = {macro.name: macro.body for macro in macros}
    constants = {}
    for macro in macros:
        body = macro.body
        for _ in range(8):  # a macro that names another
            body = re.sub(r"[A-Za-z_]\w*", lambda m: bodies.get(m.group(), m.group()), body)
        if _STRING.match(body):
            constants[macro.name] = ir.Constant(macro.name, "string", None, macro.header)
        elif re.search(r"\d", body) and _INTEGER.match(body):
            constants[macro.name] = ir.Constant(macro.name, "int", None, macro.header)
    return constants
