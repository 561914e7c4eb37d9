"""Imagination step by step: what comes after each next action, where the text of every step is taken for observed.

How it differs from deferral: `Predictor.predict` takes several actions in the latent and is shown no text between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from eval.models.base import Predictor
from eval.scores.predictions import Prediction
from loopwm.records.errors import InputError
from loopwm.records.template import Context, Regime, Transition, window_context
from loopwm.records.windows import Window


@dataclass(frozen=True)
class Imagined:
    """One imagined step. reward: predicted points, goes_on: predicted chance; None where a model predicts none."""

    observation: str
    reward: float | None = None
    goes_on: float | None = None


class Imagination(Protocol):
    """A world model as an agent meets it."""

    @property
    def judges(self) -> bool:
        """Whether it predicts reward and continuation."""
        ...

    def imagine(self, env: str, contexts: Sequence[Context], actions: Sequence[str]) -> list[Imagined]:
        """What follows one action in each context. Raises InputError for a context it cannot take."""
        ...


@dataclass(frozen=True)
class WindowImagination:
    """Any predictor, asked for the next observation of a history."""

    predictor: Predictor
    judges: bool = False

    def imagine(self, env: str, contexts: Sequence[Context], actions: Sequence[str]) -> list[Imagined]:
        windows = [next_window(env, context, action) for context, action in zip(contexts, actions, strict=True)]
        predictions = self.predictor.predict(windows, "observed", (1,))
        if any(prediction.unanswered for prediction in predictions):
            raise InputError("--model: a step was not answered within the limit of tokens, and none can follow it")
        return [Imagined(prediction.texts[1]) for prediction in predictions]


@dataclass(frozen=True)
class FedBack:
    """A predictor that is asked step by step, each answer part of the history of the next question."""

    imagination: WindowImagination

    @property
    def identity(self) -> Mapping[str, str | int]:
        return {**self.imagination.predictor.identity, "decode": "fed_back"}

    def predict(self, windows: Sequence[Window], regime: Regime, horizons: Sequence[int]) -> list[Prediction]:
        """The windows are of one environment."""
        contexts = [window_context(window, regime) for window in windows]
        predictions = [Prediction({}) for _ in windows]
        for k in range(1, max(horizons) + 1):
            actions = [window["actions"][k - 1] for window in windows]
            steps = self.imagination.imagine(windows[0]["env"], contexts, actions)
            contexts = [longer(c, a, s.observation) for c, a, s in zip(contexts, actions, steps, strict=True)]
            if k in horizons:
                for prediction, step in zip(predictions, steps, strict=True):
                    prediction.texts[k] = step.observation
        return predictions


def longer(context: Context, action: str, observation: str) -> Context:
    return replace(context, history=(*context.history, Transition(action, observation)))


def next_window(env: str, context: Context, action: str) -> Window:
    """A window of one action after what a context shows; what follows is not known."""
    history = [(None, context.observation), *((step.action, step.observation) for step in context.history)]
    return {
        "id": env, "env": env, "task": "", "variation": None, "family": "", "split": "", "goal": context.goal,
        "history": [{"action": action, "observation": text} for action, text in history],
        "look": None, "inventory": None, "hidden_state": None, "hidden_state_start": None,
        "actions": [action], "observations": [""], "rewards": [0], "dones": [False],
    }  # fmt: skip


def fed_back(predictor: Predictor, model: str, regime: Regime) -> Predictor:
    """The same model imagining by text instead of latents."""
    if Path(model).is_dir():
        from eval.models.checkpoint import CheckpointPredictor
        from eval.models.fed_back import FedBackPredictor  # torch, which the floors do without

        if isinstance(predictor, CheckpointPredictor):
            return FedBackPredictor(Path(model), predictor.depth)
    return FedBack(_by_windows(predictor, model, regime))


def make_imagination(predictor: Predictor, model: str, regime: Regime) -> Imagination:
    """The model as an agent's world."""
    if Path(model).is_dir():
        from eval.models.checkpoint import CheckpointPredictor
        from eval.models.fed_back import CheckpointImagination  # torch, which the floors do without

        if isinstance(predictor, CheckpointPredictor):
            return CheckpointImagination(predictor)
    return _by_windows(predictor, model, regime)


def _by_windows(predictor: Predictor, model: str, regime: Regime) -> WindowImagination:
    if regime != "observed":
        raise InputError(f"--context: {model!r} imagines step by step from what was 'observed' only, not {regime!r}")
    return WindowImagination(predictor)
