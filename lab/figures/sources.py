"""Sources that figures are recomputed from: the names that the marks on pages use.

A mark names a run by its suite, with `_` for `-`: `scienceworld_500.em(5)` is the exact match of the shipped checkpoint
after five actions in the context `observed`. `.given("full")`, `.by("track")`, `.of("Incline")`, `.at_depth(1)` and
`.before` are the same with another context, model, family, depth, or the weights that shipped before;
`.minus(other, 1, 5)` is the paired difference of two, `mean_of` that of several pairs of disjoint games.
A run that is named by a hash, such as `agents("0fcec8e0", earlier=True)`, says so where these weights do not ship.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil, exp
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from eval.commands.calibration import Calibration, calibrate
from eval.models.base import STRONGEST_BASELINES
from eval.models.checkpoint import checkpoint_hash
from eval.scores.intervals import RESAMPLES, SEED, Values, paired_difference
from eval.scores.predictions import Key
from eval.scores.rows import OVERALL, Item
from eval.scores.suites import suite_names
from lab.estimates import over_runs
from lab.figures.predictions import FOLDER, PREVIOUS, SUFFIX, Rescored, exact_matches
from lab.figures.studies import Copy, Difference, Percent, PixelStudy, Study
from lab.reports.decisions import Accuracy, Decision, accuracy, decisions_of
from lab.reports.error_kinds import error_kind
from lab.reports.papers import printed
from lab.reports.results_page import SHIPPED_NAME, SUITE_TITLES
from loopwm.records.errors import InputError
from loopwm.records.files import read_json, read_json_lines
from loopwm.records.windows import pair_of

DEV = {f"{env}_dev{kind}" for env in ("scienceworld", "alfworld") for kind in ("", "_noisy", "_counterfactual")}
"""Names of the dev suites but those of what people try first."""


class MissingError(InputError):
    """A figure's source is not stored."""


class Store:
    """Stored results of a folder, each read once."""

    def __init__(self, root: Path) -> None:
        self.root, self.data = root, root / "docs/results/data"
        self._results: dict[str, dict[str, Any]] = {}
        self._items: dict[str, list[tuple[str, Item, float]]] = {}
        self._exact: dict[str, dict[Key, tuple[str, float]]] = {}

    @cached_property
    def shipped_hash(self) -> str:
        return checkpoint_hash(self.root / "loopwm/pretrained")

    def weights_of(self, name: str) -> str:
        """Return the hash of a run's weights. Raises MissingError if the run is not stored."""
        path, predictions = self.data / f"{name}.json", self.data / FOLDER / f"{name}{SUFFIX}"
        if path.is_file():
            return str(self.result(name)["provenance"]["model_sha256"])
        if predictions.is_file():
            _, head = next(read_json_lines(predictions))
            return str(head["provenance"]["model_sha256"])
        raise MissingError(f"{name}: not stored")

    def check_weights(self, name: str, weights: str, *, earlier: bool = False) -> None:
        """Raise MissingError if a run is not of the weights that ship, or, if `earlier`, is of them."""
        ships = weights == self.shipped_hash
        if not ships and not earlier:
            raise MissingError(f"{name}: not stored of the weights that ship, but of {weights[:8]}")
        if ships and earlier:
            raise MissingError(f"{name}: not stored of earlier weights, but of those that ship")

    def exact(self, name: str, *, before: bool = False) -> dict[Key, tuple[str, float]]:
        """Return game and exact match by window and horizon. Raises MissingError without predictions."""
        key = f"{PREVIOUS if before else FOLDER}/{name}"
        if key not in self._exact:
            path = self.data / f"{key}{SUFFIX}"
            if not path.is_file():
                raise MissingError(f"{key}: not stored")
            self._exact[key] = exact_matches(path)
        return self._exact[key]

    def result(self, name: str, *, before: bool = False) -> dict[str, Any]:
        """Return a run's result. Raises MissingError if neither it nor its predictions are stored."""
        key = f"{PREVIOUS}/{name}" if before else name
        if key not in self._results:
            folder = self.data / (PREVIOUS if before else FOLDER)
            path, predictions = self.data / f"{key}.json", folder / f"{name}{SUFFIX}"
            if path.is_file():
                self._results[key] = read_json(path)
            elif predictions.is_file():
                self._results[key] = Rescored.read(predictions).results()
            else:
                raise MissingError(f"{key}: not stored")
        return self._results[key]

    def items(self, name: str) -> list[tuple[str, Item, float]]:
        """Return (last observation, scored prediction, trust or NaN) of each. Raises MissingError if not stored."""
        if name not in self._items:
            path = self.data / FOLDER / f"{name}{SUFFIX}"
            if not path.is_file():
                raise MissingError(f"{FOLDER}/{name}: not stored")
            run = Rescored.read(path)
            self._items[name] = [
                (
                    window["history"][-1]["observation"],
                    item,
                    run.records[item.window_id, item.horizon].get("trust", float("nan")),
                )
                for window, item in run.items()
            ]
        return self._items[name]

    def decisions(self, name: str) -> list[Decision]:
        """Return the decisions of a run on pairs. Raises MissingError if its predictions are not stored."""
        path = self.data / FOLDER / f"{name}{SUFFIX}"
        if not path.is_file():
            raise MissingError(f"{FOLDER}/{name}: not stored")
        run = Rescored.read(path)
        return decisions_of(run.windows, run.records)

    def run_of(self, path: str, *, earlier: bool) -> dict[str, Any]:
        """Read a stored file that has the hash of its weights. Raises MissingError if they are others than named."""
        result: dict[str, Any] = self.json(path)
        self.check_weights(path, result.get("model_sha256", "unknown"), earlier=earlier)
        return result

    def json(self, path: str) -> Any:
        """Read a stored file of another kind. Raises MissingError without it."""
        if not (self.data / path).is_file():
            raise MissingError(f"{path}: not stored")
        return read_json(self.data / path)


