"""Feeds small made-up headers through the generator."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from pathlib import Path

from codegen import annotations, lock, report, resolve
from codegen.emit import capi, cdef, enums, ops, source, tables, types
from codegen.parse import parse
from codegen.preprocess import preprocess

GOLDEN = Path(__file__).parent / "golden"


def write(folder: Path, texts: Mapping[str, str]) -> Path:
    """`texts` as files of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def bind(
    folder: Path,
    *,
    missing: Collection[str] = (),
    known: Mapping[str, str] | None = None,
    strict: bool = True,
    compiler: str | None = None,
    modules: Mapping[str, str] | None = None,
) -> resolve.Binding:
    """The stages up to resolve for toy.h and the ``*.toml`` beside it.

    All that toy.h declares is exported by the library "toy", but what is `missing`.
    """
    header = folder / "toy.h"
    api = parse(preprocess([header], [folder], compiler), [header])
    exported = {"toy": set(api.functions) - set(missing)}
    said = annotations.load(folder)
    return resolve.resolve(
        api, said, exported, strict=strict, known=known or {}, version="1.2.3", commit="abc",
        modules=modules,
    )  # fmt: skip


def emit(binding: resolve.Binding) -> dict[str, str]:
    """What the emitters write for `binding`, by the name of the file."""
    return {
        "api.json": json.dumps(lock.snapshot(binding.api, binding.version), indent=1),
        "cdef": cdef.emit(binding),
        "source": source.emit(binding, ["toy.h"], "", ""),
        "capi.py": capi.emit(binding),
        "capi.pyi": capi.emit_stub(binding),
        "enums.py": enums.emit(binding),
        "types.py": types.emit(binding),
        "tables.py": tables.emit(binding),
        "ops.py": ops.emit(binding),
        "ops.pyi": ops.emit_stub(binding),
        "report.txt": report.emit(binding),
    }


def golden(binding: resolve.Binding, empty: resolve.Binding) -> str:
    """All that `binding` adds to the output for an empty header, file by file."""
    boilerplate = emit(empty)
    parts = []
    for name, text in emit(binding).items():
        lines = difflib.ndiff(boilerplate[name].splitlines(), text.splitlines())
        added = [line[2:] for line in lines if line.startswith("+ ")]
        parts.append("\n".join([f"======== {name}", *added]))
    return "\n".join(parts) + "\n"
