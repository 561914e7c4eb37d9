"""Claims study of STORM's world: train arms by a protocol and measure them on the same held-out play."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from eval.scores.tables import table
from lab.pixels.paper_claims import ClaimFigures, held_out_play, measure
from lab.studies.study_protocol import Arm, Protocol, check
from lab.studies.training_runs import TrainingRun, in_processes, locked, make_run, train
from loopwm.pixel.checkpoint import load_checkpoint
from loopwm.pixel.storm.system import StormSystem
from loopwm.pixel.training_config import PixelTrainingConfig, training_config
from loopwm.records.config import read_sections
from loopwm.records.files import read_json, write_atomic, write_json
from loopwm.records.frames import count_steps, episode_files
from loopwm.records.provenance import provenance

FROM_HORIZON = 4
"""First horizon at which open-loop frames must beat the last context frame."""


@dataclass(frozen=True, kw_only=True)
class ClaimsProtocol(Protocol):
    arms: dict[str, Arm]
    frames: str
    """Held-out play."""
    columns: tuple[int, int]
    """First and last column of the frame where the agent's object moves."""
    sequences: int = 200
    context: int = 8
    """Context frames of a sequence."""
    steps: int = 15
    """Imagined steps after the context."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("sequences", "context", "steps"):
            check(getattr(self, key) > 0, key, f"must be above 0, got {getattr(self, key)}")
        check(self.sequences > 1, "sequences", f"must be at least 2, got {self.sequences}")
        check(self.steps >= FROM_HORIZON, "steps", f"must be at least {FROM_HORIZON}, got {self.steps}")
        first, last = self.columns
        check(0 <= first <= last, "columns", f"must be an ascending range, got {first} to {last}")

    def config(self, arm: str, seed: int, rate: float | None = None) -> PixelTrainingConfig:
        """Build the training configuration of a run.

        Raises:
            InputError: a key is invalid, or the model cannot imagine that many steps
        """
        config = training_config(read_sections(Path(self.base), self.overrides(arm, seed, rate)))
        check(
            config.system == StormSystem.name,
            "base",
            f"system must be {StormSystem.name}, which has latents, got {config.system}",
        )
        most, length = config.model.positions, self.context + self.steps
        check(length <= most, "steps", f"with the context must be at most model.positions ({most}), got {length}")
        return config


def worst_of_copy(figures: ClaimFigures) -> float:
    """Return the largest ratio of open-loop error to that of the last context frame, from FROM_HORIZON on."""
    pairs = zip(figures.open_loop[FROM_HORIZON - 1 :], figures.copy_last[FROM_HORIZON - 1 :], strict=True)
    return max(ours / theirs for ours, theirs in pairs)


@dataclass(frozen=True)
class Claim:
    """Figure of a checkpoint and its threshold, a lower or an upper one."""

    text: str
    value: Callable[[ClaimFigures], float]
    above: float | None = None
    below: float | None = None

    def holds(self, figures: ClaimFigures) -> bool:
        value = self.value(figures)
        return (self.above is None or value >= self.above) and (self.below is None or value < self.below)

    def bar(self) -> str:
        return f"at least {self.above:g}" if self.above is not None else f"below {self.below:g}"


CLAIMS = (
    Claim("frames decoded, error over that of the mean frame", lambda f: f.reconstruction / f.mean_frame, below=1.0),
    Claim("decoded from another's latents, error over that from its own", lambda f: f.shuffled / f.reconstruction, 2.0),
    Claim("groups of latents that tell at least a bit", lambda f: f.used_groups, above=8),
    Claim("KL to the prior over that to uniform chance", lambda f: f.kl / f.kl_uniform, below=0.5),
    Claim("KL to the prior over that to the mean posterior", lambda f: f.kl / f.kl_mean, below=0.5),
    Claim(f"open loop over the last frame seen, worst horizon from {FROM_HORIZON} on", worst_of_copy, below=1.0),
    Claim("agent's columns, error by another's actions over that by its own", lambda f: f.permuted / f.own, above=1.5),
)


def run_claims_study(protocol: ClaimsProtocol, out: Path, workers: int) -> None:
    """Complete the study, then write results.json and report.md to `out`."""
    runs = [make_run(protocol, out, arm, seed) for arm in protocol.arms for seed in protocol.seeds]
    in_processes(partial(complete, protocol), runs, workers)
    by_arm: dict[str, list[ClaimFigures]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, []).append(ClaimFigures(**read_json(_file_of(run))["found"]))
    results = {
        "study": "claims of a world",
        "protocol": asdict(protocol),
        "found": {arm: [asdict(seed) for seed in seeds] for arm, seeds in by_arm.items()},
        "provenance": provenance("lab"),
    }
    write_json(out / "results.json", results)
    write_atomic(out / "report.md", render(protocol, by_arm))


def complete(protocol: ClaimsProtocol, run: TrainingRun) -> None:
    """Train and measure a run; skip work already done with these settings."""
    train(run)
    settings = {key: getattr(protocol, key) for key in ("frames", "sequences", "context", "steps")}
    play = {path.name: count_steps(path) for path in episode_files(Path(protocol.frames))}
    settings |= {"columns": list(protocol.columns), "play": play}
    with locked(run):
        if not _file_of(run).exists() or read_json(_file_of(run))["asked"] != settings:
            write_json(_file_of(run), {"asked": settings, "found": asdict(_measured(protocol, run))})


def _file_of(run: TrainingRun) -> Path:
    return run.folder / "claims.json"


def _measured(protocol: ClaimsProtocol, run: TrainingRun) -> ClaimFigures:
    system = load_checkpoint(run.model, StormSystem.name)
    assert isinstance(system, StormSystem)
    first, last = protocol.columns
    width = system.space.frame_shape[1]
    check(last < width, "columns", f"must be below the frame's width {width}, got {last}")
    frames = protocol.context + protocol.steps
    play = held_out_play(Path(protocol.frames), system, protocol.sequences, frames, run.seed)
    return measure(system, play, protocol.context, range(first, last + 1), run.seed)


def render(protocol: ClaimsProtocol, by_arm: Mapping[str, Sequence[ClaimFigures]]) -> str:
    """Render `report.md`."""
    head = (
        f"# Study: claims of a world\n\n{protocol.question}\n\n{protocol.sequences} sequences of held-out play, "
        f"{protocol.context} seen, {protocol.steps} imagined; seeds {', '.join(map(str, protocol.seeds))}.\n\n"
    )
    columns = ["Claim", "bar", *(f"{arm}, by seed" for arm in by_arm)]
    lines = [[c.text, c.bar(), *(_by_seed(c, seeds) for seeds in by_arm.values())] for c in CLAIMS]
    horizons = ["Open loop, mean over seeds", *(str(1 + step) for step in range(protocol.steps))]
    curves = [[arm, *_curve([f.open_loop for f in seeds])] for arm, seeds in by_arm.items()]
    curves.append(["last frame seen", *_curve([f.copy_last for f in by_arm[protocol.reference]])])
    return head + table(columns, lines) + "\n\n" + table(horizons, curves) + "\n"


def _by_seed(claim: Claim, seeds: Sequence[ClaimFigures]) -> str:
    return ", ".join(f"{claim.value(f):.2f}" + ("" if claim.holds(f) else " (missed)") for f in seeds)


def _curve(seeds: Sequence[Sequence[float]]) -> list[str]:
    return [f"{value:.4f}" for value in np.mean(np.asarray(seeds), 0)]
