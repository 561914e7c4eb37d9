"""Protocol of a study, written before its full run: typed YAML, unknown keys are errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from loopwm.pixel.training_config import PixelTrainingConfig
from loopwm.records.config import read_sections, typed
from loopwm.records.errors import InputError
from loopwm.text.training.config import TrainingConfig


@dataclass(frozen=True)
class Arm:
    """Training variant."""

    overrides: tuple[str, ...] = ()
    """Changes to the training configuration, `section.key=value`."""


@dataclass(frozen=True, kw_only=True)
class Protocol(ABC):
    """Arms trained with every seed. Subclasses define training and measurements.

    A difference between an arm and the reference counts if the paired bootstrap 95 % interval over their common items
    (of the mean over seeds) excludes zero and every seed has the same sign.
    """

    question: str
    base: str
    """Base training configuration of all arms."""
    arms: Mapping[str, Arm]
    reference: str
    """Arm that the others are compared with."""
    shared: tuple[str, ...] = ()
    """Overrides of every arm: size, budget, steps."""
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        check(bool(self.arms), "arms", "must have at least one arm")
        for name in self.arms:
            check("/" not in name and name not in ("", ".", ".."), "arms", f"names must be folder names, got {name!r}")
        check_one_of("reference", self.reference, self.arms)
        check(
            bool(self.seeds) and len(set(self.seeds)) == len(self.seeds),
            "seeds",
            f"must be different numbers, got {self.seeds}",
        )

    @property
    def trained_arms(self) -> tuple[str, ...]:
        return tuple(self.arms)

    def overrides(self, arm: str, seed: int, rate: float | None = None) -> tuple[str, ...]:
        """Return the changes to the base configuration for one run. Later ones override earlier ones."""
        rates = () if rate is None else (f"optimizer.learning_rate={rate}",)
        return (*self.shared, *self.arms[arm].overrides, f"run.seed={seed}", *rates)

    @abstractmethod
    def config(self, arm: str, seed: int, rate: float | None = None) -> TrainingConfig | PixelTrainingConfig:
        """Return the configuration of one run; a rate of None keeps the configuration's.

        Raises:
            InputError: a key is invalid
        """

    def check_arm(self, arm: str) -> None:
        """Check an arm before training.

        Raises:
            InputError: the arm would fail or be invalid only after hours of training
        """
        self.config(arm, self.seeds[0])


P = TypeVar("P", bound=Protocol)


def load_protocol(kind: type[P], path: Path, overrides: Sequence[str] = ()) -> P:
    """Load a protocol and check all arms.

    Raises:
        InputError: a key is invalid, or the training program would reject an arm
    """
    protocol = typed(kind, read_sections(path, overrides))
    for arm in protocol.trained_arms:
        try:
            protocol.check_arm(arm)
        except InputError as error:
            raise InputError(f"{path}: arms.{arm}: {error}") from error
    return protocol


def check(good: bool, key: str, message: str) -> None:
    if not good:
        raise InputError(f"{key}: {message}")


def check_one_of(key: str, name: str, known: Collection[str]) -> None:
    check(name in known, key, f"must be one of {', '.join(known)}, got {name!r}")
