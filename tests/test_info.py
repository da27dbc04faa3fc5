"""`python -m ggml_cffi info`, and the command line around the commands."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ggml_cffi
from ggml_cffi import _info, capi, devices
from ggml_cffi.__main__ import main


def run_child(*arguments: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, **kwargs
    )


def test_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    info = json.loads(out)
    assert list(info) == [
        "python",
        "package",
        "ggml",
        "libraries",
        "devices",
        "missing_backends",
    ]
    assert info["python"]["version"] == platform.python_version()
    assert info["package"]["version"]
    assert Path(info["package"]["folder"]).samefile(Path(ggml_cffi.__file__).parent)
    assert info["ggml"]["version"] == capi.ggml_version()
    assert info["ggml"]["commit"] == capi.ggml_commit()
    assert info["ggml"]["built_against"]
    assert {"ggml", "ggml-base"} <= set(info["libraries"])
    maps = Path("/proc/self/maps").read_text()
    for path in info["libraries"].values():
        assert Path(path).is_file()
        assert path in maps  # what it says is what the process runs on
    assert [device["name"] for device in info["devices"]] == [d.name for d in devices()]
    there = {device["backend"] for device in info["devices"]}
    assert there.isdisjoint(info["missing_backends"])
    assert set(_info.EXPECTED) <= there | set(info["missing_backends"])


def test_cpu_device(capsys: pytest.CaptureFixture[str]) -> None:
    main(["info", "--json"])
    info = json.loads(capsys.readouterr().out)
    (cpu,) = (device for device in info["devices"] if device["type"] == "CPU")
    assert cpu["name"] == cpu["backend"] == "CPU"
    assert cpu["description"]
    assert 0 < cpu["memory_free"] <= cpu["memory_total"]
    found = {name: bool(int(value)) for name, value in cpu["features"].items() if value.isdigit()}
    has = {
        "AVX2": capi.ggml_cpu_has_avx2,
        "FMA": capi.ggml_cpu_has_fma,
        "F16C": capi.ggml_cpu_has_f16c,
        "NEON": capi.ggml_cpu_has_neon,
        "AVX512": capi.ggml_cpu_has_avx512,
    }
    for name, function in has.items():
        assert found.get(name, False) == bool(function()), name


def test_text() -> None:
    child = run_child("-m", "ggml_cffi", "info")
    assert (child.returncode, child.stderr) == (0, "")
    lines = child.stdout.splitlines()
    assert lines[0].startswith(f"Python      {platform.python_version()} ")
    assert lines[1].startswith("ggml-cffi   ")
    assert lines[2].startswith(f"ggml        {capi.ggml_version()} (commit {capi.ggml_commit()})")
    assert lines[3] == "libraries"
    assert re.search(r"^  ggml-base +/.*\.so", child.stdout, re.M)
    assert re.search(r"^  CPU       CPU, ", child.stdout, re.M)
    assert re.search(r"^ {12}memory [\d.]+ of [\d.]+ GiB free, by backend CPU$", child.stdout, re.M)
    assert "not there\n" in child.stdout


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_output_of_any_encoding(encoding: str, tmp_path: Path) -> None:
    code = (
        "from ggml_cffi import _info; info = _info.collect()\n"
        "info['package']['folder'] = 'f\\xfcr \\udcff'\n"
        "_info.collect = lambda: info\n"
        "_info.run(as_json=False); _info.run(as_json=True)"
    )
    child = run_child("-X", "utf8=0", "-c", code, env={"PYTHONIOENCODING": encoding, **_env()})
    assert (child.returncode, child.stderr) == (0, "")


def _env() -> dict[str, str]:
    import os

    return {k: v for k, v in os.environ.items() if k != "PYTHONIOENCODING"}


ALL = ["ggml", "ggml-base", "ggml-cpu", "ggml-blas", "ggml-rpc", "ggml-vulkan", "ggml-cuda"]


def test_reasons(tmp_path: Path) -> None:
    module = tmp_path / "libggml-cpu-haswell.so"
    modules = []

    def reasons(libraries: list[str], registered: dict[str, int], **environ: str) -> dict[str, str]:
        return _info.missing_backends(libraries, modules, registered, environ)

    none = reasons(["ggml", "ggml-base", "ggml-cpu"], {"CPU": 1})
    assert none["Vulkan"] == "this ggml was built without it (no libggml-vulkan)"
    assert list(none) == ["BLAS", "RPC", "Vulkan", "CUDA"]
    every = {"CPU": 1, "BLAS": 1, "RPC": 1, "Vulkan": 2, "CUDA": 1}
    assert reasons(ALL, every) == {}
    idle = reasons(ALL, {**every, "RPC": 0, "CUDA": 0})
    assert idle == {
        "RPC": "ready, but no server was added",
        "CUDA": "this ggml has it, but it found no device (is there one, with its driver?)",
    }
    del every["Vulkan"]
    off = reasons(ALL, every, GGML_DISABLE_VULKAN="1")
    assert off == {"Vulkan": "this ggml has it, but GGML_DISABLE_VULKAN is set"}
    reason = "libggml-vulkan is there, but did not register itself (is its driver?)"
    assert reasons(ALL, every) == {"Vulkan": reason}
    modules.append(module)
    loadable = reasons(["ggml", "ggml-base"], {})
    assert loadable["CPU"].startswith("a loadable module that was not loaded")
    assert loadable["CPU"].endswith(str(module))


def test_help_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("usage: python -m ggml_cffi ")
    for command in ("demo", "info"):
        assert re.search(rf"^ +{command} ", out, re.M)
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        assert caught.value.code == 0
        assert f"python -m ggml_cffi {command}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"], ["demo"]])
def test_output_that_nobody_reads(arguments: list[str]) -> None:
    """As with ``| head``: no traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "ggml_cffi", *arguments],
        stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_version() -> None:
    child = run_child("-m", "ggml_cffi", "--version")
    assert (child.returncode, child.stderr) == (0, "")
    assert child.stdout == f"ggml-cffi {_info.package_version()} (ggml {capi.ggml_version()})\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bogus"], "python -m ggml_cffi: argument COMMAND: invalid choice: 'bogus'"),
        (["--bogus"], "python -m ggml_cffi: unrecognized arguments: --bogus"),
        (["info", "more"], "python -m ggml_cffi info: unrecognized arguments: more"),
        (["info", "--json=x"], "python -m ggml_cffi info: argument --json: ignored explicit"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    out, err = capsys.readouterr()
    assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(message)


def test_a_failure_of_ggml_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**kwargs: object) -> int:
        raise ggml_cffi.StatusMemoryError("no memory:\nnone", status=-1)

    monkeypatch.setattr(_info, "run", fail)
    with pytest.raises(SystemExit) as caught:
        main(["info"])
    assert caught.value.code == 1
    assert capsys.readouterr().err == (
        "python -m ggml_cffi info: StatusMemoryError: no memory: none\n"
    )
