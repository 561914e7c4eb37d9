"""World sessions in terms of asyncio: kept worlds that are stepped, observed, forked and planned in."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from loopwm.core import SharedState
from loopwm.records import template as template
from loopwm.records.template import Context, ContextTooLongError, FormatError
from loopwm.text.model.tokenizer import special_ids
from loopwm.text.world import World, WorldModel
from serve.engine.requests import Finish, Request, RequestContext
from serve.engine.sampling import Sampling
from serve.generation.prompts import PromptTooLongError
from serve.generation.service import Depth, Service
from serve.generation.streams import TextDelta, TextStream, interleaved
from serve.worlds.log import WorldLog
from serve.worlds.steps import Candidate, Path, Planned, Step, advance, build, explore, length_of
from serve.worlds.store import Session, WorldStore

Decode = Literal["last", "each", "none"]
Json = dict[str, Any]

MAX_ACTIONS = 64
"""Most actions of one step request, or of one candidate."""
MAX_CANDIDATES = 256
"""Most candidates of one plan."""
MAX_PLANNED = 32_768
"""Most tokens of all candidates of a plan together: their keys and values are in memory at once."""
MAX_IMAGINED = 4096
"""Most imagined actions of a world that is made from its log."""


class UnsupportedError(FormatError):
    """The checkpoint cannot answer this."""


@dataclass(frozen=True)
class StepRequest:
    """max_tokens: of each observation. monitor: with a summary of each state. scored: with log-probabilities.
    step_id: a client's name for the step, which is taken once however often it is asked for."""

    actions: Sequence[str]
    decode: Decode
    max_tokens: int
    monitor: bool = False
    scored: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    step_id: str | None = None

    def sampling(self, index: int) -> Sampling:
        """Of the observation after the action with this number."""
        return Sampling(self.temperature, self.top_p, None if self.seed is None else self.seed + index)


@dataclass(frozen=True)
class Imagined:
    """A step; and of a decoded one the observation in pieces, why it ended, the loops behind its tokens and end, and
    the log-probability of its end, if it came and was asked for."""

    step: Step
    deltas: tuple[TextDelta, ...] = ()
    finish: Finish | None = None
    loops: tuple[int, ...] = ()
    end_score: float | None = None

    @property
    def observation(self) -> str | None:
        return None if self.finish is None else "".join(delta.text for delta in self.deltas)


class CachedWorld(NamedTuple):
    """A world in the cache, and the log that it is of: a session may have gone on to another one meanwhile."""

    log: WorldLog
    world: World


class PendingStep:
    """ForwardGenerator of a kept world while they are decoded. Nobody else may change the world before `close`.

    steps: all of them; the last ones have a stream each.
    """

    def __init__(
        self,
        sessions: Sessions,
        session: Session,
        asked: StepRequest,
        steps: Sequence[Step],
        streams: Sequence[TextStream],
        leave: ExitStack,
    ) -> None:
        self.session, self.asked, self.steps = session, asked, steps
        self._sessions = sessions
        self._streams = streams
        self._heard: list[list[TextDelta]] = [[] for _ in streams]
        self._leave = leave

    @property
    def _first(self) -> int:
        """Number of the first step that is decoded."""
        return len(self.steps) - len(self._streams)

    async def deltas(self) -> AsyncIterator[tuple[int, TextDelta | Finish]]:
        """What is decoded, with the numbers of its steps, as it comes; and at the end of each why it ends.

        Raises what the engine raised.
        """
        async for index, delta in interleaved(self._streams):
            if delta is None:
                yield self._first + index, self._streams[index].finish
            else:
                self._heard[index].append(delta)
                yield self._first + index, delta

    async def finish(self, render: Callable[[Session, Sequence[Imagined]], Json]) -> Json:
        """After all deltas: the world moves on. Returns what `render` makes of it, which is kept for a repetition."""
        imagined = [*map(Imagined, self.steps[: self._first]), *map(self._imagined, range(len(self._streams)))]
        world, asked = self.steps[-1].world, self.asked
        log = self.session.log.taken(asked.actions)
        moved = replace(self.session, log=log, tokens=length_of(world))
        answer = render(moved, imagined)
        answered = None if asked.step_id is None else (asked.step_id, json.dumps(answer))
        await self._sessions.change(self.session, moved.log, world, answered)
        return answer

    def _imagined(self, index: int) -> Imagined:
        stream = self._streams[index]
        step, deltas = self.steps[self._first + index], tuple(self._heard[index])
        return Imagined(step, deltas, stream.finish, tuple(stream.loops), stream.end_score)

    def close(self) -> None:
        """Frees the world and what is still decoding."""
        self._leave.close()


