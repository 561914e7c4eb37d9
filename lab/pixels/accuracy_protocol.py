"""The protocol of an accuracy study."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lab.pixels.decoders import StudyDecoderConfig
from lab.studies.study_protocol import Arm, Protocol, check, check_one_of
from loopwm.pixel.training_config import PixelTrainingConfig, training_config
from loopwm.pixel.twisted.decoding import Centre
from loopwm.records.config import read_sections


@dataclass(frozen=True, kw_only=True)
class AccuracyProtocol(Protocol):
    """Protocol: decoders are compared on the same models, arms by one decoder, all on the same transitions."""

    arms: dict[str, Arm]
    decoders: dict[str, StudyDecoderConfig]
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
    grid_c_d: tuple[float, ...] = ()
    grid_c_w: tuple[float, ...] = ()
    """Prices of transport tried in every combination on the reference arm, beside the decoders."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("reference_decoder", self.reference_decoder, self.decoders)
        check_one_of("compared_decoder", self.compared_decoder, self.decoders)
        for key in ("transitions", "run_frames"):
            check(getattr(self, key) > 0, key, f"must be above 0, got {getattr(self, key)}")

    def config(self, arm: str, seed: int, rate: float | None = None) -> PixelTrainingConfig:
        return training_config(read_sections(Path(self.base), self.overrides(arm, seed, rate)))
