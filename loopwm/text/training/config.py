"""Configuration of a text run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from loopwm.records.config import check_numbers, read_sections, typed
from loopwm.records.errors import InputError
from loopwm.records.template import CONTEXT_LIMIT, ContextKind
from loopwm.trainer.config import OptimizerConfig, RunConfig

Policy = Literal[
    "gold", "expert", "noisy-expert", "random", "fork", "omission", "ahead", "changing", "fatal", "focus", "agent",
    "probe", "other-goal", "logs",
]  # fmt: skip
"""Policies of the episodes in the shards, named as in `data_prep`."""


def require_shares(key: str, shares: Mapping[Any, float]) -> None:
    """Raise InputError for a share below zero, or shares that are all zero."""
    for name, share in shares.items():
        if not share >= 0:
            raise InputError(f"{key}.{name}: must not be below 0, got {share}")
    if shares and sum(shares.values()) == 0:
        raise InputError(f"{key}: must have a share above 0")


@dataclass(frozen=True)
class ModelConfig:
    """A preset of `loopwm.text.model.configuration.PRESETS` and overrides."""

    preset: str = "small"
    """Or `weights`: shape and tokenizer of the folder `weights`."""
    overrides: dict[str, Any] = field(default_factory=dict)
    integers: Literal["random", "fourier"] = "random"
    """Initial embeddings of the integers: random as all others, or features of the number."""
    weights: str = ""
    """Folder of a model of the same shape and vocabulary with initial weights. Empty: none."""


@dataclass(frozen=True)
class DataConfig:
    """Token shards, and the cut of their episodes into rows."""

    train: tuple[str, ...] = ()
    dev: tuple[str, ...] = ()
    folder_weights: dict[str, float] = field(default_factory=dict)
    """Times that an epoch takes the episodes of a folder of `train`; default 1. A fraction is drawn."""
    trunk_tokens_min: int = 256
    trunk_tokens_max: int = 2048
    """Range of a row's trunk length, which is drawn log-uniformly."""
    history_share: float = 0.3
    """Largest share of a trunk for steps before its first target, if it begins later in the episode."""
    snapshot_steps: int = 10
    """Most trunk steps of a row that starts with look and inventory."""
    regimes: dict[ContextKind, float] = field(default_factory=lambda: {"observed": 0.7, "snapshot": 0.3})
    """Shares of the target tokens by context kind."""
    horizon_shares: tuple[float, ...] = (0.5, 0.125, 0.125, 0.125, 0.125)
    """Shares of the target tokens by horizon, from 1 to K_max, if trunks are supervised and have slots: these are
    horizon 1, branches the others. Otherwise branches decode horizons alike.
    """
    envs: dict[str, float] = field(default_factory=dict)
    """Shares of the target tokens by world. Empty: in proportion to the shards."""
    policies: dict[Policy, float] = field(default_factory=dict)
    """Shares of a world's target tokens by policy, among those in its shards. Empty: as `envs`."""
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)
    """Shares of a policy's target tokens by task, for the worlds named here; a task without one is left out."""
    episode_steps: int = 0
    """Steps of an episode in an epoch, as whole windows drawn at random; 0: all. Suites draw an episode before its
    step, so long episodes should not count more than short ones.
    """
    max_branches: int = 8
    """Most branches of a row."""
    echo_weights: dict[str, float] = field(default_factory=dict)
    """Weight of branches where two of the next K_max observations are equal, by world; default 1. Most are refusals,
    the second because of the first, and no text tells a deferred plan of that.
    """
    query_share: float = 0.0
    """Share of the target tokens that are answers to state queries: actions that only look, whose answers are recorded
    at every step. They follow an observed step or up to K_max - 1 deferred actions.
    """
    max_queries: int = 3
    """Most state queries of a row."""
    change_weight: float = 8.0
    """Weight of state queries whose answer differs from that of the step before."""
    repeat_weight: float = 3.0
    """Weight of branches where two consecutive actions of the next K_max are equal."""

    @property
    def max_horizon(self) -> int:
        """K_max: most actions of a deferred branch."""
        return len(self.horizon_shares)

    def check(self) -> None:
        """Raise InputError naming a key whose value makes no rows."""
        self._check_folders()
        if not self.trunk_tokens_min <= self.trunk_tokens_max <= CONTEXT_LIMIT:
            raise InputError(
                f"data.trunk_tokens_max: must be trunk_tokens_min to {CONTEXT_LIMIT}, got {self.trunk_tokens_max}"
            )
        if not 1 <= self.max_horizon <= 16 or self.horizon_shares[0] <= 0:  # 17 is that of state queries
            raise InputError(f"data.horizon_shares: must be 1 to 16, first above 0, got {list(self.horizon_shares)}")
        if not self.regimes:
            raise InputError("data.regimes: must name a context kind, got none")
        require_shares("data.horizon_shares", dict(enumerate(self.horizon_shares, start=1)))
        for key in ("regimes", "envs", "policies"):
            require_shares(f"data.{key}", getattr(self, key))
        for env, shares in self.tasks.items():
            require_shares(f"data.tasks.{env}", shares)
        for env, weight in self.echo_weights.items():
            if not weight > 0:
                raise InputError(f"data.echo_weights.{env}: must be above 0, got {weight}")

    def _check_folders(self) -> None:
        for key, folders in (("train", self.train), ("dev", self.dev)):
            counts = Counter(Path(folder).resolve() for folder in folders)
            if twice := next((folder for folder in folders if counts[Path(folder).resolve()] > 1), None):
                cure = f" (use data.folder_weights={{{twice}: 2}})" if key == "train" else ""
                raise InputError(f"data.{key}: must name each folder once, got {twice} twice{cure}")
        for folder, weight in self.folder_weights.items():
            if folder not in self.train:
                raise InputError(f"data.folder_weights.{folder}: must be a folder of data.train")
            if not weight > 0:
                raise InputError(f"data.folder_weights.{folder}: must be above 0, got {weight}")


