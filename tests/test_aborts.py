"""Where ggml would end the process, a call raises AbortError, and all goes on working.

The package `aborts` has one small function for each assertion of ggml.
"""

from __future__ import annotations

import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _compute import F32, Arena, check_product
from _native import compiler
from _release import PINNED, has, needs_meta, not_here, require
from _threads import idle, threads_of_process
from aborts import AREAS, ROWS, SITES, Site, guard_class
from aborts.splits import REFUSED, Answer, split, unchecked_device

from ggml_cffi import capi, diagnostics, ffi, lib
from ggml_cffi.errors import AbortError, GGMLError, NotSupportedError, SplitError
from ggml_cffi.meta import MetaDevice, SplitState

BY_NAME = {one.name: one for one in SITES}
#: Sites that are tried on a backend of four threads as well.
OF_FOUR_THREADS = [
    BY_NAME[name]
    for name in (
        "product of matrices that do not fit",
        "reshape to another number",
        "context that is full",
        "write behind the end",
        "part of a block of IQ4 XS",
        "IQ3 S of nan",
        "graph larger than its scheduler",
        "computation of a graph larger than its scheduler",
        "event recorded on the cpu",
        "step of no size",
        "split inside a batch",
        "result of another model",
        "value of another type",
        "read of a partial product",
        "sum of a cut and a whole",
        "gradients on a meta device",
        "two buffers on one device",
    )
]


# ---- the census


