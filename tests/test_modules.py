"""A ggml whose backends are loadable modules, one of them for each kind of x86-64 processor."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from _compute import check_product

from ggml_cffi import _info, _loader, capi, device, devices
from ggml_cffi._gen import build_info
from ggml_cffi.backend import Backend

pytestmark = pytest.mark.dl

#: What ggml says that it is compiled for, and Linux of the processor.
FEATURES = {
    "ssse3": ("ssse3", capi.ggml_cpu_has_ssse3),
    "avx": ("avx", capi.ggml_cpu_has_avx),
    "avx2": ("avx2", capi.ggml_cpu_has_avx2),
    "f16c": ("f16c", capi.ggml_cpu_has_f16c),
    "fma": ("fma", capi.ggml_cpu_has_fma),
    "bmi2": ("bmi2", capi.ggml_cpu_has_bmi2),
    "avx512": ("avx512f", capi.ggml_cpu_has_avx512),
    "avx512_vnni": ("avx512_vnni", capi.ggml_cpu_has_avx512_vnni),
    "avx512_bf16": ("avx512_bf16", capi.ggml_cpu_has_avx512_bf16),
}


def names() -> set[str]:
    """The modules that came with this ggml, as ggml calls them."""
    return {path.stem.removeprefix("lib") for path in _loader.module_files(build_info)}


def flags() -> set[str]:
    """What Linux says that the processor can."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return set(next(line for line in lines if line.startswith("flags")).partition(":")[2].split())


def test_the_cpu_is_one_device_whatever_the_number_of_modules_for_it() -> None:
    assert len([name for name in names() if name.startswith("ggml-cpu")]) > 1
    kind = capi.GGML_BACKEND_DEVICE_TYPE_CPU
    assert [one.name for one in devices() if one.type is kind] == ["CPU"]
    assert "ggml-cpu" not in build_info.LIBRARIES  # nothing is linked to it


def test_devices_finds_them_in_a_process_that_has_loaded_nothing(tmp_path: Path) -> None:
    code = "import ggml_cffi; print([one.name for one in ggml_cffi.devices()])"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (found.returncode, found.stdout) == (0, f"{[one.name for one in devices()]}\n")


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the processor's flags go by other names"
)
def test_the_module_is_one_that_the_processor_can_run_and_no_poor_one() -> None:
    can = flags()
    for name, (flag, has) in FEATURES.items():
        assert not has() or flag in can, name
    if {"avx2", "fma", "f16c", "bmi2"} <= can:
        assert capi.ggml_cpu_has_avx2()
        assert capi.ggml_cpu_has_fma()


def test_features_are_those_of_the_registry() -> None:
    registry = capi.ggml_backend_reg_by_name("CPU")
    said = {name.lower() for name, value in _info.features(registry).items() if value == "1"}
    assert said
    for name, (_, has) in FEATURES.items():
        assert (name in said) == bool(has()), name


def test_functions_of_the_cpu_are_those_of_the_module() -> None:
    """None of them is linked: they are asked of the module by their names."""
    pointer = capi.ggml_backend_cpu_init()
    assert capi.ggml_backend_is_cpu(pointer)
    capi.ggml_backend_free(pointer)
    assert capi.ggml_is_numa() is False
    half = np.empty(2, np.uint16)
    capi.ggml_cpu_fp32_to_fp16(np.float32([1.5, -2]), half)
    assert half.view(np.float16).tolist() == [1.5, -2]


@pytest.mark.parametrize("n_threads", [1, 3])
def test_threads_are_set_and_compute_right(n_threads: int) -> None:
    with Backend(device("CPU")) as backend:
        backend.set_n_threads(n_threads)
        check_product(backend.handle)


@pytest.mark.parametrize("n_threads", [1, 3])
def test_a_pool_of_threads_is_the_modules_own(n_threads: int) -> None:
    pool = capi.ggml_threadpool_new(capi.ggml_threadpool_params_default(n_threads))
    backend = capi.ggml_backend_cpu_init()
    try:
        capi.ggml_backend_cpu_set_n_threads(backend, n_threads)
        capi.ggml_backend_cpu_set_threadpool(backend, pool)
        check_product(backend)
    finally:
        capi.ggml_backend_free(backend)
        capi.ggml_threadpool_free(pool)
