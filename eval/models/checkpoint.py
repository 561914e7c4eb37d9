"""Checkpoints as predictors. Loads torch, so it is imported only when a checkpoint is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import torch

from eval.scores.predictions import Prediction
from loopwm.core import ExitRule, format_rule, parse_rule
from loopwm.records.errors import InputError
from loopwm.records.template import Context, FormatError, Regime, window_context
from loopwm.records.windows import Window
from loopwm.text.world import World, WorldModel

MAX_NEW_TOKENS = 512
"""Longest observation decoded; the longest room description of ScienceWorld seen has 370 tokens."""


class CheckpointPredictor:
    """A world model that encodes the context, takes the actions without decoding, and decodes where it is scored.

    depth: loops of every pass or an exit rule, None for the checkpoint's default. Raises InputError for a folder that
    is no checkpoint, a depth outside its limits, or a rule that needs a gate it does not have.
    """

    def __init__(self, folder: Path, depth: int | ExitRule | None = None) -> None:
        try:
            self.world_model = WorldModel.from_pretrained(folder)
        except InputError as error:
            raise InputError(f"--model: {error}") from error
        config = self.world_model.model.config
        try:
            self.depth = self.world_model.model.model.core.check(config.default_depth if depth is None else depth)
        except ValueError as error:
            raise InputError(f"--{error}") from error
        self._hash = checkpoint_hash(folder)
        if torch.cuda.is_available():
            self.world_model.model.to("cuda")

    @property
    def identity(self) -> Mapping[str, str | int]:
        return {"model_sha256": self._hash, "depth": format_rule(self.depth)}

    def predict(self, windows: Sequence[Window], regime: Regime, horizons: Sequence[int]) -> list[Prediction]:
        predictions: list[Prediction] = []
        judges = self.world_model.model.config.prediction_heads
        for k, world in self._imagine(windows, regime, max(horizons)):
            predictions = predictions or [Prediction({}, cut) for cut in world.steps_cut]
            if k in horizons and judges:
                ahead = self.world_model.predictions(world)
                for i, prediction in enumerate(predictions):
                    prediction.rewards[k] = float(ahead.reward[i])
                    prediction.ends[k] = float(ahead.continuation[i]) < 0.5
            if k in horizons:
                for prediction, text in zip(predictions, self.world_model.decode(world, MAX_NEW_TOKENS), strict=True):
                    prediction.texts[k] = text
        return predictions

    def nats(
        self, windows: Sequence[Window], regime: Regime, horizons: Sequence[int]
    ) -> list[dict[int, tuple[float, int]]]:
        """Teacher-forced loss of the true observations: for each window, by horizon, (nats, tokens)."""
        found: list[dict[int, tuple[float, int]]] = [{} for _ in windows]
        for k, world in self._imagine(windows, regime, max(horizons)):
            if k in horizons:
                nats, tokens = self.world_model.nats(world, [window["observations"][k - 1] for window in windows])
                for row, loss, count in zip(found, nats.tolist(), tokens.tolist(), strict=True):
                    row[k] = (loss, count)
        return found

    def encode(self, windows: Sequence[Window], contexts: Sequence[Context]) -> World:
        """The windows' worlds. Raises InputError naming a window whose context cannot be encoded."""
        try:
            return self.world_model.encode(contexts, self.depth)
        except FormatError as error:
            raise InputError(f"window {self._too_long(windows, contexts)}: {error}") from error

    def _imagine(self, windows: Sequence[Window], regime: Regime, last: int) -> Iterator[tuple[int, World]]:
        """(horizon, worlds) after each action up to `last`, nothing decoded."""
        world = self.encode(windows, [window_context(window, regime) for window in windows])
        for k in range(1, last + 1):
            world = self.world_model.advance(world, [window["actions"][k - 1] for window in windows])
            yield k, world

    def _too_long(self, windows: Sequence[Window], contexts: Sequence[Context]) -> str:
        """The id of the first window that cannot be encoded by itself."""
        for window, context in zip(windows, contexts, strict=True):
            try:
                self.world_model.encode([context], self.depth)
            except FormatError:
                return window["id"]
        return windows[0]["id"]


def read_depth(text: str) -> ExitRule:
    """A number of loops or an exit rule. Raises InputError."""
    try:
        return parse_rule(text)
    except ValueError as error:
        raise InputError(f"--depth: {error}") from error


def checkpoint_hash(folder: Path) -> str:
    """SHA-256 over names and contents of the files that decide what a checkpoint predicts."""
    digest = sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors")):
        digest.update(f"{path.name}\0".encode())
        digest.update(sha256(path.read_bytes()).digest())
    return digest.hexdigest()
