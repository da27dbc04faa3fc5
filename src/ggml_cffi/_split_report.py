"""The split command: which tensor of a model goes where, and whether it fits."""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from . import capi, rpc
from ._demo import UsageError
from .device import Device, device
from .dtypes import type_name
from .errors import GGUFError, NotSupportedError
from .gguf import GGUFFile, GGUFTensor
from .meta import SplitState, TensorInfo, policies
from .meta._split import MAX_DEVICES
from .meta.policies import Policy

#: Kinds of tensors, by the names of llama.cpp; the first that is found in a name.
KINDS = {
    "embeddings": r"^(token_embd|position_embd|token_types)\.",
    "norms": r"norm",
    "attention": r"\.attn_",
    "experts": r"_exps\.",
    "feed-forward": r"\.ffn_",
    "output": r"^output\.",
}
OTHER = "other"
POLICIES = ("auto", "mirror", "axis0", "axis1")


@dataclass(frozen=True)
class Placed:
    """A tensor of the file, and what of it each device gets."""

    name: str
    kind: str
    type: str
    shape: tuple[int, ...]
    split: str
    axis: int | None
    """The axis of ggml's that it is cut along, None where it is not cut."""
    shares: tuple[int, ...]
    """How many elements each device gets along it."""
    why: str
    nbytes: tuple[int, ...]

    @property
    def is_mirrored(self) -> bool:
        return self.split == "mirrored"


@dataclass(frozen=True)
class Room:
    """A device: the bytes of its part of the file, and those that are free (0: it does not say)."""

    name: str
    nbytes: int
    free: int
    kinds: dict[str, int]

    @property
    def fits(self) -> bool:
        return not self.free or self.nbytes <= self.free


@dataclass(frozen=True)
class Report:
    """Where the tensors of a file go."""

    file: str
    policy: str
    tensors: tuple[Placed, ...]
    devices: tuple[Room, ...]

    @property
    def fits(self) -> bool:
        return all(one.fits for one in self.devices)


