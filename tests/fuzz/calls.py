"""Calls of any function of capi: what its stub says decides which arguments it gets."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from programs import INTEGERS, NUMBERS, REFUSALS, TYPES

import ggml_cffi
from ggml_cffi import capi, enums
from ggml_cffi.meta import MetaDevice, SplitState

#: Functions that are left out, and why.
LEFT_OUT = {
    "free": "a handle that has been freed may not be used again",
    "ggml_reset": "it frees the tensors of a context",
    "ggml_backend_buffer_reset": "it may free what tensors need",
    "ggml_backend_multi_buffer_alloc_buffer": "it takes over buffers that others still use",
    "ggml_backend_register": "it has no way back",
    "ggml_backend_device_register": "it has no way back",
    "ggml_backend_unload": "a handle that has been freed may not be used again",
    "ggml_backend_load": "it runs code of the file it is given",
    "ggml_backend_load_all": "it runs code of the files it finds",
    "ggml_backend_load_all_from_path": "it runs code of the files it finds",
    "ggml_numa_init": "it is for the whole process",
    "ggml_set_abort_callback": "it is for the whole process",
    "ggml_log_set": "it is for the whole process",
    "ggml_fopen": "it gives a FILE *",
    "ggml_threadpool_new": "its threads are real ones",
    "ggml_opt_fit": "it trains",
}
SMALL = (1, 0, 2, 3, 4, 8, 16, 32, 5, 64, 100)
STRINGS = (
    "a",
    "",
    "general.alignment",
    "b" * 100,
    "\udc80",
    "x\0y",
    "ä",
    "t1",
    "CPU",
    "\ud800",
    b"\xff",
)

Parameter = tuple[str, str, bool]  # name, annotation, whether it may be left out


def signatures() -> dict[str, tuple[list[Parameter], str]]:
    """Each function's parameters and result, as the stubs have them."""
    stub = Path(ggml_cffi.__file__).parent / "_gen" / "capi.pyi"
    found = {}
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.args.vararg is None:
            optional = len(node.args.args) - len(node.args.defaults)
            parameters = [
                (a.arg, ast.unparse(a.annotation) if a.annotation else "object", i >= optional)
                for i, a in enumerate(node.args.args)
            ]
            found[node.name] = (parameters, ast.unparse(node.returns) if node.returns else "None")
    for name, function in vars(capi).items():  # those that are written by hand
        if (
            name.startswith(("ggml_", "gguf_"))
            and name not in found
            and inspect.isfunction(function)
        ):
            signature = inspect.signature(function)
            given = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
            found[name] = (
                [(p.name, str(p.annotation), p.default is not p.empty) for p in given],
                str(signature.return_annotation),
            )
    return found


def allowed(name: str, parameters: Iterable[Parameter]) -> bool:
    if name in LEFT_OUT or "free" in name.split("_") or not hasattr(capi, name):
        return False
    kinds = [kind for _, kind, optional in parameters if not optional]
    # an address is whatever it is; callbacks have their own tests
    return not any(
        word in kind for kind in kinds for word in ("VoidP", "File", "Callable", "FunctionP")
    )


SIGNATURES = {n: s for n, s in sorted(signatures().items()) if allowed(n, s[0])}
#: What builds tensors has a fuzz of its own: the others come more often.
NAMES = [
    name
    for name, (_, returns) in SIGNATURES.items()
    for _ in range(1 if returns == "types.ggml_tensor" else 3)
]


