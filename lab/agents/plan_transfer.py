"""Measure the consistency ratio: how often plans made inside the model succeed in the real world.

The same agent plays every game twice: in the real world (Real), and in the model, where imagined observations are fed
back (WM). The actions chosen in the model are then replayed in the real world (W2R). Each is a success rate; the
consistency ratio is W2R / Real, as in Word2World (arXiv:2512.18832).

Writes results.json, report.md and plays.jsonl to --out. The same command resumes an interrupted run; a folder of other
arguments is an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from eval.models.base import Predictor
from eval.models.options import (
    DEFAULT_CACHE,
    ModelOptions,
    add_model_arguments,
    make_predictor,
)
from eval.scores.intervals import RESAMPLES, Values, resampled_means
from eval.scores.metrics import METRICS_VERSION, exact_match, token_f1
from eval.scores.predictions import PredictionFolder
from eval.scores.rows import OVERALL
from eval.scores.tables import percent, table
from lab.agents.agents import Agent, ChatAgent, RetrievalAgent
from lab.agents.imagination import Imagination, make_imagination, next_window
from lab.agents.play import (
    PLAYS,
    Plays,
    play_imagined,
    play_real,
    read_plays,
    replay,
    start_all,
    won,
    won_as_imagined,
)
from lab.agents.real_world import Game, RealWorld
from lab.estimates import estimate
from loopwm.records.command import positive
from loopwm.records.episodes import Episode, recorded_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import write_atomic, write_json
from loopwm.records.provenance import provenance
from loopwm.records.template import CONTEXT_KINDS, Context, ContextKind

EXAMPLE = (
    "python -m lab plan-transfer --model loopwm/pretrained --env scienceworld --tasks find-plant find-animal "
    "--episodes 30 --agent-episodes data/episodes/train-gold --context observed --out runs/eval/consistency"
)
MAX_STEPS = 40
RETRIEVAL_AGENT = "retrieval-agent"
RATES = ("real", "wm", "w2r")


@dataclass(frozen=True)
class ConsistencySettings:
    """Settings of a measurement. tasks: empty for all."""

    model: str
    agent: str
    env: str
    tasks: tuple[str, ...]
    split: str
    episodes: int
    context: ContextKind
    max_steps: int
    seed: int
    batch_size: int


@dataclass(frozen=True)
class Ratio:
    """Ratio W2R / Real over the same episodes, None if Real is 0.

    low, high: bootstrap 95 % bounds over episodes, from the resamples where Real is not 0: all but a share `undefined`.
    """

    value: float | None
    low: float | None
    high: float | None
    undefined: float


def consistency_ratio(real: Values, w2r: Values) -> Ratio:
    """Return the ratio of two success rates. real, w2r: (n,) successes of the same episodes."""
    means = resampled_means(np.stack([real, w2r], axis=1))
    defined = means[means[:, 0] > 0]
    undefined = 1 - len(defined) / RESAMPLES
    if real.mean() == 0:
        return Ratio(None, None, None, undefined)
    low, high = np.percentile(defined[:, 1] / defined[:, 0], [2.5, 97.5]).tolist()
    return Ratio(float(w2r.mean() / real.mean()), low, high, undefined)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--agent", default=RETRIEVAL_AGENT, help="%(default)s (the default) or openai:URL#MODEL")
    parser.add_argument("--env", required=True, help="the real world: scienceworld, alfworld, textworld")
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="default: all of them")
    parser.add_argument("--split", default="test", help="split of the variations (default: test)")
    parser.add_argument("--episodes", type=positive, required=True, help="number of games, tasks in turn")
    parser.add_argument("--context", choices=CONTEXT_KINDS, required=True, help="what the model is shown of the start")
    parser.add_argument("--agent-episodes", type=Path, nargs="+", required=True, metavar="FILE", help="train episodes")
    parser.add_argument(
        "--max-steps", type=positive, default=MAX_STEPS, help="most actions of a play (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--batch-size", type=positive, default=8, help="games imagined at once (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of variations (default: 0)")


def run(args: argparse.Namespace) -> None:
    settings = ConsistencySettings(
        args.model, args.agent, args.env, tuple(args.tasks), args.split, args.episodes, args.context,
        args.max_steps, args.seed, args.batch_size,
    )  # fmt: skip
    unknown = next_window(args.env, Context("", ""), "look")
    predictor = make_predictor(args.model, [unknown], ModelOptions.of(args), args.context, (1,))
    imagination = make_imagination(predictor, args.model, args.context)
    episodes = [episode for episode in recorded_episodes(args.agent_episodes) if episode.env == args.env]
    agent = make_agent(args.agent, episodes)
    with RealWorld(args.env) as world:
        measure(agent, predictor, imagination, world, settings, args.out)
    print((args.out / "report.md").read_text(encoding="utf-8"), end="")


def make_agent(name: str, episodes: Sequence[Episode]) -> Agent:
    """Create `retrieval-agent`, or a chat model by `openai:URL#MODEL`. Raises InputError naming the option at fault."""
    if name == RETRIEVAL_AGENT:
        return RetrievalAgent(episodes)
    if not name.startswith("openai:"):
        raise InputError(f"--agent: must be {RETRIEVAL_AGENT} or openai:URL#MODEL, got {name!r}")
    from eval.models.endpoint import Address, Endpoint, ReplyCache

    return ChatAgent(Endpoint(Address.parse(name, "--agent"), ReplyCache(DEFAULT_CACHE)), episodes)


def measure(
    agent: Agent,
    predictor: Predictor,
    imagination: Imagination,
    world: RealWorld,
    settings: ConsistencySettings,
    out: Path,
) -> dict[str, Any]:
    """Play the games missing from `out`, write the results there and return them."""
    games = world.choose_games(settings.tasks, settings.split, settings.episodes, settings.seed)
    spec = {**asdict(settings), "tasks": list(settings.tasks), **predictor.identity, **agent.identity}
    folder = PredictionFolder(out, spec)
    plays = play_missing(agent, imagination, world, games, settings, folder)
    results = make_results(spec, [plays[game.name] for game in games], imagination.judges)
    results["provenance"]["commits"] = folder.commits()
    write_json(out / "results.json", results)
    write_atomic(out / "report.md", render_consistency(results))
    return results


def play_missing(
    agent: Agent,
    imagination: Imagination,
    world: RealWorld,
    games: Sequence[Game],
    settings: ConsistencySettings,
    folder: PredictionFolder,
) -> Plays:
    """Play the batches of games missing from the folder and append each as it completes."""
    plays = read_plays(folder.path / PLAYS, RATES)
    batches = [games[i : i + settings.batch_size] for i in range(0, len(games), settings.batch_size)]
    with tqdm(total=len(games), unit="game", desc=f"{settings.model} {settings.env}") as bar:
        for batch in batches:
            if missing := [game for game in batch if game.name not in plays]:
                lines = play_batch(agent, imagination, world, batch, settings)
                new = [lines[game.name] for game in missing]
                folder.add_lines(PLAYS, new)
                plays |= {record["game"]: record for record in new}
            bar.update(len(batch))
    return plays


def play_batch(
    agent: Agent, imagination: Imagination, world: RealWorld, games: Sequence[Game], settings: ConsistencySettings
) -> Plays:
    """Play every game for real, in the model, and replayed; return its line of plays.jsonl."""
    starts = start_all(world, games, settings.context)
    worlds = imagination.worlds(settings.env)
    imagined = play_imagined(agent, worlds, imagination.judges, starts, settings.max_steps)
    records: Plays = {}
    for game, wm in zip(games, imagined, strict=True):
        real = world.robustly(game, partial(play_real, agent, world, game, settings.max_steps))
        w2r = world.robustly(game, partial(replay, world, game, wm.actions))
        records[game.name] = {
            "game": game.name,
            "task": game.task,
            "real": {**asdict(real), "success": won(real)},
            "wm": {**asdict(wm), "success": won_as_imagined(wm)},
            "w2r": {**asdict(w2r), "success": won(w2r)},
        }
    return records


def make_results(spec: Mapping[str, Any], plays: Sequence[Mapping[str, Any]], judges: bool) -> dict[str, Any]:
    """Return the content of results.json. Rows: overall, then by task."""
    tasks = [OVERALL, *sorted({play["task"] for play in plays})]
    head = ("model", "agent", "env", "split", "context")
    return {
        **{name: spec[name] for name in head},
        "metrics_version": METRICS_VERSION,
        "wm_judged_by": "model" if judges else "agent",
        "provenance": {**{name: value for name, value in spec.items() if name not in head}, **provenance("eval")},
        "rows": [{"task": task, **summarize([p for p in plays if task in (OVERALL, p["task"])])} for task in tasks],
    }


def summarize(plays: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return success rates, mean final scores, the ratio, and how far imagined and replayed observations agree.

    Each is a mean over episodes; scores below 0 count as 0.
    """
    success = {name: _column(plays, name, "success") for name in RATES}
    score = {name: _column(plays, name, "score").clip(min=0) for name in ("real", "w2r")}
    matches = np.array([_matches(play["wm"], play["w2r"]) for play in plays if play["w2r"]["actions"]])
    row: dict[str, Any] = {"n": len(plays)}
    row |= {name: {"success": estimate(success[name])} for name in RATES}
    for name, values in score.items():
        row[name]["score"] = estimate(values)
    row["consistency_ratio"] = asdict(consistency_ratio(success["real"], success["w2r"]))
    if len(matches):
        row |= {"replay_em": estimate(matches[:, 0]), "replay_f1": estimate(matches[:, 1])}
    return row