def parse_names(text: str) -> tuple[str, ...]:
    """Names of devices, for argparse, from a text such as "CPU,10.0.0.2:50052"."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or not 1 <= len(names) <= MAX_DEVICES:
        count = f"1 to {MAX_DEVICES} names"
        raise ArgumentTypeError(f"{text!r}, expected {count} with commas between them")
    return names


def run(
    path: Path,
    names: Sequence[str],
    ratios: Sequence[float] | None,
    policy: str,
    as_json: bool,
    svg: Path | None,
) -> int:
    """Print the report; the exit status is 1 if the model does not fit on the devices."""
    with ExitStack() as connections:
        try:
            found = _devices(names, connections)
        except (LookupError, ValueError, NotSupportedError) as error:
            raise UsageError(str(error)) from None
        if ratios is not None and len(ratios) != len(found):
            raise UsageError(f"{len(ratios)} ratios for {len(found)} devices")
        try:
            with GGUFFile(path) as file:
                report = make(file, found, ratios or [1.0] * len(found), policy)
        except (OSError, GGUFError, ValueError) as error:
            raise UsageError(str(error)) from None
    if svg is not None:
        from ._split_svg import draw

        try:
            svg.write_text(draw(report), encoding="utf-8")
        except OSError as error:
            raise UsageError(str(error)) from None
    print(json.dumps(_plain(report), indent=1) if as_json else told(report))
    return 0 if report.fits else 1


def _devices(names: Sequence[str], connections: ExitStack) -> list[Device]:
    """The devices of these names; "host:port" stands for all those of a worker."""
    found: list[Device] = []
    workers: dict[str, rpc.Connection] = {}
    for name in names:
        if ":" not in name:
            found.append(device(name))
            continue
        if name not in workers:
            workers[name] = connections.enter_context(rpc.connect(name))
        found += workers[name]
    if len(found) > MAX_DEVICES:
        raise ValueError(f"there are {len(found)} devices, expected at most {MAX_DEVICES}")
    return found


def make(file: GGUFFile, devices: Sequence[Device], ratios: Sequence[float], policy: str) -> Report:
    """Where a policy puts the tensors of a file.

    Raises ValueError where the policy does not fit the file.
    """
    chosen = _policy(policy, file, ratios)
    n = len(devices)
    tensors = tuple(_placed(tensor, chosen, n) for tensor in file.tensors.values())
    rooms = []
    for j, one in enumerate(devices):
        kinds = {
            kind: sum(t.nbytes[j] for t in tensors if t.kind == kind) for kind in (*KINDS, OTHER)
        }
        # devices named twice share their memory
        twin = [k for k, other in enumerate(devices) if other == one]
        free = one.memory.free // len(twin) if one.memory.free else 0
        rooms.append(Room(one.name, sum(kinds.values()), free, kinds))
    return Report(file.name, policy, tensors, tuple(rooms))


def _policy(name: str, file: GGUFFile, ratios: Sequence[float]) -> Policy:
    if name == "mirror":
        return policies.mirror()
    if name == "auto":
        return policies.gguf(file, ratios)
    return policies.by_ratio(int(name.removeprefix("axis")), ratios)


def _placed(tensor: GGUFTensor, policy: Policy, n_devs: int) -> Placed:
    block = capi.ggml_blck_size(tensor.type)
    n0, n1, n2, n3 = (*tensor.ne, 1, 1, 1, 1)[:4]
    info = TensorInfo(tensor.name, tensor.type, (n0, n1, n2, n3), 0, 0, block, tensor.nbytes)
    state = policy(info, n_devs)
    kind = next((k for k, sign in KINDS.items() if re.search(sign, tensor.name)), OTHER)
    return Placed(
        tensor.name,
        kind,
        type_name(tensor.type),
        tuple(tensor.shape),
        str(state),
        int(state.axis) if state.is_split else None,
        state.shares,
        policy.why(info, n_devs),
        _bytes(info, state, n_devs),
    )


def _bytes(info: TensorInfo, state: SplitState, n_devs: int) -> tuple[int, ...]:
    if not state.is_split:
        return (info.nbytes,) * n_devs
    length = info.ne[state.axis]
    return tuple(info.nbytes * share // length for share in state.shares)


def _plain(report: Report) -> dict[str, object]:
    rooms = [{**asdict(one), "fits": one.fits} for one in report.devices]
    return {**asdict(report), "devices": rooms, "fits": report.fits}


def told(report: Report) -> str:
    """The report for people: a line for each tensor, then the devices."""
    lines = []
    width = max((len(one.name) for one in report.tensors), default=0)
    for one in report.tensors:
        shape = "(" + ", ".join(map(str, one.shape)) + ")"
        why = f"  {one.why}" if one.is_mirrored and one.why else ""
        lines.append(f"{one.name:<{width}}  {one.type:<6} {shape:<16} {one.split}{why}")
    lines.append("")
    mirrored = sum(one.nbytes[0] for one in report.tensors if one.is_mirrored)
    for j, room in enumerate(report.devices):
        free = f"{size(room.free)} free" if room.free else "free memory unknown"
        words = "fits" if room.fits else "does not fit"
        kinds = ", ".join(f"{kind} {size(n)}" for kind, n in room.kinds.items() if n)
        lines.append(f"device {j}, {room.name}: {size(room.nbytes)} of {free}: {words} ({kinds})")
    lines.append(f"on every device: {size(mirrored)}; beside the weights a graph needs memory")
    return "\n".join(lines)


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB")


def size(n: int) -> str:
    """A number of bytes for people."""
    power = min(max(n.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    whole, rest = divmod(n, 1 << 10 * power)
    # no exponent where the unit is the last
    number = str(whole) if whole > 1023 else f"{whole + rest / (1 << 10 * power):.4g}"
    return f"{number} {_UNITS[power]}"
