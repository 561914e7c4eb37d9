"""Interface of pixel systems: models of frames that can be prepared, trained, saved and imagined in.

A new system is one module with a subclass of `PixelSystem`, one line of `SYSTEMS` in `loopwm.pixel.registry`,
configurations and tests. Training, agents, checkpoints and measurements use this interface only.

Shape suffixes: B rows, T environment steps, H/W/C frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, field, make_dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from loopwm.core.depth import DepthPlan
from loopwm.pixel.dynamics import Depth
from loopwm.pixel.imagined import FrameWorld
from loopwm.pixel.registry import SYSTEMS, named
from loopwm.pixel.replay import Segments, as_learned
from loopwm.records.config import typed
from loopwm.records.errors import naming
from loopwm.records.frames import FrameSpace

Diagnostics = Mapping[str, Tensor]
"""Sum and count (2,) of each metric, which add up over batches and processes."""

Prepared = dict[str, Tensor]


def mean_of(mean: Tensor, count: int) -> Tensor:
    """Return a mean as sum and count."""
    return torch.stack((mean.detach() * count, mean.new_tensor(count)))


class FrameBatch(NamedTuple):
    """Consecutive replayed steps, as in `Segments`; a lost life counts as terminated.

    obs and next_obs: uint8 (B, T, H, W, C), next_obs (B, 0, ...) for systems without `reads_following`; others: (B, T)
    """

    obs: Tensor
    next_obs: Tensor
    action: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    first: Tensor

    @classmethod
    def of(cls, segments: Segments) -> FrameBatch:
        learned = as_learned(segments)
        return cls(*(torch.from_numpy(getattr(learned, name)) for name in cls._fields))

    def to(self, device: torch.device) -> FrameBatch:
        return FrameBatch(*(tensor.to(device) for tensor in self))


class PixelSystem(nn.Module):
    """World model of frames. Its parameters are trained; the tensors of `prepare` are saved beside them.

    Constructors take (config: Model, objective: Objective, space: FrameSpace), and raise ValueError naming the key of
    `Model` that does not fit the space.
    """

    name: ClassVar[str]
    """Name in the registry."""
    Model: ClassVar[type]
    """Section `model`: a dataclass of sizes."""
    Objective: ClassVar[type]
    """Section `objective`: a dataclass of the loss's settings."""
    Sampling: ClassVar[type]
    """Section `sampling`: a dataclass of how the world is stepped in imagination."""
    shortest: int = 1
    """Minimum segment length, in steps."""
    width: int = 0
    """Feature width F if the world is a `LatentWorld`, else 0."""
    reads_following: ClassVar[bool] = True
    """False if the loss does not read `next_obs`, which halves the segments."""

    def __init__(self, config: Any, objective: Any, space: FrameSpace) -> None:
        super().__init__()
        self.config, self.objective, self.space = config, objective, space
        self.sampling = self.Sampling()
        """How worlds are stepped that are made without it."""
        self.looped = config
        """Section with mu_rec, default_depth and max_loops: `model`, unless a subclass says otherwise."""

    def prepare(self, frames: Iterable[Tensor]) -> dict[str, float]:
        """Process new frames before training on them, for instance to grow a codebook.

        Args:
            frames: uint8 (..., H, W, C) each

        Returns:
            Numbers to log.
        """
        return {}

    def prepared(self) -> Prepared:
        """Return the tensors of `prepare`, which a checkpoint contains beside the weights."""
        return {}

    def take_prepared(self, prepared: Prepared) -> None:
        """Restore the tensors of `prepared`. Raises ValueError if they belong to other settings."""
        if prepared:
            raise ValueError(f"{min(prepared)}: must be absent, since {self.name} prepares nothing")

    def plan(self, seed: int, step: int, rows: range) -> DepthPlan:
        """Sample the depths of rows with these indices in the global batch of an optimiser step."""
        return DepthPlan.sample(seed, step, rows, self.looped.mu_rec, self.looped.max_loops)

    def loss(self, batch: FrameBatch, depth: Depth, generator: torch.Generator) -> tuple[Tensor, Diagnostics]:
        """Return the loss and metrics, `loss` among them.

        depth: a plan in training. generator: source of all randomness, on the batch's device.
        """
        raise NotImplementedError

    def forward(self, batch: FrameBatch, depth: Depth, generator: torch.Generator) -> tuple[Tensor, Diagnostics]:
        """Return `loss`: wrappers for several processes call `forward`."""
        return self.loss(batch, depth, generator)

    def sampling_with(self, changes: Mapping[str, Any]) -> Any:
        """Return its settings of sampling with these keys changed. Raises InputError naming the key at fault."""
        return typed(self.Sampling, asdict(self.sampling) | dict(changes))

    def world(self, sampling: Any = None) -> FrameWorld[Any]:
        """Return the model as a world. sampling: an instance of `Sampling`, None for the system's."""
        raise NotImplementedError


def system_class(name: str) -> type[PixelSystem]:
    """Return the class of a system. Raises InputError if the system is not registered."""
    return cast("type[PixelSystem]", named(SYSTEMS, name, "system"))


def make_system(name: str, config: Any, objective: Any, space: FrameSpace) -> PixelSystem:
    """Create an untrained model. Raises InputError if a key does not fit the space; the message names it."""
    with naming("model.", ValueError):
        return system_class(name)(config, objective, space)


C = TypeVar("C")


def with_sections(base: type[C], sections: Mapping[str, type]) -> type[C]:
    """Extend the configuration `base` by sections of these types, which systems and learners define."""
    added = [(name, kind, field(default_factory=kind)) for name, kind in sections.items()]
    return cast("type[C]", make_dataclass(base.__name__, added, bases=(base,), frozen=True))
