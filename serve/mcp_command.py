"""`loopwm mcp`: imagined worlds as tools of the Model Context Protocol, for agents that call tools."""

from __future__ import annotations

import argparse

from loopwm.records.command import doc_parser, exit_status
from loopwm.worlds.protocol import WorldError
from serve.local_service import add_arguments, connected
from serve.start import port


def build_parser() -> argparse.ArgumentParser:
    parser = doc_parser("loopwm mcp", __doc__, "example: loopwm mcp --url http://127.0.0.1:8000")
    add_arguments(parser)
    parser.add_argument(
        "--http", metavar="PORT", type=port, help="serve streamable HTTP on this port of loopback, at /mcp, not stdio"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    args = build_parser().parse_args(arguments)
    return exit_status(lambda: _serve(args), WorldError)


def _serve(args: argparse.Namespace) -> None:
    from serve.mcp import build_server  # brings the package mcp: seconds

    with connected(args) as client:
        server = build_server(client)
        if args.http is None:
            server.run("stdio")
        else:
            server.run("streamable-http", host="127.0.0.1", port=args.http)