class World:
    """Things to call functions with, and the choices of an example."""

    def __init__(self, closing: contextlib.ExitStack) -> None:
        self.things: dict[str, list[Any]] = {}
        self.closing = closing
        self._bytes: Iterator[int] = iter(())
        ctx = self.own("ggml_context", capi.ggml_init(mem_size=1 << 20), capi.ggml_free)
        backend = self.own("ggml_backend", capi.ggml_backend_cpu_init(), capi.ggml_backend_free)
        capi.ggml_backend_cpu_set_n_threads(backend, 1)
        empty = self.own(
            "ggml_context", capi.ggml_init(mem_size=1 << 18, no_alloc=True), capi.ggml_free
        )
        for where in (ctx, empty):
            for type, ne in (
                (0, (4, 3)),
                (0, (8, 2, 2)),
                (1, (32, 4)),
                (8, (64, 2)),
                (26, (5,)),
                (0, (0, 4)),
                (0, (1,)),
            ):
                t = capi.ggml_new_tensor(where, type, list(ne))
                capi.ggml_set_name(t, f"t{len(self.things.get('ggml_tensor', ()))}")
                self.add("ggml_tensor", t)
                if where is ctx and capi.ggml_nbytes(t):
                    capi.ggml_set_zero(t)
        buffer = capi.ggml_backend_alloc_ctx_tensors(empty, backend)
        capi.ggml_backend_buffer_clear(buffer, 0)
        self.own("ggml_backend_buffer", buffer, capi.ggml_backend_buffer_free)
        a = self.things["ggml_tensor"][0]
        graph = self.add("ggml_cgraph", capi.ggml_new_graph_custom(ctx, 64, True))
        capi.ggml_build_forward_expand(graph, capi.ggml_add(ctx, a, a))
        self.add("ggml_cgraph", capi.ggml_new_graph_custom(ctx, 8, False))
        buft = self.add("ggml_backend_buffer_type", capi.ggml_backend_cpu_buffer_type())
        self.add("ggml_backend_device", capi.ggml_backend_get_device(backend))
        self.own("ggml_gallocr", capi.ggml_gallocr_new(buft), capi.ggml_gallocr_free)
        self.own(
            "ggml_backend_sched",
            capi.ggml_backend_sched_new([backend], None, 64, False, False),
            capi.ggml_backend_sched_free,
        )
        gguf = self.own("gguf_context", capi.gguf_init_empty(), capi.gguf_free)
        capi.gguf_set_val_u32(gguf, "general.alignment", 32)
        capi.gguf_set_val_str(gguf, "a", "text")
        capi.gguf_set_arr_str(gguf, "b", ["x", "y"])
        capi.gguf_add_tensor(gguf, a)
        self.file = self._written(gguf)
        self.own(
            "ggml_opt_dataset",
            capi.ggml_opt_dataset_init(0, 0, 4, 1, 8, 2),
            capi.ggml_opt_dataset_free,
        )
        self.own("ggml_opt_result", capi.ggml_opt_result_init(), capi.ggml_opt_result_free)

    def spread(self) -> None:
        """Tensors of a meta device beside the others, cut and mirrored."""
        meta = MetaDevice(["CPU", "CPU"], _cut)
        self.closing.callback(meta.close)
        device = self.add("ggml_backend_device", meta.handle)
        backend = capi.ggml_backend_dev_init(device, None)
        self.own("ggml_backend", backend, capi.ggml_backend_free)
        ctx = capi.ggml_init(mem_size=1 << 18, no_alloc=True)
        self.own("ggml_context", ctx, capi.ggml_free)
        for type, ne in ((0, (4, 2)), (0, (8, 4)), (8, (64, 2)), (26, (6,))):
            self.add("ggml_tensor", capi.ggml_new_tensor(ctx, type, list(ne)))
        buffer = capi.ggml_backend_alloc_ctx_tensors(ctx, backend)
        capi.ggml_backend_buffer_clear(buffer, 0)
        self.own("ggml_backend_buffer", buffer, capi.ggml_backend_buffer_free)
        self.add("ggml_backend_buffer_type", capi.ggml_backend_get_default_buffer_type(backend))

    @staticmethod
    def _written(gguf: Any) -> bytes:
        path = Path("valid.gguf")
        capi.gguf_write_to_file(gguf, path, False)
        return path.read_bytes()

    def add(self, kind: str, thing: Any) -> Any:
        self.things.setdefault(kind, []).append(thing)
        return thing

    def own(self, kind: str, thing: Any, free: Any) -> Any:
        self.closing.callback(free, thing)
        return self.add(kind, thing)

    # ---- arguments

    def choose(self, n: int) -> int:
        return next(self._bytes, 0) % n

    def one_of(self, options: Any) -> Any:
        return options[self.choose(len(options))]

    def integer(self) -> int:
        return self.one_of(INTEGERS) if self.choose(8) == 7 else self.one_of(SMALL)

    def number(self) -> float:
        return self.one_of(NUMBERS) if self.choose(8) == 7 else self.one_of((1.0, 0.5, 2.0, 1e-5))

    def argument(self, name: str, kind: str) -> Any:
        """One that fits, mostly."""
        if self.choose(32) == 31:
            return self.one_of(
                (None, -1, "", [], 1.5, object(), b"", 2**70, True, np.zeros(2), self)
            )
        if name == "n_threads":
            return self.one_of((1, 2, 0, -1, 2**31))  # many real ones take long
        options = [o.strip() for o in kind.split(" | ")]
        if "None" in options and self.choose(3) == 2:
            return None
        option = next((o for o in options if o not in ("None", "int")), options[0])
        return self._of(option)

    def _of(self, kind: str) -> Any:
        if kind == "int":
            return self.integer()
        if kind == "float":
            return self.number()
        if kind == "bool":
            return bool(self.choose(2))
        if kind == "types.String":
            return self.one_of(STRINGS)
        if kind == "types.ReadableBuffer":
            return self._data()
        if kind == "types.WritableBuffer":
            return self.one_of(
                (bytearray, lambda n: np.zeros(n, "u1"), lambda n: np.zeros(n, "f4"))
            )(self.one_of(SMALL))
        if kind.startswith("enums."):
            if self.choose(16) == 15:
                return self.integer()
            members = TYPES if kind == "enums.ggml_type" else list(getattr(enums, kind[6:]))
            return self.one_of(members)
        if kind.startswith("Sequence["):
            return [self._of(kind[9:-1]) for _ in range(self.choose(6))]
        if kind == "types.NumberArray" or kind.startswith("types.Array["):
            return np.zeros(self.one_of(SMALL), self.one_of(("f4", "i8", "u2", "i4", "u1")))
        things = self.things.get(kind.removeprefix("types."))
        if not things:
            raise LookupError(f"there is no {kind}")
        return things[-1 - self.choose(min(len(things), 32))]

    def _data(self) -> bytes:
        data = bytearray(self.file if self.choose(2) else b"")
        for _ in range(self.choose(4)):
            if data:
                data[self.choose(256) * len(data) // 256] = self.choose(256)
        return bytes(data[: len(data) * (self.choose(8) + 1) // 8]) or bytes(self.one_of(SMALL))

    def call(self, name: str, choices: bytes, counts: Counter[str]) -> None:
        self._bytes = iter(choices)
        parameters, returns = SIGNATURES[name]
        try:
            args = [self.argument(n, kind) for n, kind, optional in parameters if not optional]
        except LookupError:
            counts["nothing to call it with"] += 1
            return
        counts["tried"] += 1
        try:
            result = getattr(capi, name)(*args)
        except REFUSALS as error:
            counts["refused"] += 1
            if not str(error):
                raise AssertionError(f"{name}{tuple(args)!r} says nothing: {error!r}") from error
            return
        counts["accepted"] += 1
        counts[f"accepted: {name}"] += 1
        self._keep(name, result, returns)

    def _keep(self, name: str, result: Any, returns: str) -> None:
        kind = returns.replace(" | None", "").removeprefix("types.")
        if (
            result is None
            or "[" in kind
            or "." in kind
            or not isinstance(result, ggml_cffi.ffi.CData)
        ):
            return
        free = FREE.get(name)
        if free is not None:
            self.closing.callback(getattr(capi, free), result)
        if kind == "ggml_tensor" and capi.ggml_nbytes(result) > 1 << 16:
            return
        self.add(kind, result)


#: What a function makes that its caller has to free.
FREE = {
    "ggml_init": "ggml_free",
    "ggml_backend_cpu_init": "ggml_backend_free",
    "ggml_backend_dev_init": "ggml_backend_free",
    "ggml_backend_init_best": "ggml_backend_free",
    "ggml_backend_init_by_name": "ggml_backend_free",
    "ggml_backend_init_by_type": "ggml_backend_free",
    "ggml_backend_alloc_buffer": "ggml_backend_buffer_free",
    "ggml_backend_buft_alloc_buffer": "ggml_backend_buffer_free",
    "ggml_backend_alloc_ctx_tensors": "ggml_backend_buffer_free",
    "ggml_backend_alloc_ctx_tensors_from_buft": "ggml_backend_buffer_free",
    "ggml_gallocr_new": "ggml_gallocr_free",
    "ggml_gallocr_new_n": "ggml_gallocr_free",
    "ggml_backend_sched_new": "ggml_backend_sched_free",
    "gguf_init_empty": "gguf_free",
    "gguf_init_from_buffer": "gguf_free",
    "gguf_init_from_file": "gguf_free",
    "ggml_opt_dataset_init": "ggml_opt_dataset_free",
    "ggml_opt_result_init": "ggml_opt_result_free",
}


def _cut(info: Any, n_devs: int) -> SplitState:
    if info.ne[1] % 2 == 0 and info.type == 0:
        return SplitState.by_ratio(info, 1, [1] * n_devs)
    return SplitState.mirrored()


def run(example: dict[str, Any], counts: Counter[str]) -> None:
    with contextlib.ExitStack() as closing:
        folder = closing.enter_context(tempfile.TemporaryDirectory())
        before = os.getcwd()
        os.chdir(folder)
        closing.callback(os.chdir, before)
        world = World(closing)
        if example["spread"]:
            world.spread()
        for number, choices in example["calls"]:
            name = NAMES[number % len(NAMES)] if isinstance(number, int) else number
            if os.environ.get("GGML_CFFI_FUZZ_TRACE"):
                print(name, choices, flush=True)
            world.call(name, bytes.fromhex(choices), counts)
