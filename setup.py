"""The little that setuptools cannot say in pyproject.toml: a build that first finds and reads ggml.

Everything made for one ggml lies under build/<key of that ggml>, so that builds for two of them
from one checkout never mix; an editable install puts it into src as well.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

if TYPE_CHECKING:
    from codegen.prefix import Prefix

ROOT = Path(__file__).resolve().parent
if str(ROOT) not in sys.path:  # build front ends run this without the project's folder on the path
    sys.path.insert(0, str(ROOT))

PACKAGE = "ggml_cffi"
MADE = ("_gen", "_libs")  # the folders of the package that a build makes
try:
    from build_ffi import limited_api
except ImportError:  # an sdist needs none of it, and build_ggml says what is missing
    ABI3 = False
else:
    ABI3 = limited_api()


class Build(build):
    """The build command, with a folder per ggml."""

    sub_commands: ClassVar = [("build_ggml", None), *build.sub_commands]
    prefix: Prefix | None = None

    def finalize_options(self) -> None:
        # sdist and egg_info come here too and need no ggml: build_ggml says what is wrong.
        try:
            from codegen.prefix import BuildError, find_prefix
        except ImportError:
            pass
        else:
            try:
                self.prefix = find_prefix(os.environ)
                self.build_base = os.path.join(self.build_base, self.prefix.key)
            except BuildError:
                pass
        super().finalize_options()


class BuildGgml(Command):
    """Sub-command of build: find ggml, generate the code for it, copy its libraries."""

    description = "find ggml, generate the binding, copy the libraries"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        self.editable_mode = False
        self.build_base = ""
        self.build_lib = ""

    def finalize_options(self) -> None:
        extension = self.get_finalized_command("build_ext")
        assert isinstance(extension, build_ext)
        if extension.inplace:  # this may run before it, for the command build
            self.editable_mode = True
        build = self.get_finalized_command("build")
        self.build_base = build.build_base
        self.build_lib = self.build_lib or build.build_lib

    def run(self) -> None:
        try:
            from codegen.prefix import BuildError
        except ImportError as error:
            raise _exit(
                f"the build requirement {error.name} is missing\n"
                "  what to do: build with isolation (without --no-build-isolation), or install "
                "what build-system.requires in pyproject.toml lists"
            ) from None
        try:
            self._run()
        except BuildError as error:
            raise _exit(str(error)) from None

    def _run(self) -> None:
        from codegen.prefix import find_prefix
        from codegen.toolchain import check_platform, find_compiler

        check_platform()
        build = self.get_finalized_command("build")
        assert isinstance(build, Build)
        prefix = build.prefix or find_prefix(os.environ)
        os.environ["CXX"] = compiler = find_compiler(os.environ)  # setuptools compiles with it
        self.announce(f"ggml {prefix.version} ({prefix.commit}): {prefix.origin}", level=2)

        import build_ffi

        work = self._work()
        shutil.rmtree(work, ignore_errors=True)
        gen, libs = (work / name for name in MADE)
        gen.mkdir(parents=True)
        libs.mkdir()
        builder = build_ffi.prepare(prefix, gen, libs, compiler)
        made = builder.distutils_extension(tmpdir=str(work / "source"), verbose=False)
        self._fill_extension(made)

        if self.editable_mode:
            package = ROOT / "src" / PACKAGE
        else:
            package = Path(self.build_lib, PACKAGE)
            shutil.rmtree(package, ignore_errors=True)  # an earlier build's files are not shipped
        for name in MADE:
            shutil.rmtree(package / name, ignore_errors=True)
            shutil.copytree(work / name, package / name)

    def _work(self) -> Path:
        return Path(self.build_base, "ggml")

    def _fill_extension(self, made: object) -> None:
        """Turn the extension that was declared, empty, into the one that cffi made."""
        assert self.distribution.ext_modules is not None
        (declared,) = self.distribution.ext_modules
        for name in ("sources", "include_dirs", "define_macros", "libraries", "library_dirs"):
            setattr(declared, name, getattr(made, name))
        for name in ("extra_objects", "extra_compile_args", "extra_link_args"):
            setattr(declared, name, getattr(made, name))

    def get_source_files(self) -> list[str]:
        """Give no files: what this command reads is in the sdist by MANIFEST.in."""
        return []

    def get_outputs(self) -> list[str]:
        """Give what lies, or would lie, in build_lib."""
        return [str(Path(self.build_lib, PACKAGE, path)) for path in self._made()]

    def get_output_mapping(self) -> dict[str, str]:
        """Map outputs to where an editable install has them, for setuptools' strict mode."""
        if not self.editable_mode:
            return {}
        lib, source = Path(self.build_lib, PACKAGE), Path("src", PACKAGE)
        return {str(lib / path): str(source / path) for path in self._made()}

    def _made(self) -> list[Path]:
        work = self._work()
        files = [path for name in MADE for path in sorted((work / name).rglob("*"))]
        return [path.relative_to(work) for path in files if path.is_file()]


class BuildExt(build_ext):
    """build_ext after build_ggml, also where it is called by itself (``build_ext --inplace``)."""

    def run(self) -> None:
        self.run_command("build_ggml")
        super().run()


def _exit(text: str) -> SystemExit:
    # SystemExit, not an Exception: front ends then show the text and no traceback.
    return SystemExit(f"\nggml-cffi cannot be built: {text}\n")


setup(
    cmdclass={"build": Build, "build_ggml": BuildGgml, "build_ext": BuildExt},
    # Filled in by build_ggml: an sdist must not list what is generated.
    ext_modules=[
        Extension(f"{PACKAGE}._gen._ggml", sources=[], language="c++", py_limited_api=ABI3)
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if ABI3 else {},
)
