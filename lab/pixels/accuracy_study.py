"""Accuracy study: train every arm with every seed, and score every decoder.

The study's folder contains all finished work: OUT/ARM/seed-N is a training run with `accuracy.npz`, the correct
held-out transitions and the settings they were scored with; a run scored with other settings is scored again.
Transitions of one episode are correlated, so intervals resample episodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from eval.scores.tables import table
from lab.pixels.accuracy import Accuracy, HeldOut, Hits, accuracy, held_out, permuted_actions, score
from lab.pixels.accuracy_protocol import AccuracyProtocol
from lab.pixels.decoders import StudyDecoderConfig
from lab.reports.figures import save_figure
from lab.studies.differences import SeedDifference
from lab.studies.study_report import DIFFERENCE_HEADER, difference_cells, plot_forest
from lab.studies.training_runs import TrainingRun, in_processes, locked, make_run, train
from loopwm.pixel.checkpoint import load_checkpoint
from loopwm.pixel.twisted.decoding import Decoder
from loopwm.pixel.twisted.system import TwistedSystem
from loopwm.records.files import atomic_write, write_atomic, write_json
from loopwm.records.provenance import provenance

PERMUTED = "permuted actions"
PARTS = ("frame", "centre")


@dataclass(frozen=True)
class AccuracyRow:
    """Accuracy of one arm and decoder. part: `frame` or `centre`; accuracy: mean over seeds."""

    arm: str
    decoder: str
    part: str
    accuracy: Accuracy
    by_seed: tuple[float, ...]
    """Accuracy on all transitions by seed."""


@dataclass(frozen=True)
class AccuracyDifference(SeedDifference):
    """Difference ours - theirs over the same transitions; bounds over their episodes, NaN if there is only one."""

    ours: str
    theirs: str
    part: str
    creatures: str
    """Transitions: `all`, or those `with` or `without` a creature before them."""


BySeed = list[Hits]
"""Hits of each seed."""


@dataclass(frozen=True, eq=False)
class HeldOutFacts:
    """Held-out transitions (N,): creature before the frame, and episode number."""

    creature: NDArray[np.bool_]
    episode: NDArray[np.int64]


def run_accuracy_study(protocol: AccuracyProtocol, out: Path, workers: int) -> None:
    """Complete the study, then write results.json, report.md and plot.png to `out`."""
    runs = [make_run(protocol, out, arm, seed) for arm in protocol.arms for seed in protocol.seeds]
    in_processes(partial(complete, protocol), runs, workers)
    hits, facts = read_hits(runs)
    rows = [row for arm in hits for row in _rows(arm, hits[arm], facts.creature)]
    compared = _compared(protocol, hits, facts)
    results = {
        "study": "twisted accuracy",
        "protocol": asdict(protocol),
        "transitions": len(facts.creature),
        "with_creatures": int(facts.creature.sum()),
        "rows": [asdict(row) for row in rows],
        "differences": [asdict(difference) for difference in compared],
        "provenance": provenance("lab"),
    }
    write_json(out / "results.json", results)
    write_atomic(out / "report.md", render(results, rows, compared))
    plot(out / "plot.png", compared)


SCORED_BY = (
    "frames", "transitions", "run_frames", "centre", "decoders", "compared_decoder", "reference", "grid_c_d",
    "grid_c_w",
)  # fmt: skip
"""Keys of a protocol that determine `accuracy.npz` of a trained run."""


def complete(protocol: AccuracyProtocol, run: TrainingRun) -> None:
    """Train and score a run; skip work already done with these settings."""
    train(run)
    settings = json.dumps({key: asdict(protocol)[key] for key in SCORED_BY})
    with locked(run):
        if not _file_of(run).exists() or _scored_by(run) != settings:
            _write_hits(protocol, run, settings)


def _scored_by(run: TrainingRun) -> str | None:
    """Return the settings that a run was scored with; None if the file has none."""
    with np.load(_file_of(run)) as arrays:
        return str(arrays["settings"]) if "settings" in arrays else None


def _write_hits(protocol: AccuracyProtocol, run: TrainingRun, settings: str) -> None:
    system = load_checkpoint(run.model, TwistedSystem.name)
    assert isinstance(system, TwistedSystem)
    data = held_out(Path(protocol.frames), system, protocol.run_frames, protocol.transitions)
    hits = _all_hits(protocol, run, system, data)
    arrays = {f"{name}/{part}": getattr(of_decoder, part) for name, of_decoder in hits.items() for part in PARTS}
    arrays |= {"creature": data.creature.flatten(), "episode": data.episode, "settings": np.array(settings)}
    with atomic_write(_file_of(run)) as file:
        np.savez_compressed(file, **arrays)


def _file_of(run: TrainingRun) -> Path:
    return run.folder / "accuracy.npz"


def read_hits(runs: Sequence[TrainingRun]) -> tuple[dict[str, dict[str, BySeed]], HeldOutFacts]:
    """Read the hits of trained runs by arm and decoder, and the held-out transitions."""
    by_arm: dict[str, dict[str, BySeed]] = {}
    for run in runs:
        with np.load(_file_of(run)) as arrays:
            for name in dict.fromkeys(name.rpartition("/")[0] for name in arrays if "/" in name):
                hits = Hits(arrays[f"{name}/frame"], arrays[f"{name}/centre"])
                by_arm.setdefault(run.arm, {}).setdefault(name, []).append(hits)
            facts = HeldOutFacts(arrays["creature"], arrays["episode"])
    return by_arm, facts


def _decoders(protocol: AccuracyProtocol, arm: str, grid: tuple[int, int]) -> dict[str, Decoder]:
    configs = dict(protocol.decoders)
    if arm == protocol.reference:
        configs |= {
            grid_name(c_d, c_w): StudyDecoderConfig("transport", c_d, c_w)
            for c_d in protocol.grid_c_d
            for c_w in protocol.grid_c_w
        }
    region = protocol.centre.region(grid)
    return {name: config.decoder(grid, region) for name, config in configs.items()}


def grid_name(c_d: float, c_w: float) -> str:
    return f"transport c_d={c_d:g} c_w={c_w:g}"


def _all_hits(protocol: AccuracyProtocol, run: TrainingRun, system: TwistedSystem, data: HeldOut) -> dict[str, Hits]:
    grid = system.tokenizer.grid
    decoders, centre = _decoders(protocol, run.arm, grid), protocol.centre.region(grid)
    hits = score(system, data, decoders, centre, run.seed)
    if run.arm == protocol.reference:
        one = {PERMUTED: decoders[protocol.compared_decoder]}
        hits |= score(system, permuted_actions(data, run.seed), one, centre, run.seed)
    return hits


def _rows(arm: str, by_decoder: Mapping[str, BySeed], creature: NDArray[np.bool_]) -> list[AccuracyRow]:
    rows = []
    for decoder, seeds in by_decoder.items():
        for part in PARTS:
            by_seed = [accuracy(getattr(hits, part), creature) for hits in seeds]
            shares = zip(*((a.all, a.with_creatures, a.without_creatures) for a in by_seed), strict=True)
            mean = Accuracy(len(creature), *(float(np.mean(share)) for share in shares))
            rows.append(AccuracyRow(arm, decoder, part, mean, tuple(a.all for a in by_seed)))
    return rows


def _compared(
    protocol: AccuracyProtocol, hits: Mapping[str, Mapping[str, BySeed]], facts: HeldOutFacts
) -> list[AccuracyDifference]:
    """Compare decoders on the reference arm, and arms by the compared decoder, with the reference."""
    decoders = hits[protocol.reference]
    arms = {arm: of_arm[protocol.compared_decoder] for arm, of_arm in hits.items()}
    return [
        difference
        for sides, reference in ((decoders, protocol.reference_decoder), (arms, protocol.reference))
        for name in sides
        if name != reference
        for difference in _differences((name, reference), sides[name], sides[reference], facts)
    ]


def _differences(names: tuple[str, str], ours: BySeed, theirs: BySeed, facts: HeldOutFacts) -> list[AccuracyDifference]:
    subsets = {"all": np.ones_like(facts.creature), "with": facts.creature, "without": ~facts.creature}
    differences = []
    for part in PARTS:
        for label, chosen in subsets.items():
            if chosen.any():
                a, b = (np.stack([getattr(hits, part)[chosen] for hits in side]) for side in (ours, theirs))
                compared = {"ours": names[0], "theirs": names[1], "part": part, "creatures": label}
                episodes = facts.episode[chosen].astype(str).tolist()
                differences.append(AccuracyDifference.of(a.astype(float), b.astype(float), episodes, **compared))
    return differences


def plot(path: Path, compared: Sequence[AccuracyDifference]) -> None:
    """Plot differences in whole frames over all transitions."""
    shown = {f"{d.ours} - {d.theirs}": d for d in compared if (d.part, d.creatures) == ("frame", "all")}
    canvas = Figure(figsize=(9, 1 + 0.25 * len(shown)), layout="constrained")
    axes = canvas.subplots()
    plot_forest(axes, shown)
    axes.set(xlabel="difference in the share of frames that are right")
    save_figure(path, canvas)


def render(results: Mapping[str, Any], rows: Sequence[AccuracyRow], compared: Sequence[AccuracyDifference]) -> str:
    """Render `report.md`."""
    question, count, with_creatures = (
        results["protocol"]["question"],
        results["transitions"],
        results["with_creatures"],
    )
    head = (
        f"# Study: accuracy of the next frame\n\n{question}\n\n{count} held-out transitions, {with_creatures} of them "
        "from a frame with a creature. A frame is right where every token is, its centre where every token is that "
        "transport may move. Figures are percent, means over seeds.\n"
    )
    header = ["Arm", "Decoder"]
    header += [f"{part}, {label}" for part in PARTS for label in ("all", "with creatures", "without")]
    by_name: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        a = row.accuracy
        by_name.setdefault((row.arm, row.decoder), []).extend(
            f"{100 * share:.1f}" for share in (a.all, a.with_creatures, a.without_creatures)
        )
    lines = [[f"{d.ours} - {d.theirs}", d.part, d.creatures, *difference_cells(d, "em")] for d in compared]
    names = ["Difference", "Part", "Creatures", "Points", *DIFFERENCE_HEADER]
    accuracies = table(header, [[*name, *cells] for name, cells in by_name.items()])
    return "\n".join((head, accuracies, table(names, lines)))
