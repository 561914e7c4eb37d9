"""Imagined policy: a policy of ALFWorld cloned from few episodes, and improved in imagination alone.

    cloned    behaviour cloning of expert episodes of train games
    imagined  the clone, then GRPO (Shao et al., 2024) in imagined worlds that start from states of the same episodes,
              or as other train games do

Observations are sampled from the model. An imagined episode is won where the model predicts the points of a win; its
advantage is against the episodes of the same start. Both arms play every game of a split in the real world, once, by
the most probable action (`lab/agents/latent_policy.py`). After cloning, training takes no real step. Rerun the command
to resume.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from eval.models.checkpoint import CheckpointPredictor
from eval.scores.predictions import PredictionFolder
from eval.scores.tables import table
from lab.agents.agents import is_refusal
from lab.agents.latent_policy import WIN, Choice, Choices, LatentPolicy, PolicyAgent, Reading, actions_in_reach
from lab.agents.play import PLAYS, Plays, play_real, read_plays, won
from lab.agents.real_world import Game, RealWorld
from lab.estimates import estimate
from loopwm.records.command import above_zero, at_least_zero, positive
from loopwm.records.episodes import Episode, recorded_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import write_atomic, write_json
from loopwm.records.provenance import provenance
from loopwm.records.template import Context, ContextTooLongError, Transition
from loopwm.text.world import WorldModel

EXAMPLE = (
    "python -m lab imagined-policy --demonstrations data/episodes/alfworld-train-expert --starts "
    "data/episodes/alfworld-train-expert data/episodes/alfworld-built-expert --split dev --out runs/policy-dev"
)
ARMS = ("cloned", "imagined")
ROUNDS = "rounds.jsonl"
MOST_DECODED = 100
STATES_TOGETHER = 8
PASSES = 3
CLIP = 0.2
"""Of the ratio of new to old probabilities, as in PPO."""

ENTROPY_WEIGHT = 0.003
DISCOUNT = 0.97
"""Of a win for each step before it."""

NEW_SHARE = 0.25


@dataclass(frozen=True)
class Chosen:
    """A choice and the index of what was chosen. log_probability: of it then. advantage: of the whole episode."""

    choice: Choice
    index: int
    log_probability: float = 0.0
    advantage: float = 1.0


@dataclass(frozen=True)
class Start:
    """A state to imagine from, at most `limit` steps."""

    context: Context
    limit: int


class Starts:
    """Draws of starts, NEW_SHARE of them first observations of games, the others states of demonstrations."""

    def __init__(self, demonstrations: Iterable[Episode], games: Iterable[Episode], limit: int) -> None:
        """Limit: imagined steps from a first observation; half of them from a state of a demonstration."""
        self._new = [Start(context_at(game, 0), limit) for game in games]
        self._begun = [
            Start(context_at(episode, count), limit // 2)
            for episode in demonstrations
            for count in range(1, len(tidy_steps(episode)))
        ]

    def draw(self, count: int, rng: Random) -> list[Start]:
        new = round(NEW_SHARE * count)
        return rng.choices(self._new, k=new) + rng.choices(self._begun, k=count - new)


def tidy_steps(episode: Episode) -> list[Transition]:
    """Return the steps of an expert but those that change nothing for the goal."""
    steps = [Transition(step.action or "", step.observation) for step in episode.steps[1:]]
    return [step for step in steps if not step.action.startswith(("close ", "examine "))]


def context_at(episode: Episode, count: int) -> Context:
    """Return the context after `count` of the tidy steps."""
    return Context(episode.goal, episode.steps[0].observation, tuple(tidy_steps(episode)[:count]))


@dataclass
class ImaginedEpisode:
    """One imagined episode. start: index of its start. outcome: discounted win, 0 for none."""

    start: int
    limit: int
    reading: Reading
    chosen: list[Chosen] = field(default_factory=list)
    outcome: float = 0.0
    over: bool = False


def demonstrated(model: WorldModel, episode: Episode) -> Iterator[Chosen]:
    """Yield the choices of an expert, up to the limit of the context."""
    reading = Reading(model, context_at(episode, 0))
    for step in tidy_steps(episode):
        actions = actions_in_reach(reading.context)
        if step.action in actions:
            yield Chosen(reading.look(actions)[1], actions.index(step.action))
        try:
            reading.observe(step.action, step.observation)
        except ContextTooLongError:
            return


def clone(policy: LatentPolicy, demonstrations: Sequence[Chosen], epochs: int, rate: float, rng: Random) -> None:
    """Fit by AdamW. The rate rises over 50 updates and falls over the second half."""
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.05)
    batches = [batch for _ in range(epochs) for batch in _batches(demonstrations, rng)]
    for update, batch in enumerate(tqdm(batches, desc="clone", unit="step")):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (update + 1) / 50, 2 * (1 - update / len(batches)))
        logits = policy(Choices.of([one.choice for one in batch]))
        _step(optimizer, policy, F.cross_entropy(logits, torch.tensor([one.index for one in batch])))


def _batches(chosen: Sequence[Chosen], rng: Random) -> list[list[Chosen]]:
    order = rng.sample(chosen, len(chosen))
    return [order[start : start + STATES_TOGETHER] for start in range(0, len(order), STATES_TOGETHER)]


def _step(optimizer: torch.optim.Optimizer, policy: LatentPolicy, loss: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


class Imagination:
    """ImaginedEpisode episodes of a policy. Draws of actions and observations go on from call to call."""

    def __init__(self, model: WorldModel, seed: int) -> None:
        self._model, self._generator = model, torch.Generator().manual_seed(seed)

    @torch.inference_mode()
    def episodes(self, policy: LatentPolicy, starts: Sequence[Start], count: int) -> list[ImaginedEpisode]:
        """Imagine `count` episodes of each start together."""
        readings = [Reading(self._model, start.context) for start in starts]
        episodes = [
            ImaginedEpisode(i, start.limit, copy(reading))
            for i, (start, reading) in enumerate(zip(starts, readings, strict=True))
            for _ in range(count)
        ]
        while running := [one for one in episodes if not one.over and len(one.chosen) < one.limit]:
            self._step(policy, running)
        return episodes

    def _step(self, policy: LatentPolicy, episodes: Sequence[ImaginedEpisode]) -> None:
        after = []
        for episode in episodes:
            worlds, choice = episode.reading.look(actions_in_reach(episode.reading.context))
            log_probabilities = policy(Choices.of([choice]))[0].log_softmax(-1)
            index = int(torch.multinomial(log_probabilities.exp(), 1, generator=self._generator))
            episode.chosen.append(Chosen(choice, index, float(log_probabilities[index])))
            after.append(worlds.select([index]))
        texts = self._model.sample_each(after, self._generator, MOST_DECODED)
        for episode, world, text in zip(episodes, after, texts, strict=True):
            choice, index = episode.chosen[-1].choice, episode.chosen[-1].index
            if float(self._model.predictions(world).reward) >= WIN:
                episode.outcome, episode.over = DISCOUNT ** (len(episode.chosen) - 1), True
                continue
            try:
                episode.reading.observe(choice.actions[index], text)
            except ContextTooLongError:
                episode.over = True


def with_advantages(episodes: Iterable[ImaginedEpisode]) -> list[Chosen]:
    """Return all choices of starts that were won and not, with advantages in deviations of the start's outcomes."""
    by_start: dict[int, list[ImaginedEpisode]] = {}
    for episode in episodes:
        by_start.setdefault(episode.start, []).append(episode)
    chosen = list[Chosen]()
    for group in by_start.values():
        outcomes = np.array([episode.outcome for episode in group])
        if (deviation := outcomes.std()) > 0:
            for episode, advantage in zip(group, (outcomes - outcomes.mean()) / deviation, strict=True):
                chosen += [replace(one, advantage=float(advantage)) for one in episode.chosen]
    return chosen


