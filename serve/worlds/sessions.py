"""World sessions on asyncio: create, step, observe, fork, plan and try actions."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp
from typing import Any, Literal, NamedTuple

from loopwm.core.kv_cache import SLACK
from loopwm.records import template as template
from loopwm.records.template import Context, ContextTooLongError, FormatError
from loopwm.text.decoding import MemoryText
from loopwm.text.drafts import as_text
from loopwm.text.memory import Memory
from loopwm.text.model.tokenizer import special_ids
from loopwm.text.world import WorldModel
from serve.engine.requests import Finish, Request, RequestContext
from serve.engine.sampling import GREEDY_BELOW, SamplingParams
from serve.generation.prompts import PromptTooLongError
from serve.generation.service import DeadlineError, Depth, EngineUnsupportedError, Service
from serve.generation.streams import TextDelta, TextStream, interleaved, together
from serve.worlds.steps import Candidate, PrefixModel, Step, advance, build, explore
from serve.worlds.store import Answer, Session, StepIdReusedError, WorldLog, WorldStore

Decode = Literal["last", "each", "none"]
Json = dict[str, Any]

MAX_ACTIONS = 64
"""Most actions of one step request, or of one candidate."""
MAX_ACTION_TOKENS = 1024
"""Most tokens of an action: its forward is not split, and everybody waits for it."""
MAX_CANDIDATES = 256
"""Most candidates of one plan, or actions to try."""
MAX_PLANNED = 32_768
"""Most tokens of all candidates of a plan."""
MAX_IMAGINED = 4096
"""Most imagined actions of a world created from an export."""


class UnsupportedError(FormatError):
    """The checkpoint does not support the request."""


@dataclass(frozen=True)
class StepRequest:
    """Options of a step.

    decode: observations to decode.
    max_tokens: per observation.
    monitor: return a summary of each state.
    step_id: client's id of the step; a repeated request returns the saved reply.
    logprobs: the reply has each token of an observation.
    """

    actions: Sequence[str]
    decode: Decode
    max_tokens: int
    monitor: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    step_id: str | None = None
    logprobs: bool = False

    def params(self, index: int, room: int) -> SamplingParams:
        """Return the sampling parameters of the observation after action `index`, of at most `room` tokens."""
        return SamplingParams(
            self.temperature,
            self.top_p,
            None if self.seed is None else self.seed + index,
            max_tokens=min(self.max_tokens, room),
            logprobs=2,  # for the trust in an observation, and what would have been the second choice
            likelier=self.temperature < GREEDY_BELOW,
        )


@dataclass(frozen=True)
class Imagined:
    """Imagined step with its observation, if decoded.

    loops: of each token and of the end.
    end_score: log-probability of the end token, if generated.
    """

    step: Step
    deltas: tuple[TextDelta, ...] = ()
    finish: Finish | None = None
    loops: tuple[int, ...] = ()
    end_score: float | None = None

    @property
    def observation(self) -> str | None:
        return None if self.finish is None else "".join(delta.text for delta in self.deltas)

    @property
    def trust(self) -> float | None:
        """Probability of exactly this observation; None unless it was decoded to its end."""
        if self.end_score is None:
            return None
        tokens = (token for delta in self.deltas for token in delta.tokens)
        return exp(sum([*(token.scores.chosen for token in tokens if token.scores is not None), self.end_score]))


class CachedWorld(NamedTuple):
    """World in the prefix cache with its log: the session may have changed in the meantime."""

    log: WorldLog
    world: Any


class _Hints(NamedTuple):
    """Text to draft an observation from, and one that was recalled."""

    context: str
    memory_text: MemoryText | None


@dataclass
class PendingStep:
    """Steps of a world while their observations are decoded. The session is locked until `finish`, or the call's end.

    steps: all of them.
    streams: observations of the last ones.
    lock: of the session.
    """

    sessions: Sessions
    session: Session
    request: StepRequest
    steps: Sequence[Step]
    streams: Sequence[TextStream]
    lock: ExitStack

    def __post_init__(self) -> None:
        self._deltas: list[list[TextDelta]] = [[] for _ in self.streams]

    @property
    def _first(self) -> int:
        """Index of the first decoded step."""
        return len(self.steps) - len(self.streams)

    async def deltas(self) -> AsyncIterator[tuple[int, TextDelta | Finish]]:
        """Yield (step index, delta) in order of arrival, and the finish reason at the end of each observation.

        Raises errors of the engine.
        """
        async for index, delta in interleaved(self.streams):
            if delta is None:
                yield self._first + index, self.streams[index].finish
            else:
                self._deltas[index].append(delta)
                yield self._first + index, delta

    def finish(self, render: Callable[[Session, Sequence[Imagined]], Json]) -> Json:
        """Commit the steps, after all deltas; return the reply by `render`, saved for repeated requests."""
        decoded = map(_decoded, self.steps[self._first :], self._deltas, self.streams)
        imagined = [*map(Imagined, self.steps[: self._first]), *decoded]
        world, step_id = self.steps[-1].world, self.request.step_id
        log = self.session.log.with_actions(self.request.actions)
        # Rendered from a copy: the session itself changes only when the reply is saved.
        reply = render(replace(self.session, log=log, tokens=world.length), imagined)
        answer = None if step_id is None else Answer(step_id, repr(self.request), json.dumps(reply))
        self.sessions.change(self.session, log, world, answer)
        self.lock.close()  # before the client gets the reply, and may send the next request
        return reply


def _decoded(step: Step, deltas: Sequence[TextDelta], stream: TextStream) -> Imagined:
    """Join a step and its observation. stream: at its end."""
    return Imagined(step, tuple(deltas), stream.finish, tuple(stream.loops), stream.end_score)


class Sessions:
    """World sessions of one model."""

    def __init__(self, service: Service, model: WorldModel, store: WorldStore, memory: Memory | None = None) -> None:
        self.service = service
        self._memory, self._doubt = memory, model.doubt(memory) if memory else 0.0
        self.store = store
        self._model, self.state_slots = model, model.state_slots
        self._cache = service.engine.cache
        self._foreign = lru_cache(1024)(model.is_foreign)  # every reply about a world needs it
        self._text = lru_cache(1024)(lambda context: as_text(model.context_ids(context)))  # every step drafts from it
        (self._obs,) = special_ids(model.tokenizer, (template.OBS,))
        for session in store:  # one of the file may be of another checkpoint or engine
            try:
                service.engine.check_depth(session.log.depth)
            except (ValueError, NotImplementedError):
                session.log = replace(session.log, depth=service.card.depth)

    def is_foreign(self, context: Context) -> bool:
        """Return True if a context is worded unlike every training episode (`WorldModel.is_foreign`)."""
        return self._foreign(context.goal, context.observation)

    def _require(self, head: str, field: str) -> None:
        """Raise UnsupportedError for a checkpoint without a head, EngineUnsupportedError for an engine without."""
        if isinstance(self._model, PrefixModel):
            raise EngineUnsupportedError(field, f"needs {head}, which the server of --engine does not run")
        if not getattr(self._model.model.config, head):
            raise UnsupportedError(field, f"needs {head}, which this checkpoint does not have")

    async def create(
        self,
        ctx: RequestContext,
        context: Context,
        depth: Depth | None,
        actions: Sequence[str] = (),
        steps_cut: int = 0,
    ) -> Session:
        """Create a session.

        actions: imagined after the context.

        Raises:
            FormatError, TooManyWorldsError, TooMuchTextError
        """
        self.store.check_room(ctx.key)
        await self._sizes("actions", actions)
        log = WorldLog(context, self.service.rule(depth), tuple(actions), steps_cut)
        cached = await self._build(ctx, log, charged=True)
        (session,) = self.store.add(ctx.key, cached.log, cached.world.length)
        self._cache.put(session.id, cached)
        return session

    async def step(
        self,
        ctx: RequestContext,
        name: str,
        request: StepRequest,
        render: Callable[[Session, Sequence[Imagined]], Json],
    ) -> Json:
        """Imagine actions, all of them or none, and return the reply."""
        if (saved := await self.saved_reply(ctx, name, request)) is not None:
            return saved
        pending = await self.begin_step(ctx, name, request)
        with pending.lock:
            async for _ in pending.deltas():
                pass
            return pending.finish(render)

    async def saved_reply(self, ctx: RequestContext, name: str, request: StepRequest) -> Json | None:
        """Return the reply of the last step, or of the running one, if it has the request's id.

        Raises:
            StepIdReusedError: that step was another one.
            DeadlineError, or like `WorldStore.get`.
        """
        session = self.store.get(name, ctx.key)
        while session.busy is not None and request.step_id is not None and session.step_id == request.step_id:
            try:
                await asyncio.wait_for(session.busy.wait(), ctx.deadline - time.monotonic())
            except TimeoutError as error:
                raise DeadlineError("the request took longer than its deadline") from error
        answer = session.answer
        if answer is None or answer.step_id != request.step_id:
            return None
        if answer.request != repr(request):
            raise StepIdReusedError(f"step_id: {request.step_id!r} is that of another step; use a new id for each step")
        return json.loads(answer.reply)

    async def begin_step(self, ctx: RequestContext, name: str, request: StepRequest) -> PendingStep:
        """Imagine actions and start decoding. The world changes in `PendingStep.finish`."""
        if request.monitor:
            self._require("monitor_head", "monitor")
        lock = ctx.exit_stack.enter_context(ExitStack())
        try:
            session = lock.enter_context(self.store.changing(name, ctx.key, request.step_id))
            self.store.check_growth(session, session.log.with_actions(request.actions))
            world = await self._world(ctx, session)
            sizes = await self._sizes("actions", request.actions)
            size = sum(sizes[action] for action in request.actions)
            self._check_length("actions", world.length + size)
            self.service.charge(ctx, size)
            work = advance(self._model, world, request.actions, request.monitor)
            held = len(request.actions) * (size + SLACK)  # the world after each action is a copy
            steps = await self.service.work(ctx, work, held, world.depth.limit)
            first = {"last": len(steps) - 1, "each": 0, "none": len(steps)}[request.decode]
            hints = [await self._hints(session.log, request.actions[: i + 1]) for i in range(first, len(steps))]
            streams = [self._stream(ctx, steps[i].world, request, i, hint) for i, hint in enumerate(hints, first)]
            return PendingStep(self, session, request, steps, streams, lock)
        except BaseException:
            lock.close()  # now: a batch goes on
            raise

    def change(self, session: Session, log: WorldLog, world: Any, answer: Answer | None = None) -> None:
        self.store.change(session, log, world.length, answer)
        self._cache.put(session.id, CachedWorld(log, world))

    async def observe(
        self, ctx: RequestContext, name: str, action: str, observation: str, check: StepRequest | None = None
    ) -> tuple[Session, Imagined | None]:
        """Add a real step. Drops imagined steps, and the oldest real ones if the context grows too long.

        check: request to imagine the step before, from the real ones, which is returned then.
        """
        expected = None
        with self.store.changing(name, ctx.key) as session:
            if check is not None:
                real = replace(session.log, actions=())
                expected = await self._imagine(ctx, (await self._build(ctx, real)).world, real, check, "action")
            log = session.log.with_observation(action, observation)
            self.change(session, *await self._build(ctx, log, charged=True))
        return session, expected

    async def fork(self, ctx: RequestContext, name: str, count: int) -> list[Session]:
        """Copy a session. Raises TooManyWorldsError or TooMuchTextError."""
        session = self.store.get(name, ctx.key)
        cached = self._cached_world(session)
        forks = self.store.add(ctx.key, session.log, session.tokens, count)
        for fork in forks if cached is not None else ():
            self._cache.put(fork.id, cached)
        return forks

    def remove(self, owner: str, name: str) -> None:
        self.store.remove(name, owner)
        self._cache.drop(name)

    async def plan(
        self, ctx: RequestContext, name: str, candidates: Sequence[Sequence[str]], decode: bool, max_tokens: int
    ) -> tuple[list[Candidate], int, str | None]:
        """Return scores of the candidates, the best one's index, and its last observation. Changes no world."""
        self._require("prediction_heads", "candidates")
        paths = list(dict.fromkeys(tuple(one[:end]) for one in candidates for end in range(1, len(one) + 1)))
        sizes = await self._sizes("candidates", [path[-1] for path in paths])
        planned = sum(sizes[path[-1]] for path in paths)
        if planned > MAX_PLANNED:
            raise PromptTooLongError("candidates", planned, MAX_PLANNED)
        session = self.store.get(name, ctx.key)
        self.service.charge(ctx, planned)
        world = await self._world(ctx, session)
        # A forward holds the rows before and after it, as many as its tokens let in, each with all its actions and
        # SLACK columns more.
        rows = min(len(candidates), 1 + self.service.engine.limits.max_num_batched_tokens // min(sizes.values()))
        longest = max(sum(sizes[action] for action in actions) for actions in candidates)
        self._check_length("candidates", world.length + longest)
        work = explore(self._model, world, paths, sizes)
        outcomes = await self.service.work(ctx, work, 2 * rows * (SLACK + longest), world.depth.limit)
        ends = [[outcomes[tuple(one[:end])] for end in range(1, len(one) + 1)] for one in candidates]
        scores = [Candidate(*zip(*outcome, strict=True)) for outcome in ends]
        best = max(range(len(scores)), key=lambda i: scores[i].score)
        text = None
        if decode:
            actions = candidates[best]
            again = advance(self._model, world, actions)
            steps = await self.service.work(ctx, again, sum(map(sizes.__getitem__, actions)), world.depth.limit)
            hints = await self._hints(session.log, actions)
            text = await self._stream(ctx, steps[-1].world, StepRequest((), "last", max_tokens), 0, hints).text()
        return scores, best, text

    async def actions(
        self, ctx: RequestContext, name: str, candidates: Sequence[str], decode: Decode, max_tokens: int
    ) -> list[Imagined]:
        """Imagine each candidate alone, as the world's next action. Changes no world."""
        if decode == "none":
            self._require("prediction_heads", "decode")  # nothing else says what is refused
        session = self.store.get(name, ctx.key)
        world = await self._world(ctx, session)
        pairs = [(StepRequest([action], decode, max_tokens), f"candidates[{i}]") for i, action in enumerate(candidates)]
        return await together([self._imagine(ctx, world, session.log, *pair) for pair in pairs])

    async def _imagine(
        self, ctx: RequestContext, world: Any, log: WorldLog, request: StepRequest, field: str
    ) -> Imagined:
        """Imagine the one action of a request after a world, which is that of the log."""
        ((action, size),) = (await self._sizes(field, request.actions)).items()
        self._check_length(field, world.length + size)
        self.service.charge(ctx, size)
        (step,) = await self.service.work(ctx, advance(self._model, world, [action]), size + SLACK, world.depth.limit)
        if request.decode == "none":
            return Imagined(step)
        stream = self._stream(ctx, step.world, request, 0, await self._hints(log, [action]))
        return _decoded(step, await stream.deltas(), stream)

    async def _world(self, ctx: RequestContext, session: Session) -> Any:
        """Return the session's world, rebuilt if it was evicted."""
        if (cached := self._cached_world(session)) is None:
            log = session.log
            cached = CachedWorld(log, (await self._build(ctx, log)).world)
            self._cache.put(session.id, cached)
        return cached.world

    def _cached_world(self, session: Session) -> CachedWorld | None:
        """Return the cached world of the session's current log.

        Readers do not lock a session, so one that started earlier may cache an older world late.
        """
        cached: CachedWorld | None = self._cache.get(session.id)
        return cached if cached is not None and cached.log is session.log else None

    async def _build(self, ctx: RequestContext, log: WorldLog, charged: bool = False) -> CachedWorld:
        """Build the world of a log, cut to the context limit.

        charged: charge the tokens to the key. Rebuilding an evicted world is free.
        """

        def read() -> tuple[WorldLog, tuple[int, ...], int]:
            context, cut = self._model.fit(log.context)
            size = sum(self._model.count(template.render_step(action, self._model.slots)) for action in log.actions)
            fitted = replace(log, context=context, steps_cut=log.steps_cut + cut)
            return fitted, self._model.context_ids(context), size

        log, ids, size = await asyncio.to_thread(read)
        self._check_length("actions", len(ids) + size)
        if charged:
            self.service.charge(ctx, len(ids) + size)
        work = build(self.service.engine, self._model, log, ids)
        return CachedWorld(log, await self.service.work(ctx, work, len(ids) + size, log.depth.limit))

    async def _sizes(self, field: str, actions: Sequence[str]) -> dict[str, int]:
        """Return the tokens of each action, counted once. Raises FormatError for an empty or too long one."""
        texts = {action: template.render_step(action, self._model.slots) for action in actions}
        sizes = await asyncio.to_thread(lambda: {action: self._model.count(text) for action, text in texts.items()})
        if (longest := max(sizes.values(), default=0)) > MAX_ACTION_TOKENS:
            raise FormatError(field, f"an action must have at most {MAX_ACTION_TOKENS} tokens, got {longest}")
        return sizes

    def _check_length(self, field: str, tokens: int) -> None:
        if tokens > (limit := self.service.card.max_length):
            raise PromptTooLongError(field, tokens, limit)

    async def _hints(self, log: WorldLog, actions: Sequence[str]) -> _Hints:
        """Return what helps to decode the observation after these actions."""

        def read() -> _Hints:
            text = self._text(log.context) + as_text(self._model.action_ids(actions[-1])[:-1] if actions else ())
            outcome = None if self._memory is None else self._memory.recall(log.context, (*log.actions, *actions))
            return _Hints(text, None if outcome is None else self._model.memory_text(outcome, self._doubt))

        return await asyncio.to_thread(read)

    def _stream(self, ctx: RequestContext, world: Any, request: StepRequest, index: int, hints: _Hints) -> TextStream:
        """Start decoding the observation of a world. Raises ContextTooLongError if there is no room for one."""
        room = self.service.card.max_length - world.length - 1
        if room < 1:
            raise ContextTooLongError("actions", f"leave no room to decode in {self.service.card.max_length} tokens")
        params = request.params(index, room)
        start = self._model.before_decoding(world)
        observation = Request((self._obs,), params, world.depth, start, **hints._asdict())
        (stream,) = self.service.streams(ctx, [observation])
        return stream
