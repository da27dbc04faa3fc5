"""What the tests of numbers run on: GGML_CFFI_TEST_BACKEND names it, by default the CPU.

What is not here is a skip, or a failure in CI and where GGML_CFFI_EXPECT names it.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import pytest

CI = os.environ.get("GGML_CFFI_CI") == "1"
NAME = os.environ.get("GGML_CFFI_TEST_BACKEND") or "cpu"
EXPECTED = {name for name in os.environ.get("GGML_CFFI_EXPECT", "").split(",") if name}

#: How the outcome of a test is told apart that the backend has no fault in.
NOT_SUPPORTED = "not supported by the backend"
REFUSED = "refused by the meta device"


class Kind(NamedTuple):
    """A backend: the name of its device, or what a meta device is made of."""

    device: str = ""
    children: tuple[str, ...] = ()
    #: How many times larger an error may be than the CPU's.
    slack: float = 1.0

    @property
    def on_gpu(self) -> bool:
        """Whether numbers are read from a GPU: a meta device gives its first child's.

        GPUs compute what the CPU looks up in tables, and multiply matrices in half precision, or in
        TF32, which has as many significant bits.
        """
        return (*self.children, self.device)[0] in ("Vulkan", "CUDA")


#: CUDA is compiled with -use_fast_math: sines, powers and the like are off by several units in the
#: last place, and the tolerances for the CPU are of a few.
_FAST = 4.0
KINDS = {
    "cpu": Kind("CPU"),
    "native": Kind("CPU"),
    "openmp": Kind("CPU"),
    "llamafile": Kind("CPU"),
    "dl": Kind("CPU"),
    "blas": Kind("BLAS"),
    "rpc": Kind("worker"),
    "vulkan": Kind("Vulkan"),
    "cuda": Kind("CUDA", slack=_FAST),
    "meta2": Kind(children=("CPU",) * 2),
    "meta3": Kind(children=("CPU",) * 3),
    "meta-rpc": Kind(children=("worker",) * 2),
    "meta-mixed-rpc": Kind(children=("CPU", "worker")),
    "meta-mixed-vulkan": Kind(children=("CPU", "Vulkan")),
    "meta-cuda": Kind(children=("CUDA",) * 2, slack=_FAST),
    "meta-mixed-cuda": Kind(children=("CUDA", "CPU"), slack=_FAST),
}
if NAME not in KINDS:
    raise pytest.UsageError(f"GGML_CFFI_TEST_BACKEND is {NAME!r}; there are {', '.join(KINDS)}")
KIND = KINDS[NAME]
IS_META = bool(KIND.children)
#: Whether a meta device's children compute in this process's memory, and abort in it.
ON_HOST = IS_META is False or set(KIND.children) == {"CPU"}
#: The names of the devices that tests of meta devices spread tensors over.
CHILDREN = set(KIND.children) or {"CPU"}
ON_GPU = bool(CHILDREN & {"Vulkan", "CUDA"})
#: How many devices the tests of meta devices spread tensors over.
COUNTS = (len(KIND.children),) if IS_META else (2, 3)


def lacking(what: str, wanted: bool = True) -> NoReturn:
    """Leave the test for want of `what`: a failure where it is `wanted` and must be here."""
    text = f"there is no {what} here"
    if wanted and (CI or NAME in EXPECTED):
        pytest.fail(text)
    pytest.skip(text)


_workers: dict[int, Any] = {}


def workers(n: int) -> Any:
    """`n` workers on this machine, which end with the tests; others where a test has lost one."""
    from ggml_cffi import errors, rpc

    if n not in _workers:
        _workers[n] = rpc.LocalWorkers(n)
        atexit.register(lambda: _workers[n].close())
    try:
        for device in _workers[n]:
            assert device.memory.total
    except errors.RPCError:
        _workers[n].close()
        _workers[n] = rpc.LocalWorkers(n)
    return _workers[n]


def _device(name: str, number: int, of: int) -> Any:
    """A device of this kind: number `number` of the `of` that are wanted."""
    from ggml_cffi import devices, errors

    if name == "worker":
        try:
            return workers(of)[number]
        except errors.NotSupportedError:
            lacking("RPC in this ggml")
    # several of a kind may stand for one: the same GPU twice
    found = [d for d in devices() if d.name.lower().rstrip("0123456789") == name.lower()]
    if not found:
        lacking(f"device {name}")
    return found[number % len(found)]


def children(n: int) -> list[Any]:
    """The `n` devices that a meta device of the tests is made of."""
    names = KIND.children or ("CPU",) * n
    names = (names * n)[:n]
    return [_device(name, names[:i].count(name), names.count(name)) for i, name in enumerate(names)]


@contextmanager
def target() -> Iterator[Any]:
    """The device that the run is for; a meta device mirrors all tensors."""
    if not IS_META:
        yield _device(KIND.device, 0, 1)
        return
    from ggml_cffi import MetaDevice, SplitState

    def mirror(tensor: Any, n_devs: int) -> Any:
        return SplitState.mirrored()

    with MetaDevice(children(len(KIND.children)), mirror) as device:
        yield device


#: Mesa's software driver (22.3 with LLVM 15) is at the shaders that multiply these by up to eight
#: columns for longer than ten minutes; ggml says that it supports them.
_NEVER_COMPILED = ("iq4_xs", "mxfp4")


def _is_never_compiled(tensor: Any) -> bool:
    from ggml_cffi import capi

    return (
        capi.ggml_op_desc(tensor) == "MUL_MAT"
        and capi.ggml_type_name(tensor.src[0].type) in _NEVER_COMPILED
        and tensor.src[1].ne[1] <= 8
    )


def require_support(device: Any, nodes: Any) -> None:
    """Leave the test if the backend lacks the operation of one of these; the CPU has all."""
    from ggml_cffi import capi

    uses_vulkan = "Vulkan" in (KIND.device, *KIND.children)
    on_llvmpipe = uses_vulkan and "llvmpipe" in _device("Vulkan", 0, 1).description
    for node in nodes:
        handle = getattr(node, "handle", node)
        if not device.supports_op(handle):
            said = node if handle is not node else capi.ggml_op_desc(node)
            if KIND.device in ("CPU", "worker"):
                pytest.fail(f"{device.name} does not support {said}")
            pytest.skip(f"{NOT_SUPPORTED}: {said}")
        if on_llvmpipe and _is_never_compiled(handle):
            pytest.skip(f"{NOT_SUPPORTED}: {node}, which the driver does not compile")


#: Operations that ggml aborts over, though all of their operands are mirrored.
WITHOUT_RULE = {"arange", "col2im_1d", "flash_attn_ext", "lightning_indexer"}
#: What this package does not let a meta device do.
_OURS = ("is static on a meta device", "is a part of a meta device's tensor")


@contextmanager
def refusing(op: str) -> Iterator[None]:
    """Leave the test where a meta device refuses `op`, as is known of it; else it must not."""
    from ggml_cffi import errors

    if not IS_META:
        yield
        return
    try:
        yield
    except ValueError as error:
        if any(words in str(error) for words in _OURS):
            pytest.skip(f"{REFUSED}: {error}")
        raise
    except errors.SplitError as error:
        if op in WITHOUT_RULE or "writes into a tensor of a meta device" in str(error):
            pytest.skip(f"{REFUSED}: {error}")
        raise
    if op in WITHOUT_RULE:
        pytest.fail(f"ggml does not abort over {op} any more")