class Sessions:
    """CachedWorld worlds of one model behind its engine."""

    def __init__(self, service: Service, model: WorldModel, store: WorldStore) -> None:
        self.service = service
        self.store = store
        self._model = model
        self._cache = service.engine.cache
        (self._obs,) = special_ids(model.tokenizer, (template.OBS,))

    @property
    def state_slots(self) -> int:
        return self._model.state_slots

    async def create(
        self,
        ctx: RequestContext,
        context: Context,
        depth: Depth | None,
        actions: Sequence[str] = (),
        steps_cut: int = 0,
    ) -> Session:
        """actions: imagined since. Raises FormatError for a context that cannot be encoded, TooManyWorldsError or
        TooMuchTextError."""
        self.store.check_room(ctx.key)
        log = WorldLog(context, self.service.rule(depth), tuple(actions), steps_cut)
        made = await self._build(ctx, log, charged=True)
        (session,) = await self.store.add(ctx.key, made.log, length_of(made.world))
        self._cache.put(session.id, made)
        return session

    async def step(
        self,
        ctx: RequestContext,
        name: str,
        asked: StepRequest,
        render: Callable[[Session, Sequence[Imagined]], Json],
    ) -> Json:
        """The world moves on by these actions, all of them or none."""
        known = self.answered(ctx, name, asked)
        if known is not None:
            return known
        with closing(await self.begin_step(ctx, name, asked)) as taken:
            async for _ in taken.deltas():
                pass
            return await taken.finish(render)

    def answered(self, ctx: RequestContext, name: str, asked: StepRequest) -> Json | None:
        """What was answered when the step was taken, if it was the last one. Raises as `WorldStore.get` does."""
        last = self.store.get(name, ctx.key).answered
        return json.loads(last[1]) if last is not None and asked.step_id == last[0] else None

    async def begin_step(self, ctx: RequestContext, name: str, asked: StepRequest) -> PendingStep:
        """Takes the actions and begins to decode; the world stays until that is finished. Close what this returns."""
        self._check_monitor(asked.monitor)
        with ExitStack() as leave:
            session = leave.enter_context(self.store.changing(name, ctx.key))
            self.store.check_growth(session, session.log.taken(asked.actions))
            world = await self._world(ctx, session)
            fields = [f"actions[{i}]" for i in range(len(asked.actions))]
            work = advance(self._model, world, asked.actions, fields, asked.monitor)
            size = await self._size(asked.actions)
            self.service.charge(ctx, size)
            steps = await self.service.work(ctx, work, size, world.depth.limit)
            first = {"last": len(steps) - 1, "each": 0, "none": len(steps)}[asked.decode]
            streams = []
            for index in range(first, len(steps)):
                streams.append(self._stream(ctx, steps[index].world, asked, index))
                leave.callback(streams[-1].cancel)
            return PendingStep(self, session, asked, steps, streams, leave.pop_all())

    async def change(
        self, session: Session, log: WorldLog, world: World, answered: tuple[str, str] | None = None
    ) -> None:
        """The session goes on with another log, of which this is the world."""
        await self.store.change(session, log, length_of(world), answered)
        self._cache.put(session.id, CachedWorld(log, world))

    async def observe(self, ctx: RequestContext, name: str, action: str, observation: str) -> Session:
        """What really happened after the last real observation. Imagined steps since then are dropped, and the oldest
        real ones where the context grows too long."""
        with self.store.changing(name, ctx.key) as session:
            seen = session.log.seen(action, observation)
            await self.change(session, *await self._build(ctx, seen, charged=True))
        return session

    async def fork(self, ctx: RequestContext, name: str, count: int) -> list[Session]:
        """Raises TooManyWorldsError or TooMuchTextError."""
        session = self.store.get(name, ctx.key)
        kept = self._cached_world(session)
        made = await self.store.add(ctx.key, session.log, session.tokens, count)
        for fork in made if kept is not None else ():
            self._cache.put(fork.id, kept)
        return made

    async def remove(self, owner: str, name: str) -> None:
        await self.store.remove(name, owner)
        self._cache.drop(name)

    async def plan(
        self, ctx: RequestContext, name: str, candidates: Sequence[Sequence[str]], decode: bool, max_tokens: int
    ) -> tuple[list[Candidate], int, str | None]:
        """Scores of the candidates, the best one's number, and the observation it ends with. The world stays."""
        if not self._model.model.config.prediction_heads:
            raise UnsupportedError("candidates", "this checkpoint predicts no rewards, so it cannot score plans")
        paths = list(dict.fromkeys(tuple(one[:end]) for one in candidates for end in range(1, len(one) + 1)))
        planned = await self._size([path[-1] for path in paths])
        if planned > MAX_PLANNED:
            raise PromptTooLongError("candidates", planned, MAX_PLANNED)
        session = self.store.get(name, ctx.key)
        self.service.charge(ctx, planned)
        world = await self._world(ctx, session)
        reached = await self.service.work(ctx, explore(self._model, world, paths))
        found = [_candidate(reached, tuple(actions)) for actions in candidates]
        best = max(range(len(found)), key=lambda i: found[i].score)
        text = None
        if decode:
            end = reached[tuple(candidates[best])]
            asked = StepRequest((), "last", max_tokens)
            text = await self._stream(ctx, end.world.select([end.row]), asked, 0).text()
        return found, best, text

    async def _world(self, ctx: RequestContext, session: Session) -> World:
        """As it is now; computed again where its keys and values had to go."""
        kept = self._cached_world(session)
        if kept is None:
            log = session.log
            kept = CachedWorld(log, (await self._build(ctx, log)).world)
            self._cache.put(session.id, kept)
        return kept.world

    def _cached_world(self, session: Session) -> CachedWorld | None:
        """What the cache has of a session as it is now. Who reads a world does not hold up who changes it, so that an
        older one may come to the cache late."""
        kept: CachedWorld | None = self._cache.get(session.id)
        return kept if kept is not None and kept.log is session.log else None

    async def _build(self, ctx: RequestContext, log: WorldLog, charged: bool = False) -> CachedWorld:
        """The world of a log, and the log cut to fit. charged: the key pays for its tokens, before the model reads
        them; what the service had let go is built at its own cost."""

        def read() -> tuple[WorldLog, tuple[int, ...], int]:
            context, cut = self._model.fit(log.context)
            size = sum(self._model.count(template.render_step(action, self._model.slots)) for action in log.actions)
            fitted = replace(log, context=context, steps_cut=log.steps_cut + cut)
            return fitted, self._model.context_ids(context), size

        log, ids, size = await self.service.read(read)
        limit = self._model.model.config.max_position_embeddings
        if len(ids) + size > limit:
            raise PromptTooLongError("actions", len(ids) + size, limit)
        if charged:
            self.service.charge(ctx, len(ids) + size)
        work = build(self.service.engine, self._model, log, ids)
        return CachedWorld(log, await self.service.work(ctx, work, len(ids) + size, log.depth.limit))

    async def _size(self, actions: Sequence[str]) -> int:
        """Tokens of these actions. Raises FormatError for one that is empty."""
        texts = [template.render_step(action, self._model.slots) for action in actions]
        return await self.service.read(lambda: sum(map(self._model.count, texts)))

    def _check_monitor(self, monitor: bool) -> None:
        if monitor and not self._model.model.config.monitor_head:
            raise UnsupportedError("monitor", "this checkpoint has no monitor head")

    def _stream(self, ctx: RequestContext, world: World, asked: StepRequest, index: int) -> TextStream:
        """The observation of a world, as it is decoded. Raises ContextTooLongError if there is no room for one."""
        start = self._model.before_decoding(world)
        room = self.service.card.max_length - start.length - 1
        if room < 1:
            raise ContextTooLongError("actions", f"no room is left to decode in {self.service.card.max_length} tokens")
        assert isinstance(start, SharedState)  # as `build` made it
        most, top = min(asked.max_tokens, room), 0 if asked.scored else None
        request = Request((self._obs,), most, asked.sampling(index), world.depth, start, top=top)
        (stream,) = self.service.streams(ctx, [request])
        return stream


def _candidate(reached: Mapping[Path, Planned], actions: Path) -> Candidate:
    steps = [reached[actions[:end]] for end in range(1, len(actions) + 1)]
    return Candidate([step.reward for step in steps], [step.continuation for step in steps])
