"""The command line: `python -m ggml_cffi demo`, `info`, `rpc-server` and `split`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ._demo import UsageError, parse_devices, parse_number, parse_ratios
from ._info import build_info, package_version
from .errors import GGMLError

PROGRAM = f"python -m {__package__}"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is for --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 2 for what cannot be done as asked, 1 if it failed.

    `--help`, `--version` and arguments that cannot be read raise SystemExit, as argparse does.
    """
    parser, commands = _parsers()
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands.get(given.command, parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if given.command is None:
        parser.print_help()
        return 0
    try:
        return _COMMANDS[given.command](given)
    except UsageError as error:
        commands[given.command].error(str(error))
    except (GGMLError, MemoryError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        commands[given.command].exit(1, f"{PROGRAM} {given.command}: {reason}\n")


def _as_command() -> int:
    """`main`, whose output may be cut off (by ``| head``): then it ends without a word, with 1."""
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # what is left in the buffer, which Python writes at its end, goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _demo(given: argparse.Namespace) -> int:
    from . import _demo

    return _demo.run(given.model, given.layer, given.devices, given.ratios)


def _info(given: argparse.Namespace) -> int:
    from . import _info

    return _info.run(as_json=given.json)


def _rpc_server(given: argparse.Namespace) -> int:
    from . import _rpc_server

    return _rpc_server.run(
        given.host, given.port, given.device, given.threads, given.cache_dir,
        allow_remote=given.allow_remote, until_eof=given.until_eof,
    )  # fmt: skip


def _split(given: argparse.Namespace) -> int:
    from . import _split_report

    return _split_report.run(
        given.file, given.devices, given.ratios, given.policy, given.json, given.svg
    )


_COMMANDS = {"demo": _demo, "info": _info, "rpc-server": _rpc_server, "split": _split}


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(prog=PROGRAM, description="ggml for Python.")
    version = f"ggml-cffi {package_version()} (ggml {build_info().GGML_VERSION})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    what = "split a transformer's feed-forward block over several CPU devices, and check the result"
    demo = commands.add_parser("demo", help=what, description=f"{what.capitalize()}.")
    what = "print versions, libraries and devices"
    info = commands.add_parser("info", help=what, description=f"{what.capitalize()}.")

    demo.add_argument(
        "--model",
        type=Path,
        metavar="FILE.gguf",
        help="take the weights of a layer of this file, instead of made-up ones (needs gguf)",
    )
    demo.add_argument("--layer", type=parse_number, metavar="N", help="the layer (default: 0)")
    demo.add_argument(
        "--devices", type=parse_devices, metavar="N", help="1 to 16 CPU devices (default: 2)"
    )
    demo.add_argument(
        "--ratios", type=parse_ratios, metavar="A,B,...", help="their shares (default: equal)"
    )
    info.add_argument("--json", action="store_true", help="as JSON")
    made = {"demo": demo, "info": info}
    made |= {"rpc-server": _add_rpc_server(commands), "split": _add_split(commands)}
    return parser, made


def _add_rpc_server(commands: Any) -> _Parser:
    what = "serve devices of this machine to another process, by ggml's RPC"
    text = f"{what.capitalize()}. Prints its address once it listens; ends on SIGTERM and Ctrl-C."
    server: _Parser = commands.add_parser("rpc-server", help=what, description=text)
    server.add_argument("--host", default="127.0.0.1", help="an IPv4 address (default: 127.0.0.1)")
    server.add_argument("--port", type=parse_number, default=0, help="default: a free one")
    server.add_argument(
        "--device", action="append", metavar="NAME", help="may be repeated (default: CPU)"
    )
    server.add_argument("--threads", type=parse_number, metavar="N", help="default: all cores")
    server.add_argument("--cache-dir", type=Path, metavar="DIR", help="keep large tensors here")
    server.add_argument(
        "--allow-remote",
        action="store_true",
        help="serve on an address that is not loopback; ggml's RPC has no authentication",
    )
    server.add_argument(
        "--until-eof", action="store_true", help="end when standard input does, too"
    )
    return server


def _add_split(commands: Any) -> _Parser:
    from ._split_report import POLICIES, parse_names

    what = "show which tensor of a GGUF file would go to which device, and whether it fits"
    text = f"{what.capitalize()}. The exit status is 1 if it does not."
    split: _Parser = commands.add_parser("split", help=what, description=text)
    split.add_argument("file", type=Path, metavar="FILE.gguf")
    split.add_argument(
        "--devices",
        type=parse_names,
        required=True,
        metavar="NAME,...",
        help="1 to 16 devices, as `info` lists them, or host:port for those of a worker; "
        "one may be named several times",
    )
    split.add_argument(
        "--ratios", type=parse_ratios, metavar="A,B,...", help="their shares (default: equal)"
    )
    split.add_argument(
        "--policy",
        choices=POLICIES,
        default="auto",
        help="auto: by the names and metadata of llama.cpp (default)",
    )
    split.add_argument("--json", action="store_true", help="as JSON")
    split.add_argument("--svg", type=Path, metavar="OUT", help="draw the devices' memory")
    return split


if __name__ == "__main__":
    sys.exit(_as_command())
