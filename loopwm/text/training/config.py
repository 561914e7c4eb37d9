"""Configuration of a text run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from loopwm.records.config import read_sections, require_positive, typed
from loopwm.records.errors import InputError
from loopwm.records.template import CONTEXT_LIMIT, ContextKind
from loopwm.trainer.config import OptimizerConfig, RunConfig

Policy = Literal["gold", "expert", "noisy-expert", "random", "fork", "omission", "probe"]
"""Of the episodes in the shards, as `data_prep` names them."""


def require_shares(key: str, shares: Mapping[Any, float]) -> None:
    """Raises InputError for a share below zero, or shares that are all zero."""
    for name, share in shares.items():
        if not share >= 0:
            raise InputError(f"{key}.{name}: {share} is below zero")
    if shares and sum(shares.values()) == 0:
        raise InputError(f"{key}: all shares are zero")


@dataclass(frozen=True)
class ModelConfig:
    """A preset of `loopwm.text.model.configuration.PRESETS` and what is changed in it."""

    preset: str = "small"
    overrides: dict[str, Any] = field(default_factory=dict)
    integers: Literal["random", "fourier"] = "random"
    """How the embeddings of the integers start: as all others, or from features of the number."""
    weights: str = ""
    """Folder of a model of the same shape and vocabulary whose weights the run begins with. Empty: none."""


@dataclass(frozen=True)
class DataConfig:
    """Where the token shards lie and how rows are cut from their episodes."""

    train: tuple[str, ...] = ()
    dev: tuple[str, ...] = ()
    folder_weights: dict[str, float] = field(default_factory=dict)
    """How often an epoch takes the episodes of a folder of `train`; 1 where none is given. A fraction is drawn."""
    trunk_tokens_min: int = 256
    trunk_tokens_max: int = 2048
    """A row's trunk is cut at a length drawn log-uniformly from this range."""
    history_share: float = 0.3
    """Most of a trunk that steps before its first target may take, where it begins later in the episode."""
    snapshot_steps: int = 10
    """Most trunk steps of a row that starts with look and inventory."""
    regimes: dict[ContextKind, float] = field(default_factory=lambda: {"observed": 0.7, "snapshot": 0.3})
    """Shares of the target tokens by what rows show at their head."""
    horizon_shares: tuple[float, ...] = (0.5, 0.125, 0.125, 0.125, 0.125)
    """Shares of the target tokens by horizon, from 1 to K_max, where trunks are supervised and have slots: they are
    horizon 1, branches the others. Otherwise branches hold horizons alike."""
    envs: dict[str, float] = field(default_factory=dict)
    """Shares of the target tokens by world. Empty: as many as the shards hold."""
    policies: dict[Policy, float] = field(default_factory=dict)
    """Shares of a world's target tokens by policy, among those that the shards hold of it. Empty: as `envs`."""
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)
    """Shares of a policy's target tokens by task, for the worlds named here; a task without one is left out."""
    episode_steps: int = 0
    """An epoch takes whole windows of an episode, drawn at random, until they hold so many steps: suites draw an
    episode before its step, so that long ones count no more there than short ones. 0: all."""
    max_branches: int = 8
    """Most branches of a row."""
    echo_weights: dict[str, float] = field(default_factory=dict)
    """How much likelier a branch leaves where two of the next K_max observations are equal, by world; 1 where none is
    given. Most are refusals, the second because of the first, which no text tells a deferred plan."""
    query_share: float = 0.0
    """Share of the target tokens that are answers to state queries: actions that only look, whose answers are recorded
    at every step. They follow an observed step or up to K_max - 1 deferred actions."""
    max_queries: int = 3
    """Most state queries of a row."""
    change_weight: float = 8.0
    """How much likelier a state query is asked where its answer is not that of the step before."""
    repeat_weight: float = 3.0
    """How much likelier a branch leaves where two of the next K_max actions in a row are equal."""

    @property
    def max_horizon(self) -> int:
        """K_max: most actions of a deferred branch."""
        return len(self.horizon_shares)

    def check(self) -> None:
        """Raises InputError naming a key whose value makes no rows."""
        self._check_folders()
        if not self.trunk_tokens_min <= self.trunk_tokens_max <= CONTEXT_LIMIT:
            raise InputError(f"data.trunk_tokens_max: expected trunk_tokens_min .. {CONTEXT_LIMIT}")
        if self.query_share >= 1:
            raise InputError(f"data.query_share: must be below 1, got {self.query_share}")
        if self.history_share >= 1:
            raise InputError(f"data.history_share: {self.history_share} leaves no room for targets")
        if not 1 <= self.max_horizon <= 16 or self.horizon_shares[0] <= 0:
            raise InputError("data.horizon_shares: expected 1 to 16 of them, the first above zero")
        if not self.regimes:
            raise InputError("data.regimes: at least one is needed")
        require_shares("data.horizon_shares", dict(enumerate(self.horizon_shares, start=1)))
        for key in ("regimes", "envs", "policies"):
            require_shares(f"data.{key}", getattr(self, key))
        for env, shares in self.tasks.items():
            require_shares(f"data.tasks.{env}", shares)
        for env, weight in self.echo_weights.items():
            if not weight > 0:
                raise InputError(f"data.echo_weights.{env}: {weight} is not above zero")

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
    """Which observations are targets, and what is added to their loss. Everything is summed and divided by the number
    of target tokens, so at coefficient 1 the reward of a step weighs as much as one token."""

    supervise: Literal["terminal", "all", "every"] = "every"
    """terminal: the deepest horizon of a branch; all: every horizon of a branch; every: also the trunk."""
    integer_weights: dict[str, float] = field(default_factory=dict)
    """How many tokens an integer that is a target counts for, by world; 1 where none is given."""
    opening_weights: dict[str, float] = field(default_factory=dict)
    """The same of the first token of an observation, which decides between a refusal and what else may happen."""
    undetermined_weight: float = 1.0
    """How many tokens a target counts for that nothing shown determines, such as what a place not seen yet holds."""
    reward_coef: float = 0.0
    continue_coef: float = 0.0
    """These two need model.overrides.prediction_heads."""
    consistency_coef: float = 0.0
    """Needs model.overrides.monitor_head."""
    contraction_coef: float = 0.0
    bag_coef: float = 0.0
    """Of the words of every step's observation, told from its slots: the steps between, which nobody decodes, too."""
    state_coef: float = 0.0
    """Of the tokens of look and inventory after every step, predicted from its slots."""
    horizon_every: int = 0
    """Delta of the curriculum K = min(data.max_horizon, 1 + floor(step / Delta)); 0: none."""


