"""The parent's side: a child process that runs examples and may die of one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TIMEOUT = 120  # seconds an example may take: a busy machine is no fault


class Runner:
    """Hands examples to a child, which is replaced when it dies; adds up what becomes of them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._child: subprocess.Popen[str] | None = None
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - until close()

    def run(self, example: dict[str, Any]) -> None:
        """Raise AssertionError, with the example, if it is a fault."""
        line = json.dumps(example)
        child = self._alive()
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(line + "\n")
            child.stdin.flush()
        answer = self._answer(child)
        if answer is None:
            raise AssertionError(
                f"the process {self._ended(child)}\n{self._said()}\nto see it again: "
                f"python {HERE / 'worker.py'} '{line}'"
            )
        self.counts["examples"] += 1
        self.counts.update(answer["counts"])
        if "fault" in answer:
            raise AssertionError(
                f"{answer['fault']}\nto see it again: python {HERE / 'worker.py'} '{line}'"
            )

    def _alive(self) -> subprocess.Popen[str]:
        if self._child is None:
            self._stderr.seek(0)
            self._stderr.truncate()
            self._child = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", str(HERE / "worker.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env={**os.environ, "GGML_NO_BACKTRACE": "1"},
            )
        return self._child

    def _answer(self, child: subprocess.Popen[str]) -> dict[str, Any] | None:
        assert child.stdout is not None
        if not select.select([child.stdout], [], [], TIMEOUT)[0]:
            return None
        line = child.stdout.readline()
        found: dict[str, Any] | None = json.loads(line) if line.endswith("\n") else None
        return found

    def _ended(self, child: subprocess.Popen[str]) -> str:
        self._child = None
        try:
            child.wait(1)
            how = f"has ended with {child.returncode}"
        except subprocess.TimeoutExpired:
            how = f"has not answered for {TIMEOUT} s"
        self._close(child)
        return how

    @staticmethod
    def _close(child: subprocess.Popen[str]) -> None:
        """Close a child's pipes, and wait for its end."""
        assert child.stdin is not None and child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        try:
            child.wait(1)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()

    def _said(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()[-4000:]

    def close(self) -> None:
        if self._child is not None:
            self._close(self._child)
        self._stderr.close()

    def report(self, title: str) -> str:
        """The counts, most frequent first."""
        lines = [f"{n:8} {name}" for name, n in self.counts.most_common()]
        return "\n".join([f"--- {title}", *lines])
