"""The study of claims about STORM's world: arms trained by a protocol, measured on the same held-out play."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from eval.scores.tables import table
from lab.pixels.paper_claims import Found, held_out_play, measure
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
"""The first horizon at which open-loop frames have to beat the last frame seen."""


@dataclass(frozen=True, kw_only=True)
class ClaimsProtocol(Protocol):
    arms: dict[str, Arm]
    frames: str
    """Held-out play."""
    columns: tuple[int, int]
    """First and last column of the frame where what the agent moves is."""
    sequences: int = 200
    context: int = 8
    """Frames of a sequence that are seen."""
    steps: int = 15
    """Those imagined after them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("sequences", "context", "steps"):
            check(getattr(self, key) > 0, key, f"{getattr(self, key)} is not above zero")
        check(self.sequences > 1, "sequences", "actions of another sequence need two")
        check(self.steps >= FROM_HORIZON, "steps", f"claims are about horizons from {FROM_HORIZON} on")
        first, last = self.columns
        check(0 <= first <= last, "columns", f"{first} to {last} are none")

    def config(self, arm: str, seed: int, rate: float | None = None) -> PixelTrainingConfig:
        """Raises InputError for a model that cannot be asked so far ahead, too."""
        found = training_config(read_sections(Path(self.base), self.overrides(arm, seed, rate)))
        check(
            found.system == StormSystem.name, "base", f"{found.system} has no latents to ask of, {StormSystem.name} has"
        )
        most, asked = found.model.positions, self.context + self.steps
        check(asked <= most, "steps", f"{asked} frames with the context are more than model.positions, {most}")
        return found


def worst_of_copy(found: Found) -> float:
    """The greatest ratio of open-loop error to that of the last frame seen, from FROM_HORIZON on."""
    pairs = zip(found.open_loop[FROM_HORIZON - 1 :], found.copy_last[FROM_HORIZON - 1 :], strict=True)
    return max(ours / theirs for ours, theirs in pairs)


@dataclass(frozen=True)
class Claim:
    """A number of a checkpoint, and the bound that it has to keep: above it, or below."""

    text: str
    value: Callable[[Found], float]
    above: float | None = None
    below: float | None = None

    def holds(self, found: Found) -> bool:
        value = self.value(found)
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
    """Does what is not done yet, then writes results.json and report.md to `out`."""
    runs = [make_run(protocol, out, arm, seed) for arm in protocol.arms for seed in protocol.seeds]
    in_processes(partial(complete, protocol), runs, workers)
    found: dict[str, list[Found]] = {}
    for run in runs:
        found.setdefault(run.arm, []).append(Found(**read_json(_file_of(run))["found"]))
    results = {
        "study": "claims of a world",
        "protocol": asdict(protocol),
        "found": {arm: [asdict(seed) for seed in seeds] for arm, seeds in found.items()},
        "provenance": provenance("lab"),
    }
    write_json(out / "results.json", results)
    write_atomic(out / "report.md", render(protocol, found))


def complete(protocol: ClaimsProtocol, run: TrainingRun) -> None:
    """Trains and measures; what is done already by these settings is skipped."""
    train(run)
    asked = {key: getattr(protocol, key) for key in ("frames", "sequences", "context", "steps")}
    play = {path.name: count_steps(path) for path in episode_files(Path(protocol.frames))}
    asked |= {"columns": list(protocol.columns), "play": play}
    with locked(run):
        if not _file_of(run).exists() or read_json(_file_of(run))["asked"] != asked:
            write_json(_file_of(run), {"asked": asked, "found": asdict(_measured(protocol, run))})


def _file_of(run: TrainingRun) -> Path:
    return run.folder / "claims.json"


def _measured(protocol: ClaimsProtocol, run: TrainingRun) -> Found:
    system = load_checkpoint(run.model, StormSystem.name)
    assert isinstance(system, StormSystem)
    first, last = protocol.columns
    width = system.space.frame_shape[1]
    check(last < width, "columns", f"{last} is outside the frame's {width}")
    frames = protocol.context + protocol.steps
    play = held_out_play(Path(protocol.frames), system, protocol.sequences, frames, run.seed)
    return measure(system, play, protocol.context, range(first, last + 1), run.seed)


def render(protocol: ClaimsProtocol, found: Mapping[str, Sequence[Found]]) -> str:
    """The content of `report.md`."""
    head = (
        f"# Study: claims of a world\n\n{protocol.question}\n\n{protocol.sequences} sequences of held-out play, "
        f"{protocol.context} seen, {protocol.steps} imagined; seeds {', '.join(map(str, protocol.seeds))}.\n\n"
    )
    columns = ["Claim", "bar", *(f"{arm}, by seed" for arm in found)]
    lines = [[c.text, c.bar(), *(_by_seed(c, seeds) for seeds in found.values())] for c in CLAIMS]
    horizons = ["Open loop, mean over seeds", *(str(1 + step) for step in range(protocol.steps))]
    curves = [[arm, *_curve([f.open_loop for f in seeds])] for arm, seeds in found.items()]
    curves.append(["last frame seen", *_curve([f.copy_last for f in found[protocol.reference]])])
    return head + table(columns, lines) + "\n\n" + table(horizons, curves) + "\n"


def _by_seed(claim: Claim, seeds: Sequence[Found]) -> str:
    return ", ".join(f"{claim.value(f):.2f}" + ("" if claim.holds(f) else " (missed)") for f in seeds)


def _curve(seeds: Sequence[Sequence[float]]) -> list[str]:
    return [f"{value:.4f}" for value in np.mean(np.asarray(seeds), 0)]
