"""Run the service of a checkpoint until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import closing
from ipaddress import ip_address
from pathlib import Path

import httpx
import torch
from transformers.utils import logging as transformers_logging

from loopwm.core import name_of, parse_rule
from loopwm.core.exit_rules import ExitRule, Fixed
from loopwm.records.errors import InputError
from loopwm.records.template import END, Context, render_prompt
from loopwm.runtime import keep_for_reuse, settle, use_device
from loopwm.text.memory import Memory
from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.text.world import WorldModel
from loopwm.worlds.http import KEY_VARIABLE
from serve.engine.engine import Engine, EngineStoppedError
from serve.engine.remote import RemoteEngine, RemoteEngineError
from serve.generation.prompts import PromptReader
from serve.generation.rate_limits import RateLimiter
from serve.generation.service import ModelCard, Service
from serve.http.app import create_app
from serve.http.auth import KeyRing, read_keys
from serve.http.logs import set_up
from serve.http.server import Server
from serve.limits import Limits, WorldLimits
from serve.start import SHIPPED
from serve.worlds.sessions import Sessions
from serve.worlds.sqlite import WorldFile
from serve.worlds.steps import PrefixModel
from serve.worlds.store import WorldStore

log = logging.getLogger(__name__)

SWITCH_INTERVAL = 0.0005
"""Interpreter switch interval in seconds, a tenth of Python's default."""

SAMPLE = Context("Your task is to boil water.", "This room is called the kitchen. You see: \n\ta stove\n\t2 pots")
"""Text by which the checkpoint of another server is known."""

BACKLOG = 256
"""Most connections that wait to be accepted."""

FIRST_DESCRIPTOR = 3
"""Of the sockets that a supervisor passes (sd_listen_fds(3))."""


def run(args: argparse.Namespace) -> None:
    """Serve as the options of `serve.start` say. Raises InputError."""
    keys = None if args.api_keys is None else read_keys(args.api_keys)
    with inherited_socket() or (listen_unix(args.uds) if args.uds else listen(args.host, args.port)) as listener:
        serve(args, listener, keys)


def serve(args: argparse.Namespace, listener: socket.socket, keys: KeyRing | None) -> None:
    """Load the checkpoint and serve on the socket until SIGINT or SIGTERM. Raises InputError."""
    rate_limiter = RateLimiter(None if keys is None else keys.quotas)
    if keys is not None:  # before the checkpoint is loaded, since SIGHUP ends a process that does not handle it
        signal.signal(signal.SIGHUP, lambda *_: _reload_keys(args.api_keys, keys, rate_limiter))
    threads = _prepare_process()
    world_model, depth = load_model(args)
    model, tokenizer, config = world_model.model, world_model.tokenizer, world_model.model.config
    first, folder = min(args.model.glob("*.safetensors")), args.model.resolve().name
    names = args.name or [SHIPPED if folder == "pretrained" else folder]
    limits = Limits(args.max_batch, args.max_queue, cache_bytes=args.cache_bytes)
    world_model, chosen = make_engine(args.engine, world_model, depth, limits, threads)
    card = ModelCard(names, int(first.stat().st_mtime), chosen.max_length, depth)
    memory = Memory.load(args.memory) if args.memory else None
    file = None if args.worlds_file is None else WorldFile(args.worlds_file)
    world_limits = WorldLimits(args.world_ttl, args.max_worlds)
    store = WorldStore(world_limits, file=file, rate_limiter=rate_limiter)
    with chosen as engine, closing(store) as worlds:
        service = Service(
            card,
            engine,
            tokenizer,
            PromptReader(
                tokenizer, config.slots, context_tokens=config.context_tokens, is_foreign=world_model.is_foreign
            ),
            rate_limiter,
        )
        sessions = Sessions(service, world_model, worlds, memory)
        app = create_app(sessions, keys, (*args.allowed_hosts, socket.gethostname()), args.cors_origins, args.root_path)
        server = Server(app, service, args.grace, args.drain_seconds, args.trusted_proxies)
        set_up(args.access_log)
        where = _address(listener, args.root_path, warn=keys is None)
        size = f"{model.num_parameters() / 1e6:.1f}M parameters, {args.engine or model.device.type}"
        for signal_number in (signal.SIGINT, signal.SIGTERM):  # from before clients know of it until after its end
            signal.signal(signal_number, server.handle_exit)
        print(f"{names[0]} ({size}) on {where}", flush=True)
        settle()
        server.run([listener])


def _prepare_process() -> int:
    """Set the process up for one busy thread, the engine's; return how many that one may use."""
    keep_for_reuse()
    # The process may be restricted to some of the CPUs.
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else processors
    # Only the engine's thread may use several threads: a second OpenMP pool, even idle, makes the threads sleep
    # between operations, and a forward takes twice as long.
    torch.set_num_threads(1)
    # The engine releases the interpreter lock at each operation and may wait this long to reacquire it.
    sys.setswitchinterval(SWITCH_INTERVAL)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    return threads


