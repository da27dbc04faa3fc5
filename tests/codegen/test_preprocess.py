"""Where headers lie, and what compilers write of that: each header is found, or an error."""

from __future__ import annotations

import shutil

import pytest
from harness import write

import codegen
from codegen.parse import ParseError, parse
from codegen.prefix import find_prefix, read_prefix
from codegen.preprocess import PreprocessError, _unescape, preprocess

COMPILERS = ("gcc", "g++", "clang", "clang++")
FOLDERS = (
    *("plain", "with space", "comma,x", "o'ne", "a>b", "grün", "\udcff", "ta\tb", "n\nl"),
    *('quo"te', "back\\slash", "\\101", "\\n", '"\\'),
)
TOY = {
    "toy.h": '#include "toy-base.h"\n#include "other.h"\nint toy_top(struct toy *a);\n',
    "toy-base.h": "#pragma once\n#define TOY_SIZE 4\nstruct toy;\nint toy_base(struct toy *a);\n",
    "other.h": "#define OTHER 1\nint other(int a);\n",
}


def found(folder, compiler, names=("toy-base.h", "toy.h")):
    headers = [folder / name for name in names]
    api = parse(preprocess(headers, [folder], compiler), headers)
    functions = {name: function.where.header for name, function in api.functions.items()}
    return functions, {name: constant.header for name, constant in api.constants.items()}


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_any_name(name, compiler, tmp_path, need):
    need(shutil.which(compiler), compiler)
    functions, constants = found(write(tmp_path / name, TOY), compiler)
    assert functions == {"toy_base": "toy-base.h", "toy_top": "toy.h"}
    assert constants == {"TOY_SIZE": "toy-base.h"}


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_pin_in_a_folder_of_an_odd_name(compiler, tmp_path, need):
    need(shutil.which(compiler), compiler)
    pin = find_prefix({})
    there = shutil.copytree(pin.root, tmp_path / 'grün "\\n"')
    api = codegen.read_api(read_prefix(there, origin="a test"), compiler)
    assert len(api.functions) > 650
    assert api == codegen.read_api(pin, compiler)


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("/a/b.h", "/a/b.h"),
        ("/gr\\303\\274n/b.h", "/grün/b.h"),  # clang
        ("/grün/b.h", "/grün/b.h"),  # gcc
        ('/\\"\\\\/b.h', '/"\\/b.h'),
        ("/\\\\303\\\\n/b.h", "/\\303\\n/b.h"),
        ("/\\n\\t\\0011\\79/b.h", "/\n\t\x011\x079/b.h"),
        ("/\\377/b.h", "/\udcff/b.h"),
    ],
)
def test_the_path_of_a_line_marker(words, path):
    assert str(_unescape(words)) == path


@pytest.mark.parametrize("compiler", COMPILERS)
def test_links_to_headers(compiler, tmp_path, need):
    """As the stores of some distributions have them, under names that say nothing."""
    need(shutil.which(compiler), compiler)
    write(tmp_path / "store", {f"{name}-1": text for name, text in TOY.items()})
    (tmp_path / "include").mkdir()
    for name in TOY:
        (tmp_path / "include" / name).symlink_to(f"../store/{name}-1")
    functions, _ = found(tmp_path / "include", compiler)
    assert functions == {"toy_base": "toy-base.h", "toy_top": "toy.h"}


def test_a_header_of_the_same_name_in_the_working_directory(tmp_path, monkeypatch):
    write(tmp_path / "here", dict.fromkeys(TOY, "#error\n"))
    monkeypatch.chdir(tmp_path / "here")
    assert len(found(write(tmp_path / "there", TOY), "cc")[0]) == 2


def test_a_comment_that_is_not_utf8(tmp_path):
    (tmp_path / "toy.h").write_bytes(b"// gr\xfcn\r\nint toy(\r\n  int a); // \xff\r\n")
    assert found(tmp_path, "cc", ["toy.h"])[0] == {"toy": "toy.h"}


def test_an_empty_header(tmp_path):
    assert found(write(tmp_path, {"toy.h": ""}), "cc", ["toy.h"]) == ({}, {})


def test_error_another_header_of_the_same_name(tmp_path):
    ours = write(tmp_path / "ours", {"toy.h": "int ours(int a);\n"})
    theirs = write(tmp_path / "theirs", {"toy.h": "int theirs(int a);\n"})
    with pytest.raises(PreprocessError, match="takes others in their place") as error:
        preprocess([ours / "toy.h"], [theirs, ours], "cc")
    assert f"looked for: {ours}/toy.h" in str(error.value)


def test_error_line_markers_that_are_not_understood(tmp_path):
    """On another release than the pin all functions would be missing, without a word."""
    strange = tmp_path / "strange cc"
    strange.write_text('#!/bin/sh\ncc "$@" | sed "s/^# /%%line /"\n')
    strange.chmod(0o755)
    folder = write(tmp_path, TOY)
    with pytest.raises(PreprocessError, match="does not say where these headers begin") as error:
        preprocess([folder / "toy.h"], [folder], f"'{strange}'")
    assert f"looked for: {folder}/toy.h" in str(error.value)


def test_error_no_header(tmp_path):
    with pytest.raises(PreprocessError, match=r"failed:\n.*toy\.h"):
        preprocess([tmp_path / "toy.h"], [tmp_path], "cc")


def test_error_no_compiler(tmp_path, monkeypatch):
    with pytest.raises(PreprocessError, match="no C compiler\n  looked for: no-such-cc on PATH\n"):
        preprocess([tmp_path / "toy.h"], [tmp_path], "no-such-cc")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(PreprocessError, match="looked for: cc, gcc, clang on PATH"):
        preprocess([tmp_path / "toy.h"], [tmp_path])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int toy(int;\n", r"^toy\.h:1:"),
        ('int toy(int a);\nint toys[] = {1};;\n;\n_Static_assert(1, ""); toy;\n', r"^toy\.h:4:"),
    ],
)
def test_error_what_the_parser_does_not_understand(text, said, tmp_path):
    with pytest.raises(ParseError, match=said):
        found(write(tmp_path, {"toy.h": text}), "cc", ["toy.h"])
