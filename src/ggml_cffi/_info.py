"""The info command: versions, the libraries that serve, devices, and missing backends."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from . import capi
from ._handles import Handle
from ._loader import ffi, lib, library_files, module_files
from ._runtime import invoke
from .device import Device, devices, listed

# The backends that this package is made for: the name in ggml's registry, that of the library, and
# the variable that keeps a backend which was built in from being registered.
EXPECTED = {
    "CPU": ("ggml-cpu", None),
    "BLAS": ("ggml-blas", None),
    "RPC": ("ggml-rpc", None),
    "Vulkan": ("ggml-vulkan", "GGML_DISABLE_VULKAN"),
    "CUDA": ("ggml-cuda", None),
}


class DeviceInfo(TypedDict):
    """What there is to say about a device; memory in bytes."""

    name: str
    description: str
    type: str
    backend: str
    memory_free: int
    memory_total: int
    features: dict[str, str]


class Info(TypedDict):
    """What `info --json` prints."""

    python: dict[str, str]
    package: dict[str, str]
    ggml: dict[str, str]
    libraries: dict[str, str]
    devices: list[DeviceInfo]
    missing_backends: dict[str, str]


def package_version() -> str:
    """The version of the installed package."""
    try:
        return importlib.metadata.version("ggml-cffi")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


def build_info() -> Any:
    """What the build says of itself."""
    return importlib.import_module(f"{__package__}._gen.build_info")


def collect() -> Info:
    """Gather all that the command tells."""
    build = build_info()
    return {
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "platform": platform.platform(),
        },
        "package": {"version": package_version(), "folder": str(Path(__file__).parent)},
        "ggml": {
            "version": build.GGML_VERSION,  # the loader has compared both with what serves
            "commit": build.GGML_COMMIT,
            "built_against": build.PREFIX_ORIGIN,
        },
        "libraries": _libraries(build),
        "devices": [_device(device) for device in devices()],
        "missing_backends": missing_backends(
            build.LIBRARIES, module_files(build), _registered(), os.environ
        ),
    }


def _libraries(build: Any) -> dict[str, str]:
    """The files that serve: the linked libraries, and the modules that were loaded."""
    found = {name: _serving_file(name, path) for name, path in library_files(build).items()}
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    for path in module_files(build):
        file = os.path.realpath(path)
        if file not in found.values() and f" {file}\n" in maps:
            found[path.stem.removeprefix("lib")] = file
    return found


def _serving_file(library: str, expected: Path) -> str:
    path = lib.ggml_cffi_library_of(library.encode())  # NULL: a backend's, which we never call into
    return os.path.realpath(os.fsdecode(ffi.string(path)) if path else expected)


def _device(device: Device) -> DeviceInfo:
    registry = capi.ggml_backend_dev_backend_reg(device.handle)
    free, total = device.memory
    return {
        "name": device.name,
        "description": device.description,
        "type": device.type.name.removeprefix("GGML_BACKEND_DEVICE_TYPE_"),
        "backend": capi.ggml_backend_reg_name(registry) if registry else "",
        "memory_free": free,
        "memory_total": total,
        "features": features(registry) if registry else {},
    }


def features(registry: Handle) -> dict[str, str]:
    """What a backend says that it was built with, or that it finds in this machine."""
    address = capi.ggml_backend_reg_get_proc_address(registry, "ggml_backend_get_features")
    if not address:
        return {}
    feature = invoke("ggml_backend_get_features_t", address, registry)
    found = {}
    while feature and feature.name:  # the end is marked by one without a name
        found[_text(feature.name)] = _text(feature.value) if feature.value else ""
        feature += 1
    return found


def _text(value: Handle) -> str:
    text: bytes = ffi.string(value)
    return text.decode("utf-8", "replace")


def _registered() -> dict[str, int]:
    """The backends in ggml's registry, with their numbers of devices."""
    registries = listed("reg")
    return {
        capi.ggml_backend_reg_name(registry): capi.ggml_backend_reg_dev_count(registry)
        for registry in registries
    }


def missing_backends(
    libraries: list[str],
    modules: list[Path],
    registered: Mapping[str, int],
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Why an expected backend has no device: backend → reason.

    `libraries` are those that the extension is linked to, `modules` the loadable backends,
    `registered` gives the number of devices of each backend in the registry.
    """
    reasons = {}
    for name, (library, switch) in EXPECTED.items():
        if registered.get(name):
            continue
        own = [path for path in modules if path.name.startswith(f"lib{library}")]
        loadable = own if library not in libraries else []
        if name in registered and name == "RPC":
            reason = "ready, but no server was added"
        elif name in registered:
            reason = "this ggml has it, but it found no device (is there one, with its driver?)"
        elif library in libraries and switch is not None and switch in environ:
            reason = f"this ggml has it, but {switch} is set"
        elif library in libraries:
            reason = f"lib{library} is there, but did not register itself (is its driver?)"
        elif loadable:
            reason = f"a loadable module that was not loaded or does not suit: {loadable[0]}"
        else:
            reason = f"this ggml was built without it (no lib{library})"
        reasons[name] = reason
    return reasons


def run(*, as_json: bool) -> int:
    """Print it; returns the exit status."""
    info = collect()
    text = json.dumps(info, indent=2) if as_json else "\n".join(_lines(info))
    # a folder's name may be no UTF-8, and the terminal of any encoding
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))
    return 0


def _lines(info: Info) -> list[str]:
    python, package, ggml = info["python"], info["package"], info["ggml"]
    lines = [
        f"Python      {python['version']} ({python['implementation']}, {python['platform']})",
        f"ggml-cffi   {package['version']} in {package['folder']}",
        f"ggml        {ggml['version']} (commit {ggml['commit']}), from {ggml['built_against']}",
        "libraries",
    ]
    width = max(10, *(len(name) + 1 for name in info["libraries"]))
    lines += [f"  {name:<{width}}{path}" for name, path in info["libraries"].items()]
    lines.append("devices" if info["devices"] else "devices     none")
    for device in info["devices"]:
        free, total = device["memory_free"] / 2**30, device["memory_total"] / 2**30
        lines.append(f"  {device['name']:<10}{device['type']}, {device['description']}")
        memory = f"memory {free:.1f} of {total:.1f} GiB free, " if total else ""
        lines.append(f"{'':12}{memory}by backend {device['backend'] or 'of no name'}")
        if device["features"]:
            pairs = device["features"].items()
            lines.append(f"{'':12}" + " ".join(k if v == "1" else f"{k}={v}" for k, v in pairs))
    if info["missing_backends"]:
        lines.append("not there")
    lines += [f"  {name:<10}{reason}" for name, reason in info["missing_backends"].items()]
    return lines
