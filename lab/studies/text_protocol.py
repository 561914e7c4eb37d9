"""Protocol of a study that trains text models: arms, windows, and their jobs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub.errors import StrictDataclassError

from lab.studies.study_protocol import Arm, Protocol, check
from lab.studies.training_runs import TrainingRun
from loopwm.records.errors import InputError
from loopwm.records.template import ContextKind
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.training.config import TrainingConfig, load_config

Decoding = Literal["deferred", "each_step", "fed_back"]


@dataclass(frozen=True)
class TextArm(Arm):
    """Training and decoding variant.

    decode: `deferred` decodes the last observation only; `each_step` every one, which changes only the number of
    decoder calls; `fed_back` every one, and continues from the decoded text as if it were observed
    """

    trained_as: str = ""
    """Another arm whose models are used instead of training."""
    decode: Decoding = "deferred"


@dataclass(frozen=True, kw_only=True)
class TextProtocol(Protocol):
    """Protocol of text models; all arms are scored on the same windows."""

    arms: dict[str, TextArm]
    windows: str
    """Window file, or the name of a suite."""
    train: tuple[str, ...] = ()
    """Shard folders instead of the base configuration's data.train."""
    dev: tuple[str, ...] = ()
    """Shard folders instead of the base configuration's data.dev."""
    rates: tuple[float, ...] = ()
    """Learning rates tried by every arm with the first seed; the best on dev loss is used for all seeds."""
    regimes: tuple[ContextKind, ...] = ("snapshot",)
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
        super().__post_init__()
        check(bool(self.regimes), "regimes", "at least one is needed")
        ascending = list(self.horizons) == sorted(set(self.horizons))
        check(bool(self.horizons) and ascending and self.horizons[0] >= 1, "horizons", "expected 1 or more, ascending")
        for name in ("limit", "depth", "latent_horizon"):
            check(getattr(self, name) >= 0, name, f"must be at least 0, got {getattr(self, name)}")
        for name in ("batch_size", "latent_windows"):
            check(getattr(self, name) > 0, name, f"must be above 0, got {getattr(self, name)}")
        for name, arm in self.arms.items():
            if arm.trained_as:
                known = arm.trained_as in self.trained_arms
                check(known, f"arms.{name}.trained_as", f"{arm.trained_as!r} is no such arm")
                check(not arm.overrides, f"arms.{name}.overrides", f"it is trained as {arm.trained_as}")

    @property
    def trained_arms(self) -> tuple[str, ...]:
        return tuple(name for name, arm in self.arms.items() if not arm.trained_as)

    def model_arm(self, name: str) -> str:
        """Return the arm whose training creates the models of arm `name`."""
        return self.arms[name].trained_as or name

    def overrides(self, arm: str, seed: int, rate: float | None = None) -> tuple[str, ...]:
        folders = (("train", self.train), ("dev", self.dev))
        data = tuple(f"data.{key}=[{', '.join(names)}]" for key, names in folders if names)
        return (*super().overrides(arm, seed, rate), *data)

    def config(self, arm: str, seed: int, rate: float | None = None) -> TrainingConfig:
        return load_config(Path(self.base), list(self.overrides(arm, seed, rate)))

    def check_arm(self, arm: str) -> None:
        config = self.config(arm, self.seeds[0])
        run, model = config.run, config.model
        check(run.log_every == 1, "run.log_every", f"{run.log_every}, expected 1: spikes are of single steps")
        check(run.steps % run.eval_every == 0, "run.eval_every", f"{run.eval_every} does not divide run.steps")
        check(bool(config.data.dev), "data.dev", "a shard folder is needed")
        check(model.preset in PRESETS, "model.preset", f"{model.preset!r} is unknown")
        unknown = set(model.overrides) - set(LoopWMConfig().to_dict())
        check(not unknown, "model.overrides", f"unknown key {min(unknown, default='')!r}")
        try:
            LoopWMConfig(**{**PRESETS[model.preset], **model.overrides})
        except (StrictDataclassError, TypeError, ValueError) as error:
            raise InputError(f"model.overrides: {' '.join(str(error).split())}") from error


@dataclass(frozen=True)
class Job:
    """One arm with one seed, to train and score. Arms that share models share the run."""

    protocol: TextProtocol
    arm: str
    run: TrainingRun

    @property
    def decode(self) -> Decoding:
        return self.protocol.arms[self.arm].decode

    @property
    def follows_latents(self) -> bool:
        return self.protocol.latent_horizon > 0 and self.arm == self.run.arm

    def scores(self, regime: ContextKind) -> Path:
        return self.run.folder / "eval" / self.arm / regime

    def latents(self, regime: ContextKind) -> Path:
        size = f"{self.protocol.latent_horizon}-{self.protocol.latent_windows}"
        return self.run.folder / "eval" / f"latents-{regime}-{size}.json"