@dataclass(frozen=True)
class BatchConfig:
    """A global batch holds at least so many rows and tokens, cut into `micro_batches` by length, over all processes."""

    rows: int = 16
    tokens: int = 8192
    """Without padding."""
    micro_batches: int = 4


@dataclass(frozen=True)
class DepthConfig:
    """How many loops a row makes in training; the mean is the model's mu_rec."""

    sampling: Literal["per_sequence", "per_batch", "fixed"] = "per_sequence"
    backward_loops: int = 0
    """mu_bwd, the last loops that carry gradients; 0: ceil(mu_rec / 2)."""
    ramp_start: int = 0
    ramp_steps: int = 0
    """mu_rec is 1 up to step `ramp_start` and grows over so many steps from there."""


POSITIVE = {
    "data": ("trunk_tokens_min", "snapshot_steps", "repeat_weight", "change_weight"),
    "batch": ("rows", "tokens", "micro_batches"),
    "optimizer": ("learning_rate", "clip_norm"),
    "run": ("steps", "log_every", "eval_every", "eval_batches", "save_every", "keep_checkpoints"),
}
"""Keys whose values must be above zero."""

NOT_NEGATIVE = {
    "objective": (
        "undetermined_weight",
        "reward_coef",
        "continue_coef",
        "consistency_coef",
        "contraction_coef",
        "bag_coef",
        "state_coef",
        "horizon_every",
    ),
    "data": ("history_share", "max_branches", "episode_steps", "query_share", "max_queries"),
    "optimizer": ("weight_decay", "average"),
    "depth": ("backward_loops", "ramp_start", "ramp_steps"),
}
"""Keys whose values must not be below zero."""


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
        require_shares("objective.integer_weights", self.objective.integer_weights)
        require_shares("objective.opening_weights", self.objective.opening_weights)
        if self.objective.supervise != "every" and not self.data.max_branches:
            raise InputError("data.max_branches: without branches nothing is supervised but trunks (supervise: every)")
        if self.optimizer.average >= 1:
            raise InputError(f"optimizer.average: {self.optimizer.average} is not below 1")
        if self.batch.rows < self.batch.micro_batches:
            raise InputError(f"batch.rows: {self.batch.rows} do not fill {self.batch.micro_batches} micro_batches")


RETIRED: dict[str, dict[str, Any]] = {
    "objective": {"exit_loss": "none", "exit_entropy_coef": 0.0},
    "depth": {"mean_rate": 0.0, "loop_price": 0.01},
}
"""Keys of earlier run folders whose mechanism was removed, with the value that still means the same run."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainingConfig:
    """Read a YAML file and apply `section.key=value` overrides. Raises InputError."""
    return training_config(read_sections(path, overrides))


def training_config(sections: dict[str, Any]) -> TrainingConfig:
    """Convert sections to a configuration; drop retired keys at their defaults. Raises InputError."""
    for section, keys in RETIRED.items():
        if not isinstance(values := sections.get(section), dict):
            continue  # `typed` reports a section that is not a mapping
        for key, default in keys.items():
            if (value := values.pop(key, default)) != default:
                raise InputError(f"{section}.{key}: must be {default}, got {value!r}; this key was removed")
    return typed(TrainingConfig, sections)
