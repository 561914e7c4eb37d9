"""Typed training configuration: dataclasses read from YAML, with overrides from the command line.

Unknown keys and values of a wrong type are errors that name the key. An override is written `section.key=value`
with a YAML value, e.g. `optimizer.learning_rate=3e-3`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from loopwm.records.errors import InputError
from loopwm.text.format import CONTEXT_LIMIT, RowRegime

Env = Literal["scienceworld", "alfworld", "textworld"]
Policy = Literal["gold", "expert", "noisy-expert", "random", "fork"]
"""Of the episodes in the shards, as `data_prep` names them."""

T = typing.TypeVar("T")


def require_shares(key: str, shares: Mapping[Any, float]) -> None:
    """Raises InputError for a share below zero, or shares that are all zero."""
    for name, share in shares.items():
        if not share >= 0:
            raise InputError(f"{key}.{name}: {share} is below zero")
    if shares and sum(shares.values()) == 0:
        raise InputError(f"{key}: all shares are zero")


@dataclass(frozen=True)
class ModelConfig:
    """A preset of `loopwm.text.configuration.PRESETS` and what is changed in it."""

    preset: str = "small"
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataConfig:
    """Where the token shards lie and how rows are cut from their episodes."""

    train: tuple[str, ...] = ()
    dev: tuple[str, ...] = ()
    trunk_tokens_min: int = 256
    trunk_tokens_max: int = 2048
    """A row's trunk is cut at a length drawn log-uniformly from this range."""
    history_share: float = 0.3
    """Most of a trunk that steps before its first target may take, where it begins later in the episode."""
    snapshot_steps: int = 10
    """Most trunk steps of a row that starts with look and inventory."""
    regimes: dict[RowRegime, float] = field(default_factory=lambda: {"observed": 0.7, "snapshot": 0.3})
    """Shares of the target tokens by what rows show at their head."""
    horizon_shares: tuple[float, ...] = (0.5, 0.125, 0.125, 0.125, 0.125)
    """Shares of the target tokens by horizon, from 1 to K_max, where trunks are supervised and have slots: they are
    horizon 1, branches the others. Otherwise branches hold horizons alike."""
    envs: dict[Env, float] = field(default_factory=dict)
    """Shares of the target tokens by world. Empty: as many as the shards hold."""
    policies: dict[Policy, float] = field(default_factory=dict)
    """Shares of a world's target tokens by policy, among those that the shards hold of it. Empty: as `envs`."""
    max_branches: int = 8
    """Most branches of a row."""
    repeat_weight: float = 3.0
    """How much likelier a branch leaves where two of the next K_max actions in a row are equal."""

    @property
    def max_horizon(self) -> int:
        """K_max: most actions of a deferred branch."""
        return len(self.horizon_shares)

    def check(self) -> None:
        """Raises InputError naming a key whose value makes no rows."""
        if not self.trunk_tokens_min <= self.trunk_tokens_max <= CONTEXT_LIMIT:
            raise InputError(f"data.trunk_tokens_max: expected trunk_tokens_min .. {CONTEXT_LIMIT}")
        if self.history_share >= 1:
            raise InputError(f"data.history_share: {self.history_share} leaves no room for targets")
        if not 1 <= self.max_horizon <= 16 or self.horizon_shares[0] <= 0:
            raise InputError("data.horizon_shares: expected 1 to 16 of them, the first above zero")
        if not self.regimes:
            raise InputError("data.regimes: at least one is needed")
        require_shares("data.horizon_shares", dict(enumerate(self.horizon_shares, start=1)))
        for key in ("regimes", "envs", "policies"):
            require_shares(f"data.{key}", getattr(self, key))


