"""A progress bar by tqdm, which need not be there."""

from __future__ import annotations

import importlib
import sys
from types import TracebackType
from typing import Any

DELAY = 1.0
"""Seconds before a bar is shown: none for what is done by then."""


class Bar:
    """A bar of batches on stderr.

    `wanted` None: if that is a terminal and tqdm is installed. True needs tqdm (ImportError).
    """

    def __init__(self, total: int, wanted: bool | None) -> None:
        self._bar: Any = None
        # not left to tqdm, which begins a thread for a bar that it does not show as well
        if wanted is False or (wanted is None and not _is_terminal()):
            return
        try:
            module: Any = importlib.import_module("tqdm")
        except ImportError:
            if wanted:
                raise
            return
        self._bar = module.tqdm(total=total, unit="batch", delay=DELAY, dynamic_ncols=True)

    def describe(self, text: str) -> None:
        """What stands before the bar."""
        if self._bar is not None:
            self._bar.set_description(text, refresh=False)

    def update(self, n: int) -> bool:
        """So many more are done; whether that has been drawn."""
        return self._bar is not None and bool(self._bar.update(n))

    def show(self, numbers: dict[str, float]) -> None:
        """What stands behind the bar when it is next drawn."""
        if self._bar is not None:
            self._bar.set_postfix({k: f"{v:.4g}" for k, v in numbers.items()}, refresh=False)

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
