"""Service for a terminal command: a running one, or one that the command starts for a checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from loopwm.records.errors import InputError, naming
from loopwm.records.files import PACKAGED

if TYPE_CHECKING:
    from loopwm.worlds.http import Client

KEPT = ("LOOPWM_DEPTH", "LOOPWM_DEVICE", "LOOPWM_MEMORY")
"""Variables whose options the service of a command takes, too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="running service, such as http://127.0.0.1:8000")
    where.add_argument("--model", type=Path, default=PACKAGED, help="checkpoint folder")
    parser.add_argument("--api-key-file", type=Path, help="file with the service's API key")


@contextlib.contextmanager
def connected(args: argparse.Namespace) -> Iterator[Client]:
    """Return a client of the given service, or of one started for the checkpoint. Raises InputError."""
    from loopwm.worlds.http import Client  # brings httpx, a third of a second, which help does not need

    key = None if args.api_key_file is None else read_text("--api-key-file", args.api_key_file).strip()
    if args.url is not None:
        yield Client(args.url, key)
        return
    # Other variables are options of another service: its socket, its keys.
    own = {name: text for name, text in os.environ.items() if name in KEPT or not name.startswith("LOOPWM_")}
    command = [sys.executable, "-m", "serve", "--model", str(args.model), "--port", "0", "--access-log", "off"]
    # A session of its own, so that Ctrl-C reaches only the command.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=own) as server:

        def end(number: int, _: object) -> None:
            server.terminate()  # a signal's own action would leave it running
            server.wait()
            os._exit(128 + number)  # `sys.exit` would wait for a thread that reads standard input

        handlers = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            assert server.stdout is not None
            if not (words := server.stdout.readline().split()):
                raise InputError("the service did not start")
            yield Client(words[-1], key)
        finally:
            server.terminate()
            for number, handler in handlers.items():
                signal.signal(number, handler)


def read_text(option: str, path: Path) -> str:
    """Return the file's text. Raises InputError, which names the option."""
    with naming(f"{option}: ", (OSError, ValueError)):
        return path.read_text(encoding="utf-8")