class Backends:
    """The backends of the sites, by name and number of threads: each lasts to the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[tuple[str, int], Any] = {}
        self.devices: list[MetaDevice] = []

    def get(self, name: str, threads: int = 1) -> Any:
        found = self.made.get((name, threads))
        if found is None:
            found = self.made[name, threads] = self._make(name, threads)
            check_product(found)  # it has the threads that it will have
        return found

    def _make(self, name: str, threads: int) -> Any:
        if name == "cpu":
            backend = capi.ggml_backend_cpu_init()
            capi.ggml_backend_cpu_set_n_threads(backend, threads)
            return backend
        if name == "meta":
            self.devices.append(MetaDevice(["CPU", "CPU"], split, on_error="raise"))
            device = self.devices[-1].handle
        else:
            device = unchecked_device(self.folder)
        backend = capi.ggml_backend_dev_init(device)
        for index in range(2):
            child = capi.ggml_backend_meta_simple_backend(backend, index)
            capi.ggml_backend_cpu_set_n_threads(child, threads)
        return backend

    def free(self) -> None:
        for backend in self.made.values():
            capi.ggml_backend_free(backend)
        for device in self.devices:
            device.close()


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backends]:
    made = Backends(tmp_path_factory.mktemp("split"))
    yield made
    made.free()


@pytest.fixture
def cpu_backend(backends: Backends) -> Any:
    return backends.get("cpu")


@pytest.fixture
def applies(need: Callable[[object, str], None]) -> Callable[[Site], None]:
    """Skip what this ggml, or this machine, does not have."""

    def applies(one: Site) -> None:
        require(one.function, *(["ggml_backend_meta_device"] if one.backend != "cpu" else []))
        if one.backend == "unchecked":
            if not PINNED:
                not_here("what an unchecked split state does, known of the pinned release only")
            need(compiler(), "C compiler")

    return applies


def abort(one: Site, backend: Any) -> AbortError | NotSupportedError:
    """Let a site abort; the error, and what the site had made is freed."""
    with Arena(backend) as arena, pytest.raises((AbortError, NotSupportedError)) as caught:
        one.provoke(arena)
    return caught.value


def place(error: AbortError | NotSupportedError) -> tuple[str, int]:
    """File and line of an assertion."""
    if isinstance(error, AbortError):
        assert error.file is not None and error.line is not None
        return os.path.basename(error.file), error.line
    found = re.search(r"\((\S+):(\d+): GGML_ASSERT", str(error))  # an operation that is not there
    assert found, error
    return os.path.basename(found[1]), int(found[2])


def check_census(one: Site, backend: Any) -> None:
    """An abort is an exception, and leaves a working backend, no threads and no work behind."""
    check_product(backend, 1)  # the threads of a pool, such as OpenMP's, come with the first one
    threads, aborts = threads_of_process(), diagnostics.caught_aborts()
    error = abort(one, backend)
    assert diagnostics.caught_aborts() == aborts + 1
    assert one.fragment in str(error)
    if isinstance(error, AbortError):
        assert one.fragment in error.message
        assert error.message in str(error)
        assert error.message.startswith(f"{error.file}:{error.line}: ")
        assert error.function == one.function
    file, line = place(error)
    assert file.endswith((".c", ".cpp", ".h"))
    assert line > 0
    check_product(backend, len(one.name))
    assert idle(threads), "threads that run on, or more of them than before"


@pytest.mark.parametrize("one", SITES, ids=lambda one: f"{one.area}: {one.name}")
def test_an_abort_raises_and_the_backend_goes_on(
    one: Site, backends: Backends, applies: Callable[[Site], None]
) -> None:
    applies(one)
    check_census(one, backends.get(one.backend))


@pytest.mark.parametrize("one", OF_FOUR_THREADS, ids=lambda one: f"{one.area}: {one.name}")
def test_an_abort_with_four_threads(
    one: Site, backends: Backends, applies: Callable[[Site], None]
) -> None:
    applies(one)
    check_census(one, backends.get(one.backend, 4))


def test_at_least_ten_sites_with_four_threads() -> None:
    assert len(OF_FOUR_THREADS) >= 10
    assert len({one.area for one in OF_FOUR_THREADS}) >= 10
    assert {guard_class(one.function) for one in OF_FOUR_THREADS} >= {"throw", "compute"}


@pytest.fixture(scope="module")
def places(backends: Backends) -> dict[str, tuple[str, int]]:
    """File and line of each site, on the pinned release."""
    if not PINNED:
        not_here("the lines of assertions, known of the pinned release only")
    return {one.name: place(abort(one, backends.get(one.backend))) for one in SITES}


def test_at_least_60_sites_in_all_areas(
    places: dict[str, tuple[str, int]],
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    found: dict[tuple[str, int], list[Site]] = {}
    for one in SITES:
        found.setdefault(places[one.name], []).append(one)
    lines = []
    for (file, line), sites in sorted(found.items()):
        classes = sorted({guard_class(one.function) for one in sites})
        lines.append(f"{file}:{line}  {'/'.join(classes)}  {sites[0].area}: {sites[0].fragment}")
    record_property("assertion sites", "; ".join(lines))
    with capsys.disabled():
        print(f"\n{len(found)} assertion sites:", *lines, sep="\n  ")
    assert len(found) >= 60
    for area in AREAS:
        assert sum(one.area == area for sites in found.values() for one in sites[:1]) >= 3, area
    assert {file for file, _ in found} >= {
        "ggml.c", "ggml-alloc.c", "ggml-backend.cpp", "ggml-backend-meta.cpp", "ggml-cpu.c",
        "ggml-opt.cpp", "ggml-quants.c", "gguf.cpp",
    }  # fmt: skip


# ---- what a split state, or a call on a meta device, can trigger


@pytest.mark.parametrize("row", ROWS)
def test_each_row_of_the_meta_backend(row: str, places: dict[str, tuple[str, int]]) -> None:
    """Each of its places is led to by a site, and its sites lead nowhere else."""
    found = {"{}:{}".format(*places[one.name]) for one in SITES if one.row == row}
    assert found == ROWS[row]


@needs_meta
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_read_out_of_bounds_never_reaches_ggml(name: str) -> None:
    """The split function's answer is refused with its tensor's name; nothing is allocated."""
    answer: Answer = REFUSED[name]

    def bad(info: Any, n_devs: int) -> Any:
        return vars(answer) if info.name == "w" else SplitState.mirrored()

    gc.collect()  # what other tests have left
    live = diagnostics.live_handles()
    with MetaDevice(["CPU", "CPU"], bad, on_error="raise") as device:
        backend = capi.ggml_backend_dev_init(device.handle)
        with Arena(backend) as arena, pytest.raises(SplitError, match="'w'") as caught:
            arena.weight(8, 4, name="w")
        assert isinstance(caught.value.__cause__, ValueError)
        check_product(backend)
        capi.ggml_backend_free(backend)
    assert diagnostics.live_handles() == live


@needs_meta
def test_a_meta_device_over_none_never_reaches_ggml() -> None:
    """ggml would take it, and then read what is not there."""
    with pytest.raises(ValueError, match="0 devices, expected 1 to 16"):
        capi.ggml_backend_meta_device([], split)
    with pytest.raises(ValueError, match="17 devices, expected 1 to 16"):
        capi.ggml_backend_meta_device([capi.ggml_backend_dev_by_name("CPU")] * 17, split)
    cpu = ffi.new("struct ggml_backend_device *[]", [capi.ggml_backend_dev_by_name("CPU")])
    callback = ffi.cast(ffi.typeof(ffi.addressof(lib, "ggml_backend_meta_device")).args[2], 8)
    assert lib.ggml_backend_meta_device(cpu, 0, callback, ffi.NULL) == ffi.NULL
    assert "n_devs >= 1" in ffi.string(lib.ggml_cffi_error_text()).decode()


# ---- what the census sees


def test_the_census_sees_a_thread_that_is_left_behind() -> None:
    threads, end = threads_of_process(), threading.Event()
    left = threading.Thread(target=end.wait)
    left.start()
    assert not idle(threads, seconds=0.2)
    end.set()
    left.join()
    assert idle(threads)


def test_the_census_sees_a_thread_that_runs_on() -> None:
    end = threading.Event()

    def spin() -> None:
        while not end.is_set():
            pass

    left = threading.Thread(target=spin)
    left.start()
    assert not idle(threads_of_process(), seconds=0.2)
    end.set()
    left.join()
    assert idle(threads_of_process())


# ---- errors and threads


def test_one_site_many_times(cpu_backend: Any) -> None:
    with Arena(cpu_backend) as arena:
        ctx, a, b = arena.context(), arena.tensor(4, 3), arena.tensor(5, 3)
        used = capi.ggml_used_mem(ctx)
        messages = set()
        for _ in range(2000):
            with pytest.raises(AbortError) as caught:
                capi.ggml_mul_mat(ctx, a, b)
            messages.add(str(caught.value))
        assert len(messages) == 1
        assert capi.ggml_used_mem(ctx) == used


def test_the_error_is_consumed_by_the_call_that_set_it(cpu_backend: Any) -> None:
    with Arena(cpu_backend) as arena:
        tensor = arena.weight(4)
        with pytest.raises(AbortError):
            capi.ggml_backend_tensor_set(tensor, bytes(20), 0)
        assert capi.ggml_get_name(tensor) == ""
        assert capi.ggml_is_quantized(F32) is False  # a zero that is no error
        capi.ggml_backend_tensor_set(tensor, np.arange(4, dtype=np.float32), 0)
        assert capi.ggml_get_f32_1d(tensor, 0) == 0.0


def test_the_error_survives_pickling(cpu_backend: Any) -> None:
    error = abort(SITES[0], cpu_backend)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is AbortError
    for field in ("message", "file", "line", "function", "args"):
        assert getattr(again, field) == getattr(error, field)
    assert isinstance(error, GGMLError)


def test_other_threads_go_on_while_one_aborts() -> None:
    """Three threads compute, two abort all the time, each with things of its own."""
    begun = time.monotonic()
    done = dict.fromkeys(range(5), 0)
    errors: list[BaseException] = []

    def go_on() -> bool:
        """Until all have got ahead, however slow the machine is."""
        passed = time.monotonic() - begun
        return not errors and (passed < 1.5 or (min(done.values()) < 5 and passed < 300))

    def compute(number: int) -> None:
        backend = capi.ggml_backend_cpu_init()
        capi.ggml_backend_cpu_set_n_threads(backend, 1)
        try:
            while go_on():
                check_product(backend, number + done[number])
                done[number] += 1
        finally:
            capi.ggml_backend_free(backend)

    def fail(number: int) -> None:
        backend = capi.ggml_backend_cpu_init()
        sites = [one for one in SITES if one.backend == "cpu" and not one.alone]
        sites = [one for one in sites if has(one.function)]
        try:
            while go_on():
                abort(sites[done[number] % len(sites)], backend)
                done[number] += 1
        finally:
            capi.ggml_backend_free(backend)

    def run(work: Callable[[int], None], number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    works = [compute, compute, compute, fail, fail]
    threads = [threading.Thread(target=run, args=(w, i)) for i, w in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert all(count >= 5 for count in done.values()), done


def test_an_abort_in_a_callback_can_be_caught_there(cpu_backend: Any) -> None:
    """A call inside a callback has a guard of its own; the call around it goes on."""
    caught: list[AbortError] = []
    with Arena(cpu_backend) as arena:
        ctx, other = arena.context(), arena.context()
        wrong = arena.tensor(4, 3), arena.tensor(5, 3)

        def double(dst, a, ith, nth):
            with pytest.raises(AbortError) as error:
                capi.ggml_mul_mat(other, *wrong)
            caught.append(error.value)
            for i in range(4):
                capi.ggml_set_f32_1d(dst, i, 2 * capi.ggml_get_f32_1d(a, i))

        x = arena.weight(4)
        capi.ggml_backend_tensor_set(x, np.arange(4, dtype=np.float32), 0)
        result = capi.ggml_map_custom1(ctx, x, double)
        capi.ggml_backend_graph_compute(arena.backend, arena.graph(ctx, result))
        found = np.empty(4, np.float32)
        capi.ggml_backend_tensor_get(result, found, 0)
    assert len(caught) == 1 and caught[0].function == "ggml_mul_mat"
    np.testing.assert_array_equal(found, [0, 2, 4, 6])
    check_product(cpu_backend)


def test_an_abort_in_a_callback_comes_out_of_the_call(cpu_backend: Any) -> None:
    with Arena(cpu_backend) as arena:
        ctx, other = arena.context(), arena.context()
        wrong = arena.tensor(4, 3), arena.tensor(5, 3)
        fail = lambda dst, a, ith, nth: capi.ggml_mul_mat(other, *wrong)  # noqa: E731
        graph = arena.graph(ctx, capi.ggml_map_custom1(ctx, arena.weight(4), fail))
        with pytest.raises(AbortError) as caught:
            capi.ggml_backend_graph_compute(arena.backend, graph)
    assert caught.value.function == "ggml_mul_mat"
    check_product(cpu_backend)


# ---- aborts inside a kernel


#: Rows of a table by numbers that the graph makes of others: only the kernel can tell which.
KERNEL = """
import numpy as np
from ggml_cffi import capi, ffi
from ggml_cffi.meta import MetaDevice, SplitState

