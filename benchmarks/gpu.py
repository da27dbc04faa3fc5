"""A meta device over one GPU against the GPU itself: a feed-forward stack, whole and cut in two."""

from __future__ import annotations

import contextlib
import sys

import numpy as np

from ggml_cffi import Device, MetaDevice, capi, devices

from . import common
from .common import Ratio
from .stack import Stack, split

SHAPE = {"width": 4096, "hidden": 16384, "n_layers": 4}
TOKENS = (1, 512)
#: What is compared: the times that it takes to those of the plain device.
PAIRS = {
    "meta of one / plain": ("meta of one", "plain"),
    "meta of the same twice / plain": ("meta of two", "plain"),
    "meta of the same twice / meta of one": ("meta of two", "meta of one"),
}


def measure(
    where: Device,
    n_tokens: int,
    n_rounds: int,
    passes: int = 5,
    shape: dict[str, int] = SHAPE,
    tolerance: float = 1e-3,
) -> dict[str, Ratio]:
    """The ratios on a device; the results must agree, `tolerance` of a number of about 1."""
    with contextlib.ExitStack() as held:
        targets: dict[str, Device] = {"plain": where}
        for name, children in (("meta of one", [where]), ("meta of two", [where, where])):
            targets[name] = held.enter_context(MetaDevice(children, split))
        want = None
        subjects = {}
        for name, target in targets.items():
            stack = Stack(target, **shape, n_tokens=n_tokens, dtype="f16")
            held.callback(stack.close)
            found = stack.run()
            want = found if want is None else want
            np.testing.assert_allclose(found, want, tolerance, tolerance, err_msg=name)
            subjects[name] = common.wall(stack.run)
        rounds = common.measure(subjects, n_rounds, passes)
    return {name: rounds.ratio(*pair) for name, pair in PAIRS.items()}


def main(arguments: list[str] | None = None) -> int:
    """Measure on the first GPU, and print."""
    options = common.parser(__doc__, 9).parse_args(arguments)
    found = [one for one in devices() if one.type == capi.GGML_BACKEND_DEVICE_TYPE_GPU]
    if not found:
        print("there is no GPU here: nothing is measured", file=sys.stderr)
        return 0
    for n_tokens in TOKENS:
        ratios = measure(found[0], n_tokens, options.rounds, tolerance=3e-2)
        title = (
            f"{found[0].description}: {SHAPE['n_layers']} layers of {SHAPE['width']} x "
            f"{SHAPE['hidden']}, float16, {n_tokens} token{'s' * (n_tokens > 1)}; times"
        )
        common.report(title, ratios, [], options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
