"""Imagination step by step: every predicted text is appended to the history before the next action.

`Predictor.predict` differs: it takes several actions in the latent without feeding text back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from eval.models.base import Predictor
from eval.models.checkpoint import CheckpointPredictor, begin
from eval.scores.predictions import Prediction
from loopwm.records.errors import InputError
from loopwm.records.template import Context, ContextKind
from loopwm.records.windows import Window
from loopwm.worlds.protocol import Imagined, Worlds, longer


class PredictorWorlds:
    """Worlds of any predictor: each step asks for the next observation of a history and appends it."""

    def __init__(self, predictor: Predictor, env: str) -> None:
        self._predictor, self._env = predictor, env
        self._real: list[Context] = []
        self._now: list[Context] = []

    @property
    def steps_cut(self) -> tuple[int, ...]:
        return (0,) * len(self._real)

    def begin(self, contexts: Sequence[Context]) -> None:
        self._real, self._now = list(contexts), list(contexts)

    def step(self, actions: Sequence[str], decode: bool = True) -> list[Imagined]:
        windows = [next_window(self._env, *query) for query in zip(self._now, actions, strict=True)]
        predictions = self._predictor.predict(windows, "observed", (1,))
        if any(prediction.unanswered for prediction in predictions):
            raise InputError("--model: a step was cut off at the token limit, so the rollout cannot go on")
        texts = [prediction.texts[1] for prediction in predictions]
        self._now = [longer(*step) for step in zip(self._now, actions, texts, strict=True)]
        return [Imagined(text) for text in texts]

    def fork(self, rows: Sequence[int]) -> PredictorWorlds:
        fork = PredictorWorlds(self._predictor, self._env)
        fork._real, fork._now = ([contexts[row] for row in rows] for contexts in (self._real, self._now))
        return fork

    def observe(self, actions: Sequence[str], observations: Sequence[str]) -> None:
        self._real = [longer(*step) for step in zip(self._real, actions, observations, strict=True)]
        self._now = list(self._real)

    def close(self) -> None:
        self._real, self._now = [], []


@dataclass(frozen=True)
class Imagination:
    """Model as an agent's world.

    worlds: creates worlds of an environment. judges: True if it predicts reward and continuation.
    """

    worlds: Callable[[str], Worlds]
    judges: bool = False


@dataclass(frozen=True)
class FedBack:
    """Predictor that imagines step by step, each answer part of the next history."""

    predictor: Predictor
    imagination: Imagination

    @property
    def identity(self) -> Mapping[str, str | int]:
        return {**self.predictor.identity, "decode": "fed_back"}

    def predict(
        self, windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]
    ) -> list[Prediction]:
        """Predict windows of one environment."""
        worlds = self.imagination.worlds(windows[0]["env"])
        begin(worlds, windows, context_kind)
        predictions = [Prediction({}, cut) for cut in worlds.steps_cut]
        for k in range(1, max(horizons) + 1):
            actions = [window["actions"][k - 1] for window in windows]
            texts = [step.observation for step in worlds.step(actions)]
            if k in horizons:
                for prediction, text in zip(predictions, texts, strict=True):
                    prediction.texts[k] = text
            worlds.observe(actions, texts)
        return predictions


def next_window(env: str, context: Context, action: str) -> Window:
    """Return a window of one action after a context; its answer is unknown."""
    history = [(None, context.observation), *((step.action, step.observation) for step in context.history)]
    return {
        "id": env, "env": env, "task": "", "variation": None, "family": "", "split": "", "goal": context.goal,
        "history": [{"action": action, "observation": text} for action, text in history],
        "look": None, "inventory": None, "hidden_state": None, "hidden_state_start": None,
        "actions": [action], "observations": [""], "rewards": [0], "dones": [False],
    }  # fmt: skip


def fed_back(predictor: Predictor, model: str, context_kind: ContextKind) -> Predictor:
    """Return the same model, imagining by text instead of latents."""
    return FedBack(predictor, make_imagination(predictor, model, context_kind))


def make_imagination(predictor: Predictor, model: str, context_kind: ContextKind) -> Imagination:
    """Return the model as an agent's world. Raises InputError for a context that it does not support."""
    if isinstance(predictor, CheckpointPredictor):
        return imagination_of(predictor)
    if context_kind != "observed":
        raise InputError(
            f"--context: must be 'observed' for {model!r}, which imagines step by step, got {context_kind!r}"
        )
    return Imagination(partial(PredictorWorlds, predictor))


def imagination_of(checkpoint: CheckpointPredictor) -> Imagination:
    """Return a checkpoint's own worlds."""
    return Imagination(lambda env: checkpoint.worlds(), checkpoint.world_model.model.config.prediction_heads)