F32, I32 = capi.GGML_TYPE_F32, capi.GGML_TYPE_I32

def made(threads, how):
    if how != "meta device":
        backend = capi.ggml_backend_cpu_init()
        capi.ggml_backend_cpu_set_n_threads(backend, threads)
        return backend
    device = MetaDevice(["CPU", "CPU"], lambda info, n_devs: SplitState.mirrored())
    backend = capi.ggml_backend_dev_init(device.handle)
    for index in range(2):
        child = capi.ggml_backend_meta_simple_backend(backend, index)
        capi.ggml_backend_cpu_set_n_threads(child, threads)
    return backend

def compute(threads, how="backend"):
    backend = made(threads, how)
    ctx = capi.ggml_init(mem_size=1 << 24, no_alloc=True)
    weights = capi.ggml_init(mem_size=1 << 20, no_alloc=True)
    numbers = capi.ggml_new_tensor_2d(weights, F32, 64, 1)
    table = capi.ggml_new_tensor_2d(weights, F32, 4, 3)
    capi.ggml_set_param(table)
    capi.ggml_backend_alloc_ctx_tensors(weights, backend)
    capi.ggml_backend_tensor_set(numbers, np.arange(64, dtype=np.float32), 0)
    numbers_1d = capi.ggml_reshape_1d(ctx, numbers, 64)
    result = capi.ggml_get_rows(ctx, table, capi.ggml_cast(ctx, numbers_1d, I32))
    graph = capi.ggml_new_graph(ctx)
    capi.ggml_build_forward_expand(graph, result)
    if how in ("scheduler", "training"):
        sched = capi.ggml_backend_sched_new([backend], None, 4096, False, False)
    if how == "scheduler":
        capi.ggml_backend_sched_graph_compute(sched, graph)
    elif how == "training":
        optimizer = capi.ggml_opt_init(
            backend_sched=sched,
            loss_type=capi.GGML_OPT_LOSS_TYPE_MEAN,
            ctx_compute=ctx,
            inputs=numbers,
            outputs=result,
        )
        capi.ggml_opt_alloc(optimizer, False)
        capi.ggml_opt_eval(optimizer, None)
    else:
        capi.ggml_backend_alloc_ctx_tensors(ctx, backend)
        if how == "plan":
            plan = capi.ggml_backend_graph_plan_create(backend, graph)
            capi.ggml_backend_graph_plan_compute(backend, plan)
        elif how == "context":
            work = capi.ggml_init(mem_size=1 << 20)
            capi.ggml_graph_compute_with_ctx(work, graph, threads)
        else:
            capi.ggml_backend_graph_compute(backend, graph)
