"""The accuracy study: every arm with every seed is trained, and every decoder judged on what it predicts.

Everything that is finished lies in the study's folder: OUT/ARM/seed-N holds a training run and `accuracy.npz`, whether
each held-out transition was predicted right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.pixels.accuracy import Accuracy, HeldOut, Hits, accuracy, held_out, permuted_actions, score
from eval.pixels.protocol import Protocol
from eval.scores.intervals import paired_difference
from eval.scores.tables import table
from eval.studies.training import TrainingRun, train
from loopwm.pixel.checkpoint import load_checkpoint
from loopwm.pixel.twisted.decoding import Decoder, DecoderConfig
from loopwm.pixel.twisted.system import TwistedSystem
from loopwm.records.files import atomic_write, write_atomic, write_json
from loopwm.records.provenance import provenance

PERMUTED = "permuted actions"
PARTS = ("frame", "centre")


@dataclass(frozen=True)
class Row:
    """Of one arm and decoder: `frame` or `centre`; accuracy: the mean over seeds of each share."""

    arm: str
    decoder: str
    part: str
    accuracy: Accuracy
    by_seed: tuple[float, ...]
    """Shares of all transitions."""


@dataclass(frozen=True)
class PairedDifference:
    """ours - theirs over the same transitions and seeds; low and high are 95 % bounds of the mean over seeds."""

    ours: str
    theirs: str
    part: str
    creatures: str
    """Transitions: `all`, or those `with` or `without` a creature before them."""
    difference: float
    low: float
    high: float
    by_seed: tuple[float, ...]
    counts: bool


Found = dict[str, list[Hits]]
"""By decoder, one for each seed."""


def run_study(protocol: Protocol, out: Path) -> None:
    """Does what is not done yet, then writes results.json and report.md to `out`."""
    found, creature = {}, np.zeros(0, dtype=bool)
    for arm in protocol.arms:
        seeds = []
        for seed in protocol.seeds:
            run = _run(protocol, arm, seed, out)
            train(run)
            hits, creature = _scored(protocol, run)
            seeds.append(hits)
        found[arm] = {decoder: [hits[decoder] for hits in seeds] for decoder in seeds[0]}
    rows = [row for arm in found for row in _rows(arm, found[arm], creature)]
    compared = [*_decoder_differences(protocol, found, creature), *_arm_differences(protocol, found, creature)]
    results = {
        "study": "twisted accuracy",
        "protocol": asdict(protocol),
        "transitions": len(creature),
        "with_creatures": int(creature.sum()),
        "rows": [asdict(row) for row in rows],
        "differences": [asdict(difference) for difference in compared],
        "provenance": provenance("eval"),
    }
    write_json(out / "results.json", results)
    write_atomic(out / "report.md", render(results, rows, compared))


def _run(protocol: Protocol, arm: str, seed: int, out: Path) -> TrainingRun:
    overrides, config = protocol.overrides(arm, seed), protocol.config(arm, seed)
    return TrainingRun(arm, seed, None, out / arm / f"seed-{seed}", Path(protocol.base), overrides, config)


def _decoders(protocol: Protocol, arm: str, grid: tuple[int, int]) -> dict[str, Decoder]:
    configs = dict(protocol.decoders)
    if arm == protocol.reference:
        configs |= {
            grid_name(c_d, c_w): DecoderConfig("transport", c_d, c_w)
            for c_d in protocol.grid_c_d
            for c_w in protocol.grid_c_w
        }
    region = protocol.centre.region(grid)
    return {name: config.decoder(grid, region) for name, config in configs.items()}


def grid_name(c_d: float, c_w: float) -> str:
    return f"transport c_d={c_d:g} c_w={c_w:g}"


def _scored(protocol: Protocol, run: TrainingRun) -> tuple[dict[str, Hits], NDArray[np.bool_]]:
    """Hits of a trained run by decoder, and which transitions start with a creature; kept in the run's folder."""
    path = run.folder / "accuracy.npz"
    if not path.exists():
        system = load_checkpoint(run.model, TwistedSystem.name)
        assert isinstance(system, TwistedSystem)
        data = held_out(Path(protocol.frames), system, protocol.run_frames, protocol.transitions)
        _write(path, _all_hits(protocol, run, system, data), data.creature.flatten())
    with np.load(path) as arrays:
        names = list(dict.fromkeys(name.rpartition("/")[0] for name in arrays if "/" in name))
        hits = {name: Hits(arrays[f"{name}/frame"], arrays[f"{name}/centre"]) for name in names}
        return hits, arrays["creature"]


