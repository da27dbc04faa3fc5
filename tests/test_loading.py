"""Backends from loadable modules: loading one, what lives of it, and unloading it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _fake_backend import compile_module, let_compute, require_layout
from _native import compiler
from _release import needs, needs_meta, not_here

import ggml_cffi
from codegen.prefix import find_prefix
from ggml_cffi import Backend, Context, Device, Graph, MetaDevice, capi, ops
from ggml_cffi._gen import build_info
from ggml_cffi.errors import GGMLError, NotSupportedError
from ggml_cffi.meta import SplitState, split_function

pytestmark = needs("0.13: nothing is registered twice")


@pytest.fixture(scope="module")
def path(need: Any, tmp_path_factory: Any) -> Path:
    """A module whose device computes as the CPU does."""
    need(compiler(), "C compiler")
    require_layout()
    made = compile_module(tmp_path_factory.mktemp("module") / "libggml-tests.so")
    let_compute(made)
    return made


@pytest.fixture
def loaded(path: Path) -> Iterator[Device]:
    (found,) = ggml_cffi.load_backend(path)
    yield found
    if any(found == each for each in ggml_cffi.devices()):
        ggml_cffi.unload_backend(path)


def check_product(device: Device) -> None:
    """A product on the device is right."""
    a, b = np.arange(12, dtype=np.float32).reshape(3, 4), np.ones((2, 4), np.float32)
    with Context() as ctx, Backend(device, 1) as backend:
        x, y = ctx.from_numpy(a), ctx.from_numpy(b)
        ctx.allocate(device)
        np.testing.assert_array_equal(Graph(ops.mul_mat(x, y)).compile(backend)(), b @ a.T)


def names() -> list[str]:
    return [device.name for device in ggml_cffi.devices()]


def test_loading_unloading_and_loading_again(path: Path) -> None:
    before = names()
    for form in (path, str(path), path.parent / ".." / path.parent.name / path.name):
        (device,) = ggml_cffi.load_backend(form)
        assert names() == [*before, "Loaded0"]
        assert ggml_cffi.device("loaded0") == device
        check_product(device)
        ggml_cffi.unload_backend(form)
        assert names() == before
    (device,) = ggml_cffi.load_backend(path)
    ggml_cffi.unload_backend(device)
    assert names() == before


def test_a_device_that_is_kept_beyond_its_backend(path: Path) -> None:
    (device,) = ggml_cffi.load_backend(path)
    handle, reg = device.handle, capi.ggml_backend_dev_backend_reg(device.handle)
    kind = device.buffer_type()
    ggml_cffi.unload_backend(device)
    for use in (
        lambda: device.name,
        lambda: device.handle,
        lambda: Backend(device),
        lambda: ggml_cffi.unload_backend(device),
        lambda: MetaDevice([device], lambda info, n: SplitState.mirrored()),
    ):
        with pytest.raises(ValueError, match="unloaded"):
            use()
    assert repr(device) == "<Device of a backend that has been unloaded>"
    for function, argument in (
        (capi.ggml_backend_dev_name, handle),
        (capi.ggml_backend_dev_init, handle),
        (capi.ggml_backend_reg_name, reg),
        (capi.ggml_backend_register, reg),
        (capi.ggml_backend_unload, reg),
        (capi.ggml_backend_buft_name, kind),
        (capi.ggml_gallocr_new, kind),
        (lambda kind: capi.ggml_gallocr_new_n([kind]), kind),
        (lambda kind: capi.ggml_backend_buft_alloc_buffer(kind, 64), kind),
    ):
        with pytest.raises(ValueError, match=r"has been unloaded"):
            function(argument)


# ---- what lives


def graph_of(ctx: Context) -> Any:
    x = ctx.input((4,), name="x")
    return Graph(ops.relu(x))


def a_backend(device: Device) -> Callable[[], object]:
    return Backend(device).close


def a_buffer(device: Device) -> Callable[[], object]:
    buffer = capi.ggml_backend_buft_alloc_buffer(device.buffer_type(), 64)
    return lambda: capi.ggml_backend_buffer_free(buffer)


def an_empty_buffer(device: Device) -> Callable[[], object]:
    buffer = capi.ggml_backend_buft_alloc_buffer(device.buffer_type(), 0)
    return lambda: capi.ggml_backend_buffer_free(buffer)


def a_buffer_of_several(device: Device) -> Callable[[], object]:
    kinds = (ggml_cffi.device("CPU").buffer_type(), device.buffer_type())
    parts = [capi.ggml_backend_buft_alloc_buffer(kind, 64) for kind in kinds]
    buffer = capi.ggml_backend_multi_buffer_alloc_buffer(parts)
    return lambda: capi.ggml_backend_buffer_free(buffer)


def a_context(device: Device) -> Callable[[], object]:
    ctx = Context()
    ctx.tensor((4,), "f32")
    ctx.allocate(device)
    return ctx.close


def an_event(device: Device) -> Callable[[], object]:
    event = capi.ggml_backend_event_new(device.handle)
    return lambda: capi.ggml_backend_event_free(event)


def a_graph_allocator(device: Device) -> Callable[[], object]:
    allocator = capi.ggml_gallocr_new(device.buffer_type())
    return lambda: capi.ggml_gallocr_free(allocator)


def a_graph_allocator_of_several(device: Device) -> Callable[[], object]:
    kinds = [ggml_cffi.device("CPU").buffer_type(), device.buffer_type()]
    allocator = capi.ggml_gallocr_new_n(kinds)
    return lambda: capi.ggml_gallocr_free(allocator)


def a_compiled_graph(device: Device) -> Callable[[], object]:
    ctx = Context()
    compiled = graph_of(ctx).compile(device)
    compiled(x=np.ones(4, np.float32))
    return lambda: (compiled.close(), ctx.close())


def a_scheduler(device: Device) -> Callable[[], object]:
    backends = [Backend(device), Backend(ggml_cffi.device("CPU"))]
    scheduler = capi.ggml_backend_sched_new([one.handle for one in backends], None, 16, False, True)
    return lambda: [capi.ggml_backend_sched_free(scheduler), *(one.close() for one in backends)]


def a_meta_device(device: Device) -> Callable[[], object]:
    meta = MetaDevice([device, "CPU"], lambda info, n: SplitState.mirrored())
    return meta.close


def a_meta_device_of_capi(device: Device) -> Callable[[], object]:
    split = lambda info, n: SplitState.mirrored()  # noqa: E731
    meta = capi.ggml_backend_meta_device([device.handle], split)
    return split_function(meta).close


def a_forgotten_meta_device(device: Device) -> Callable[[], object]:
    kept = [MetaDevice([device], lambda info, n: SplitState.mirrored())]
    return kept.clear


def a_backend_of_a_meta_device(device: Device) -> Callable[[], object]:
    meta = MetaDevice([device, device], lambda info, n: SplitState.mirrored())
    backend = Backend(meta)
    meta.close()
    return backend.close


def a_buffer_of_a_meta_device(device: Device) -> Callable[[], object]:
    meta = MetaDevice([device, device], lambda info, n: SplitState.mirrored())
    ctx = Context()
    ctx.tensor((4,), "f32")
    ctx.allocate(meta)
    meta.close()
    return ctx.close


@contextmanager
def a_graph(kind: Any) -> Iterator[Any]:
    """A graph of one operation whose tensors are in memory of this kind."""
    ctx = capi.ggml_init(mem_size=1 << 20, mem_buffer=None, no_alloc=True)
    result = capi.ggml_relu(ctx, capi.ggml_new_tensor_1d(ctx, capi.GGML_TYPE_F32, 4))
    graph = capi.ggml_new_graph(ctx)
    capi.ggml_build_forward_expand(graph, result)
    buffer = capi.ggml_backend_alloc_ctx_tensors_from_buft(ctx, kind)
    yield graph
    capi.ggml_backend_buffer_free(buffer)
    capi.ggml_free(ctx)


def a_copy_of_a_graph(device: Device) -> Callable[[], object]:
    kind = capi.ggml_backend_cpu_buffer_type()
    with a_graph(kind) as graph, Backend(device) as backend:
        copy = capi.ggml_backend_graph_copy(backend.handle, graph)
    return lambda: capi.ggml_backend_graph_copy_free(copy)


def a_plan(device: Device) -> Callable[[], object]:
    left = ExitStack()
    graph = left.enter_context(a_graph(capi.ggml_backend_cpu_buffer_type()))
    backend = left.enter_context(Backend(device))
    plan = capi.ggml_backend_graph_plan_create(backend.handle, graph)
    left.callback(capi.ggml_backend_graph_plan_free, backend.handle, plan)
    return left.close


LIVING = [
    (a_backend, "1 backend"),
    (a_buffer, "1 buffer"),
    (an_empty_buffer, "1 buffer"),
    (a_buffer_of_several, "1 buffer"),
    (a_context, "1 buffer"),
    (an_event, "1 event"),
    (a_graph_allocator, "1 graph allocator"),
    (a_graph_allocator_of_several, "1 graph allocator"),
    (a_compiled_graph, "1 backend, 1 graph allocator"),
    (a_scheduler, "1 backend, 1 scheduler"),
    (a_copy_of_a_graph, "1 graph copy"),
    (a_plan, "1 backend, 1 plan"),
    pytest.param(a_meta_device, "1 meta device", marks=needs_meta),
    pytest.param(a_meta_device_of_capi, "1 meta device", marks=needs_meta),
    pytest.param(a_forgotten_meta_device, "1 meta device", marks=needs_meta),
    pytest.param(a_backend_of_a_meta_device, "1 backend", marks=needs_meta),
    pytest.param(a_buffer_of_a_meta_device, "1 buffer", marks=needs_meta),
]


@pytest.mark.parametrize(("make", "what"), LIVING)
def test_what_lives_of_a_backend_keeps_it(loaded: Device, make: Any, what: str) -> None:
    free = make(loaded)
    reg = capi.ggml_backend_dev_backend_reg(loaded.handle)
    try:
        for unload, given in (
            (ggml_cffi.unload_backend, loaded),
            (capi.ggml_backend_unload, reg),
        ):
            with pytest.raises(ValueError, match=rf"Loaded still has {what}$"):
                unload(given)
        assert "Loaded0" in names()
    finally:
        free()
    ggml_cffi.unload_backend(loaded)
    assert "Loaded0" not in names()


def test_what_nobody_refers_to_does_not_keep_it(loaded: Device) -> None:
    circle: list[Any] = [Backend(loaded)]
    circle.append(circle)
    del circle
    ggml_cffi.unload_backend(loaded)


def test_an_object_at_the_address_of_one_that_is_gone(loaded: Device) -> None:
    """Buffers are made and freed by many threads: none is counted too much, or too little."""
    kind = loaded.buffer_type()

    def work() -> None:
        for _ in range(300):
            capi.ggml_backend_buffer_free(capi.ggml_backend_buft_alloc_buffer(kind, 64))

    kept = capi.ggml_backend_buft_alloc_buffer(kind, 64)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(ValueError, match=r"still has 1 buffer$"):
        ggml_cffi.unload_backend(loaded)
    capi.ggml_backend_buffer_free(kept)
    ggml_cffi.unload_backend(loaded)


@needs_meta
def test_a_meta_device_over_what_is_unloaded(loaded: Device) -> None:
    meta = MetaDevice(["CPU", loaded], lambda info, n: SplitState.mirrored())
    handle = meta.handle
    meta.close()
    ggml_cffi.unload_backend(loaded)
    for function in capi.ggml_backend_dev_init, capi.ggml_backend_dev_memory:
        with pytest.raises(ValueError, match="device belongs to a backend that has been unloaded"):
            function(handle)


def test_devices_while_others_load_and_unload(path: Path) -> None:
    """ggml's list of devices is a vector that nobody guards."""
    end = time.monotonic() + 0.5
    errors: list[BaseException] = []

    def look() -> None:
        try:
            while time.monotonic() < end:
                found = names()
                assert "CPU" in found
                capi.ggml_backend_dev_by_name("Loaded0")
        except ValueError as error:
            if "unloaded" not in str(error):
                errors.append(error)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    n = 0
    while time.monotonic() < end:
        ggml_cffi.load_backend(path)
        ggml_cffi.unload_backend(path)
        n += 1
    for thread in threads:
        thread.join()
    assert not errors
    assert n > 1