"""
WAYS = {
    "backend": "ggml_backend_graph_compute",
    "plan": "ggml_backend_graph_plan_compute",
    "context": "ggml_graph_compute_with_ctx",
    "scheduler": "ggml_backend_sched_graph_compute",
    "training": "ggml_opt_eval",
}
if has("ggml_backend_meta_device"):
    WAYS["meta device"] = "ggml_backend_graph_compute"


def child(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", KERNEL + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )


@pytest.mark.parametrize(("how", "function"), WAYS.items(), ids=WAYS)
def test_an_abort_in_a_kernel_of_several_threads_ends_the_process(how: str, function: str) -> None:
    result = child(f"compute(4, {how!r})\nprint('still here')")
    assert result.returncode == -signal.SIGABRT, result.stderr
    assert result.stdout == ""
    assert re.search(r"^\S+:\d+: GGML_ASSERT\(.*\) failed$", result.stderr, re.M)
    assert "Fatal Python error: Aborted" in result.stderr
    assert "in compute" in result.stderr


def test_an_abort_in_a_kernel_of_one_thread_raises() -> None:
    result = child(f"""
        from ggml_cffi.errors import AbortError
        for how in {list(WAYS)}:
            for _ in range(3):
                try:
                    compute(1, how)
                except AbortError as error:
                    print(error.function, error.line > 0)
    """)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "".join(f"{function} True\n" * 3 for function in WAYS.values())
