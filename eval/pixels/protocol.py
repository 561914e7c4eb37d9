"""The written-down protocol of an accuracy study: typed YAML, unknown keys are errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loopwm.pixel.training_config import PixelTrainingConfig, training_config
from loopwm.pixel.twisted.decoding import Centre, DecoderConfig
from loopwm.records.config import load_typed, read_sections
from loopwm.records.errors import InputError


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    overrides: tuple[str, ...] = ()
    """Changes to the training configuration, `section.key=value`."""


@dataclass(frozen=True)
class Protocol:
    """Everything that decides a study, written before its full run.

    Decoders are compared on the same models, arms by one decoder. A difference counts where the paired bootstrap 95 %
    interval over transitions (of the mean over seeds) excludes zero and every seed has the same sign.
    """

    question: str
    base: str
    """Training configuration that all arms change."""
    arms: dict[str, Arm]
    reference: str
    """Arm that the others are compared with."""
    decoders: dict[str, DecoderConfig]
    reference_decoder: str
    """Decoder that the others are compared with."""
    compared_decoder: str
    """Decoder by which arms are compared."""
    frames: str
    """Held-out play."""
    transitions: int = 2000
    run_frames: int = 20
    """Frames of a run of held-out play."""
    centre: Centre = field(default_factory=Centre)
    shared: tuple[str, ...] = ()
    """Overrides of every arm."""
    seeds: tuple[int, ...] = (0,)
    grid_c_d: tuple[float, ...] = ()
    grid_c_w: tuple[float, ...] = ()
    """Prices of transport tried in every combination on the reference arm, beside the decoders."""

    def __post_init__(self) -> None:
        for key, name, known in (
            ("reference", self.reference, self.arms),
            ("reference_decoder", self.reference_decoder, self.decoders),
            ("compared_decoder", self.compared_decoder, self.decoders),
        ):
            if name not in known:
                raise InputError(f"{key}: {name!r} is not one of {', '.join(known)}")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise InputError("seeds: expected different numbers")
        for key in ("transitions", "run_frames"):
            if getattr(self, key) < 1:
                raise InputError(f"{key}: {getattr(self, key)} is not above zero")

    def overrides(self, arm: str, seed: int) -> tuple[str, ...]:
        """Changes to the base configuration that make one run. Later ones win."""
        return (*self.shared, *self.arms[arm].overrides, f"run.seed={seed}")

    def config(self, arm: str, seed: int) -> PixelTrainingConfig:
        return training_config(read_sections(Path(self.base), self.overrides(arm, seed)))


def load_protocol(path: Path, overrides: Sequence[str] = ()) -> Protocol:
    """Raises InputError naming file or key, also for an arm that the training program would refuse."""
    try:
        protocol = load_typed(Protocol, path, overrides)
        for arm in protocol.arms:
            protocol.config(arm, protocol.seeds[0])
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return protocol
