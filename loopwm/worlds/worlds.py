"""Where imagined worlds live: in this process, or behind the service."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from loopwm.core import ExitRule
from loopwm.records.template import Context
from loopwm.text.world import World, WorldModel


class WorldError(RuntimeError):
    """The service answered with an error; message and code are its own."""

    def __init__(self, message: str, code: str | None) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Imagined:
    """What a step is imagined to bring. reward (points) and continuation, the chance that the world goes on, are None
    where the checkpoint does not predict them."""

    observation: str
    reward: float | None
    continuation: float | None


class Worlds(Protocol):
    """One world at a time, begun from a context.

    What cannot be encoded is a FormatError, or the service's WorldError.
    """

    def begin(self, context: Context) -> None:
        """Forgets the world before."""

    def step(self, action: str) -> Imagined | None:
        """The world after the action; None if it would grow over the model's limit. The next step goes on from it."""

    def close(self) -> None: ...


class LocalWorlds:
    """Worlds of a checkpoint in this process. depth: loops of every pass or an exit rule, None for the default."""

    def __init__(self, model: WorldModel, depth: int | ExitRule | None = None, max_new_tokens: int = 256) -> None:
        self._model, self._depth, self._max_new_tokens = model, depth, max_new_tokens
        self._world: World | None = None

    @classmethod
    def from_pretrained(cls, path: str | Path) -> LocalWorlds:
        """Raises InputError (one line) for a folder that is no checkpoint."""
        return cls(WorldModel.from_pretrained(path))

    def begin(self, context: Context) -> None:
        self._world = self._model.encode([context], self._depth)

    def step(self, action: str) -> Imagined | None:
        if self._world is None:
            raise ValueError("step: begin a world first")
        world, config = self._model.advance(self._world, [action]), self._model.model.config
        if int(world.state.next_position.max()) + self._max_new_tokens > config.max_position_embeddings:
            return None
        self._world = world
        text = self._model.decode(world, self._max_new_tokens)[0]
        if not config.prediction_heads:
            return Imagined(text, None, None)
        found = self._model.predictions(world)
        return Imagined(text, found.reward.item(), found.continuation.item())

    def close(self) -> None:
        self._world = None


class HttpWorlds:
    """Worlds kept by a running service (`python -m serve`). key: its API key, if it asks for one."""

    def __init__(self, url: str, model: str, key: str | None = None, timeout: float = 60.0) -> None:
        """url: such as http://127.0.0.1:8000/v1."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout)
        self._model = model
        self._name: str | None = None

    def begin(self, context: Context) -> None:
        self.close_world()
        steps = [asdict(step) for step in context.history]
        shown = {"look": context.look, "inventory": context.inventory, "hidden_state": context.hidden_state}
        body = {"model": self._model, "goal": context.goal, "observation": context.observation, "history": steps}
        self._name = self._post("/worlds", {**body, **shown})["id"]

    def step(self, action: str) -> Imagined | None:
        if self._name is None:
            raise ValueError("step: begin a world first")
        try:
            (step,) = self._post(f"/worlds/{self._name}/step", {"actions": action})["steps"]
        except WorldError as error:
            if error.code == "context_length_exceeded":
                return None
            raise
        return Imagined(step["observation"], step["reward"], step["continuation"])

    def close_world(self) -> None:
        if self._name is not None:
            self._client.delete(f"/worlds/{self._name}")
            self._name = None

    def close(self) -> None:
        self.close_world()
        self._client.close()

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self._client.post(path, json=body)
        if not response.is_success:
            error = response.json()["error"]
            raise WorldError(error["message"], error["code"])
        found: dict[str, Any] = response.json()
        return found
