"""Building and installing the package, as a user does it: in folders and environments of its own.

Slow: `pytest -m "not packaging"` leaves these out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import codegen
from codegen.elf import read_library
from codegen.prefix import Prefix, find_prefix

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).resolve().parent.parent
OTHER = "libggml-python==0.17.0.post1"

NOT_COPIED = (
    *(".git", ".nox", ".*cache", ".hypothesis", ".venv*", "build", "dist", "*.egg-info"),
    *("_gen", "_libs", "__pycache__", "*.gguf"),
)

# What is asked of an installed package, in a process that knows nothing of the build.
REPORT = """
import json
from pathlib import Path
import ggml_cffi
from ggml_cffi import capi
from ggml_cffi._loader import ffi, lib
lines = Path("/proc/self/maps").read_text().splitlines()
maps = {line.split(None, 5)[5].strip() for line in lines if line.count("/") > 1}
cpu = capi.ggml_backend_cpu_init()
print(json.dumps({
    "package": ggml_cffi.__file__,
    "version": ffi.string(lib.ggml_version()).decode(),
    "backend": capi.ggml_backend_name(cpu),
    "libraries": sorted(path for path in maps if "ggml" in path.rpartition("/")[2]),
}))
capi.ggml_backend_free(cpu)
"""


def run(*command: str | Path, cwd: Path, fails: bool = False, **environ: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("GGML_", "PYTHON"))}
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**clean, "CFLAGS": "-O0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert (result.returncode != 0) == fails, result.stdout
    return result.stdout


def build_wheel(source: Path, dest: Path, *options: str, **environ: str) -> Path:
    """Build in this environment, or as pip does by default if ``options`` is empty."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", dest, *options, source]
    run(*command, cwd=dest.parent, **environ)
    (wheel,) = dest.glob("*.whl")
    return wheel


def report(python: Path | str, cwd: Path, **environ: str) -> Mapping[str, object]:
    answer = json.loads(run(python, "-c", REPORT, cwd=cwd, **environ).splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def expected_libraries(prefix: Prefix) -> set[str]:
    return {prefix.library_file(name) for name in prefix.libraries}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("packaging")
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def checkout(folder: Path) -> Path:
    """A copy of the sources, with what an earlier editable install for another ggml left there."""
    dest = folder / "checkout"
    shutil.copytree(ROOT, dest, ignore=shutil.ignore_patterns(*NOT_COPIED))
    package = dest / "src" / "ggml_cffi"
    for name in ("_gen/stale.py", "_gen/capi.pyi", "_gen/_ggml.abi3.so", "_libs/libstale.so"):
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text("stale")
    return dest


@pytest.fixture(scope="module")
def sdist(checkout: Path, folder: Path) -> Path:
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder / 'sdist')!r})"
    run(sys.executable, "-c", code, cwd=checkout)
    (path,) = (folder / "sdist").glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(sdist: Path, folder: Path) -> Path:
    (folder / "wheel").mkdir()
    return build_wheel(sdist, folder / "wheel")


@pytest.fixture(scope="module")
def python(folder: Path) -> Path:
    """An environment with nothing in it but pip."""
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    return folder / "venv" / "bin" / "python"


@pytest.fixture(scope="module")
def other(folder: Path) -> Path:
    """The install prefix of another release of ggml."""
    dest = folder / "other"
    dest.mkdir()
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", dest, OTHER]
    run(*command, cwd=folder)
    (archive,) = dest.glob("*.whl")
    with zipfile.ZipFile(archive) as content:
        content.extractall(dest)
    return dest / "libggml"


def test_the_pin_is_said_once() -> None:
    """ggml/pin.toml is what the generator goes by; pyproject.toml can only repeat it."""
    pin = codegen.pin()
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    wanted = set(re.findall(r"libggml-python==[\w.]+", text))
    assert wanted == {f"{pin['distribution']}=={pin['version']}"}
    assert find_prefix({}).version == pin["ggml"]


CPP = sorted(path.name for path in (ROOT / "ggml").glob("*.hpp"))


def test_what_the_generator_compiles_is_there() -> None:
    assert {*codegen.CPP, "modules.hpp"} == set(CPP)


