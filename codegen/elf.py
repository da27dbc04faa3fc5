"""What the build must know of a shared library: read from its ELF file, never guessed from its name."""

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
        needed = tuple(str(tag.needed) for tag in tags if tag.entry.d_tag == "DT_NEEDED")
        soname = next((str(tag.soname) for tag in tags if tag.entry.d_tag == "DT_SONAME"), None)
        # DT_RPATH counts only where there is no DT_RUNPATH.
        runpath = next((tag.runpath for tag in tags if tag.entry.d_tag == "DT_RUNPATH"), None)
        if runpath is None:
            runpath = next((tag.rpath for tag in tags if tag.entry.d_tag == "DT_RPATH"), "")
    return Library(machine, soname, needed, tuple(part for part in runpath.split(":") if part))


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