def improve(policy: LatentPolicy, chosen: Sequence[Chosen], optimizer: torch.optim.Optimizer, rng: Random) -> None:
    """Take PASSES over the choices by the clipped objective of PPO (Schulman et al., 2017)."""
    for batch in (batch for _ in range(PASSES) for batch in _batches(chosen, rng)):
        log_probabilities = policy(Choices.of([one.choice for one in batch])).log_softmax(-1)
        old, advantage = torch.tensor([[one.log_probability, one.advantage] for one in batch]).T
        ratio = (log_probabilities[range(len(batch)), [one.index for one in batch]] - old).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
        entropy = -(log_probabilities.exp() * log_probabilities.clamp(min=-30)).sum(-1).mean()
        _step(optimizer, policy, -gain - ENTROPY_WEIGHT * entropy)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--demonstrations", type=Path, nargs="+", required=True, metavar="FILE", help="expert episodes to clone")
    add(
        "--starts", type=Path, nargs="+", required=True, metavar="FILE", help="train games, to imagine from their start"
    )
    add("--out", type=Path, required=True, help="folder of the results")
    add("--model", type=Path, default=Path("loopwm/pretrained"), help="checkpoint folder (default: %(default)s)")
    add("--split", default="valid_seen", help="split of the games that are played (default: %(default)s)")
    add("--count", type=positive, default=50, help="demonstrations (default: %(default)s)")
    add("--epochs", type=positive, default=4, help="of cloning (default: %(default)s)")
    add("--rate", type=above_zero, default=1e-3, help="learning rate of cloning (default: %(default)s)")
    add("--rounds", type=at_least_zero, default=8, help="of imagined episodes (default: %(default)s)")
    add("--round-starts", type=positive, default=24, help="starts of a round (default: %(default)s)")
    add("--group", type=positive, default=6, help="imagined episodes of a start (default: %(default)s)")
    add("--imagined-steps", type=positive, default=24, help="most from a first observation (default: %(default)s)")
    add("--imagined-rate", type=above_zero, default=3e-4, help="learning rate in imagination (default: %(default)s)")
    add("--max-steps", type=positive, default=40, help="environment steps of a game (default: %(default)s)")
    add("--seed", type=int, default=0, help="of all draws (default: 0)")


