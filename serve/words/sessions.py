"""World sessions in terms of asyncio: kept worlds that are stepped, observed, forked and planned in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Literal

from loopwm.core import ExitRule, SharedState
from loopwm.records import template as template
from loopwm.records.template import Context, ContextTooLongError, FormatError
from loopwm.text.tokenizer import special_ids
from loopwm.text.world import World, WorldModel
from serve.engine.requests import Finish, Request
from serve.engine.sampling import Sampling
from serve.words import imagining
from serve.words.imagining import Candidate, Plan, Step
from serve.words.service import Piece, Service, TextStream, interleaved
from serve.words.store import Session, WorldStore

Decode = Literal["last", "each", "none"]

MAX_ACTIONS = 64
"""Most actions of one step request, or of one candidate."""
MAX_CANDIDATES = 256
"""Most candidates of one plan."""


class UnsupportedError(FormatError):
    """The checkpoint cannot answer this."""


@dataclass(frozen=True)
class StepRequest:
    """max_tokens: of each observation. monitor: with a summary of each state. scored: with log-probabilities."""

    actions: Sequence[str]
    decode: Decode
    max_tokens: int
    monitor: bool
    scored: bool


@dataclass(frozen=True)
class Imagined:
    """A step; and of a decoded one the observation in pieces, why it ended, and the loops behind its tokens and end."""

    step: Step
    pieces: tuple[Piece, ...] = ()
    finish: Finish | None = None
    loops: tuple[int, ...] = ()

    @property
    def observation(self) -> str | None:
        return None if self.finish is None else "".join(piece.text for piece in self.pieces)


class Stepping:
    """Steps of a kept world while they are decoded. Nobody else may change the world before `close`.

    steps: all of them; the last ones have a stream each.
    """

    def __init__(
        self, session: Session, steps: Sequence[Step], streams: Sequence[TextStream], leave: ExitStack
    ) -> None:
        self.session = session
        self.steps = steps
        self._streams = streams
        self._heard: list[list[Piece]] = [[] for _ in streams]
        self._leave = leave

    @property
    def _first(self) -> int:
        """Number of the first step that is decoded."""
        return len(self.steps) - len(self._streams)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece | Finish]]:
        """What is decoded, with the numbers of its steps, as it comes; and at the end of each why it ends.

        Raises what the engine raised.
        """
        async for index, piece in interleaved(self._streams):
            if piece is None:
                yield self._first + index, self._streams[index].finish
            else:
                self._heard[index].append(piece)
                yield self._first + index, piece

    def finish(self) -> list[Imagined]:
        """After all pieces: the world moves on."""
        self.session.world = self.steps[-1].world
        return [*map(Imagined, self.steps[: self._first]), *map(self._imagined, range(len(self._streams)))]

    def _imagined(self, index: int) -> Imagined:
        stream = self._streams[index]
        step, pieces = self.steps[self._first + index], tuple(self._heard[index])
        return Imagined(step, pieces, stream.finish, tuple(stream.loops))

    def close(self) -> None:
        """Frees the world and what is still decoding."""
        self._leave.close()


class Sessions:
    """Kept worlds of one model behind its engine."""

    def __init__(self, service: Service, model: WorldModel, store: WorldStore) -> None:
        self.service = service
        self.store = store
        self._model = model
        (self._obs,) = special_ids(model.tokenizer, (template.OBS,))

    async def create(self, owner: str, context: Context, depth: ExitRule) -> Session:
        """Raises FormatError for a context that cannot be encoded."""
        world = await self.service.work(imagining.create(self._model, context, depth))
        return self.store.add(owner, world, world)

    async def step(self, owner: str, name: str, asked: StepRequest) -> tuple[Session, list[Imagined]]:
        """The world moves on by these actions, all of them or none."""
        with closing(await self.begin_step(owner, name, asked)) as taken:
            async for _ in taken.pieces():
                pass
            return taken.session, taken.finish()

    async def begin_step(self, owner: str, name: str, asked: StepRequest) -> Stepping:
        """Takes the actions and begins to decode; the world stays until that is finished. Close what this returns."""
        self._check_monitor(asked.monitor)
        with ExitStack() as leave:
            session = leave.enter_context(self.store.changing(name, owner))
            work = imagining.advance(self._model, session.world, asked.actions, asked.monitor)
            steps = await self.service.work(work)
            first = {"last": len(steps) - 1, "each": 0, "none": len(steps)}[asked.decode]
            streams = []
            for step in steps[first:]:
                streams.append(self._stream(step.world, asked.max_tokens, 0 if asked.scored else None))
                leave.callback(streams[-1].cancel)
            return Stepping(session, steps, streams, leave.pop_all())

    async def observe(self, owner: str, name: str, action: str, observation: str) -> Session:
        """What really happened after the last real observation. Imagined steps since then are dropped."""
        with self.store.changing(name, owner) as session:
            session.world = session.real = await self.service.work(
                imagining.observe(self._model, session.real, action, observation)
            )
        return session

    def fork(self, owner: str, name: str, count: int) -> list[Session]:
        session = self.store.get(name, owner)
        return [self.store.add(owner, session.world, session.real) for _ in range(count)]

    async def plan(
        self, owner: str, name: str, candidates: Sequence[Sequence[str]], decode: bool, max_tokens: int
    ) -> tuple[list[Candidate], int, str | None]:
        """Scores of the candidates, the best one's number, and the observation it ends with. The world stays."""
        if not self._model.model.config.prediction_heads:
            raise UnsupportedError("candidates", "this checkpoint predicts no rewards, so it cannot score plans")
        world = self.store.get(name, owner).world
        found: Plan = await self.service.work(imagining.plan(self._model, world, candidates))
        text = (await self._stream(found.world, max_tokens).text()) if decode else None
        return found.candidates, found.best, text

    def _check_monitor(self, monitor: bool) -> None:
        if monitor and not self._model.model.config.monitor_head:
            raise UnsupportedError("monitor", "this checkpoint has no monitor head")

    def _stream(self, world: World, max_tokens: int, top: int | None = None) -> TextStream:
        """The observation of a world, as it is decoded. Raises ContextTooLongError if there is no room for one."""
        start = self._model.before_decoding(world)
        room = self.service.card.max_length - start.length - 1
        if room < 1:
            raise ContextTooLongError("actions", f"no room is left to decode in {self.service.card.max_length} tokens")
        start = start if isinstance(start, SharedState) else SharedState(start.alone(0), 1)
        request = Request((self._obs,), min(max_tokens, room), Sampling(), world.depth, start, top=top)
        return self.service.stream(request)