def names_in_sdist(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def tracked() -> set[str]:
    """The files of the repository, as git lists them."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split("\0") if (ROOT / name).is_file()}


def test_the_sdist_has_all_that_is_in_git(sdist: Path, need: Callable[..., None]) -> None:
    """So that its own tests pass."""
    need(shutil.which("git") and (ROOT / ".git").exists(), "git checkout")
    assert tracked() - names_in_sdist(sdist) == set()


def test_a_wheel_is_made_anew_where_a_file_has_changed_that_goes_into_it() -> None:
    """noxfile.py keeps wheels by the files that it names: nox itself is not installed here."""
    text = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^SOURCES = \((.*?)^\)$", text, re.M | re.S)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (licenses,) = re.findall(r"^license-files = \[(.*)\]$", project, re.M)
    (readme,) = re.findall(r'^readme = "(.*)"$', project, re.M)
    wanted = {"build_ffi.py", "setup.py", "pyproject.toml", "MANIFEST.in", readme}
    wanted |= {"codegen", "ggml", "src/ggml_cffi", *re.findall('"(.*?)"', licenses)}
    assert set(re.findall('"(.*?)"', listed)) == wanted


# ---- CONTRIBUTING.md

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_table_of_the_headers_is_in_their_order() -> None:
    rows = re.findall(r"^\| `(\w+\.hpp)` \| \w", CONTRIBUTING, re.M)
    assert rows == [*codegen.CPP, "modules.hpp"]
    assert re.findall(r"\b\w+\.hpp\b", CONTRIBUTING) == rows


def test_all_markers_are_said() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (section,) = re.findall(r"^markers = \[(.*?)^\]$", project, re.M | re.S)
    markers = re.findall(r'^ *"(\w+)', section, re.M)
    assert "no_sanitizer" in markers
    (said,) = re.findall(r"\bMarkers, .*\n\n((?:- .*\n|  .*\n)+)", CONTRIBUTING)
    assert sorted(re.findall(r"`(\w+)`(?=[:,])", said)) == sorted(markers)


def test_all_settings_are_said() -> None:
    """Those that the build and nox read or set."""
    files = [*(ROOT / "codegen").glob("*.py"), *ROOT.glob("*.py")]
    read: set[str] = set()
    for file in files:
        source = file.read_text(encoding="utf-8")
        read |= set(re.findall(r'environ[^"\n]*"(GGML_CFFI_\w+)"', source))
    assert {"GGML_CFFI_PREFIX", "GGML_CFFI_LINK", "GGML_CFFI_CUDA_ARCHITECTURES"} <= read
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join([CONTRIBUTING, *(path.read_text(encoding="utf-8") for path in documents)])
    assert {name for name in read if not re.search(rf"\b{name}\b", text)} == set()


# ---- builds


def test_sdist(sdist: Path) -> None:
    names = names_in_sdist(sdist)
    for wanted in (
        "LICENSE",
        "NOTICE-ggml",
        "README.md",
        "build_ffi.py",
        "codegen/libc/stdint.h",
        "codegen/prefix.py",
        "ggml/annotations/rules.toml",
        *(f"ggml/{name}" for name in CPP),
        "ggml/pin.toml",
        "pyproject.toml",
        "setup.py",
        "src/ggml_cffi/_loader.py",
        "src/ggml_cffi/py.typed",
        "tests/test_packaging.py",
    ):
        assert wanted in names
    made = [name for name in names if re.search(r"_gen|_libs|\.so|^build/|__pycache__", name)]
    assert made == []


def test_wheel_from_sdist(wheel: Path) -> None:
    assert re.fullmatch(r"ggml_cffi-[\d.]+-cp310-abi3-linux_\w+\.whl", wheel.name)
    names = names_in(wheel)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"ggml_cffi"}
    made = {name.removeprefix("ggml_cffi/") for name in names}
    gen = {name.partition("/")[2] for name in made if name.startswith("_gen/")}
    assert {"__init__.py", "build_info.py", "capi.py", "capi.pyi", "_ggml.abi3.so"} <= gen
    assert "stale.py" not in gen
    libs = {name.partition("/")[2] for name in made if name.startswith("_libs/")}
    assert libs == {*expected_libraries(find_prefix({})), "LICENSE.ggml"}
    assert {"py.typed", "errors.py"} <= made
    licenses = {name.rpartition("/")[2] for name in names if "/licenses/" in name}
    assert licenses == {"LICENSE", "NOTICE-ggml"}


def test_the_wheel_is_linked_to_its_copies(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract("ggml_cffi/_gen/_ggml.abi3.so", folder / "linked"))
        notice = archive.read("ggml_cffi/_libs/LICENSE.ggml").decode()
    library = read_library(path)
    assert library is not None
    assert "$ORIGIN/../_libs" in library.runpath
    assert {n for n in library.needed if "ggml" in n} == expected_libraries(find_prefix({}))
    assert str(folder).encode() not in path.read_bytes(), "the build folder is named"
    assert "The ggml authors" in notice


def test_install_the_wheel(wheel: Path, python: Path, folder: Path) -> None:
    """With what it needs at run time, and neither the build's folder nor its requirements."""
    run(python, "-m", "pip", "install", wheel, cwd=folder)
    found = report(python, folder)
    site = str(folder / "venv")
    assert str(found["package"]).startswith(site)
    assert found["version"] == find_prefix({}).version
    assert found["backend"] == "CPU"
    libraries = found["libraries"]
    assert isinstance(libraries, list)
    assert {Path(path).name for path in libraries} == {
        "_ggml.abi3.so",
        *expected_libraries(find_prefix({})),
    }
    assert all(path.startswith(site) for path in libraries)
    installed = run(python, "-m", "pip", "list", cwd=folder).lower()
    assert "libggml" not in installed
    run(python, "-m", "pip", "uninstall", "-y", "ggml-cffi", cwd=folder)
    assert "No module named 'ggml_cffi'" in run(
        python, "-c", "import ggml_cffi", cwd=folder, fails=True
    )
    assert not list((folder / "venv").rglob("*ggml*")), "uninstalling leaves nothing"


def test_editable_install_beside_a_build_for_another_ggml(
    checkout: Path, python: Path, folder: Path, other: Path
) -> None:
    """From one checkout: editable for the pin, then wheels for another ggml and for the pin."""
    run(python, "-m", "pip", "install", "-e", checkout, cwd=folder)
    pin, another = find_prefix({}), find_prefix({"GGML_CFFI_PREFIX": str(other)})
    assert pin.key != another.key
    source = checkout / "src" / "ggml_cffi"
    assert not list(source.rglob("*stale*")), "what an earlier install left is cleared away"
    assert {p.name for p in (source / "_libs").glob("*.so")} == expected_libraries(pin)

    wheels = {}
    for prefix, environ in ((another, {"GGML_CFFI_PREFIX": str(other)}), (pin, {})):
        dest = folder / prefix.key
        dest.mkdir()
        wheel = build_wheel(checkout, dest, "--no-build-isolation", **environ)
        wheels[prefix.version] = dest
        libs = {name.rpartition("/")[2] for name in names_in(wheel) if "/_libs/" in name}
        assert libs == {*expected_libraries(prefix), "LICENSE.ggml"}
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(dest / "site")

    # The editable install is what it was, and needs nothing of the build's folder.
    shutil.rmtree(checkout / "build")
    found = report(python, folder)
    assert found["package"] == str(source / "__init__.py")
    assert found["version"] == pin.version
    for version, dest in wheels.items():
        found = report(sys.executable, folder, PYTHONPATH=str(dest / "site"))
        assert str(found["package"]).startswith(str(dest))
        assert found["version"] == version

    run(python, "-m", "pip", "uninstall", "-y", "ggml-cffi", cwd=folder)
    assert "No module named 'ggml_cffi'" in run(
        python, "-c", "import ggml_cffi", cwd=folder, fails=True
    )


def test_a_system_prefix_is_linked_where_it_lies(checkout: Path, folder: Path, other: Path) -> None:
    """Nothing is copied; the import tells of another ggml that is loaded, or lies in its place."""
    root, dest = folder / "system", folder / "linked-to-system"
    shutil.copytree(find_prefix({}).root, root)
    dest.mkdir()
    environ = {"GGML_CFFI_PREFIX": str(root), "GGML_CFFI_LINK": "system"}
    wheel = build_wheel(checkout, dest, "--no-build-isolation", **environ)
    assert not [name for name in names_in(wheel) if "libggml" in name]
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(dest / "site")
    path = str(dest / "site")
    found = report(sys.executable, folder, PYTHONPATH=path)
    libraries = found["libraries"]
    assert isinstance(libraries, list)
    assert {str(Path(p).parent) for p in libraries} == {
        str(dest / "site" / "ggml_cffi" / "_gen"),
        str(root / "lib64"),
    }

    first = other / "lib64" / "libggml-base.so"
    code = f"import ctypes; ctypes.CDLL({str(first)!r}); import ggml_cffi"
    text = run(sys.executable, "-c", code, cwd=folder, fails=True, PYTHONPATH=path).splitlines()[-1]
    assert text.startswith("ImportError: ")
    assert f"in {root}/lib64/libggml" in text
    assert f"in {first}" in text

    shutil.rmtree(root / "lib64")
    shutil.copytree(other / "lib64", root / "lib64")
    old, new = find_prefix({}), find_prefix({"GGML_CFFI_PREFIX": str(root)})
    command = [sys.executable, "-c", "import ggml_cffi"]
    text = run(*command, cwd=folder, fails=True, PYTHONPATH=path).splitlines()[-1]
    assert text.startswith("ImportError: ")
    assert f"built for ggml {old.version} ({old.commit}) in {root}" in text
    assert f"ggml {new.version} ({new.commit})" in text


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"GGML_CFFI_PREFIX": "/nowhere"}, "the ggml prefix /nowhere is not a folder"),
        (
            {"CXX": "no-such-c++"},
            r"there is no C\+\+ compiler\n.*looked for: no-such-c\+\+ on PATH",
        ),
    ],
)
def test_pip_shows_what_is_wrong(
    checkout: Path, tmp_path: Path, environ: Mapping[str, str], said: str
) -> None:
    options = ["--no-deps", "--no-build-isolation", "-w", tmp_path]
    text = run(
        *(sys.executable, "-m", "pip", "wheel", *options, checkout),
        cwd=tmp_path,
        fails=True,
        **environ,
    )
    assert re.search("ggml-cffi cannot be built: " + said, text)
    assert "what to do: " in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (r"\bvoid +(ggml_free) *\(", r"void \1((", r"ggml\.h:\d+:\d+: "),
        (r"\bvoid +(ggml_free) *\(", r"void void \1(", "cffi does not take .*'void void'"),
        (r"\bggml_fp32_to_fp16_row\b", "ggml_gone", r"ggml\.toml:\d+: .*ggml_fp32_to_fp16_row"),
        ("#pragma once", "#error no good", "failed:\n(.|\n)*no good"),
    ],
)
def test_pip_shows_what_is_wrong_with_the_headers(
    checkout: Path, tmp_path: Path, old: str, new: str, said: str
) -> None:
    root = shutil.copytree(find_prefix({}).root, tmp_path / "prefix")
    header = root / "include" / "ggml.h"
    text = header.read_text(encoding="utf-8")
    text, found = re.subn(old, new, text)
    assert found
    header.write_text(text, encoding="utf-8")
    options = ["--no-deps", "--no-build-isolation", "-w", tmp_path]
    command = (sys.executable, "-m", "pip", "wheel", *options, checkout)
    text = run(*command, cwd=tmp_path, fails=True, GGML_CFFI_PREFIX=str(root))
    assert re.search("ggml-cffi cannot be built: .*" + said, text), text
    assert "Traceback" not in text


def test_a_build_and_an_extension_in_place_in_one_command(checkout: Path, tmp_path: Path) -> None:
    source = shutil.copytree(checkout, tmp_path / "fresh")
    for name in ("_gen", "_libs"):
        shutil.rmtree(source / "src" / "ggml_cffi" / name, ignore_errors=True)
    command = (sys.executable, "setup.py", "-q", "build", "-b", tmp_path / "out")
    run(*command, "build_ext", "--inplace", cwd=source, CFLAGS="-O0")
    found = report(sys.executable, tmp_path, PYTHONPATH=str(source / "src"))
    assert found["package"] == str(source / "src" / "ggml_cffi" / "__init__.py")
    assert found["version"] == find_prefix({}).version


def test_the_sdist_needs_no_ggml_and_no_compiler(checkout: Path, tmp_path: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-c", code, cwd=checkout, GGML_CFFI_PREFIX="/nowhere", CXX="no-such-c++")
    assert list(tmp_path.glob("*.tar.gz"))