# ---- what cannot be loaded


def test_error_no_module(tmp_path: Path) -> None:
    text = tmp_path / "libggml-text.so"
    text.write_text("no library")
    before = names()
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "none.so"))):
        ggml_cffi.load_backend(tmp_path / "none.so")
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        ggml_cffi.load_backend(tmp_path)
    with pytest.raises(GGMLError, match=re.escape(str(text))):
        ggml_cffi.load_backend(text)
    for value in (None, 3, b"x", [text]):
        with pytest.raises(TypeError, match="expected a str or a path"):
            ggml_cffi.load_backend(value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="null"):
        ggml_cffi.load_backend("a\0b")
    assert names() == before


@pytest.mark.usefixtures("path")
def test_error_no_backend_of_this_ggml(tmp_path: Path, need: Any) -> None:
    none = tmp_path / "libnone.so"
    source = ["-shared", "-o", str(none), "-x", "c", "/dev/null"]
    subprocess.run([str(compiler()), *source], check=True)
    with pytest.raises(GGMLError, match=f"failed to find ggml_backend_init in {none}"):
        ggml_cffi.load_backend(none)
    old = compile_module(tmp_path / "libold.so", api=1)
    with pytest.raises(NotSupportedError, match=rf"{old}: incompatible API version"):
        ggml_cffi.load_backend(old)
    foreign = compile_module(tmp_path / "libforeign.so", score=0)
    with pytest.raises(NotSupportedError, match=f"{foreign}.*does not suit this machine"):
        ggml_cffi.load_backend(foreign)
    assert "Loaded0" not in names()


