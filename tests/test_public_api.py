"""The names and signatures of ggml_cffi and capi, kept in ggml/public_api.json.

What is new passes; what is gone or other than it was fails, until it is acknowledged by writing the
file anew: GGML_CFFI_UPDATE_API=1.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import ggml_cffi
from ggml_cffi import _gen, _overrides, capi
from ggml_cffi._gen import build_info

FILE = Path(__file__).resolve().parent.parent / "ggml" / "public_api.json"


def signature(value: Any) -> str:
    """What a name is: a signature, the members of an enum, or a type."""
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return f"enum {', '.join(value.__members__)}"
    if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
        return f"tuple {', '.join(value._fields)}"  # its signature is each Python's own
    if callable(value):
        try:
            return str(inspect.signature(value))
        except ValueError:  # an exception without a constructor of its own
            return "class"
    if isinstance(value, types.UnionType):
        return "UnionType"  # Python 3.14 calls it Union
    return type(value).__name__


def members(cls: type) -> dict[str, str]:
    """A class's constructor and public members, with what it inherits from classes of ours."""
    found = {"": signature(cls)}
    ours = [base for base in cls.__mro__ if base.__module__.startswith("ggml_cffi")]
    for name, value in inspect.getmembers(cls):
        if name.startswith("_") or not any(name in vars(base) for base in ours):
            continue
        plain = inspect.getattr_static(cls, name)
        is_property = isinstance(plain, property) or name in getattr(cls, "_fields", ())
        found[f".{name}"] = "property" if is_property else signature(value)
    return found


def of_a_module(module: Any) -> dict[str, str]:
    """What it names in __all__, or else what is public and its own, or generated for it."""
    own = tuple(prefix + module.__name__.rpartition(".")[2] for prefix in ("ggml_cffi.", "_gen."))
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and str(getattr(value, "__module__", "")).endswith(own)
    ]
    found = {}
    for name in names:
        value = getattr(module, name)
        if isinstance(value, type) and not issubclass(value, enum.Enum):
            found |= {name + member: text for member, text in members(value).items()}
        else:
            found[name] = signature(value)
    return found


def of_capi() -> dict[str, str]:
    """As the stub has it, where there is one: it knows more than the running functions."""
    stub = Path(_gen.__file__).with_name("capi.pyi").read_text(encoding="utf-8")
    found = {}
    for node in ast.parse(stub).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"
        elif isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = ast.unparse(node.annotation)
    for name in dir(capi):
        if not name.startswith("_") and name not in found:
            value = getattr(capi, name)
            if not inspect.ismodule(value):
                found[name] = signature(value)
    return dict(sorted(found.items()))


def public_modules() -> list[Any]:
    """The package's, with itself, but capi."""
    found = [m.name for m in pkgutil.iter_modules(ggml_cffi.__path__) if not m.name.startswith("_")]
    found.remove("capi")
    return [ggml_cffi, *(importlib.import_module(f"ggml_cffi.{name}") for name in found)]


def snapshot() -> dict[str, dict[str, str]]:
    modules = {module.__name__: of_a_module(module) for module in public_modules()}
    return {**modules, "ggml_cffi.capi": of_capi()}


def changes(kept: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> list[str]:
    """What is gone or changed; what is new is no matter."""
    return [
        f"{module}.{name}: {text} -> {now.get(module, {}).get(name, 'gone')}"
        for module, names in kept.items()
        for name, text in names.items()
        if now.get(module, {}).get(name) != text
    ]


def test_nothing_is_gone_or_changed() -> None:
    now = snapshot()
    if os.environ.get("GGML_CFFI_UPDATE_API") == "1":
        kept = {"ggml": build_info.GGML_VERSION, "names": now}
        FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    kept = json.loads(FILE.read_text(encoding="utf-8"))
    if kept["ggml"] != build_info.GGML_VERSION:  # another release has other functions
        for module in ("capi", "enums", "ops"):
            del kept["names"][f"ggml_cffi.{module}"]
    assert changes(kept["names"], now) == []


def test_all_is_there() -> None:
    now = snapshot()
    assert set(capi.__coverage__.bound) <= set(now["ggml_cffi.capi"])
    assert len(capi.__coverage__.bound) > 500
    assert {"MetaDevice", "MetaDevice.error", "MultiBuffer", "SplitState.by_ratio"} <= set(
        now["ggml_cffi"]
    )
    assert set(_overrides.__all__) <= set(now["ggml_cffi.capi"])
    assert {"quantize", "dequantize"} <= set(now["ggml_cffi.quants"])
    assert {"Backend", "Device", "Context", "Tensor", "Graph", "Compiled"} <= set(now["ggml_cffi"])
    assert {"Scheduler", "GGUFFile", "GGUFWriter", "quantize", "dequantize", "OperandError"} <= set(
        now["ggml_cffi"]
    )
    assert {"Tensor.numpy", "Context.allocate", "Graph.compile"} <= set(now["ggml_cffi"])
    assert {"ops", "quants", "dtypes", "gguf", "diagnostics", "logs"} <= set(now["ggml_cffi"])
    assert "numpy_dtype" in now["ggml_cffi.dtypes"]
    assert now["ggml_cffi.logs"] and now["ggml_cffi.diagnostics"] and now["ggml_cffi.errors"]
    assert "GGML_TYPE_Q4_0" in now["ggml_cffi.enums"]["ggml_type"]


def test_a_change_is_seen() -> None:
    now = {"module": {"kept": "(a)", "changed": "(a, b)", "new": "()"}}
    kept = {"module": {"kept": "(a)", "changed": "(a)", "gone": "()"}}
    assert changes(kept, now) == ["module.changed: (a) -> (a, b)", "module.gone: () -> gone"]
    assert changes({"gone": {"name": "()"}}, now) == ["gone.name: () -> gone"]


def test_modules_say_what_they_have() -> None:
    """Without __all__ the list above would be a guess at it."""
    written = [m for m in public_modules() if m.__name__ not in ("ggml_cffi.enums",)]
    assert [m.__name__ for m in written if not getattr(m, "__all__", None)] == []


def test_what_is_not_asked_for_is_not_imported() -> None:
    """Objects take a quarter of the time again that capi takes."""
    code = """
import sys, ggml_cffi
late = {f"ggml_cffi.{name}" for name in ("tensor", "graph", "scheduler", "ops", "quants", "gguf")}
assert not late & set(sys.modules), late & set(sys.modules)
assert {"Context", "ops", "__version__", *ggml_cffi.__all__} <= set(dir(ggml_cffi))
assert ggml_cffi.ops.add and ggml_cffi.Graph and ggml_cffi.GGUFFile and ggml_cffi.quants.quantize
assert late <= set(sys.modules)
from ggml_cffi import *
assert all(name in globals() for name in ggml_cffi.__all__)
try:
    ggml_cffi.nothing
except AttributeError as error:
    assert "has no attribute 'nothing'" in str(error)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
