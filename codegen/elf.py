"""What the build must know of a shared library, read from its ELF file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection


@dataclass(frozen=True)
class Library:
    """The dynamic section of one shared library, with the machine it is for (``EM_X86_64``)."""

    machine: str
    soname: str | None
    needed: tuple[str, ...]
    runpath: tuple[str, ...]


def read_library(path: Path) -> Library | None:
    """Read the ELF file at ``path``; None where it is no shared library (a linker script, say)."""
    with path.open("rb") as file:
        try:
            elf = ELFFile(file)
            dynamic = next((s for s in elf.iter_sections() if isinstance(s, DynamicSection)), None)
            if dynamic is None:
                return None
            machine = str(elf["e_machine"])
            tags = list(dynamic.iter_tags())
        except ELFError:
            return None
        found: dict[str, list[str]] = {}
        for tag in tags:
            kind = str(tag.entry.d_tag)
            if kind in ("DT_NEEDED", "DT_SONAME", "DT_RUNPATH", "DT_RPATH"):
                # pyelftools gives the text under the name of the tag, in lower case.
                found.setdefault(kind, []).append(getattr(tag, kind[3:].lower()))
    # DT_RPATH counts only where there is no DT_RUNPATH.
    runpath = (found.get("DT_RUNPATH") or found.get("DT_RPATH") or [""])[0]
    return Library(
        machine=machine,
        soname=found.get("DT_SONAME", [None])[0],
        needed=tuple(found.get("DT_NEEDED", [])),
        runpath=tuple(part for part in runpath.split(":") if part),
    )


def exported_symbols(path: Path) -> set[str]:
    """Give the names that the shared library at ``path`` defines for others."""
    with path.open("rb") as file:
        table = ELFFile(file).get_section_by_name(".dynsym")
        if not isinstance(table, SymbolTableSection):
            return set()
        return {
            symbol.name
            for symbol in table.iter_symbols()
            if symbol["st_shndx"] != "SHN_UNDEF"
            and symbol["st_info"]["bind"] in ("STB_GLOBAL", "STB_WEAK", "STB_LOOS")
            and symbol["st_other"]["visibility"] in ("STV_DEFAULT", "STV_PROTECTED")
        }