def test_error_loaded_already(loaded: Device, path: Path) -> None:
    with pytest.raises(ValueError, match=f"{path}' is loaded already"):
        ggml_cffi.load_backend(path)
    link = path.with_name("another-name.so")
    link.symlink_to(path)
    with pytest.raises(ValueError, match=f"{link}' is loaded already"):
        ggml_cffi.load_backend(link)
    link.unlink()
    assert names().count(loaded.name) == 1


LINKED_TO_ANOTHER = """
import os, sys
import ggml_cffi
from ggml_cffi import capi
before = len(ggml_cffi.devices())
os.chdir(os.path.dirname(sys.argv[1]))
for load in (
    lambda: ggml_cffi.load_backend(sys.argv[1]),
    lambda: capi.ggml_backend_load(sys.argv[1]),
    lambda: capi.ggml_backend_load_all_from_path(os.path.dirname(sys.argv[1])),
    lambda: capi.ggml_backend_load_all(),
):
    try:
        load()
    except ggml_cffi.NotSupportedError as error:
        print(error)
assert len(ggml_cffi.devices()) == before
"""


@pytest.mark.isolation
@pytest.mark.usefixtures("path")
def test_error_linked_to_another_ggml(tmp_path: Path) -> None:
    """As a backend of the very libggml-python is, which this package has copied."""
    if build_info.SYSTEM_LIBDIR is not None:
        not_here("libraries of its own")
    base = find_prefix({}).libraries["ggml-base"]
    option = "-Wl,--no-as-needed", str(base), f"-Wl,-rpath,{base.parent}"
    module = compile_module(tmp_path / "libggml-rpc.so", 2, 1, *option)
    done = subprocess.run(
        [sys.executable, "-c", LINKED_TO_ANOTHER, str(module)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert f"'{module}' cannot be loaded: it is linked to another ggml" in line
        assert "_libs/libggml-base-" in line


# ---- what cannot be unloaded


def test_error_the_cpu_is_built_in_or_in_use() -> None:
    cpu = ggml_cffi.device("CPU")
    linked = "ggml-cpu" in build_info.LIBRARIES
    why = "CPU is built in, not a loadable module" if linked else r"CPU still has \d+ backend"
    with Backend(cpu), pytest.raises(ValueError, match=why):
        ggml_cffi.unload_backend(cpu)
    assert cpu in ggml_cffi.devices()


WITHOUT_THE_CPU = """
import sys
import numpy as np
import ggml_cffi
from _fake_backend import let_compute
from ggml_cffi import capi, ops
from ggml_cffi._gen import build_info
let_compute(sys.argv[1])
(device,) = ggml_cffi.load_backend(sys.argv[1])
if "ggml-cpu" not in build_info.LIBRARIES:
    ggml_cffi.unload_backend(ggml_cffi.device("CPU"))
    assert ggml_cffi.devices() == [device]
    for call in capi.ggml_cpu_has_avx2, capi.ggml_is_numa, capi.ggml_backend_cpu_init:
        try:
            call()
        except ggml_cffi.NotSupportedError as error:
            assert str(error).startswith(call.__name__ + ": the backend CPU is a loadable module")
        else:
            raise AssertionError(call)
a, b = np.arange(12, dtype=np.float32).reshape(3, 4), np.ones((2, 4), np.float32)
with ggml_cffi.Context() as ctx:
    x, y = ctx.from_numpy(a), ctx.from_numpy(b)
    ctx.allocate(device)
    result = ops.cast(ops.mul_mat(x, y), "f16")
    print((ggml_cffi.Graph(result).compile(device)() == b @ a.T).all())
"""


def test_a_backend_computes_where_the_cpu_is_not_loaded(path: Path) -> None:
    """What the checks before a graph ask of the CPU, they do without where it is a module."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_CPU, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_error_nothing_to_unload(path: Path) -> None:
    with pytest.raises(ValueError, match=f"no backend is loaded from '{path}'; those loaded are"):
        ggml_cffi.unload_backend(path)
    for value in (None, 3, b"x"):
        with pytest.raises(TypeError, match="expected a str or a path"):
            ggml_cffi.unload_backend(value)  # type: ignore[arg-type]


@needs_meta
def test_error_a_meta_device_has_no_backend() -> None:
    meta = MetaDevice(["CPU"], lambda info, n: SplitState.mirrored())
    with pytest.raises(ValueError, match="belongs to no backend"):
        ggml_cffi.unload_backend(meta)
    meta.close()
