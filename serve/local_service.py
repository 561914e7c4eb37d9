"""Service for a terminal command: a running one, or one that the command starts for a checkpoint."""

from __future__ import annotations

import argparse
import contextlib
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
    command = [sys.executable, "-m", "serve", "--model", str(args.model), "--port", "0", "--access-log", "off"]
    # A session of its own, so that Ctrl-C reaches only the command.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        # End by way of `finally`: a signal's own action would leave the service running.
        ends = (signal.SIGTERM, signal.SIGHUP)
        handlers = {end: signal.signal(end, lambda number, _: sys.exit(128 + number)) for end in ends}
        try:
            assert server.stdout is not None
            words = server.stdout.readline().split()
            if not words:
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