@dataclass(frozen=True)
class Run:
    """Figures of one kept run; horizons count actions."""

    store: Store
    suite: str
    context: str = "observed"
    model: str = SHIPPED_NAME
    family: str = OVERALL
    depth: int = 2
    earlier: bool = False

    def given(self, context: str) -> Run:
        return replace(self, context=context)

    def by(self, model: str) -> Run:
        return replace(self, model=model)

    def of(self, family: str) -> Run:
        return replace(self, family=family)

    def at_depth(self, depth: int) -> Run:
        return replace(self, depth=depth)

    @property
    def before(self) -> Run:
        return replace(self, earlier=True)

    @property
    def name(self) -> str:
        name = f"{self.suite}--{self.context}--{self.model}"
        return name if self.suite in SUITE_TITLES or self.model != SHIPPED_NAME else f"{name}--T{self.depth}"

    @property
    def result(self) -> dict[str, Any]:
        """Return the stored result. Raises MissingError without one."""
        self._check_weights()
        return self.store.result(self.name, before=self.earlier)

    def _check_weights(self) -> None:
        """Raise MissingError if the run should be of the weights that ship, and is of others."""
        if self.model == SHIPPED_NAME and not self.earlier:
            self.store.check_weights(self.name, self.store.weights_of(self.name))

    @property
    def best_baseline(self) -> Run:
        """Return the strongest baseline of the environment in the context `observed`."""
        return self.by(STRONGEST_BASELINES[self.suite.partition("_")[0].partition("-")[0]])

    def minus(self, other: Run, *horizons: int) -> Difference:
        """Return the paired difference of exact match, meaned over (all shared) horizons; of pairs, of both right."""
        ours, theirs, games = self._paired(other, horizons)
        d = paired_difference("em", 0, ours, theirs, games)
        mean, low, high = (100 * value for value in (d.difference, d.low, d.high))
        return Difference(mean, low, high, Percent(100 * d.a), Percent(100 * d.b), d.n)

    def _paired(self, other: Run, horizons: tuple[int, ...] = ()) -> tuple[Values, Values, list[str]]:
        """Return both runs' exact match of shared windows or pairs, and their games. Raises MissingError without."""
        shared = {k for _, k in self._scores} & {k for _, k in other._scores}
        a, b = (run._exact(horizons or tuple(shared)) for run in (self, other))
        both = sorted(a.keys() & b.keys())
        if not both:
            raise MissingError(f"{self.name}: no window in common with {other.name}")
        ours, theirs = (np.array([run[name][1] for name in both]) for run in (a, b))
        return ours, theirs, [a[name][0] for name in both]

    @property
    def gain(self) -> Difference:
        """Return the difference from the weights that shipped before, over all horizons."""
        return self.minus(self.before)

    @property
    def _scores(self) -> dict[Key, tuple[str, float]]:
        self._check_weights()
        return self.store.exact(self.name, before=self.earlier)

    def _exact(self, horizons: tuple[int, ...]) -> dict[str, tuple[str, float]]:
        """Return game and score by window, or by pair."""
        scores: dict[str, list[float]] = {}
        games = {}
        for (name, horizon), (game, em) in self._scores.items():
            if horizon in horizons:
                scores.setdefault(pair_of(name), []).append(em)
                games[pair_of(name)] = game
        paired = "counterfactual" in self.suite
        return {
            name: (games[name], min(values) if paired else float(np.mean(values)))
            for name, values in scores.items()
            if not paired or len(values) == 2
        }

    def row(self, horizon: int) -> dict[str, Any]:
        """Return the row of the family at a horizon. Raises MissingError without one."""
        rows = self.result["rows"]
        row = next((row for row in rows if (row["family"], row["horizon"]) == (self.family, horizon)), None)
        if row is None:
            raise MissingError(f"{self.name}: no row of {self.family} after {horizon}")
        return row

    def n(self, horizon: int) -> int:
        return int(self.row(horizon)["n"])

    def em(self, horizon: int, split: str = "") -> Percent | None:
        """Return the exact match of all or of a split such as `novel`, None without such items."""
        share = self.row(horizon).get(f"em_{split}" if split else "em")
        return None if share is None else Percent(100 * share)

    def n_of(self, split: str, horizon: int) -> int:
        return int(self.row(horizon)[f"n_{split}"])

    def true(self, kind: str, horizon: int) -> int:
        """Return how many refusals, ends or rewards (other than 0) there are."""
        row = self.row(horizon)[kind]
        return int(row["n_nonzero"] if kind == "reward" else row["n"])

    def found(self, kind: str, horizon: int) -> int:
        """Return how many of them were predicted right."""
        row = self.row(horizon)[kind]
        return round(row.get("accuracy_nonzero" if kind == "reward" else "recall", 0) * self.true(kind, horizon))

    def false_alarms(self, kind: str, horizon: int) -> int:
        return int(self.row(horizon)[kind]["predicted"]) - self.found(kind, horizon)

    def wrong(self, horizon: int, kind: str = "") -> int:
        """Return the number of wrong predictions, of all or of a kind of error."""
        if not kind:
            return round(self.n(horizon) * (1 - self.row(horizon)["em"]))
        wrong = [(last, item) for last, item, _ in self._items() if item.horizon == horizon and not item.scores["em"]]
        kinds = [error_kind(item.game.partition("/")[0], item.prediction, item.reference, last) for last, item in wrong]
        return kinds.count(kind)  # type: ignore[arg-type]

    def wrong_unanswerable(self, horizon: int) -> int:
        """Return the number of wrong predictions of what nothing seen determines."""
        row = self.row(horizon)
        return self.wrong(horizon) - round(row["n_decidable"] * (1 - row["em_decidable"]))

    @property
    def pairs(self) -> int:
        return int(self.result["pairs"]["n"])

    @property
    def both(self) -> Percent:
        """Return the share of pairs with both answers right."""
        return Percent(100 * self.result["pairs"]["both"])

    def _items(self) -> list[tuple[str, Item, float]]:
        self._check_weights()
        return [entry for entry in self.store.items(self.name) if self.family in (OVERALL, entry[1].family)]


