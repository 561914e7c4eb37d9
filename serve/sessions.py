"""World sessions in terms of asyncio: kept worlds that are stepped, observed, forked and planned in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from loopwm.core import ExitRule, SharedState
from loopwm.text import format as template
from loopwm.text.format import Context, FormatError
from loopwm.text.tokenizer import special_ids
from loopwm.text.world import World, WorldModel
from serve import imagining
from serve.imagining import Candidate, Plan, Step
from serve.requests import Request
from serve.sampling import Sampling
from serve.service import Service, TextStream, together
from serve.worlds import Session, WorldStore

Decode = Literal["last", "each", "none"]

MAX_ACTIONS = 64
"""Most actions of one step request, or of one candidate."""
MAX_CANDIDATES = 256
"""Most candidates of one plan."""


class UnsupportedError(FormatError):
    """The checkpoint cannot answer this."""


@dataclass(frozen=True)
class Imagined:
    """A step with its observation, if that was decoded, its tokens, and the loops behind these and the end mark."""

    step: Step
    observation: str | None = None
    tokens: int = 0
    loops: tuple[int, ...] = ()


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

    async def step(
        self, owner: str, name: str, actions: Sequence[str], decode: Decode, max_tokens: int, monitor: bool
    ) -> tuple[Session, list[Imagined]]:
        """The world moves on by these actions, all of them or none."""
        self._check_monitor(monitor)
        with self.store.changing(name, owner) as session:
            steps = await self.service.work(imagining.advance(self._model, session.world, actions, monitor))
            first = {"last": len(steps) - 1, "each": 0, "none": len(steps)}[decode]
            decoded = await together([self._decode(step, max_tokens) for step in steps[first:]])
            session.world = steps[-1].world
        return session, [*(Imagined(step) for step in steps[:first]), *decoded]

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

    async def _decode(self, step: Step, max_tokens: int) -> Imagined:
        stream = self._stream(step.world, max_tokens)
        text = await stream.text()
        return Imagined(step, text, stream.tokens, tuple(stream.loops))

    def _stream(self, world: World, max_tokens: int) -> TextStream:
        """The observation of a world, as it is decoded. Raises FormatError if there is no room for one."""
        start = self._model.before_decoding(world)
        room = self.service.card.max_length - start.length - 1
        if room < 1:
            raise FormatError("actions", f"no room is left to decode in {self.service.card.max_length} tokens")
        start = start if isinstance(start, SharedState) else SharedState(start.alone(0), 1)
        return self.service.stream(Request((self._obs,), min(max_tokens, room), Sampling(), world.depth, start))
