"""What a pixel system is: a model of frames that can be prepared, trained, kept on disk and imagined in.

A new system is one module with a subclass of `PixelSystem`, one line of `SYSTEMS` in `loopwm.pixel.registry`,
configurations and tests. Training, agents, checkpoints and measurements know systems by this alone.

Shape suffixes: B rows, T environment steps, H/W/C frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, make_dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from loopwm.core import DepthPlan
from loopwm.pixel.dynamics import Depth
from loopwm.pixel.imagined import FrameWorld
from loopwm.pixel.registry import SYSTEMS, named
from loopwm.pixel.replay import Segments, as_learned
from loopwm.records.errors import InputError
from loopwm.records.frames import FrameSpace

Diagnostics = Mapping[str, Tensor]
"""Sum and count (2,) each, so that they add up over batches and processes."""

Prepared = dict[str, Tensor]


def mean_of(mean: Tensor, count: int) -> Tensor:
    """A mean as sum and count."""
    return torch.stack((mean.detach() * count, mean.new_tensor(count)))


class FrameBatch(NamedTuple):
    """Consecutive steps of replayed play, as in `Segments`: obs and next_obs uint8 (B, T, H, W, C), all else (B, T).
    A lost life is an end here."""

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
    """A world model of frames. Its parameters are what is trained; what `prepare` makes of play is kept beside them.

    Constructors take (config: Model, objective: Objective, space: FrameSpace), and raise ValueError naming the key of
    `Model` that does not fit the space.
    """

    name: ClassVar[str]
    """As in the registry."""
    Model: ClassVar[type]
    """Section `model`: a dataclass of sizes, with mu_rec, default_depth and max_loops."""
    Objective: ClassVar[type]
    """Section `objective`: a dataclass of the loss's settings."""
    Sampling: ClassVar[type]
    """Section `sampling`: a dataclass of how the world is stepped in imagination."""
    shortest: int = 1
    """Steps that a segment must have to be learned from."""
    width: int = 0
    """F, of the features of its world if that is a `LatentWorld`, else 0."""

    def __init__(self, config: Any, objective: Any, space: FrameSpace) -> None:
        super().__init__()
        self.config, self.objective, self.space = config, objective, space

    def prepare(self, frames: Iterable[Tensor]) -> dict[str, float]:
        """Takes new frames, uint8 (..., H, W, C) each, before they are trained on; what is to be told of that."""
        return {}

    def prepared(self) -> Prepared:
        """What `prepare` made: a checkpoint keeps it beside the weights."""
        return {}

    def take_prepared(self, prepared: Prepared) -> None:
        """Takes what `prepared` gave. Raises ValueError for that of other settings."""
        if prepared:
            raise ValueError(f"{min(prepared)}: {self.name} is not prepared")

    def plan(self, seed: int, step: int, rows: range) -> DepthPlan:
        """Depths of the rows with these indices in the global batch of an optimiser step."""
        return DepthPlan.sample(seed, step, rows, self.config.mu_rec, self.config.max_loops)

    def loss(self, batch: FrameBatch, depth: Depth, generator: torch.Generator) -> tuple[Tensor, Diagnostics]:
        """The loss and measurements, `loss` among them. depth: a plan in training. All chance is the generator's,
        which lives on the batch's device."""
        raise NotImplementedError

    def forward(self, batch: FrameBatch, depth: Depth, generator: torch.Generator) -> tuple[Tensor, Diagnostics]:
        """The loss, where wrappers of several processes look for it."""
        return self.loss(batch, depth, generator)

    def world(self, sampling: Any = None) -> FrameWorld[Any]:
        """The model as a world; sampling: an instance of `Sampling`, None for its defaults."""
        raise NotImplementedError


def system_class(name: str) -> type[PixelSystem]:
    """Raises InputError for a system that is not registered."""
    return cast("type[PixelSystem]", named(SYSTEMS, name, "system"))


def make_system(name: str, config: Any, objective: Any, space: FrameSpace) -> PixelSystem:
    """A fresh model. Raises InputError naming the key that does not fit the space."""
    try:
        return system_class(name)(config, objective, space)
    except ValueError as error:
        raise InputError(f"model.{error}") from error


C = TypeVar("C")


def with_sections(base: type[C], sections: Mapping[str, type]) -> type[C]:
    """The configuration `base` with sections of these types, which systems and learners bring along."""
    added = [(name, kind, field(default_factory=kind)) for name, kind in sections.items()]
    return cast("type[C]", make_dataclass(base.__name__, added, bases=(base,), frozen=True))