def run(args: argparse.Namespace) -> None:
    """Train and play. Raises InputError for a model without reward attention or another run in the folder."""
    predictor = CheckpointPredictor(args.model)
    model = predictor.world_model
    if not model.model.config.reward_attention:
        raise InputError("--model: must have reward attention, which `python -m lab fit-goals` adds")
    paths = ("demonstrations", "starts")
    settings = {name: value for name, value in vars(args).items() if isinstance(value, int | float | str)}
    spec = {**settings, **predictor.identity} | {name: [path.name for path in vars(args)[name]] for name in paths}
    folder = PredictionFolder(args.out, spec)
    policies = train(model, args, folder)
    agents = {name: partial(PolicyAgent, model, policy) for name, policy in policies.items()}
    with RealWorld("alfworld") as world:
        measure(world, agents, args.split, args.max_steps, folder, spec)
    print((args.out / "report.md").read_text(encoding="utf-8"), end="")


def train(model: WorldModel, args: argparse.Namespace, folder: PredictionFolder) -> dict[str, LatentPolicy]:
    """Return the policy of each arm, from the last round that was written."""
    torch.manual_seed(args.seed)
    cloned, path, rng = LatentPolicy(model.model), folder.path / "cloned.pt", Random(args.seed)
    demonstrations = rng.sample(_alfworld(args.demonstrations), args.count)
    if path.exists():
        cloned.load_state_dict(torch.load(path))
    else:
        with torch.inference_mode():
            chosen = [one for episode in tqdm(demonstrations, unit="episode") for one in demonstrated(model, episode)]
        clone(cloned, chosen, args.epochs, args.rate, rng)
        _save(cloned.state_dict(), path)
    starts = Starts(demonstrations, _alfworld(args.starts), args.imagined_steps)
    return {"cloned": cloned, "imagined": imagine_rounds(model, cloned, starts, args, folder)}


