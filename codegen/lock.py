"""The lock (ggml/api.json): names and types of all that was parsed. Its diff reviews an upgrade."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from . import ir

SECTIONS = ("functions", "structs", "enums", "typedefs", "constants")


def snapshot(api: ir.Api, version: str, unexported: Iterable[str] = ()) -> dict[str, Any]:
    """`api` as JSON data, sorted; `unexported` are the functions that no library has."""
    functions = {
        name: ir.declare(f.type, name) + (" [deprecated]" if f.deprecated is not None else "")
        for name, f in api.functions.items()
    }
    structs = {
        name: None if s.fields is None else [ir.declare_field(field) for field in s.fields]
        for name, s in api.structs.items()
    }
    enums = {
        name: [v.name if v.value is None else f"{v.name} = {v.value}" for v in e.values]
        for name, e in api.enums.items()
    }
    typedefs = {name: ir.declare(t.type, name) for name, t in api.typedefs.items()}
    constants = {
        name: c.kind if c.type is None else ir.declare(c.type) for name, c in api.constants.items()
    }
    parts: tuple[dict[str, Any], ...] = (functions, structs, enums, typedefs, constants)
    sections = {
        section: dict(sorted(part.items())) for section, part in zip(SECTIONS, parts, strict=True)
    }
    return {"ggml": version} | sections | {"unexported": sorted(unexported)}


def load(path: Path) -> dict[str, Any]:
    """The lock's data, empty where there is none yet."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return data


def functions(path: Path) -> dict[str, str]:
    """The functions in the lock that a library has, with their declarations."""
    data = load(path)
    unexported = set(data.get("unexported", ()))
    return {name: c for name, c in data.get("functions", {}).items() if name not in unexported}


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Lines: what was added (+), removed (-) and changed (~)."""
    for section in SECTIONS:
        before, after = old.get(section, {}), new.get(section, {})
        for name in sorted(set(before) | set(after)):
            if name not in before:
                yield f"+ {section[:-1]} {name}: {_word(after[name])}"
            elif name not in after:
                yield f"- {section[:-1]} {name}: {_word(before[name])}"
            elif before[name] != after[name]:
                yield f"~ {section[:-1]} {name}: {_change(before[name], after[name])}"


def _word(value: Any) -> str:
    return "; ".join(value) if isinstance(value, list) else str(value)


def _change(before: Any, after: Any) -> str:
    if isinstance(before, list) and isinstance(after, list):
        gone = [f"-{item}" for item in before if item not in after]
        new = [f"+{item}" for item in after if item not in before]
        return ", ".join(gone + new) or "order"
    return f"{_word(before)} -> {_word(after)}"