def _all_hits(protocol: Protocol, run: TrainingRun, system: TwistedSystem, data: HeldOut) -> dict[str, Hits]:
    grid = system.tokenizer.grid
    decoders, centre = _decoders(protocol, run.arm, grid), protocol.centre.region(grid)
    hits = score(system, data, decoders, centre, run.seed)
    if run.arm == protocol.reference:
        one = {PERMUTED: decoders[protocol.compared_decoder]}
        hits |= score(system, permuted_actions(data, run.seed), one, centre, run.seed)
    return hits


def _write(path: Path, hits: Mapping[str, Hits], creature: NDArray[np.bool_]) -> None:
    arrays = {f"{name}/{part}": getattr(found, part) for name, found in hits.items() for part in PARTS}
    with atomic_write(path) as file:
        np.savez_compressed(file, creature=creature, **arrays)


def _rows(arm: str, found: Found, creature: NDArray[np.bool_]) -> list[Row]:
    rows = []
    for decoder, seeds in found.items():
        for part in PARTS:
            by_seed = [accuracy(getattr(hits, part), creature) for hits in seeds]
            shares = zip(*((a.all, a.with_creatures, a.without_creatures) for a in by_seed), strict=True)
            mean = Accuracy(len(creature), *(float(np.mean(share)) for share in shares))
            rows.append(Row(arm, decoder, part, mean, tuple(a.all for a in by_seed)))
    return rows


def _decoder_differences(
    protocol: Protocol, found: Mapping[str, Found], creature: NDArray[np.bool_]
) -> list[PairedDifference]:
    """On the reference arm, every decoder against the reference decoder."""
    of_arm = found[protocol.reference]
    theirs = of_arm[protocol.reference_decoder]
    others = [name for name in of_arm if name != protocol.reference_decoder]
    return [
        difference
        for name in others
        for difference in _differences((name, protocol.reference_decoder), of_arm[name], theirs, creature)
    ]


def _arm_differences(
    protocol: Protocol, found: Mapping[str, Found], creature: NDArray[np.bool_]
) -> list[PairedDifference]:
    """By the compared decoder, every arm against the reference arm."""
    theirs = found[protocol.reference][protocol.compared_decoder]
    return [
        difference
        for arm in found
        if arm != protocol.reference
        for difference in _differences(
            (arm, protocol.reference), found[arm][protocol.compared_decoder], theirs, creature
        )
    ]


def _differences(
    names: tuple[str, str], ours: Sequence[Hits], theirs: Sequence[Hits], creature: NDArray[np.bool_]
) -> list[PairedDifference]:
    everywhere = np.ones_like(creature)
    subsets = {"all": everywhere, "with": creature, "without": ~creature}
    found = []
    for part in PARTS:
        for label, chosen in subsets.items():
            if chosen.any():
                a, b = (
                    np.stack([getattr(hits, part)[chosen] for hits in side]).astype(float) for side in (ours, theirs)
                )
                paired = paired_difference(part, 0, a.mean(0), b.mean(0), range(a.shape[1]))
                by_seed = (a - b).mean(1)
                one_sign = bool((by_seed > 0).all() or (by_seed < 0).all())
                counts = one_sign and (paired.low > 0 or paired.high < 0)
                bounds = (paired.difference, paired.low, paired.high)
                found.append(PairedDifference(*names, part, label, *bounds, tuple(by_seed.tolist()), counts))
    return found


def render(results: Mapping[str, Any], rows: Sequence[Row], compared: Sequence[PairedDifference]) -> str:
    """The content of `report.md`."""
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
    lines = [
        [
            f"{d.ours} - {d.theirs}",
            d.part,
            d.creatures,
            f"{100 * d.difference:+.1f}",
            f"{100 * d.low:+.1f} to {100 * d.high:+.1f}",
            " ".join(f"{100 * value:+.1f}" for value in d.by_seed),
            "yes" if d.counts else "no",
        ]
        for d in compared
    ]
    names = ["Difference", "Part", "Creatures", "Points", "95 %", "by seed", "a difference"]
    accuracies = table(header, [[*name, *cells] for name, cells in by_name.items()])
    return "\n".join((head, accuracies, table(names, lines)))