def imagine_rounds(
    model: WorldModel, cloned: LatentPolicy, starts: Starts, args: argparse.Namespace, folder: PredictionFolder
) -> LatentPolicy:
    """Improve a copy round by round; a line each of rounds.jsonl says how many imagined episodes were won."""
    policy, path, first = deepcopy(cloned), folder.path / "imagined.pt", 0
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.imagined_rate, betas=(0.9, 0.95), weight_decay=0.0)
    if path.exists():
        saved = torch.load(path)
        policy.load_state_dict(saved["policy"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["rounds"]
    for number in tqdm(range(first, args.rounds), initial=first, total=args.rounds, unit="round"):
        rng = Random(f"{args.seed}/{number}")
        imagination = Imagination(model, rng.getrandbits(32))
        episodes = imagination.episodes(policy, starts.draw(args.round_starts, rng), args.group)
        improve(policy, with_advantages(episodes), optimizer, rng)
        won_share = float(np.mean([episode.outcome > 0 for episode in episodes]))
        steps = sum(len(episode.chosen) for episode in episodes)
        folder.add_lines(ROUNDS, [{"round": number + 1, "won": won_share, "steps": steps}])
        _save({"policy": policy.state_dict(), "optimizer": optimizer.state_dict(), "rounds": number + 1}, path)
    return policy


def _alfworld(paths: Sequence[Path]) -> list[Episode]:
    return [episode for episode in recorded_episodes(paths) if episode.env == "alfworld"]


def _save(value: Mapping[str, Any], path: Path) -> None:
    buffer = BytesIO()
    torch.save(value, buffer)
    write_atomic(path, buffer.getvalue())


Agents = Mapping[str, Callable[[], PolicyAgent]]


def measure(
    world: RealWorld, agents: Agents, split: str, max_steps: int, folder: PredictionFolder, spec: Mapping[str, Any]
) -> dict[str, Any]:
    """Play missing games, write the results and return them."""
    games = world.all_games(split)
    plays = read_plays(folder.path / PLAYS, agents)
    for game in tqdm(games, unit="game"):
        if game.name not in plays:
            plays[game.name] = play_game(world, agents, game, max_steps)
            folder.add_lines(PLAYS, [plays[game.name]])
    results = make_results(plays, games, spec)
    write_json(folder.path / "results.json", results)
    write_atomic(folder.path / "report.md", render(results))
    return results


def play_game(world: RealWorld, agents: Agents, game: Game, max_steps: int) -> dict[str, Any]:
    """Play the game once with every arm; return its line of plays.jsonl."""
    line: dict[str, Any] = {"game": game.name, "task": game.task}
    for name, make_agent in agents.items():
        played = world.robustly(game, lambda make=make_agent: play_real(make(), world, game, max_steps))  # type: ignore[misc]
        refused = sum(map(is_refusal, played.observations))
        line[name] = {"actions": played.actions, "won": won(played), "refused": refused}
    return line


def make_results(plays: Plays, games: Sequence[Game], spec: Mapping[str, Any]) -> dict[str, Any]:
    """Build results.json: wins and steps of each arm, and the differences of the second from the first, by game."""
    wins = {arm: np.array([100.0 * plays[game.name][arm]["won"] for game in games]) for arm in ARMS}
    steps = {arm: np.array([float(len(plays[game.name][arm]["actions"])) for game in games]) for arm in ARMS}
    cloned, imagined = ARMS
    return {
        "n": len(games),
        "demonstrations": spec["count"],
        "arms": {arm: {"won": estimate(wins[arm]), "steps": estimate(steps[arm])} for arm in ARMS},
        "difference": {
            "won": estimate(wins[imagined] - wins[cloned]),
            "steps": estimate(steps[imagined] - steps[cloned]),
        },
        "tasks": {
            task: {arm: sum(plays[game.name][arm]["won"] for game in some) for arm in ARMS} | {"n": len(some)}
            for task, some in _by_task(games).items()
        },
        "provenance": {**spec, **provenance("lab")},
    }


def _by_task(games: Sequence[Game]) -> dict[str, list[Game]]:
    return {task: [game for game in games if game.task == task] for task in dict.fromkeys(game.task for game in games)}


def render(results: Mapping[str, Any]) -> str:
    """Render report.md."""
    spec = results["provenance"]
    text = f"# A policy improved in imagination, ALFWorld\n\n{results['n']} games of split {spec['split']}, at most "
    text += f"{spec['max_steps']} steps; means over games, bootstrap 95 % bounds. {spec['count']} demonstrations.\n\n"
    arms = [*results["arms"].items(), ("imagined - cloned", results["difference"])]
    rows = [[arm, _cell(row["won"]), _cell(row["steps"])] for arm, row in arms]
    tasks = [[task, *(str(row[name]) for name in ("n", *ARMS))] for task, row in results["tasks"].items()]
    return text + table(["Policy", "won, %", "real steps a game"], rows) + "\n" + table(["Task", "n", *ARMS], tasks)


def _cell(estimated: Mapping[str, Any]) -> str:
    low, high = estimated["ci95"]
    return f"{estimated['mean']:.1f} ({low:.1f} to {high:.1f})"