def _column(plays: Sequence[Mapping[str, Any]], name: str, value: str) -> Values:
    return np.array([play[name][value] for play in plays], dtype=np.float64)


def _matches(wm: Mapping[str, Any], w2r: Mapping[str, Any]) -> tuple[float, float]:
    """Return EM and token F1 of the imagined observations over the replayed steps."""
    pairs = list(zip(wm["observations"], w2r["observations"], strict=False))
    return (
        float(np.mean([exact_match(imagined, observed) for imagined, observed in pairs])),
        float(np.mean([token_f1(imagined, observed) for imagined, observed in pairs])),
    )


def render_consistency(results: Mapping[str, Any]) -> str:
    """Return the content of report.md."""
    provenance = results["provenance"]
    text = f"# {results['agent']} in {results['env']} and in {results['model']}\n\n"
    text += (
        f"Split {results['split']}, at most {provenance['max_steps']} steps, the model shown: {results['context']}. "
    )
    text += "Success rates and matches in percent, scores of 0 to 100 (negative ones count as 0), bootstrap 95 % "
    text += f"bounds over episodes. Success in the model is judged by the {results['wm_judged_by']}.\n\n"
    header = ["Task", "n", "Real", "WM", "W2R", "CR = W2R / Real", "score Real", "score W2R", "EM", "F1"]
    text += table(header, [_line(row) for row in results["rows"]])
    text += "\nEM and F1: imagined observations against those of the replay, means of episodes.\n"
    undefined = results["rows"][0]["consistency_ratio"]["undefined"]
    if undefined:
        text += f"Without a real success the ratio is undefined; so it is in {percent(undefined)} % of the resamples.\n"
    return text


def _line(row: Mapping[str, Any]) -> list[str]:
    rates = [_cell(row[name]["success"], 100) for name in RATES]
    scores = [_cell(row[name]["score"], 1) for name in ("real", "w2r")]
    matches = [_cell(row[name], 100) if name in row else "-" for name in ("replay_em", "replay_f1")]
    return [row["task"], str(row["n"]), *rates, _ratio_cell(row["consistency_ratio"]), *scores, *matches]


def _cell(estimate: Mapping[str, Any], unit: float) -> str:
    low, high = estimate["ci95"]
    return f"{unit * estimate['mean']:.1f} ({unit * low:.1f}-{unit * high:.1f})"


def _ratio_cell(ratio: Mapping[str, Any]) -> str:
    if ratio["value"] is None:
        return "undefined (Real = 0)"
    return f"{ratio['value']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
