"""The 58 names of the backend family: what each does, on the ggml that this was built for.

`covers` says which names a test is about; at the end nothing may be left over.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _backends
import numpy as np
import pytest
from _compute import Arena, check_product
from _fake_backend import (
    FakeDevice,
    buffer_type,
    compile_module,
    event_of,
    on_free,
    patched,
    require_layout,
)
from _native import compiler
from _release import needs, needs_meta

from ggml_cffi import capi, ffi
from ggml_cffi._gen import build_info
from ggml_cffi.errors import AbortError, GGMLError, NotSupportedError, SplitError
from ggml_cffi.meta import SplitState, split_function

FAMILY = [
    "buffer_clear",
    "buffer_get_usage",
    "buffer_is_host",
    "buffer_is_multi_buffer",
    "buffer_reset",
    "buffer_set_usage",
    "buffer_usage_any",
    "buffer_usage_compute",
    "buffer_usage_weights",
    "cpu_init",
    "dev_by_name",
    "dev_by_type",
    "dev_count",
    "dev_description",
    "dev_get",
    "dev_get_props",
    "dev_init",
    "dev_memory",
    "dev_name",
    "dev_offload_op",
    "dev_supports_buft",
    "dev_supports_op",
    "dev_type",
    "device_register",
    "device_type_accel",
    "device_type_cpu",
    "device_type_gpu",
    "device_type_igpu",
    "event_free",
    "event_new",
    "event_record",
    "event_synchronize",
    "event_wait",
    "get_device",
    "graph_compute_async",
    "graph_plan_compute",
    "graph_plan_create",
    "graph_plan_free",
    "init_best",
    "init_by_name",
    "init_by_type",
    "load",
    "load_all",
    "meta_device",
    "multi_buffer_alloc_buffer",
    "multi_buffer_set_usage",
    "reg_by_name",
    "reg_count",
    "reg_dev_count",
    "reg_dev_get",
    "reg_get",
    "reg_name",
    "register",
    "synchronize",
    "tensor_copy_async",
    "tensor_get_async",
    "tensor_set_async",
    "unload",
]

TESTS: dict[str, Callable[..., object]] = {}
HERE = Path(__file__).resolve().parent
ANY, WEIGHTS, COMPUTE = (
    capi.ggml_backend_buffer_usage_any(),
    capi.ggml_backend_buffer_usage_weights(),
    capi.ggml_backend_buffer_usage_compute(),
)


def covers(names: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """The test below shows what these functions do."""

    def mark(test: Callable[..., object]) -> Callable[..., object]:
        for name in names.split():
            TESTS.setdefault(name, test)
        return test

    return mark


@pytest.fixture
def arena(cpu):
    capi.ggml_backend_cpu_set_n_threads(cpu, 1)
    with Arena(cpu) as arena:
        yield arena


@pytest.fixture
def device(cpu):
    """The CPU device."""
    return capi.ggml_backend_get_device(cpu)


@pytest.fixture
def make(cpu, arena):
    """Make a buffer; `freed` says that somebody else frees it."""

    def make(size: int = 256, freed: bool = False) -> Any:
        made = capi.ggml_backend_alloc_buffer(cpu, size)
        if not freed:
            arena.callback(capi.ggml_backend_buffer_free, made)
        return made

    return make


@pytest.fixture(scope="module")
def fake():
    """A GPU that is none, with streams and events."""
    require_layout()
    return FakeDevice()


def data(buffer, size: int) -> bytes:
    return bytes(ffi.buffer(ffi.cast("char *", capi.ggml_backend_buffer_get_base(buffer)), size))


def read(tensor) -> np.ndarray[Any, Any]:
    found = np.empty(capi.ggml_nelements(tensor), np.float32)
    capi.ggml_backend_tensor_get(tensor, found, 0)
    return found


def child(code: str, cwd: Path = HERE, **environ: str) -> str:
    """What a Python program prints in a process of its own; it must end well."""
    program = "from ggml_cffi import capi\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{PYTHONPATH}", **environ},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


PYTHONPATH = os.environ.get("PYTHONPATH", "")


# ---- buffers


@covers("buffer_usage_any buffer_usage_weights buffer_usage_compute")
def test_usages():
    names = [
        capi.ggml_backend_buffer_usage_any().name,
        capi.ggml_backend_buffer_usage_weights().name,
        capi.ggml_backend_buffer_usage_compute().name,
    ]
    assert names == [f"GGML_BACKEND_BUFFER_USAGE_{word}" for word in ("ANY", "WEIGHTS", "COMPUTE")]
    assert (ANY, WEIGHTS, COMPUTE) == (0, 1, 2)
    assert ANY is capi.GGML_BACKEND_BUFFER_USAGE_ANY


@covers("buffer_set_usage buffer_get_usage")
def test_usage_is_kept(make):
    one, other = make(), make()
    assert capi.ggml_backend_buffer_get_usage(one) is ANY
    for usage in (WEIGHTS, COMPUTE, ANY, WEIGHTS):
        capi.ggml_backend_buffer_set_usage(one, usage)
        assert capi.ggml_backend_buffer_get_usage(one) is usage
    capi.ggml_backend_buffer_set_usage(one, 2)
    assert capi.ggml_backend_buffer_get_usage(one) is COMPUTE
    assert capi.ggml_backend_buffer_get_usage(other) is ANY
    with pytest.raises(ValueError, match="usage is 3, which is no ggml_backend_buffer_usage"):
        capi.ggml_backend_buffer_set_usage(one, 3)
    assert capi.ggml_backend_buffer_get_usage(one) is COMPUTE
    with pytest.raises(ValueError, match="buffer must not be NULL or None"):
        capi.ggml_backend_buffer_set_usage(None, ANY)
    with pytest.raises(ValueError, match="buffer must not be NULL or None"):
        capi.ggml_backend_buffer_get_usage(None)


@covers("buffer_clear")
def test_clear_reaches_every_byte(make):
    one, other = make(1000), make(1000)
    capi.ggml_backend_buffer_clear(other, 7)
    for value in (0, 1, 255):
        capi.ggml_backend_buffer_clear(one, value)
        assert data(one, 1000) == bytes([value]) * 1000
    assert data(other, 1000) == b"\7" * 1000
    for value in (256, -1):
        with pytest.raises(OverflowError, match="value"):
            capi.ggml_backend_buffer_clear(one, value)
    assert data(one, 1000) == b"\xff" * 1000
    with pytest.raises(ValueError, match="buffer must not be NULL or None"):
        capi.ggml_backend_buffer_clear(None, 0)


@covers("buffer_clear")
def test_clear_reaches_the_tensors_of_any_backend(backend):
    with Arena(backend) as arena:
        tensor = arena.weight(8, 4)
        capi.ggml_backend_tensor_set(tensor, np.ones(32, np.float32), 0)
        capi.ggml_backend_buffer_clear(tensor.buffer, 0)
        assert not read(tensor).any()


@covers("buffer_reset")
def test_reset_is_passed_on(fake, make):
    """The CPU keeps nothing about tensors, so nothing changes there; another buffer is told."""
    one = make(8)
    capi.ggml_backend_buffer_clear(one, 3)
    capi.ggml_backend_buffer_set_usage(one, WEIGHTS)
    capi.ggml_backend_buffer_reset(one)
    assert data(one, 8) == b"\3" * 8
    assert capi.ggml_backend_buffer_get_usage(one) is WEIGHTS
    told = []
    with patched(one, reset=told.append):
        capi.ggml_backend_buffer_reset(one)
        capi.ggml_backend_buffer_reset(one)
    assert told == [one, one]
    with pytest.raises(ValueError, match="buffer must not be NULL or None"):
        capi.ggml_backend_buffer_reset(None)


@covers("buffer_reset")
def test_reset_leaves_tensors_usable(backend):
    with Arena(backend) as arena:
        tensor = arena.weight(4)
        capi.ggml_backend_buffer_reset(tensor.buffer)
        capi.ggml_backend_tensor_set(tensor, np.arange(4, dtype=np.float32), 0)
        assert read(tensor).tolist() == [0, 1, 2, 3]


@covers("buffer_is_host")
def test_is_host(fake, make):
    one = make()
    assert capi.ggml_backend_buffer_is_host(one) is True
    with patched(one, buft=buffer_type(is_host=False)):
        assert capi.ggml_backend_buffer_is_host(one) is False
    with pytest.raises(ValueError, match="buffer must not be NULL or None"):
        capi.ggml_backend_buffer_is_host(None)


# ---- multi buffers


@covers("multi_buffer_alloc_buffer buffer_is_multi_buffer")
def test_a_multi_buffer_is_the_sum_of_its_parts(make):
    parts = [make(100, freed=True), make(200, freed=True), make(300, freed=True)]
    multi = capi.ggml_backend_multi_buffer_alloc_buffer(parts)
    assert capi.ggml_backend_buffer_is_multi_buffer(multi) is True
    assert [capi.ggml_backend_buffer_is_multi_buffer(part) for part in parts] == [False] * 3
    assert capi.ggml_backend_buffer_get_size(multi) == 600
    assert capi.ggml_backend_buffer_get_base(multi) is None
    assert capi.ggml_backend_buffer_get_type(multi) == capi.ggml_backend_buffer_get_type(parts[0])
    assert capi.ggml_backend_buffer_is_host(multi) is True
    capi.ggml_backend_buffer_clear(multi, 5)
    assert [data(part, 100) for part in parts] == [b"\5" * 100] * 3
    # a multi buffer may be part of another one; the last one frees them all
    outer = capi.ggml_backend_multi_buffer_alloc_buffer((multi, make(50, freed=True)))
    assert capi.ggml_backend_buffer_get_size(outer) == 650
    capi.ggml_backend_buffer_free(outer)
    with pytest.raises(ValueError, match="buffer must not be NULL or None"):
        capi.ggml_backend_buffer_is_multi_buffer(None)


@covers("multi_buffer_alloc_buffer")
def test_a_multi_buffer_frees_its_parts(fake, make):
    parts = [make(freed=True) for _ in range(3)]
    freed: list[Any] = []
    for part in parts:
        on_free(part, freed.append)
    inner = capi.ggml_backend_multi_buffer_alloc_buffer(parts[:2])
    outer = capi.ggml_backend_multi_buffer_alloc_buffer([inner, parts[2]])
    assert freed == []
    capi.ggml_backend_buffer_free(outer)
    assert freed == parts


@covers("multi_buffer_alloc_buffer")
def test_multi_buffers_of_wrong_lists(make):
    function = capi.ggml_backend_multi_buffer_alloc_buffer
    one = make()
    for buffers, error, words in [
        (None, ValueError, "buffers must not be"),
        ([], ValueError, "buffers must have at least 1 element"),
        ([None], ValueError, r"buffers\[0\] must not be NULL or None"),
        ([one, ffi.NULL], ValueError, r"buffers\[1\] must not be NULL or None"),
        ([one, one], ValueError, r"buffers\[0\] and buffers\[1\] are the same"),
        (one, TypeError, "buffers"),
        ("ab", TypeError, "buffers"),
        ([one, 1], TypeError, "buffers"),
        (3, TypeError, "buffers"),
    ]:
        with pytest.raises(error, match=words):
            function(buffers)
    capi.ggml_backend_buffer_clear(one, 1)  # nobody has taken it over
    assert data(one, 256) == b"\1" * 256


@covers("multi_buffer_set_usage")
def test_the_usage_of_a_multi_buffer_s_parts(make):
    parts = [make(freed=True), make(freed=True)]
    multi = capi.ggml_backend_multi_buffer_alloc_buffer(parts)
    usage = capi.ggml_backend_buffer_get_usage
    capi.ggml_backend_multi_buffer_set_usage(multi, WEIGHTS)
    assert [usage(part) for part in parts] == [WEIGHTS, WEIGHTS]
    assert usage(multi) is ANY
    capi.ggml_backend_buffer_set_usage(multi, COMPUTE)
    assert [usage(part) for part in (*parts, multi)] == [COMPUTE] * 3
    with pytest.raises(ValueError, match="usage is 9"):
        capi.ggml_backend_multi_buffer_set_usage(multi, 9)
    with pytest.raises(AbortError, match="is_multi_buffer"):
        capi.ggml_backend_multi_buffer_set_usage(parts[0], ANY)
    with pytest.raises(ValueError, match="buffer must not be NULL or None"):
        capi.ggml_backend_multi_buffer_set_usage(None, ANY)
    assert [usage(part) for part in (*parts, multi)] == [COMPUTE] * 3
    capi.ggml_backend_buffer_free(multi)


def test_a_tensor_cannot_be_put_into_a_multi_buffer(arena, make):
    multi = capi.ggml_backend_multi_buffer_alloc_buffer([make(freed=True)])
    arena.callback(capi.ggml_backend_buffer_free, multi)
    with pytest.raises(ValueError, match="is_multi_buffer"):
        capi.ggml_backend_tensor_alloc(multi, arena.tensor(4), ffi.cast("void *", 4096))


# fmt: off
def test_buffers_into_a_multi_buffer_as_they_stand():
    cpu = capi.ggml_backend_cpu_init()
    ctx1 = capi.ggml_init(mem_size=1024, no_alloc=True); ctx2 = capi.ggml_init(mem_size=2048, no_alloc=True)  # noqa: E501, E702
    a = capi.ggml_new_tensor_1d(ctx1, capi.GGML_TYPE_F32, 10); b = capi.ggml_new_tensor_1d(ctx2, capi.GGML_TYPE_F32, 20)  # noqa: E501, E702, F841
    buf1 = capi.ggml_backend_alloc_ctx_tensors(ctx1, cpu); buf2 = capi.ggml_backend_alloc_ctx_tensors(ctx2, cpu)  # noqa: E501, E702
    multi = capi.ggml_backend_multi_buffer_alloc_buffer([buf1, buf2])
    capi.ggml_backend_buffer_free(multi); capi.ggml_backend_free(cpu); capi.ggml_free(ctx1); capi.ggml_free(ctx2)  # noqa: E501, E702
# fmt: on


# ---- devices


@covers("device_type_cpu device_type_gpu device_type_igpu device_type_accel")
def test_device_types():
    names = [
        capi.ggml_backend_device_type_cpu().name,
        capi.ggml_backend_device_type_gpu().name,
        capi.ggml_backend_device_type_igpu().name,
        capi.ggml_backend_device_type_accel().name,
    ]
    assert names == [f"GGML_BACKEND_DEVICE_TYPE_{word}" for word in ("CPU", "GPU", "IGPU", "ACCEL")]
    assert capi.ggml_backend_device_type_cpu() is capi.GGML_BACKEND_DEVICE_TYPE_CPU
    assert capi.ggml_backend_device_type_cpu() == 0


@covers("dev_count dev_get")
def test_devices_by_number():
    n = capi.ggml_backend_dev_count()
    assert n >= 1
    devices = [capi.ggml_backend_dev_get(i) for i in range(n)]
    assert len(set(devices)) == n
    assert capi.ggml_backend_dev_get(0) == devices[0]
    with pytest.raises(AbortError, match="index < ggml_backend_dev_count"):
        capi.ggml_backend_dev_get(n)
    with pytest.raises(OverflowError, match="index"):
        capi.ggml_backend_dev_get(-1)


@covers("dev_by_name dev_name")
def test_devices_by_name(device):
    assert capi.ggml_backend_dev_name(device) == "CPU"
    for name in ("CPU", "cpu", b"Cpu"):
        assert capi.ggml_backend_dev_by_name(name) == device
    for name in ("", "CPU0", "no such device", "é"):
        assert capi.ggml_backend_dev_by_name(name) is None
    for i in range(capi.ggml_backend_dev_count()):
        found = capi.ggml_backend_dev_get(i)
        assert capi.ggml_backend_dev_by_name(capi.ggml_backend_dev_name(found)) == found
    with pytest.raises(ValueError, match="name must not be"):
        capi.ggml_backend_dev_by_name(None)
    with pytest.raises(ValueError, match="NUL"):
        capi.ggml_backend_dev_by_name("CPU\0")
    with pytest.raises(ValueError, match="device must not be NULL or None"):
        capi.ggml_backend_dev_name(None)


@covers("dev_by_type dev_type")
def test_devices_by_type(device):
    assert capi.ggml_backend_dev_type(device) is capi.ggml_backend_device_type_cpu()
    assert capi.ggml_backend_dev_by_type(capi.ggml_backend_device_type_cpu()) == device
    there = {
        capi.ggml_backend_dev_type(capi.ggml_backend_dev_get(i))
        for i in range(capi.ggml_backend_dev_count())
    }
    for type_ in type(capi.GGML_BACKEND_DEVICE_TYPE_CPU):
        found = capi.ggml_backend_dev_by_type(type_)
        assert (found is not None) == (type_ in there)
        if found is not None:
            assert capi.ggml_backend_dev_type(found) is type_
    with pytest.raises(ValueError, match="type is 77, which is no ggml_backend_dev_type"):
        capi.ggml_backend_dev_by_type(77)
    with pytest.raises(ValueError, match="device must not be NULL or None"):
        capi.ggml_backend_dev_type(None)


@covers("dev_description dev_memory")
def test_what_a_device_says(device):
    description = capi.ggml_backend_dev_description(device)
    assert description.strip()
    assert description != "NULL"
    free, total = capi.ggml_backend_dev_memory(device)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free <= total == pages
    for function in (capi.ggml_backend_dev_description, capi.ggml_backend_dev_memory):
        with pytest.raises(ValueError, match="device must not be NULL or None"):
            function(None)


@covers("dev_get_props")
def test_properties_agree_with_the_rest(device):
    props = capi.ggml_backend_dev_get_props(device)
    assert ffi.string(props.name).decode() == capi.ggml_backend_dev_name(device)
    assert ffi.string(props.description).decode() == capi.ggml_backend_dev_description(device)
    assert props.type == capi.ggml_backend_dev_type(device)
    assert props.memory_total == capi.ggml_backend_dev_memory(device)[1]
    assert 0 < props.memory_free <= props.memory_total
    assert not props.device_id  # no PCI device
    caps = {name: getattr(props.caps, name) for name, _ in ffi.typeof(props.caps).fields}
    known = {
        "async": False,
        "host_buffer": False,
        "buffer_from_host_ptr": True,
        "events": False,
        "mmap_support": True,  # the newest: older releases lack the field
    }
    assert caps == {name: known[name] for name in caps}
    assert len(caps) >= 4
    with pytest.raises(ValueError, match="device must not be NULL or None"):
        capi.ggml_backend_dev_get_props(None)


@covers("dev_supports_op")
def test_supported_operations(arena, device):
    ctx = arena.context()
    x = arena.tensor(256, ctx=ctx)
    supports = capi.ggml_backend_dev_supports_op
    assert supports(device, capi.ggml_sqr(ctx, x)) is True
    assert supports(device, capi.ggml_reshape_2d(ctx, x, 16, 16)) is True
    for type_, answer in (("Q4_0", True), ("F16", True), ("IQ2_XXS", False), ("IQ1_S", False)):
        other = arena.tensor(256, type=capi.ggml_type[f"GGML_TYPE_{type_}"], ctx=ctx)
        assert supports(device, capi.ggml_cpy(ctx, x, other)) is answer
    with pytest.raises(ValueError, match="op must not be NULL or None"):
        supports(device, None)
    with pytest.raises(ValueError, match="device must not be NULL or None"):
        supports(None, x)


@covers("dev_supports_buft")
def test_supported_buffer_types(fake, cpu, device):
    own = capi.ggml_backend_get_default_buffer_type(cpu)
    supports = capi.ggml_backend_dev_supports_buft
    assert supports(device, own) is True
    assert supports(device, buffer_type(is_host=True)) is True
    assert supports(device, buffer_type(is_host=False)) is False
    with pytest.raises(ValueError, match="buft must not be NULL or None"):
        supports(device, None)
    with pytest.raises(ValueError, match="device must not be NULL or None"):
        supports(None, own)


@needs_meta
@covers("dev_supports_buft")
def test_buffer_types_that_a_meta_device_supports(cpu, device):
    supports = capi.ggml_backend_dev_supports_buft
    meta = capi.ggml_backend_meta_device([device, device], mirrored)
    assert supports(meta, capi.ggml_backend_get_default_buffer_type(cpu)) is False
    assert supports(meta, capi.ggml_backend_dev_buffer_type(meta)) is True
    other = capi.ggml_backend_meta_device([device] * 3, mirrored)
    assert supports(meta, capi.ggml_backend_dev_buffer_type(other)) is False


@covers("dev_offload_op")
def test_offloaded_operations(fake, arena, device):
    ctx = arena.context()
    weight, batch = arena.tensor(8, 4, ctx=ctx), arena.tensor(8, 64, ctx=ctx)
    product = capi.ggml_mul_mat(ctx, weight, batch)
    assert capi.ggml_backend_dev_offload_op(device, product) is False  # it is where weights are
    assert capi.ggml_backend_dev_offload_op(fake.pointer, product) is True
    assert capi.ggml_backend_dev_offload_op(fake.pointer, capi.ggml_sqr(ctx, batch)) is False
    with pytest.raises(ValueError, match="op must not be NULL or None"):
        capi.ggml_backend_dev_offload_op(device, None)


# ---- backends


@covers("cpu_init get_device")
def test_a_cpu_backend(device):
    one, other = capi.ggml_backend_cpu_init(), capi.ggml_backend_cpu_init()
    assert one != other
    assert capi.ggml_backend_name(one) == "CPU"
    assert capi.ggml_backend_is_cpu(one)
    assert capi.ggml_backend_get_device(one) == capi.ggml_backend_get_device(other) == device
    capi.ggml_backend_free(one)
    check_product(other)
    capi.ggml_backend_free(other)
    with pytest.raises(ValueError, match="backend must not be NULL or None"):
        capi.ggml_backend_get_device(None)


@covers("get_device")
def test_the_device_of_any_backend(backend):
    found = capi.ggml_backend_get_device(backend)
    other = capi.ggml_backend_dev_init(found)
    assert capi.ggml_backend_get_device(other) == found
    capi.ggml_backend_free(other)


def computes(backend) -> None:
    try:
        check_product(backend)
    finally:
        capi.ggml_backend_free(backend)


@covers("dev_init")
def test_a_device_makes_backends(device):
    computes(capi.ggml_backend_dev_init(device))
    computes(capi.ggml_backend_dev_init(device, None))
    computes(capi.ggml_backend_dev_init(device, "whatever the CPU may think of it"))
    with pytest.raises(ValueError, match="device must not be NULL or None"):
        capi.ggml_backend_dev_init(None)
    with pytest.raises(TypeError, match="params"):
        capi.ggml_backend_dev_init(device, 3)


@covers("init_by_name")
def test_a_backend_by_name():
    computes(capi.ggml_backend_init_by_name("CPU"))
    computes(capi.ggml_backend_init_by_name("cpu", ""))
    with pytest.raises(GGMLError, match="ggml_backend_init_by_name: there is no device of that"):
        capi.ggml_backend_init_by_name("no such device")
    with pytest.raises(ValueError, match="name must not be"):
        capi.ggml_backend_init_by_name(None)


@covers("init_by_type")
def test_a_backend_by_type():
    computes(capi.ggml_backend_init_by_type(capi.ggml_backend_device_type_cpu()))
    computes(capi.ggml_backend_init_by_type(0, "x"))
    missing = capi.ggml_backend_device_type_igpu()
    if capi.ggml_backend_dev_by_type(missing) is None:
        with pytest.raises(GGMLError, match="there is no device of that type"):
            capi.ggml_backend_init_by_type(missing)
    with pytest.raises(ValueError, match="type is 99, which is no ggml_backend_dev_type"):
        capi.ggml_backend_init_by_type(99)


@covers("init_best")
def test_the_best_backend():
    best = capi.ggml_backend_init_best()
    gpus = [capi.ggml_backend_device_type_gpu(), capi.ggml_backend_device_type_igpu()]
    found = [d for d in map(capi.ggml_backend_dev_by_type, gpus) if d is not None]
    expected = found[0] if found else capi.ggml_backend_dev_by_name("CPU")
    assert capi.ggml_backend_get_device(best) == expected
    computes(best)


@covers("init_best")
@pytest.mark.usefixtures("fake")
def test_the_best_backend_of_several():
    gpus = capi.ggml_backend_device_type_gpu(), capi.ggml_backend_device_type_igpu()
    if any(capi.ggml_backend_dev_by_type(type_) is not None for type_ in gpus):
        pytest.skip("there is a real GPU, which comes first")
    shown = child("""
        from _fake_backend import FakeDevice
        for name, type in (
            ("Accel0", capi.ggml_backend_device_type_accel()),
            ("Igpu0", capi.ggml_backend_device_type_igpu()),
            ("Gpu0", capi.ggml_backend_device_type_gpu()),
        ):
            capi.ggml_backend_register(FakeDevice(name, type).reg)
            print(capi.ggml_backend_name(capi.ggml_backend_init_best()))
    """)
    best = capi.ggml_backend_init_best()
    assert shown.split() == [capi.ggml_backend_name(best), "Igpu0", "Gpu0"]
    capi.ggml_backend_free(best)


# ---- work


def squares(arena, backend):
    """A graph that squares four numbers on a backend: its input, its result, the graph."""
    ctx = arena.context()
    x = arena.tensor(4, name="x", ctx=ctx)
    capi.ggml_set_input(x)
    result = capi.ggml_sqr(ctx, x)
    graph = arena.graph(ctx, result)
    return x, result, graph


@covers("graph_compute_async synchronize")
def test_computing_and_waiting(backend, target):
    with Arena(backend) as arena:
        x, result, graph = squares(arena, backend)
        _backends.require_support(target, [result])
        for factor in (1, 2, 3):
            capi.ggml_backend_tensor_set(x, factor * np.arange(4, dtype=np.float32), 0)
            status = capi.ggml_backend_graph_compute_async(backend, graph)
            assert status is capi.ggml_status.GGML_STATUS_SUCCESS
            capi.ggml_backend_synchronize(backend)
            assert read(result).tolist() == [(factor * i) ** 2 for i in range(4)]
        with pytest.raises(ValueError, match="cgraph must not be NULL or None"):
            capi.ggml_backend_graph_compute_async(backend, None)
        ctx = arena.context()
        nowhere = arena.graph(ctx, capi.ggml_sqr(ctx, arena.tensor(4, ctx=ctx)), allocate=False)
        with pytest.raises(ValueError, match="requires"):
            capi.ggml_backend_graph_compute_async(backend, nowhere)
    with pytest.raises(ValueError, match="backend must not be NULL or None"):
        capi.ggml_backend_synchronize(None)


@covers("synchronize")
def test_synchronising_does_what_waits(fake, arena):
    tensor, stream = arena.weight(4), fake.stream()
    capi.ggml_backend_buffer_clear(tensor.buffer, 0)
    source = np.ones(4, np.float32)
    capi.ggml_backend_tensor_set_async(stream.pointer, tensor, source, 0)
    assert not read(tensor).any()
    capi.ggml_backend_synchronize(stream.pointer)
    assert read(tensor).all()
    capi.ggml_backend_free(stream.pointer)


@covers("graph_plan_create graph_plan_compute graph_plan_free")
def test_plans(cpu, arena):
    x, result, graph = squares(arena, cpu)
    plans = [capi.ggml_backend_graph_plan_create(cpu, graph) for _ in range(2)]
    assert plans[0] != plans[1]
    for factor, plan in ((1, plans[0]), (2, plans[1]), (3, plans[0])):
        capi.ggml_backend_tensor_set(x, factor * np.arange(4, dtype=np.float32), 0)
        status = capi.ggml_backend_graph_plan_compute(cpu, plan)
        assert status is capi.ggml_status.GGML_STATUS_SUCCESS
        assert read(result).tolist() == [(factor * i) ** 2 for i in range(4)]
    for plan in plans:
        capi.ggml_backend_graph_plan_free(cpu, plan)


@covers("graph_plan_create graph_plan_compute graph_plan_free")
@needs_meta
def test_a_backend_without_plans(arena, device):
    meta = capi.ggml_backend_dev_init(capi.ggml_backend_meta_device([device], mirrored))
    arena.callback(capi.ggml_backend_free, meta)
    with Arena(meta) as things:
        graph = squares(things, meta)[2]
        with pytest.raises(NotSupportedError, match="the backend has no graph_plan_create"):
            capi.ggml_backend_graph_plan_create(meta, graph)
        with pytest.raises(NotSupportedError, match="the backend has no graph_plan_compute"):
            capi.ggml_backend_graph_plan_compute(meta, ffi.cast("void *", 8))
        with pytest.raises(NotSupportedError, match="the backend has no graph_plan_free"):
            capi.ggml_backend_graph_plan_free(meta, ffi.cast("void *", 8))


@covers("tensor_set_async tensor_get_async")
def test_transfers(backend):
    with Arena(backend) as arena:
        tensor = arena.weight(4)
        source = np.array([1, 2, 3, 4], np.float32)
        capi.ggml_backend_tensor_set_async(backend, tensor, source, 0)
        capi.ggml_backend_synchronize(backend)
        assert read(tensor).tolist() == [1, 2, 3, 4]
        found = np.zeros(4, np.float32)
        capi.ggml_backend_tensor_get_async(backend, tensor, found, 0)
        capi.ggml_backend_synchronize(backend)
        assert found.tolist() == [1, 2, 3, 4]
        assert source.tolist() == [1, 2, 3, 4]


@covers("tensor_copy_async")
def test_copies(cpu, arena):
    other = capi.ggml_backend_cpu_init()
    arena.callback(capi.ggml_backend_free, other)
    src, dst = arena.weight(4, 3), arena.weight(4, 3)
    capi.ggml_backend_tensor_set(src, np.arange(12, dtype=np.float32), 0)
    capi.ggml_backend_tensor_copy_async(cpu, other, src, dst)
    capi.ggml_backend_synchronize(other)
    assert read(dst).tolist() == list(range(12))
    with pytest.raises(AbortError, match="different layouts"):
        capi.ggml_backend_tensor_copy_async(cpu, other, src, arena.weight(3, 4))


@covers("event_new event_free event_record event_wait event_synchronize")
def test_events(fake, arena):
    """One stream writes, another waits for that and reads; then the host waits."""
    one, two = fake.stream(), fake.stream()
    event = capi.ggml_backend_event_new(fake.pointer)
    tensor = arena.weight(4)
    capi.ggml_backend_buffer_clear(tensor.buffer, 0)
    source, found = np.ones(4, np.float32), np.zeros(4, np.float32)
    capi.ggml_backend_tensor_set_async(one.pointer, tensor, source, 0)
    capi.ggml_backend_event_record(event, one.pointer)
    capi.ggml_backend_event_wait(two.pointer, event)
    capi.ggml_backend_tensor_get_async(two.pointer, tensor, found, 0)
    capi.ggml_backend_synchronize(two.pointer)
    assert found.tolist() == [1, 1, 1, 1]
    source *= 2
    capi.ggml_backend_tensor_set_async(one.pointer, tensor, source, 0)
    capi.ggml_backend_event_record(event, one.pointer)
    assert read(tensor).tolist() == [1, 1, 1, 1]
    capi.ggml_backend_event_synchronize(event)
    assert read(tensor).tolist() == [2, 2, 2, 2]
    capi.ggml_backend_event_free(event)
    assert not fake.events
    for stream in (one, two):
        capi.ggml_backend_free(stream.pointer)


@covers("event_new event_free event_record event_wait event_synchronize")
def test_a_device_without_events(cpu, device):
    with pytest.raises(NotSupportedError, match="the device has no events"):
        capi.ggml_backend_event_new(device)
    event = event_of(device)
    with pytest.raises(NotSupportedError, match="has no event_record"):
        capi.ggml_backend_event_record(event, cpu)
    with pytest.raises(NotSupportedError, match="has no event_wait"):
        capi.ggml_backend_event_wait(cpu, event)
    with pytest.raises(NotSupportedError, match="has no event_synchronize"):
        capi.ggml_backend_event_synchronize(event)
    capi.ggml_backend_event_free(None)
    check_product(cpu)


# ---- the meta device


def mirrored(info, n_devs):
    return SplitState.mirrored()


def by_rows(info, n_devs):
    """A split by rows of `up`, so that `down` has it by columns; all else is mirrored."""
    if info.name == "up":
        return SplitState.by_ratio(info, 1, [1] * n_devs)
    if info.name == "down":
        return SplitState.by_ratio(info, 0, [1] * n_devs)
    return SplitState.mirrored()


@covers("meta_device")
@pytest.mark.parametrize("n", [1, 2, 3])
@needs_meta
def test_a_meta_device_computes_in_shares(device, n):
    asked = []

    def split(info, n_devs):
        asked.append((info.name, n_devs))
        return by_rows(info, n_devs)

    meta = capi.ggml_backend_meta_device([device] * n, split)
    assert capi.ggml_backend_dev_type(meta).name == "GGML_BACKEND_DEVICE_TYPE_META"
    backend = capi.ggml_backend_dev_init(meta)
    assert capi.ggml_backend_meta_n_backends(backend) == n
    computes(backend)
    assert set(asked) == {("up", n), ("down", n)}
    assert len(asked) == 2
    assert split_function(meta).error is None
    assert capi.ggml_backend_meta_device([device] * n, split) != meta


@covers("meta_device")
@needs_meta
def test_the_latch_of_a_meta_device(device):
    def split(info, n_devs):
        raise KeyError(info.name)

    meta = capi.ggml_backend_meta_device([device, device], split)
    computes(capi.ggml_backend_dev_init(meta))  # mirrored, so right
    assert isinstance(split_function(meta).error, KeyError)
    meta = capi.ggml_backend_meta_device([device, device], split, on_error="raise")
    backend = capi.ggml_backend_dev_init(meta)
    with pytest.raises(SplitError) as caught:
        computes(backend)
    assert isinstance(caught.value.__cause__, KeyError)


@covers("meta_device")
@needs_meta
def test_meta_devices_of_wrong_lists(device):
    make = capi.ggml_backend_meta_device
    meta = make([device], mirrored)
    for devs, error in [
        (None, ValueError),
        ([], ValueError),
        ([device] * 17, ValueError),
        ([device, None], ValueError),
        ([device, ffi.NULL], ValueError),
        ([device, meta], ValueError),
        (device, TypeError),
        ("CPU", TypeError),
        ([device, "CPU"], TypeError),
        (7, TypeError),
    ]:
        with pytest.raises(error, match=r"devs|devices"):
            make(devs, mirrored)
    with pytest.raises(TypeError, match="split_fn"):
        make([device], None)
    with pytest.raises(ValueError, match="on_error"):
        make([device], mirrored, "ignore")
    assert capi.ggml_backend_meta_device([device] * 16, mirrored)


# ---- registries


@covers("reg_count reg_get reg_name reg_by_name")
def test_registries():
    n = capi.ggml_backend_reg_count()
    assert n >= 1
    regs = [capi.ggml_backend_reg_get(i) for i in range(n)]
    names = [capi.ggml_backend_reg_name(reg) for reg in regs]
    assert len(set(regs)) == len(set(names)) == n
    assert "CPU" in names
    for reg, name in zip(regs, names, strict=True):
        assert capi.ggml_backend_reg_by_name(name) == reg
        assert capi.ggml_backend_reg_by_name(name.lower()) == reg
    assert capi.ggml_backend_reg_by_name("no such backend") is None
    with pytest.raises(AbortError, match="index < ggml_backend_reg_count"):
        capi.ggml_backend_reg_get(n)
    with pytest.raises(ValueError, match="name must not be"):
        capi.ggml_backend_reg_by_name(None)
    with pytest.raises(ValueError, match="reg must not be NULL or None"):
        capi.ggml_backend_reg_name(None)


@covers("reg_dev_count reg_dev_get")
def test_the_devices_of_registries(device):
    found = []
    for i in range(capi.ggml_backend_reg_count()):
        reg = capi.ggml_backend_reg_get(i)
        n = capi.ggml_backend_reg_dev_count(reg)
        devices = [capi.ggml_backend_reg_dev_get(reg, j) for j in range(n)]
        assert all(capi.ggml_backend_dev_backend_reg(d) == reg for d in devices)
        found += devices
    n = capi.ggml_backend_dev_count()
    assert set(found) == {capi.ggml_backend_dev_get(i) for i in range(n)}
    assert len(found) == n
    cpu = capi.ggml_backend_reg_by_name("CPU")
    assert capi.ggml_backend_reg_dev_count(cpu) == 1
    assert capi.ggml_backend_reg_dev_get(cpu, 0) == device
    with pytest.raises(AbortError, match="index == 0"):
        capi.ggml_backend_reg_dev_get(cpu, 1)
    for function in (
        capi.ggml_backend_reg_dev_count,
        lambda reg: capi.ggml_backend_reg_dev_get(reg, 0),
    ):
        with pytest.raises(ValueError, match="reg must not be NULL or None"):
            function(None)


@covers("register unload")
@pytest.mark.usefixtures("fake")
@needs("0.13: nothing is registered twice")
def test_registering_a_backend():
    shown = child("""
        from _fake_backend import FakeDevice
        regs, devices = capi.ggml_backend_reg_count(), capi.ggml_backend_dev_count()
        def show():
            print(capi.ggml_backend_reg_count() - regs, end=" ")
            print(capi.ggml_backend_dev_count() - devices, end=" ")
            print(capi.ggml_backend_dev_by_name("Fake0") == fake.pointer, end=" ")
            print(capi.ggml_backend_reg_by_name("Fake") == fake.reg)
        fake = FakeDevice("Fake0")
        show()
        capi.ggml_backend_register(fake.reg)
        show()
        capi.ggml_backend_register(fake.reg)  # once is enough
        show()
        capi.ggml_backend_unload(fake.reg)
        show()
        capi.ggml_backend_unload(fake.reg)  # nor is there more to unload
        capi.ggml_backend_register(fake.reg)
        show()
        for function in capi.ggml_backend_register, capi.ggml_backend_unload:
            try:
                function(None)
            except ValueError as error:
                print(error)
    """)
    assert shown.splitlines() == [
        "0 0 False False",
        "1 1 True True",
        "1 1 True True",
        "0 0 False False",
        "1 1 True True",
        "ggml_backend_register: reg must not be NULL or None",
        "ggml_backend_unload: reg must not be NULL or None",
    ]


@covers("device_register")
@pytest.mark.usefixtures("fake")
@needs("0.13: nothing is registered twice")
def test_registering_a_device():
    shown = child("""
        from _fake_backend import FakeDevice
        fake = FakeDevice("Fake0")
        regs, devices = capi.ggml_backend_reg_count(), capi.ggml_backend_dev_count()
        for _ in range(2):  # the second time changes nothing
            capi.ggml_backend_device_register(fake.pointer)
            print(capi.ggml_backend_dev_count() - devices, capi.ggml_backend_reg_count() - regs)
        print(capi.ggml_backend_dev_get(devices) == fake.pointer)
        print(capi.ggml_backend_name(capi.ggml_backend_init_by_name("fake0")))
        capi.ggml_backend_device_register(capi.ggml_backend_dev_get(0))
        print(capi.ggml_backend_dev_count() - devices)
        try:
            capi.ggml_backend_device_register(None)
        except ValueError as error:
            print(error)
    """)
    assert shown.splitlines() == [
        "1 0",
        "1 0",
        "True",
        "Fake0",
        "1",
        "ggml_backend_device_register: device must not be NULL or None",
    ]


@covers("unload")
def test_the_backend_that_is_built_in_or_in_use_stays():
    reg, cpu = capi.ggml_backend_reg_by_name("CPU"), capi.ggml_backend_cpu_init()
    linked = "ggml-cpu" in build_info.LIBRARIES
    why = "CPU is built in, not a loadable module" if linked else r"CPU still has \d+ backend"
    with pytest.raises(ValueError, match=why):
        capi.ggml_backend_unload(reg)
    assert capi.ggml_backend_reg_by_name("CPU") == reg
    capi.ggml_backend_free(cpu)


@covers("load")
def test_files_that_are_no_backends(tmp_path):
    text = tmp_path / "libggml-text.so"
    text.write_text("no library")
    n = capi.ggml_backend_reg_count()
    for path, words in [
        ("/nowhere/libggml-none.so", "/nowhere/libggml-none.so.*No such file"),
        (text, "libggml-text.so"),
        (tmp_path, re.escape(str(tmp_path))),
        ("libm.so.6", "failed to find ggml_backend_init in libm.so.6"),
    ]:
        with pytest.raises(GGMLError, match=f"(?s)ggml_backend_load: .*{words}"):
            capi.ggml_backend_load(path)
    assert capi.ggml_backend_reg_count() == n
    with pytest.raises(ValueError, match="path must not be"):
        capi.ggml_backend_load(None)


@pytest.fixture(scope="module")
def module(need, tmp_path_factory):
    """Compile a loadable backend: `module(api=..., score=...)` gives its path."""
    need(compiler(), "C compiler")
    require_layout()

    def compile(
        folder: Path | None = None, name: str = "tests", api: int = 2, score: int = 1
    ) -> Path:
        folder = folder or tmp_path_factory.mktemp("module")
        return compile_module(folder / f"libggml-{name}.so", api, score)

    return compile


@covers("load unload")
@needs("0.13: nothing is registered twice")
def test_loading_and_unloading(module):
    path = module()
    shown = child(f"""
        from ggml_cffi.errors import GGMLError
        path = {str(path)!r}
        regs, devices = capi.ggml_backend_reg_count(), capi.ggml_backend_dev_count()
        accel = capi.ggml_backend_device_type_accel()
        reg = capi.ggml_backend_load(path)
        print(capi.ggml_backend_reg_name(reg), capi.ggml_backend_reg_by_name("loaded") == reg)
        print(capi.ggml_backend_reg_count() - regs, capi.ggml_backend_dev_count() - devices)
        device = capi.ggml_backend_dev_by_name("Loaded0")
        print(capi.ggml_backend_dev_description(device), *capi.ggml_backend_dev_memory(device))
        print(capi.ggml_backend_dev_type(device) is accel)
        print(capi.ggml_backend_dev_by_type(accel) is not None)
        print(capi.ggml_backend_load(path) == reg, capi.ggml_backend_reg_count() - regs)
        try:
            capi.ggml_backend_dev_init(device)
        except GGMLError as error:
            print(error)
        capi.ggml_backend_unload(reg)
        print(capi.ggml_backend_reg_count() - regs, capi.ggml_backend_dev_by_name("Loaded0"))
        from pathlib import Path
        print(path in Path("/proc/self/maps").read_text())  # what points into it stays as it is
    """)
    assert shown.splitlines() == [
        "Loaded True",
        "1 1",
        "a module of the tests 1 2",
        "True",
        "True",
        "True 1",
        "ggml_backend_dev_init: the device could not be initialised",
        "0 None",
        "True",
    ]


@covers("load")
def test_modules_that_do_not_fit(module):
    old = r"incompatible API version \(backend: 1, current: 2\)"
    with pytest.raises(NotSupportedError, match=old):
        capi.ggml_backend_load(module(api=1))
    with pytest.raises(NotSupportedError, match="does not suit this machine"):
        capi.ggml_backend_load(module(score=0))  # it says that it cannot run on this machine
    assert capi.ggml_backend_reg_by_name("Loaded") is None


@covers("load_all")
@needs("0.13: nothing is registered twice")
def test_loading_all(module, tmp_path):
    """ggml looks for the names of its backends beside the program and in the current folder."""
    code = """
        regs, devices = capi.ggml_backend_reg_count(), capi.ggml_backend_dev_count()
        for _ in range(2):
            capi.ggml_backend_load_all()
            print(capi.ggml_backend_reg_count() - regs, capi.ggml_backend_dev_count() - devices)
        print(capi.ggml_backend_dev_by_name("Loaded0") is not None)
    """
    assert child(code, tmp_path).splitlines() == ["0 0", "0 0", "False"]
    module(tmp_path, "blas")
    assert child(code, tmp_path).splitlines() == ["1 1", "1 1", "True"]
    outside = module(name="outside")  # not one of the names
    assert child(code, outside.parent).splitlines() == ["0 0", "0 0", "False"]
    shown = child(code, outside.parent, GGML_BACKEND_PATH=str(outside))
    # a build with loadable modules has looked there when it was imported
    new = "1 1" if "ggml-cpu" in build_info.LIBRARIES else "0 0"
    assert shown.splitlines() == [new, new, "True"]


# ---- all of them


def test_all_names_are_there():
    assert len(FAMILY) == len(set(FAMILY)) == 58
    for name in FAMILY:
        function = getattr(capi, f"ggml_backend_{name}")
        assert callable(function)
        assert not isinstance(function, type)  # ggml_backend_dev_type is an enum's tag too
        assert function.__name__ == f"ggml_backend_{name}"
        assert function.__doc__


def test_each_name_has_a_test():
    assert set(TESTS) == set(FAMILY)
    for name, test in TESTS.items():
        assert f"capi.ggml_backend_{name}" in inspect.getsource(test), (name, test.__name__)
