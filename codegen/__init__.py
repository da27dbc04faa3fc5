"""From ggml's headers to the binding: see README.md beside this file."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from . import ir, lock, report, resolve
from .annotations import load as load_annotations
from .emit import capi, cdef, enums, ops, source, tables, types
from .parse import parse
from .prefix import Prefix, exported_symbols
from .preprocess import preprocess

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
GGML = ROOT / "ggml"
#: The C++ around every call, in this order.
CPP = (
    "process.hpp",
    "tables.hpp",
    "handles.hpp",
    "checks.hpp",
    "kernels.hpp",
    "gradients.hpp",
    "indices.hpp",
    "versions.hpp",
    "memory.hpp",
    "cuts.hpp",
    "state.hpp",
    "shapes.hpp",
    "callbacks.hpp",
    "network.hpp",
    "plans.hpp",
    "registry.hpp",
    "guard.hpp",
    "graphs.hpp",
    "raising.hpp",
    "building.hpp",
    "pages.hpp",
    "quants.hpp",
)


@dataclass(frozen=True)
class Generated:
    """What the build compiles and installs."""

    cdef: str
    source: str
    python_files: list[Path]
    libraries: list[str]
    include_dirs: list[Path]


def pin() -> dict[str, object]:
    """ggml/pin.toml."""
    return tomllib.loads((GGML / "pin.toml").read_text(encoding="utf-8"))


def is_pin(prefix: Prefix) -> bool:
    """Whether `prefix` is the release that the lock and the annotations are for."""
    return prefix.version == pin()["ggml"]


def header_names(prefix: Prefix) -> list[str]:
    """The headers to bind: those of the core, and a backend's where its library is linkable."""
    headers = pin()["headers"]
    assert isinstance(headers, dict)
    names = [name for name in headers["always"] if (prefix.include / name).exists()]
    for name, library in headers["optional"].items():
        there = library in prefix.libraries or prefix.variants(library)
        if there and (prefix.include / name).exists():
            names.append(name)
    return names


def read_api(prefix: Prefix, compiler: str | None = None) -> ir.Api:
    """Stages 1 and 2 for `prefix`, with our supplement to its headers."""
    headers = [prefix.include / name for name in header_names(prefix)]
    headers.append(GGML / "supplement.h")
    # ours first: a prefix like /usr has headers of everybody's
    return parse(preprocess(headers, [GGML, prefix.include], compiler), headers)


def bind(
    prefix: Prefix, compiler: str | None = None, *, strict: bool | None = None
) -> resolve.Binding:
    """Stages 1 to 4; `strict` by default on the pin, where a wrong annotation is an error."""
    headers = pin()["headers"]
    assert isinstance(headers, dict)
    idle = set(headers["optional"]) - set(header_names(prefix))
    exported, modules = _exported(prefix)
    return resolve.resolve(
        read_api(prefix, compiler),
        load_annotations(GGML / "annotations"),
        exported,
        strict=is_pin(prefix) if strict is None else strict,
        idle={Path(name).stem + ".toml" for name in idle},
        known=lock.functions(GGML / "api.json"),
        version=prefix.version,
        commit=prefix.commit,
        modules=modules,
    )


def _exported(prefix: Prefix) -> tuple[dict[str, set[str]], dict[str, str]]:
    """The symbols of each library, and which are loadable modules of which backend."""
    exported = {name: exported_symbols(path) for name, path in prefix.libraries.items()}
    modules = {}
    for library, backend in _modules().items():
        if library not in prefix.libraries and (paths := prefix.variants(library)):
            modules[library] = backend
            exported[library] = set.intersection(*map(exported_symbols, paths))
    return exported, modules


def _modules() -> dict[str, str]:
    """Backends that may be loadable modules: library → name in ggml's registry."""
    found = pin()["modules"]
    assert isinstance(found, dict)
    return found


def generate(prefix: Prefix, outdir: Path, *, compiler: str | None = None) -> Generated:
    """Write the Python files of ``_gen`` into `outdir` and give the rest back."""
    binding = bind(prefix, compiler)
    files = {
        "__init__.py": '"""Made by codegen at build time."""\n',
        "capi.py": capi.emit(binding),
        "capi.pyi": capi.emit_stub(binding),
        "enums.py": enums.emit(binding),
        "enums.pyi": enums.emit_stub(binding),
        "tables.py": tables.emit(binding),
        "types.py": types.emit(binding),
        "ops.py": ops.emit(binding),
        "ops.pyi": ops.emit_stub(binding),
        "build_info.py": _build_info(prefix, binding),
        "report.txt": report.emit(binding),
    }
    outdir.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in files.items():
        path = outdir / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return Generated(
        cdef=cdef.emit(binding),
        source=source.emit(
            binding,
            header_names(prefix),
            (GGML / "supplement.h").read_text(encoding="utf-8"),
            "".join((GGML / name).read_text(encoding="utf-8") for name in CPP),
            (GGML / "modules.hpp").read_text(encoding="utf-8"),
        ),
        python_files=written,
        libraries=sorted(
            {b.library for b in binding.bound} - set(binding.modules), key=_link_order
        ),
        include_dirs=[prefix.include],
    )


def _link_order(name: str) -> tuple[int, str]:
    """Users before used."""
    return ({"ggml": 0, "ggml-base": 2}.get(name, 1), name)


def _build_info(prefix: Prefix, binding: resolve.Binding) -> str:
    facts = {
        "GGML_VERSION": prefix.version,
        "GGML_COMMIT": prefix.commit,
        "PREFIX_KEY": prefix.key,
        "PREFIX_ORIGIN": prefix.origin,
        "SYSTEM_LIBDIR": str(prefix.libdir) if prefix.system else None,
        "SYSTEM_MODULES": [str(path) for path in prefix.modules] if prefix.system else [],
        "LIBRARIES": sorted(prefix.libraries),
    }
    lines = ['"""What this build was made from; generated by codegen."""\n']
    for name, value in facts.items():  # what an empty list holds, nobody could tell
        lines.append(f"{name}{': list[str]' if isinstance(value, list) else ''} = {value!r}")
    return "\n".join(lines) + "\n"


def lock_text(prefix: Prefix) -> str:
    """The text of api.json for `prefix`."""
    api = read_api(prefix)
    unexported = set(api.functions).difference(*_exported(prefix)[0].values())
    return json.dumps(lock.snapshot(api, prefix.version, unexported), indent=1) + "\n"
