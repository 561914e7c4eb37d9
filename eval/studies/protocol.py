"""The written-down protocol of a training study: typed YAML, unknown keys are errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub.errors import StrictDataclassError

from loopwm.records.config import load_typed
from loopwm.records.errors import InputError
from loopwm.records.template import Regime
from loopwm.text.configuration import PRESETS, LoopWMConfig
from loopwm.text.training_config import TrainingConfig, load_config

Decoding = Literal["deferred", "each_step", "fed_back"]


@dataclass(frozen=True)
class Arm:
    """One way to train and to imagine.

    decode: `deferred` decodes the last observation alone; `each_step` every one, which changes the number of decoder
    calls and nothing else; `fed_back` every one, and goes on from the decoded text as if it had been observed.
    """

    overrides: tuple[str, ...] = ()
    """Changes to the training configuration, `section.key=value`."""
    trained_as: str = ""
    """Another arm whose models are used instead of training."""
    decode: Decoding = "deferred"


@dataclass(frozen=True)
class Protocol:
    """Everything that decides a study, written before its full run.

    A difference between an arm and the reference counts where the paired bootstrap 95 % interval over windows (of the
    mean over seeds) excludes zero and every seed has the same sign.
    """

    question: str
    base: str
    """Training configuration that all arms change."""
    arms: dict[str, Arm]
    reference: str
    """Arm that the others are compared with."""
    windows: str
    """Window file, or the name of a suite."""
    shared: tuple[str, ...] = ()
    """Overrides of every arm: size, budget, steps."""
    train: tuple[str, ...] = ()
    """Shard folders instead of the base configuration's data.train."""
    dev: tuple[str, ...] = ()
    """Shard folders instead of the base configuration's data.dev."""
    seeds: tuple[int, ...] = (0,)
    rates: tuple[float, ...] = ()
    """Learning rates tried by every arm with the first seed; the best on dev loss is used for all seeds."""
    regimes: tuple[Regime, ...] = ("snapshot",)
    horizons: tuple[int, ...] = (1, 2, 3, 4, 5)
    limit: int = 0
    """Windows, a sample stratified by family; 0 takes all."""
    batch_size: int = 32
    depth: int = 0
    """Loops of every pass at evaluation; 0 takes each model's default_depth."""
    latent_horizon: int = 0
    """Norms of the latent are followed up to this horizon; 0 leaves them out."""
    latent_windows: int = 64
    """Windows whose actions are repeated for that."""

    def __post_init__(self) -> None:
        _check(bool(self.arms), "arms", "at least one is needed")
        _check(self.reference in self.arms, "reference", f"{self.reference!r} is not an arm")
        _check(bool(self.seeds) and len(set(self.seeds)) == len(self.seeds), "seeds", "expected different numbers")
        _check(bool(self.regimes), "regimes", "at least one is needed")
        ascending = list(self.horizons) == sorted(set(self.horizons))
        _check(bool(self.horizons) and ascending and self.horizons[0] >= 1, "horizons", "expected 1 or more, ascending")
        for name in ("limit", "depth", "latent_horizon"):
            _check(getattr(self, name) >= 0, name, f"{getattr(self, name)} is below zero")
        for name in ("batch_size", "latent_windows"):
            _check(getattr(self, name) > 0, name, f"{getattr(self, name)} is not above zero")
        for name, arm in self.arms.items():
            _check("/" not in name and name not in ("", ".", ".."), "arms", f"{name!r} cannot name a folder")
            if arm.trained_as:
                _check(
                    arm.trained_as in self.trained_arms, f"arms.{name}.trained_as", f"{arm.trained_as!r} is no such arm"
                )
                _check(not arm.overrides, f"arms.{name}.overrides", f"it is trained as {arm.trained_as}")

    @property
    def trained_arms(self) -> tuple[str, ...]:
        return tuple(name for name, arm in self.arms.items() if not arm.trained_as)

    def model_arm(self, name: str) -> str:
        """The arm whose training makes the models of arm `name`."""
        return self.arms[name].trained_as or name


def _check(good: bool, key: str, message: str) -> None:
    if not good:
        raise InputError(f"{key}: {message}")


def load_protocol(path: Path, overrides: Sequence[str] = ()) -> Protocol:
    """Raises InputError naming file or key, also for an arm that the training program would refuse."""
    protocol = load_typed(Protocol, path, overrides)
    for name in protocol.trained_arms:
        try:
            check_training(arm_config(protocol, name, protocol.seeds[0], None))
        except InputError as error:
            raise InputError(f"{path}: arms.{name}: {error}") from error
    return protocol


def arm_overrides(protocol: Protocol, arm: str, seed: int, rate: float | None) -> list[str]:
    """Changes to the base configuration that make one run. Later ones win."""
    overrides = [*protocol.shared, *protocol.arms[arm].overrides, f"run.seed={seed}"]
    for key, folders in (("train", protocol.train), ("dev", protocol.dev)):
        if folders:
            overrides.append(f"data.{key}=[{', '.join(folders)}]")
    if rate is not None:
        overrides.append(f"optimizer.learning_rate={rate}")
    return overrides


def arm_config(protocol: Protocol, arm: str, seed: int, rate: float | None) -> TrainingConfig:
    return load_config(Path(protocol.base), arm_overrides(protocol, arm, seed, rate))


def check_training(config: TrainingConfig) -> None:
    """Raises InputError for what would fail, or spoil the study, only after hours of training."""
    run, model = config.run, config.model
    _check(run.log_every == 1, "run.log_every", f"{run.log_every}, expected 1: spikes are of single steps")
    _check(run.steps % run.eval_every == 0, "run.eval_every", f"{run.eval_every} does not divide run.steps")
    _check(bool(config.data.dev), "data.dev", "a shard folder is needed")
    _check(model.preset in PRESETS, "model.preset", f"{model.preset!r} is unknown")
    unknown = set(model.overrides) - set(LoopWMConfig().to_dict())
    _check(not unknown, "model.overrides", f"unknown key {min(unknown, default='')!r}")
    try:
        LoopWMConfig(**{**PRESETS[model.preset], **model.overrides})
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise InputError(f"model.overrides: {' '.join(str(error).split())}") from error