def trust(*runs: Run, horizons: tuple[int, ...] | None = None) -> Calibration:
    """Return the calibration of the trust in the predictions of runs, at some horizons."""
    entries = [entry for run in runs for entry in run._items() if horizons is None or entry[1].horizon in horizons]
    values = np.nan_to_num(np.array([value for _, _, value in entries]))  # a text that was cut cannot be right
    return calibrate(values, np.array([item.scores["em"] == 1 for _, item, _ in entries]))


def decided(run: Run, criterion: str = "points, then refusals") -> Accuracy:
    """Return how often a run prefers the better plan of its suite's pairs. Raises MissingError if not stored."""
    run._check_weights()
    result = accuracy(run.store.decisions(run.name), criterion)
    if result is None:
        raise MissingError(f"{run.name}: no pairs differ in {criterion}")
    return result


def mean_of(*differences: Difference) -> Difference:
    """Return the mean of differences over disjoint games, with normal 95 % bounds from the widths of theirs."""
    margin = sum(((d.high - d.low) / 2) ** 2 for d in differences) ** 0.5 / len(differences)
    mean = sum(d.mean for d in differences) / len(differences)
    return Difference(mean, mean - margin, mean + margin)


def mean_gain(runs: Sequence[Run]) -> Difference:
    """Return the mean over suites of what the weights that ship gained, with 95 % bounds.

    Suites of a world share games: these are resampled once for all of its suites. Worlds are resampled independently.
    """
    worlds: dict[str, list[tuple[Values, Sequence[str]]]] = {}
    for run in runs:
        ours, theirs, games = run._paired(run.before)
        worlds.setdefault(run.suite.partition("-")[0], []).append((ours - theirs, games))
    mean = float(np.mean([values.mean() for suites in worlds.values() for values, _ in suites]))
    sums = np.sum([_resampled_sum(suites, i) for i, (_, suites) in enumerate(sorted(worlds.items()))], axis=0)
    low, high = np.percentile(sums, [2.5, 97.5]) / len(runs)
    return Difference(100 * mean, 100 * float(low), 100 * float(high))


