"""`python -m serve`: an OpenAI-compatible HTTP service for one checkpoint. `play` and `mcp` are its clients."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import configargparse

from loopwm.records.command import DEVICES, Parser, exit_status, positive
from loopwm.records.files import PACKAGED
from serve.limits import Limits, WorldLimits

SHIPPED = "loopwm-small"
"""Name of the checkpoint that ships with the package."""

EXAMPLE = "example: python -m serve --model loopwm/pretrained --port 8000; in the terminal: python -m serve play --help"

KEYS_HELP = """require a key of this file: lines of a name, the SHA-256 of a key and its limits, such as requests=60
tokens=10000 (per minute) concurrent=8 worlds=100 bytes=1000000; reloaded on SIGHUP. To add one:
KEY=$(openssl rand -hex 24); echo "$KEY"; echo "NAME $(printf %%s "$KEY" | sha256sum | cut -d' ' -f1)" >> FILE"""

HOSTS_HELP = """host names to answer for, in addition to addresses, localhost and this machine's name; * for any"""

ORIGINS_HELP = "sites whose pages may use the service from a browser, such as https://app.example, or * for any"
DRAIN_HELP = "seconds after SIGTERM in which requests are still taken while /ready is 503"
PROXIES_HELP = "addresses or networks of proxies whose X-Forwarded-For names the client in the access log"
LOG_HELP = "lines of requests on standard error; json: those of errors, too"
DEPTH_HELP = "loops of every forward, or an exit rule, as convergence:eps=0.8,limit=4; default: the checkpoint's"

ENGINE_HELP = """vLLM server that generates in place of this process, http://HOST:PORT; it must serve the checkpoint
of --model; OPENAI_API_KEY holds its key"""

MEMORY_HELP = "train episodes, as of `loopwm import`, to recall outcomes of worlds' actions from"


class OptionsParser(configargparse.ArgumentParser, Parser):
    """Parser of options on the command line, in variables of the environment, or in a file, in this order."""


def build_parser() -> argparse.ArgumentParser:
    sources: dict[str, Any] = {
        "auto_env_var_prefix": "LOOPWM_",
        "config_file_parser_class": configargparse.YAMLConfigFileParser,
    }
    parser = OptionsParser(
        prog="python -m serve",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        **sources,
    )
    limits, worlds = Limits(), WorldLimits()
    parser.add_argument("--config", is_config_file=True, metavar="FILE", help="YAML file of these options")
    parser.add_argument("--model", type=Path, default=PACKAGED, help="checkpoint folder")
    parser.add_argument("--engine", metavar="URL", help=ENGINE_HELP)
    parser.add_argument("--memory", type=Path, nargs="+", default=[], metavar="EPISODES", help=MEMORY_HELP)
    parser.add_argument("--name", nargs="+", help=f"model names for clients; default: the folder's name, or {SHIPPED}")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=port, default=8000, help="0 for a free one")
    parser.add_argument("--uds", type=Path, metavar="FILE", help="Unix socket to listen on, in place of host and port")
    parser.add_argument("--root-path", type=_prefix, default="", metavar="PATH", help="where a proxy shows the service")
    parser.add_argument("--cors-origins", nargs="+", default=[], metavar="ORIGIN", help=ORIGINS_HELP)
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--max-queue", type=positive, default=limits.max_queue, help="most requests that wait")
    parser.add_argument("--max-batch", type=positive, default=limits.max_batch, help="most requests in a batch")
    parser.add_argument("--depth", metavar="LOOPS|RULE", help=DEPTH_HELP)
    parser.add_argument("--api-keys", type=Path, metavar="FILE", help=KEYS_HELP)
    parser.add_argument("--grace", type=_seconds, default=10.0, help="seconds to finish running requests")
    parser.add_argument("--drain-seconds", type=_seconds, default=0.0, help=DRAIN_HELP)
    parser.add_argument("--trusted-proxies", nargs="+", default=[], metavar="ADDRESS", help=PROXIES_HELP)
    parser.add_argument("--world-ttl", type=_seconds, default=worlds.ttl, help="seconds until an unused world expires")
    parser.add_argument("--worlds-file", type=Path, metavar="FILE", help="SQLite file that keeps worlds over restarts")
    parser.add_argument("--max-worlds", type=positive, default=worlds.max_worlds, help="most worlds per key")
    parser.add_argument("--cache-bytes", type=positive, default=limits.cache_bytes, help="memory budget of KV caches")
    parser.add_argument("--allowed-hosts", nargs="+", default=[], metavar="NAME", help=HOSTS_HELP)
    parser.add_argument("--access-log", choices=("off", "plain", "json"), default="plain", help=LOG_HELP)
    return parser


def port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port, 0 to 65535, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    if re.fullmatch(r"\d+\.?\d*", text):
        return float(text)
    raise argparse.ArgumentTypeError(f"must be seconds, at least 0, got {text!r}")


def _prefix(text: str) -> str:
    if text and not text.startswith("/"):
        raise argparse.ArgumentTypeError(f"must begin with /, got {text!r}")
    return text.rstrip("/")


def main(arguments: list[str] | None = None) -> int:
    args = build_parser().parse_args(arguments)
    from serve.run import run  # it brings torch, which takes seconds that help and wrong options do not need

    return exit_status(lambda: run(args))