@dataclass(frozen=True)
class ObjectiveConfig:
    """Which observations are targets, and what is added to their loss. Everything is summed and divided by the number
    of target tokens, so at coefficient 1 the reward of a step weighs as much as one token."""

    supervise: Literal["terminal", "all", "every"] = "every"
    """terminal: the deepest horizon of a branch; all: every horizon of a branch; every: also the trunk."""
    reward_coef: float = 0.0
    continue_coef: float = 0.0
    """These two need model.overrides.prediction_heads."""
    consistency_coef: float = 0.0
    """Needs model.overrides.monitor_head."""
    contraction_coef: float = 0.0
    horizon_every: int = 0
    """Delta of the curriculum K = min(data.max_horizon, 1 + floor(step / Delta)); 0: none."""
    exit_loss: Literal["none", "entropy", "expected"] = "none"
    """What teaches the exit gate: the paper's regulariser, or the expected loss over exits instead of the last one."""
    exit_entropy_coef: float = 0.0
    """alpha: weight of the gate's entropy, or of that of the exit distribution."""


@dataclass(frozen=True)
class BatchConfig:
    """A global batch holds at least so many rows and tokens, cut into `micro_batches` by length, over all processes."""

    rows: int = 16
    tokens: int = 8192
    """Without padding."""
    micro_batches: int = 4


@dataclass(frozen=True)
class OptimizerConfig:
    """Muon for the matrices inside the core, AdamW for everything else; or AdamW for all."""

    name: Literal["muon", "adamw"] = "muon"
    learning_rate: float = 5e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95
    clip_norm: float = 1.0
    warmup_steps: int = 50
    decay_share: float = 0.4
    """Share of the steps, at the end, over which the rate falls linearly to zero. 0: a plateau up to the end, from
    which another run can go on, or cool down (`--start-from`)."""
    average: float = 0.0
    """What an average of the weights keeps of itself at each step; it is evaluated and exported in their place.
    0: no average."""


@dataclass(frozen=True)
class DepthConfig:
    """How many loops a row makes in training; the mean is the model's mu_rec."""

    sampling: Literal["per_sequence", "per_batch", "fixed"] = "per_sequence"
    backward_loops: int = 0
    """mu_bwd, the last loops that carry gradients; 0: ceil(mu_rec / 2)."""
    ramp_start: int = 0
    ramp_steps: int = 0
    """mu_rec is 1 up to step `ramp_start` and grows over so many steps from there."""
    mean_rate: float = 0.0
    """mu_rec is learned at this rate, from the model's on; 0: it is not. The exported model names where it ended."""
    loop_price: float = 0.01
    """Nats of the mean target that a loop must earn where mu_rec is learned."""


@dataclass(frozen=True)
class RunConfig:
    """Length, logging and checkpoints of a run."""

    steps: int = 1000
    seed: int = 0
    mixed_precision: Literal["no", "bf16", "auto"] = "bf16"
    """auto: whichever a layer is faster in on this processor, measured when the run starts or goes on."""
    log_every: int = 10
    eval_every: int = 200
    eval_batches: int = 8
    """Batches to evaluate on, each of as many rows as a training step has."""
    save_every: int = 100
    keep_checkpoints: int = 2


POSITIVE = {
    "data": ("trunk_tokens_min", "snapshot_steps", "repeat_weight"),
    "batch": ("rows", "tokens", "micro_batches"),
    "optimizer": ("learning_rate", "clip_norm"),
    "run": ("steps", "log_every", "eval_every", "eval_batches", "save_every", "keep_checkpoints"),
}
"""Keys whose values must be above zero."""

NOT_NEGATIVE = {
    "objective": (
        "reward_coef",
        "continue_coef",
        "consistency_coef",
        "contraction_coef",
        "horizon_every",
        "exit_entropy_coef",
    ),
    "data": ("history_share", "max_branches"),
    "optimizer": ("weight_decay", "average"),
    "depth": ("backward_loops", "ramp_start", "ramp_steps", "mean_rate", "loop_price"),
}
"""Keys whose values must not be below zero."""


def require_positive(config: Any, sections: Mapping[str, Sequence[str]]) -> None:
    """Raises InputError for a value that is not above zero; sections: keys by the name of their section."""
    for section, keys in sections.items():
        for key in keys:
            value = getattr(getattr(config, section), key)
            if value <= 0:
                raise InputError(f"{section}.{key}: {value} is not above zero")


