"""The report: counts, what is left out and why. Its diff is part of an upgrade's review."""

from __future__ import annotations

from collections import Counter

from .resolve import Binding


def emit(binding: Binding) -> str:
    """The text."""
    api = binding.api
    declared = Counter(f.where.header for f in api.functions.values())
    bound = Counter(b.function.where.header for b in binding.bound)
    guards = Counter(b.guard for b in binding.bound)
    lines = [f"ggml {binding.version}", ""]
    lines.append(f"functions declared {len(api.functions)}")
    lines.append(f"functions bound    {len(binding.bound)}")
    lines.append(f"functions left out {len(binding.skipped)}")
    lines.append(f"structs {len(api.structs)}, enums {len(api.enums)}, "
                 f"constants {len(api.constants)}, callbacks {len(binding.callbacks)}")  # fmt: skip
    lines.append("")
    lines += [f"{h}: {bound[h]} of {n}" for h, n in sorted(declared.items())]
    lines.append("")
    lines += [f"guard {name}: {n}" for name, n in sorted(guards.items())]
    lines += ["", "left out:"]
    lines += [f"  {name}: {why}" for name, why in sorted(binding.skipped.items())]
    lines += ["", "hand-written:"]
    lines += [f"  {b.name}" for b in binding.bound if b.override]
    if binding.absent:
        lines += ["", "known, not in this build:"]
        lines += [f"  {name}" for name in binding.absent]
    if binding.notes:
        lines += ["", "notes:"]
        lines += [f"  {note}" for note in binding.notes]
    return "\n".join(lines) + "\n"
