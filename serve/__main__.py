"""`python -m serve`; one error line if a package of the extra is missing."""

from __future__ import annotations

import sys

from loopwm.records.command import run_main

CLIENTS = {"play": ("serve.play", "serve"), "mcp": ("serve.mcp_command", "mcp")}
"""Modules and extras of the commands that are clients of a service."""


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["play"] and "--pixels" in arguments:
        return run_main("serve.pixels.play", "pixel", arguments[1:])
    if arguments[:1] and arguments[0] in CLIENTS:
        return run_main(*CLIENTS[arguments[0]], arguments[1:])
    return run_main("serve.start", "serve", arguments)


if __name__ == "__main__":
    sys.exit(main())
