"""Checkpoints as predictors. The only module of `eval` that loads torch, and only when a checkpoint is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import torch

from eval.errors import EvalError
from eval.predictors import Prediction
from eval.windows import Window
from loopwm.text.checkpoint import CheckpointError
from loopwm.text.format import Context, FormatError, Regime, window_context
from loopwm.text.world import WorldModel

MAX_NEW_TOKENS = 512
"""Longest observation decoded; the longest room description of ScienceWorld seen has 370 tokens."""


class CheckpointPredictor:
    """A world model that encodes the context, takes the actions without decoding, and decodes where it is scored.

    depth: loops of every pass, None for the checkpoint's default. Raises EvalError for a folder that is no checkpoint
    or a depth outside its limits.
    """

    def __init__(self, folder: Path, depth: int | None = None) -> None:
        try:
            self._world_model = WorldModel.from_pretrained(folder)
        except CheckpointError as error:
            raise EvalError(f"--model: {error}") from error
        config = self._world_model.model.config
        self._depth: int = config.default_depth if depth is None else depth
        if not 1 <= self._depth <= config.max_loops:
            raise EvalError(f"--depth: {depth} is not in 1 .. {config.max_loops}, the loops this checkpoint allows")
        self._hash = checkpoint_hash(folder)
        if torch.cuda.is_available():
            self._world_model.model.to("cuda")

    @property
    def identity(self) -> Mapping[str, str | int]:
        return {"model_sha256": self._hash, "depth": self._depth}

    def predict(self, windows: Sequence[Window], regime: Regime, horizons: Sequence[int]) -> list[Prediction]:
        contexts = [window_context(window, regime) for window in windows]
        try:
            world = self._world_model.encode(contexts, self._depth)
        except FormatError as error:
            raise EvalError(f"window {self._too_long(windows, contexts)}: {error}") from error
        predictions = [Prediction({}, cut) for cut in world.steps_cut]
        for k in range(1, max(horizons) + 1):
            world = self._world_model.advance(world, [window["actions"][k - 1] for window in windows])
            if k in horizons:
                for prediction, text in zip(predictions, self._world_model.decode(world, MAX_NEW_TOKENS), strict=True):
                    prediction.texts[k] = text
        return predictions

    def _too_long(self, windows: Sequence[Window], contexts: Sequence[Context]) -> str:
        """The id of the first window that cannot be encoded by itself."""
        for window, context in zip(windows, contexts, strict=True):
            try:
                self._world_model.encode([context], self._depth)
            except FormatError:
                return window["id"]
        return windows[0]["id"]


def checkpoint_hash(folder: Path) -> str:
    """SHA-256 over names and contents of the files that decide what a checkpoint predicts."""
    digest = sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors")):
        digest.update(f"{path.name}\0".encode())
        digest.update(sha256(path.read_bytes()).digest())
    return digest.hexdigest()