@dataclass(frozen=True)
class TrainingConfig:
    system: Literal["text"] = "text"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    depth: DepthConfig = field(default_factory=DepthConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        require_positive(self, POSITIVE)
        for section, keys in NOT_NEGATIVE.items():
            for key in keys:
                value = getattr(getattr(self, section), key)
                if not value >= 0:
                    raise InputError(f"{section}.{key}: {value} is below zero")
        self.data.check()
        if self.optimizer.average >= 1:
            raise InputError(f"optimizer.average: {self.optimizer.average} is not below 1")
        if self.depth.mean_rate and (self.depth.ramp_steps or self.depth.sampling == "fixed"):
            raise InputError("depth.mean_rate: mu_rec is learned where depths are drawn, and without depth.ramp_steps")
        if self.batch.rows < self.batch.micro_batches:
            raise InputError(f"batch.rows: {self.batch.rows} do not fill {self.batch.micro_batches} micro_batches")


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainingConfig:
    """Reads a YAML file and applies `section.key=value` overrides. Raises InputError."""
    return load_typed(TrainingConfig, path, overrides)


def load_typed(cls: type[T], path: Path, overrides: Sequence[str] = ()) -> T:
    """Reads a YAML file as the dataclass `cls` and applies `section.key=value` overrides. Raises InputError."""
    return typed(cls, read_sections(path, overrides))


def typed(cls: type[T], raw: dict[str, Any]) -> T:
    """The sections as the dataclass `cls`. Raises InputError."""
    config: T = _build(cls, raw, "")
    return config


def read_sections(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What a YAML file holds with `section.key=value` overrides, not looked at further. Raises InputError."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{path}: expected a mapping of sections")
    for override in overrides:
        _apply_override(raw, override)
    return raw


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise InputError(f"override {override!r}: expected section.key=value")
    *parents, leaf = key.split(".")
    node = raw
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise InputError(f"override {override!r}: {parent} is not a section")
    node[leaf] = yaml.safe_load(value)


def _build(cls: type, raw: dict[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    unknown = set(raw) - set(hints)
    if unknown:
        raise InputError(f"{prefix}{min(unknown)}: unknown key; known: {', '.join(sorted(hints))}")
    missing = _required(cls) - set(raw)
    if missing:
        raise InputError(f"{prefix}{min(missing)}: missing")
    values = {key: _convert(hints[key], value, prefix + key) for key, value in raw.items()}
    try:
        return cls(**values)
    except InputError:
        raise
    except ValueError as error:  # of a section that a system brings along
        raise InputError(f"{prefix}{error}") from error


def _required(cls: type) -> set[str]:
    nothing = dataclasses.MISSING
    return {f.name for f in dataclasses.fields(cls) if f.default is nothing and f.default_factory is nothing}


def _convert(hint: Any, value: Any, name: str) -> Any:
    """`value` as the annotated type, or InputError naming the key."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, dict):
            return _build(hint, value, f"{name}.")
        raise InputError(f"{name}: expected a section, got {value!r}")
    origin = typing.get_origin(hint)
    if origin is Literal:
        if value in typing.get_args(hint):
            return value
        raise InputError(f"{name}: {value!r} is not one of {', '.join(map(str, typing.get_args(hint)))}")
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(typing.get_args(hint)[0], item, name) for item in value)
    if origin is dict and isinstance(value, dict):
        named, item = typing.get_args(hint)
        if item is Any:
            return value
        return {_convert(named, key, name): _convert(item, v, f"{name}.{key}") for key, v in value.items()}
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        return _float(value, name)
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias) and type(value) is hint:
        return value
    raise InputError(f"{name}: expected {getattr(hint, '__name__', hint)}, got {value!r}")


def _float(value: float | str, name: str) -> float:
    # YAML 1.1 reads 5e-3 as a string.
    try:
        return float(value)
    except ValueError:
        raise InputError(f"{name}: expected a number, got {value!r}") from None