def _resampled_sum(suites: Sequence[tuple[Values, Sequence[str]]], world: int) -> Values:
    """Return the sum of the suites' means by resample of all games that any has, (RESAMPLES,). world: of the seed."""
    union = {game: i for i, game in enumerate(sorted({game for _, games in suites for game in games}))}
    counts = np.random.default_rng((SEED, world)).multinomial(
        len(union), np.full(len(union), 1 / len(union)), RESAMPLES
    )
    sums = np.zeros(RESAMPLES)
    for values, games in suites:
        weights = counts[:, [union[game] for game in games]]
        sums += weights @ values / weights.sum(axis=1)
    return sums


@dataclass(frozen=True)
class Agents:
    """Scores of agents that look ahead in a checkpoint.

    weights: first digits of its hash. earlier: True unless it ships, or any use raises MissingError.
    """

    store: Store
    weights: str
    earlier: bool = False

    @cached_property
    def _result(self) -> dict[str, Any]:
        return self.store.run_of(f"agents/look-ahead--{self.weights}.json", earlier=self.earlier)

    @property
    def games(self) -> int:
        return int(self._result["n"])

    def score(self, arm: str) -> float:
        return float(self._result["arms"][arm]["mean"])

    def lost(self, arm: str) -> float:
        """Return the per cent of games that ended below zero."""
        return float(self._result["arms"][arm]["lost"])

    def refused(self, arm: str) -> float:
        return float(self._result["arms"][arm]["refused"])

    def steps(self, arm: str) -> float:
        return float(self._result["arms"][arm]["steps"])

    def difference(self, a: str, b: str, measure: str | None = None) -> list[float]:
        """Return mean and bounds of a - b. measure: lost, refused or steps; None: the score."""
        row = next(row for row in self._result["differences"] if (row["a"], row["b"]) == (a, b))
        row = row[measure] if measure else row
        return [row["mean"], *row["ci95"]]


@dataclass(frozen=True)
class Search:
    """Real steps of an agent of ALFWorld that searches. weights, earlier: as of `Agents`."""

    store: Store
    weights: str
    earlier: bool = False

    @cached_property
    def _result(self) -> dict[str, Any]:
        return self.store.run_of(f"searches/alfworld--{self.weights}.json", earlier=self.earlier)

    @property
    def games(self) -> int:
        return int(self._result["n"])

    def steps(self, arm: str) -> float:
        return float(self._result["arms"][arm]["steps"]["mean"])

    def won(self, arm: str) -> float:
        """Return the per cent of games that were won."""
        return float(self._result["arms"][arm]["won"]["mean"])

    def difference(self, arm: str) -> list[float]:
        """Return mean and bounds of the model's steps less those of an arm."""
        row = self._result["differences"][arm]["steps"]
        return [row["mean"], *row["ci95"]]


@dataclass(frozen=True)
class Policies:
    """Games of ALFWorld played by policies that learn in imagination, the mean of all seeds or one seed.

    weights, earlier: as of `Agents`.
    """

    store: Store
    weights: str
    seed: int | None = None
    earlier: bool = False

    @cached_property
    def _results(self) -> list[dict[str, Any]]:
        pattern = f"policies/alfworld--{self.weights}--seed-{'*' if self.seed is None else self.seed}.json"
        names = [str(path.relative_to(self.store.data)) for path in sorted(self.store.data.glob(pattern))]
        if not names:
            raise MissingError(f"{pattern}: not stored")
        return [self.store.run_of(name, earlier=self.earlier) for name in names]

    @cached_property
    def _mean(self) -> dict[str, Any]:
        return over_runs([result["by_game"] for result in self._results])

    @property
    def games(self) -> int:
        return int(self._results[0]["n"])

    @property
    def demonstrations(self) -> int:
        return int(self._results[0]["demonstrations"])

    @property
    def seeds(self) -> int:
        return len(self._results)

    def mean(self, arm: str, measure: str) -> float:
        """Return the per cent won or the real steps a game."""
        return float(self._mean["arms"][arm][measure]["mean"])

    def difference(self, measure: str) -> list[float]:
        """Return mean and bounds of what learning in imagination changed."""
        row = self._mean["difference"][measure]
        return [row["mean"], *row["ci95"]]


