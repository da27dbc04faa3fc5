"""The public API is typed through and through; nox -s typing runs the type checkers on it."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import typed_sample
from _release import needs_meta

import ggml_cffi
from ggml_cffi import capi

GEN = Path(ggml_cffi.__file__).parent / "_gen"
PUBLIC = sorted(set(ggml_cffi.__all__) - {"capi", "enums", "errors", "ffi", "lib"})


def annotations(function: ast.FunctionDef) -> list[tuple[str, ast.expr | None]]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    others = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    found = [(a.arg, a.annotation) for a in (*named, *others) if a.arg not in ("self", "cls")]
    return [*found, ("return", function.returns)]


@pytest.mark.parametrize("path", sorted(GEN.glob("*.pyi")), ids=lambda path: path.name)
def test_no_any_in_the_stubs(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert "Any" not in names
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    bare = [(f.name, name) for f in functions for name, kind in annotations(f) if kind is None]
    assert bare == []


def test_every_function_has_a_stub() -> None:
    tree = ast.parse((GEN / "capi.pyi").read_text(encoding="utf-8"))
    stubs = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    generated = importlib.import_module("ggml_cffi._gen.capi")
    functions = {n for n, f in vars(generated).items() if inspect.isfunction(f) and n[0] != "_"}
    assert stubs == functions
    for name in stubs:
        node = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
        real = inspect.signature(getattr(generated, name))
        assert [n for n, _ in annotations(node)[:-1]] == list(real.parameters)


def hinted(thing: object, where: str) -> list[tuple[str, str, object]]:
    """Every parameter and result of a class or function, with its annotation."""
    if inspect.isclass(thing):
        found = []
        for name, member in vars(thing).items():
            if name.startswith("_") and name not in ("__init__", "__call__", "__enter__"):
                continue
            function = member.fget if isinstance(member, property) else member
            function = getattr(function, "__func__", function)
            if inspect.isfunction(function):
                found += hinted(function, f"{where}.{name}")
        return found
    signature = inspect.signature(thing)  # type: ignore[arg-type]
    kinds = {n: p.annotation for n, p in signature.parameters.items() if n not in ("self", "cls")}
    return [(where, n, a) for n, a in (kinds | {"return": signature.return_annotation}).items()]


def test_no_any_in_the_classes() -> None:
    things = [(name, getattr(ggml_cffi, name)) for name in PUBLIC]
    overrides = importlib.import_module("ggml_cffi._overrides")
    things += [(name, getattr(overrides, name)) for name in overrides.__all__]
    found = [hint for name, thing in things if callable(thing) for hint in hinted(thing, name)]
    assert len(found) > 50
    loose = [
        (where, name)
        for where, name, kind in found
        if kind is inspect.Parameter.empty
        or "Any" in re.sub(r"(NDArray|dtype)\[Any\]", "", str(kind))
    ]
    assert loose == []


def test_every_function_is_documented() -> None:
    bare = [name for name in capi.__coverage__.bound if not (getattr(capi, name).__doc__ or "")]
    assert bare == []


@needs_meta
def test_sample_runs() -> None:
    typed_sample.main()


def test_marked_as_typed() -> None:
    assert (Path(ggml_cffi.__file__).parent / "py.typed").is_file()