@dataclass(frozen=True)
class ObjectiveConfig:
    """Targets, and terms added to their loss.

    Everything is summed and divided by the number of target tokens, so at coefficient 1 the reward of a step weighs as
    much as one token.
    """

    supervise: Literal["terminal", "all", "every"] = "every"
    """terminal: the deepest horizon of a branch; all: every horizon of a branch; every: also the trunk."""
    integer_weights: dict[str, float] = field(default_factory=dict)
    """Weight of an integer target, in tokens, by world; default 1."""
    opening_weights: dict[str, float] = field(default_factory=dict)
    """Weight of an observation's first token, by world; default 1. It decides between a refusal and all other outcomes.
    """
    undetermined_weight: float = 1.0
    """Weight of a target that no shown text determines, such as the contents of an unseen place."""
    reward_coef: float = 0.0
    continue_coef: float = 0.0
    accept_coef: float = 0.0
    """All three require model.overrides.prediction_heads."""
    consistency_coef: float = 0.0
    """Requires model.overrides.monitor_head."""
    contraction_coef: float = 0.0
    bag_coef: float = 0.0
    """For the words of every step's observation, predicted from its slots, also at steps that are not decoded."""
    state_coef: float = 0.0
    """For the words of `look` and of `inventory` after every step, predicted from its slots as by `bag_coef`."""
    state_change_weight: float = 8.0
    """Weight of a word of these that the step before did not show, relative to the others."""
    horizon_every: int = 0
    """Delta of the curriculum K = min(data.max_horizon, 1 + floor(step / Delta)); 0: none."""


@dataclass(frozen=True)
class BatchConfig:
    """Least rows and tokens of a global batch over all processes, cut into `micro_batches` by length."""

    rows: int = 16
    tokens: int = 8192
    """Without padding."""
    micro_batches: int = 4
    packed: int = 0
    """Columns of a line that holds several rows, for GPUs; 0: one row a line, as CPUs need it. A micro-batch has
    tokens / micro_batches / packed lines, rounded up. Leave room for the last row: 59000 tokens fill 8 lines of 8192.
    """
    workers: int = 0
    """Processes that build batches ahead of their steps; 0: the training process builds them."""


@dataclass(frozen=True)
class DepthConfig:
    """Loops of a row in training: max(1, Poisson(mu_rec))."""

    sampling: Literal["per_sequence", "per_batch", "fixed"] = "per_sequence"
    backward_loops: int = 0
    """mu_bwd, the last loops that carry gradients; 0: ceil(mu_rec / 2)."""
    ramp_start: int = 0
    ramp_steps: int = 0
    """mu_rec is 1 up to step `ramp_start` and grows linearly over `ramp_steps` steps from there."""


POSITIVE = {
    "data": ("trunk_tokens_min", "snapshot_steps", "repeat_weight", "change_weight"),
    "batch": ("rows", "tokens", "micro_batches"),
    "objective": ("state_change_weight",),
    "optimizer": ("learning_rate", "clip_norm"),
    "depth": (),
    "run": ("steps", "log_every", "eval_every", "eval_batches", "save_every", "keep_checkpoints"),
}
"""Keys whose values must be above zero, by section; other numbers of the section must not be below it."""


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
        check_numbers(self, POSITIVE)
        self.data.check()
        require_shares("objective.integer_weights", self.objective.integer_weights)
        require_shares("objective.opening_weights", self.objective.opening_weights)
        if self.objective.supervise != "every" and not self.data.max_branches:
            raise InputError("data.max_branches: must be above 0 unless objective.supervise is every, got 0")
        if self.batch.rows < self.batch.micro_batches:
            raise InputError(
                f"batch.rows: must be at least batch.micro_batches = {self.batch.micro_batches}, got {self.batch.rows}"
            )


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainingConfig:
    """Read a YAML file and apply `section.key=value` overrides. Raises InputError."""
    return typed(TrainingConfig, read_sections(path, overrides))