@dataclass(frozen=True)
class Outside:
    """Trust of noisy dev windows in which one thing does not belong to the world (`lab trust-outside`)."""

    store: Store
    condition: str

    def trust(self, env: str) -> str:
        row = self._row(env)["trust"]
        low, high = row["ci95"]
        return f"{100 * row['mean']:.1f} ({100 * low:.1f}-{100 * high:.1f})"

    def high(self, env: str) -> Percent:
        """Return the share of answers with a trust of 0.9 or more."""
        return Percent(100 * self._row(env)["high"]["mean"])

    def right(self, env: str) -> Percent | None:
        """Return exact match, or None where it is not known what happens."""
        row = self._row(env).get("exact")
        return None if row is None else Percent(100 * row["mean"])

    def _row(self, env: str) -> dict[str, Any]:
        row: dict[str, Any] = self.store.json("trust/outside.json")["worlds"][env][self.condition]
        return row


class Weights:
    """Counts of the shipped weights."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files = sorted(folder.glob("*.safetensors"))

    @cached_property
    def _sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for path in self.files:
            with path.open("rb") as file:
                header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
            sizes |= {name: int(np.prod(t["shape"])) for name, t in header.items() if name != "__metadata__"}
        return sizes

    @property
    def parameters(self) -> int:
        return sum(self._sizes.values())

    @property
    def without_embeddings(self) -> int:
        return sum(size for name, size in self._sizes.items() if "embed_tokens" not in name)

    @property
    def mean_loops(self) -> float:
        """Return the mean of max(1, Poisson(mu_rec)), the loops of a row in training."""
        rate = float(self.config["mu_rec"])
        return rate + exp(-rate)

    @property
    def mebibytes(self) -> float:
        return sum(path.stat().st_size for path in self.files) / 2**20

    @cached_property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = read_json(self._folder / "config.json")
        return config


class Training:
    """Dev rows of a training run that was kept, by step."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = {row["step"]: row for row in rows}

    def at(self, step: int) -> dict[str, Any]:
        return self._rows[step]


def read_config(root: Path, name: str) -> dict[str, Any]:
    """Return a file of configs/, named without its ending."""
    config: dict[str, Any] = yaml.safe_load((root / f"configs/{name}.yaml").read_text(encoding="utf-8"))
    return config


def interactions(config: dict[str, Any]) -> int:
    """Return the interactions of an agent's run: whole rounds of all environments."""
    real = config["real"]
    rounds = real["count"] * real["steps"]
    return int(rounds * ceil(real["total"] / rounds))


def names_in(root: Path) -> dict[str, Any]:
    """Return every name that a mark may use."""
    store, weights = Store(root), Weights(root / "loopwm/pretrained")
    runs = {
        suite.replace("-", "_"): Run(store, suite, depth=weights.config["default_depth"]) for suite in suite_names()
    }
    functions: tuple[Callable[..., Any], ...] = (min, max, sum, len, round, abs, float, range, trust, decided, mean_of)
    return {
        **runs,
        **{function.__name__: function for function in functions},
        "dev_gain": lambda: mean_gain([run for name, run in runs.items() if "_dev" in name]),
        "paper_em": lambda environment: printed(environment, "LoopWM", 5, OVERALL)[0].figures["em"],
        "dev_trust": lambda: trust(*(run for name, run in runs.items() if name in DEV)),
        "probe_trust": lambda: trust(*(run for name, run in runs.items() if name.endswith("_dev_probe"))),
        "agents": partial(Agents, store),
        "search": partial(Search, store),
        "outside": partial(Outside, store),
        "policies": partial(Policies, store),
        "weights": weights,
        "training": lambda name: Training(store.json(f"training/{name}.json")),
        "study": lambda name: Study(store.json(f"studies/{name}.json"), copied=False),
        "pixel_study": lambda name: PixelStudy(store.json(f"pixels/{name}.json")),
        "copied_study": lambda name: Study(store.json(f"studies/{name}.json"), copied=True),
        "copied": lambda name: Copy(**store.json(f"copied/{name}.json")["table"]),
        "config": partial(read_config, root),
        "interactions": lambda name: interactions(read_config(root, name)),
        "stored": store.json,
    }
