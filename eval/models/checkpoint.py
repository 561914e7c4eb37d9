"""Checkpoints as predictors. Loads torch, so it is imported only for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from eval.scores.predictions import Prediction
from loopwm.core.exit_rules import ExitRule, Fixed, format_rule, parse_rule
from loopwm.records.errors import InputError, naming
from loopwm.records.files import sha256_of_files
from loopwm.records.template import LONGEST_OBSERVATION, Context, ContextKind, FormatError, window_context
from loopwm.records.training_episodes import TrainingEpisodes
from loopwm.records.windows import Window
from loopwm.text.memory import Memory
from loopwm.text.world import WorldModel
from loopwm.worlds.local import LocalWorlds
from loopwm.worlds.protocol import Worlds


class CheckpointPredictor:
    """World model that encodes the context, advances without decoding, and decodes at the scored horizons.

    depth: loops of every pass or an exit rule, None for the checkpoint's default. greedy: decode the most probable
    token at a time, not the likelier of two texts. device: the CPU by default. memory: train episodes to recall
    outcomes from. Raises InputError for a folder without a checkpoint, a depth outside its limits, or a rule that needs
    a gate it does not have.
    """

    def __init__(
        self,
        folder: Path,
        depth: int | ExitRule | None = None,
        greedy: bool = False,
        device: torch.device | None = None,
        memory: Sequence[Path] = (),
    ) -> None:
        with naming("--model: "):
            self.world_model = WorldModel.from_pretrained(folder, device)
        config = self.world_model.model.config
        with naming("--", ValueError):
            self.depth = self.world_model.model.model.core.check(config.default_depth if depth is None else depth)
        self.memory = Memory.load(memory) if memory else None
        self.greedy = greedy or not isinstance(self.depth, Fixed)
        self.training_episodes = TrainingEpisodes.load(folder)
        self._hash = checkpoint_hash(folder)

    @property
    def identity(self) -> Mapping[str, str | int]:
        identity = {"model_sha256": self._hash, "depth": format_rule(self.depth)}
        if self.memory is not None:
            identity["memory_sha256"] = self.memory.sha256
        # Nothing for greedy decoding, so that folders of runs from before there was another can be resumed.
        return identity if self.greedy else {**identity, "decoding": "likelier of two"}

    def worlds(self) -> LocalWorlds:
        return LocalWorlds(self.world_model, self.depth, LONGEST_OBSERVATION, self.greedy, self.memory)

    def begin(self, windows: Sequence[Window], context_kind: ContextKind) -> LocalWorlds:
        """Start the windows' worlds. Raises InputError naming a window whose context cannot be encoded."""
        worlds = self.worlds()
        begin(worlds, windows, context_kind)
        return worlds

    def count_foreign(self, windows: Sequence[Window]) -> int:
        starts = ((window["goal"], window["history"][0]["observation"]) for window in windows)
        return sum(self.world_model.is_foreign(goal, observation) for goal, observation in starts)

    def predict(
        self, windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]
    ) -> list[Prediction]:
        worlds = self.begin(windows, context_kind)
        predictions = [Prediction({}, cut) for cut in worlds.steps_cut]
        for k in range(1, max(horizons) + 1):  # all steps are imagined, few decoded
            steps = worlds.step([window["actions"][k - 1] for window in windows], decode=k in horizons)
            if k in horizons:
                for prediction, step in zip(predictions, steps, strict=True):
                    prediction.texts[k] = step.observation
                    if step.reward is not None and step.continuation is not None:
                        prediction.rewards[k] = step.reward
                        prediction.ends[k] = step.ends
                    if step.trust is not None:
                        prediction.trusts[k] = step.trust
        return predictions


def begin(worlds: Worlds, windows: Sequence[Window], context_kind: ContextKind) -> None:
    """Start the windows' worlds. Raises InputError, from the FormatError, naming a window that cannot be encoded."""
    contexts = [window_context(window, context_kind) for window in windows]
    try:
        worlds.begin(contexts)
    except FormatError as error:
        raise InputError(f"window {_refused(worlds, windows, contexts)}: {error}") from error


def _refused(worlds: Worlds, windows: Sequence[Window], contexts: Sequence[Context]) -> str:
    """Return the id of the first window that cannot be encoded by itself."""
    for window, context in zip(windows, contexts, strict=True):
        try:
            worlds.begin([context])
        except FormatError:
            return window["id"]
    return windows[0]["id"]


def read_depth(text: str) -> ExitRule:
    """Parse a number of loops or an exit rule. Raises InputError."""
    with naming("--depth: ", ValueError):
        return parse_rule(text)


def checkpoint_hash(folder: Path) -> str:
    """Return the SHA-256 over names and contents of the files that decide a checkpoint's predictions."""
    return sha256_of_files(folder, (".json", ".safetensors"))