def _address(listener: socket.socket, root_path: str, warn: bool) -> str:
    """Return what clients connect to. warn: log if that is anybody on the network."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    if warn and not ip_address(host).is_loopback:
        log.warning("any client that reaches %s can use this service; set --api-keys", host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{root_path}/v1"


def load_model(args: argparse.Namespace) -> tuple[WorldModel, ExitRule]:
    """Load the checkpoint, and the exit rule of requests without one. Raises InputError."""
    model, tokenizer = load_checkpoint(args.model, device=use_device(args.device))
    try:
        model.config.require_causal("the service")
    except ValueError as error:
        raise InputError(f"--model: {error}") from error
    try:
        depth = model.model.core.check(model.config.default_depth if args.depth is None else parse_rule(args.depth))
    except ValueError as error:
        raise InputError(f"--depth: {str(error).removeprefix('depth: ')}") from error
    if depth.depends_on_batch:
        raise InputError(f"--depth: must not depend on other requests of the batch, got {name_of(depth)}")
    return WorldModel(model, tokenizer), depth


def make_engine(
    url: str | None, model: WorldModel, depth: ExitRule, limits: Limits, threads: int
) -> tuple[WorldModel, Engine]:
    """Return the engine of this process, or of a server at `url`, and the model of its worlds. Raises InputError."""
    if url is None:
        return model, Engine(model.model, model.tokenizer.get_vocab()[END], limits, threads)
    prefixes = PrefixModel(model.model, model.tokenizer)
    return prefixes, connect(url, prefixes, depth, limits)


def connect(url: str, model: PrefixModel, depth: ExitRule, limits: Limits) -> RemoteEngine:
    """Return the engine of a server that has the model, whose weights are dropped. Raises InputError."""
    if not isinstance(depth, Fixed):
        raise InputError(f"--depth: must be a number of loops with --engine, got {name_of(depth)}")
    text, end = render_prompt(SAMPLE, ["open cupboard", "look around"], model.slots), model.tokenizer.get_vocab()[END]
    try:
        engine = RemoteEngine(url, model.model, end, depth, limits, os.environ.get(KEY_VARIABLE))
        engine.drop_weights(text, tuple(model.tokenizer(text, add_special_tokens=False)["input_ids"]))
        asyncio.run(engine.check())
    except (EngineStoppedError, RemoteEngineError, httpx.InvalidURL) as error:
        raise InputError(f"--engine: {error}") from error
    if engine.max_length < (needed := model.model.config.context_tokens):
        raise InputError(f"--engine: must take a context's {needed} tokens (--max-model-len), got {engine.max_length}")
    return engine


def _reload_keys(path: Path, keys: KeyRing, rate_limiter: RateLimiter) -> None:
    """Reload the key file; an invalid one changes nothing."""
    try:
        ring = read_keys(path)
    except InputError as error:
        log.error("%s; keeping the previous keys", error)
        return
    keys.replace(ring)
    rate_limiter.replace(ring.quotas)
    log.info("%s: reloaded %d keys", path, len(ring))


def listen(host: str, port: int) -> socket.socket:
    """Listen on a socket with TCP_NODELAY.

    asyncio sets it only on sockets it creates itself; without it the body of a response waits 40 ms for the
    acknowledgement of its headers (Nagle's algorithm).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return _without_delay(socket.create_server((host, port), family=family, backlog=BACKLOG))
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]
        raise InputError(f"cannot listen on {host} port {port}: {reason}; choose another --port, or 0") from error


def listen_unix(path: Path) -> socket.socket:
    """Listen on a Unix socket, in place of one that nobody listens on any more. Raises InputError."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            if path.is_socket() and probe.connect_ex(str(path)):
                path.unlink()
        listener.bind(str(path))
        path.chmod(0o666)  # its folder says who may connect
    except OSError as error:
        listener.close()
        raise InputError(f"--uds: cannot listen on {path}: {error.strerror or error}") from error
    listener.listen(BACKLOG)
    return listener


def inherited_socket() -> socket.socket | None:
    """Return the socket that systemd listens on for this process, None if there is none.

    Connections wait in it while the service restarts.
    """
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    if os.environ.get("LISTEN_FDS") != "1":
        raise InputError(f"LISTEN_FDS: must be 1 socket, got {os.environ.get('LISTEN_FDS')!r}")
    return _without_delay(socket.socket(fileno=FIRST_DESCRIPTOR))


def _without_delay(listener: socket.socket) -> socket.socket:
    if listener.family != socket.AF_UNIX:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
