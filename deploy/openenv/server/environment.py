"""OpenEnv server of the imagined environment: reset, step and state over WebSocket, a session a connection.

    python deploy/openenv/server/environment.py --starts windows.jsonl.gz --context snapshot --port 8001

Trainers use this convention for environments. Sessions share one model; with --url their worlds are in a running
service, which batches them.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, ConcurrencyConfig, EnvironmentMetadata, Observation, State
from pydantic import Field

from loopwm.records.command import above_zero, doc_parser
from loopwm.records.errors import InputError
from loopwm.records.template import CONTEXT_KINDS, Context
from loopwm.worlds.gym import MAX_ACTION, ImaginedTextEnv, read_starts
from loopwm.worlds.http import KEY_VARIABLE
from loopwm.worlds.protocol import WorldError, Worlds
from loopwm.worlds.starts import Start
from loopwm.worlds.vector import make_worlds

SESSION_TIMEOUT = 3600.0
"""Seconds of silence after which a session ends."""


class TextAction(Action):
    text: str = Field(min_length=1, max_length=MAX_ACTION)


class TextObservation(Observation):
    """Observation of an imagined environment.

    reward: predicted score difference in points, None where the checkpoint predicts none. metadata: the goal at a
    reset; afterwards `truncated`, `continuation`, how the text ended (`finish`) and its `trust`.
    """

    text: str


class ImaginedEnvironment(Environment[TextAction, TextObservation, State]):
    """One session."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, make_worlds: Callable[[], Worlds], starts: Sequence[Context | Start], max_steps: int) -> None:
        super().__init__()
        self._env = ImaginedTextEnv(make_worlds(), starts, max_steps)
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> TextObservation:
        text, info = self._env.reset(seed=seed)
        self._state = State(episode_id=episode_id or uuid.uuid4().hex, step_count=0)
        return TextObservation(text=text, metadata={"goal": info["goal"]})

    def step(self, action: TextAction, timeout_s: float | None = None, **kwargs: Any) -> TextObservation:
        text, reward, terminated, truncated, info = self._env.step(action.text)
        self._state.step_count += 1
        metadata = {"truncated": truncated, **{name: info[name] for name in ("continuation", "finish", "trust")}}
        predicted = reward if info["predicted"] else None
        return TextObservation(text=text, done=terminated or truncated, reward=predicted, metadata=metadata)

    @property
    def state(self) -> State:
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        about = "A text world imagined by a looped world model; the real environment is never run."
        return EnvironmentMetadata(name="loopwm", description=about, version="1.0.0")

    def close(self) -> None:
        self._env.close()


def create_app(
    make_worlds: Callable[[], Worlds],
    starts: Sequence[Context | Start],
    max_steps: int = 50,
    sessions: int = 64,
    session_timeout: float = SESSION_TIMEOUT,
) -> FastAPI:
    """Build the server; `make_worlds` is called for every session.

    session_timeout: seconds of silence after which a session's place and world are released; the client must reconnect.
    """
    make = partial(ImaginedEnvironment, make_worlds, starts, max_steps)
    limits = ConcurrencyConfig(max_concurrent_envs=sessions, session_timeout=session_timeout)
    return create_fastapi_app(make, TextAction, TextObservation, concurrency_config=limits)


def main(arguments: list[str] | None = None) -> int:
    parser = doc_parser("python deploy/openenv/server/environment.py", __doc__)
    parser.add_argument("--starts", type=Path, required=True, help="window file: episodes start where its windows do")
    parser.add_argument("--context", choices=CONTEXT_KINDS, default="snapshot", help="default: snapshot")
    parser.add_argument("--model", help="checkpoint folder, by default the packaged one; with --url its name there")
    parser.add_argument("--url", help=f"a running service that keeps the worlds; {KEY_VARIABLE} holds its key")
    parser.add_argument("--max-steps", type=int, default=50, help="of an episode (default: 50)")
    parser.add_argument("--sessions", type=int, default=64, help="at once (default: 64)")
    timeout_told = f"seconds that a session may be silent for (default: {SESSION_TIMEOUT:g})"
    parser.add_argument("--session-timeout", type=above_zero, default=SESSION_TIMEOUT, help=timeout_told)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    args = parser.parse_args(arguments)
    try:
        starts = read_starts(args.starts, args.context)
        make = make_worlds(args.url, os.environ.get(KEY_VARIABLE), args.model).fresh
    except (InputError, OSError, WorldError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    app = create_app(make, starts, args.max_steps, args.sessions, args.session_timeout)
    uvicorn.run(app, host=args.host, port=args.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
