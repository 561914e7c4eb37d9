"""Imagined policy: a policy of ALFWorld cloned from few episodes, and from what it wins in imagination.

    cloned    behaviour cloning of expert episodes of train games
    imagined  cloning of these and of imagined episodes that were won: the policy acts in sampled imagined worlds that
              start as other train games do, and the shortest win of each start is one more demonstration

An imagined episode is won where the model is sure of a win. Every round plays the starts that are not won
yet with the policy of the round before, and clones anew (expert iteration, Anthony et al., 2017, with samples in place
of a search).
Both arms play every game of a split in the real world, once, by the most probable action
(`lab/agents/latent_policy.py`). Nothing but the demonstrations is a real step. Rerun the command to resume.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from eval.models.checkpoint import CheckpointPredictor
from eval.scores.predictions import PredictionFolder
from eval.scores.tables import table
from lab.agents.agents import FULL_SCORE, is_refusal
from lab.agents.latent_policy import Choice, Choices, LatentPolicy, PolicyAgent, Reading, actions_in_reach
from lab.agents.play import PLAYS, Plays, play_real, read_plays, won
from lab.agents.real_world import Game, RealWorld
from lab.episodes import episodes_hash, train_only
from lab.estimates import over_runs
from loopwm.records.command import above_zero, at_least_zero, positive
from loopwm.records.episodes import Episode, Step, recorded_episodes, write_episodes
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
MOST_DECODED = 100
STATES_TOGETHER, STARTS_TOGETHER = 8, 8
POLICY = "imagined"
SURE = 0.95
"""Least probability of a win that counts: of 144 wins that were likelier than not 69 % were true by ALFWorld's rules,
of 109 from 0.97 on 83 %, with nine in ten of the true ones."""


@dataclass(frozen=True)
class Chosen:
    """A choice and the index of what was chosen."""

    choice: Choice
    index: int


def tidy_steps(episode: Episode) -> list[Transition]:
    """Return the steps of an expert but those that change nothing for the goal."""
    steps = [Transition(step.action or "", step.observation) for step in episode.steps[1:]]
    return [step for step in steps if not step.action.startswith(("close ", "examine "))]


def demonstrated(model: WorldModel, episode: Episode) -> Iterator[Chosen]:
    """Yield the choices of an expert, up to the limit of the context."""
    reading = Reading(model, Context(episode.goal, episode.steps[0].observation))
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
    shuffled = [one for _ in range(epochs) for one in rng.sample(demonstrations, len(demonstrations))]
    batches = [shuffled[start : start + STATES_TOGETHER] for start in range(0, len(shuffled), STATES_TOGETHER)]
    for update, batch in enumerate(tqdm(batches, desc="clone", unit="step")):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (update + 1) / 50, 2 * (1 - update / len(batches)))
        logits = policy(Choices.of([one.choice for one in batch]))
        loss = F.cross_entropy(logits, torch.tensor([one.index for one in batch]))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()


@dataclass
class _Try:
    """One imagined episode of a start, by its index."""

    start: int
    reading: Reading
    steps: list[Step] = field(default_factory=list)
    over: bool = False


class Imagination:
    """Imagined episodes of a policy: from each start some tries of at most `max_steps` together, until one is won.

    Draws of actions and observations go on from call to call.
    """

    def __init__(self, model: WorldModel, max_steps: int, tries: int, seed: int) -> None:
        self._model, self._max_steps, self._tries = model, max_steps, tries
        self._generator = torch.Generator().manual_seed(seed)

    @torch.inference_mode()
    def wins(self, policy: LatentPolicy, starts: Sequence[Episode]) -> list[Episode]:
        """Return the shortest win of each start that is won, as an episode. starts: their first steps are used."""
        readings = [Reading(self._model, Context(start.goal, start.steps[0].observation)) for start in starts]
        tries = [_Try(i, copy(reading)) for i, reading in enumerate(readings) for _ in range(self._tries)]
        won: dict[int, Episode] = {}
        for _ in range(self._max_steps):
            running = [one for one in tries if not one.over and one.start not in won]
            if not running:
                break
            self._step(policy, running)
            for one in running:
                if one.steps[-1].done:
                    start = starts[one.start]
                    steps = (start.steps[0], *one.steps)
                    won[one.start] = replace(start, policy=POLICY, steps=steps, hidden_state=None)
        return [won[i] for i in sorted(won)]

    def _step(self, policy: LatentPolicy, tries: Sequence[_Try]) -> None:
        after, actions, sures = [], [], []
        for one in tries:
            worlds, choice = one.reading.look(actions_in_reach(one.reading.context))
            shares = policy(Choices.of([choice]))[0].softmax(-1)
            index = int(torch.multinomial(shares, 1, generator=self._generator))
            after.append(worlds.select([index]))
            actions.append(choice.actions[index])
            sures.append(bool(choice.predicted[index, 0] >= SURE))
        texts = self._model.sample_each(after, self._generator, MOST_DECODED)
        for one, action, text, wins in zip(tries, actions, texts, sures, strict=True):
            one.steps.append(Step(action, text, FULL_SCORE * wins, wins))
            try:
                one.reading.observe(action, text)
            except ContextTooLongError:
                one.over = True


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
    add("--rounds", type=at_least_zero, default=2, help="of imagined episodes (default: %(default)s)")
    add("--tries", type=positive, default=4, help="imagined episodes of a start (default: %(default)s)")
    add("--imagined-steps", type=positive, default=22, help="most of an imagined episode (default: %(default)s)")
    add("--max-steps", type=positive, default=40, help="environment steps of a game (default: %(default)s)")
    add("--seed", type=int, default=0, help="of all draws (default: 0)")


def run(args: argparse.Namespace) -> None:
    """Train and play.

    Raises InputError for a model without reward attention, held-out episodes or another run in the folder.
    """
    predictor = CheckpointPredictor(args.model)
    model = predictor.world_model
    if not model.model.config.reward_attention:
        raise InputError("--model: must have reward attention, which `python -m lab fit-goals` adds")
    sources = {name: _alfworld(vars(args)[name], f"--{name}") for name in ("demonstrations", "starts")}
    settings = {name: value for name, value in vars(args).items() if isinstance(value, int | float | str)}
    spec = {**settings, **predictor.identity} | {name: [path.name for path in vars(args)[name]] for name in sources}
    # Policies and imagined episodes in the folder are those of the episodes, whatever their files are called.
    spec |= {f"{name}_sha256": episodes_hash(episodes) for name, episodes in sources.items()}
    folder = PredictionFolder(args.out, spec)
    policies = train(model, sources["demonstrations"], sources["starts"], args, folder.path)
    agents = {name: partial(PolicyAgent, model, policy) for name, policy in policies.items()}
    with RealWorld("alfworld") as world:
        measure(world, agents, args.split, args.max_steps, folder, spec)
    print((args.out / "report.md").read_text(encoding="utf-8"), end="")


def train(
    model: WorldModel, episodes: Sequence[Episode], starts: Sequence[Episode], args: argparse.Namespace, out: Path
) -> dict[str, LatentPolicy]:
    """Return the policy of each arm. What was imagined and fitted before is read from the folder.

    Raises InputError for fewer demonstrations than asked for.
    """
    if len(episodes) < args.count:
        raise InputError(f"--count: must be at most {len(episodes)}, the episodes of ALFWorld, got {args.count}")
    demonstrations = Random(args.seed).sample(episodes, args.count)
    cloned = policy = clone_of(model, demonstrations, args, out / "cloned.pt")
    wins = list[Episode]()
    for number in range(1, args.rounds + 1):
        names = {win.variation for win in wins}
        left = [start for start in starts if start.variation not in names]
        wins += imagined_wins(model, policy, left, number, args, out / f"imagined-{number}")
        policy = clone_of(model, [*demonstrations, *wins], args, out / f"imagined-{number}.pt")
    return {"cloned": cloned, "imagined": policy}


def imagined_wins(
    model: WorldModel,
    policy: LatentPolicy,
    starts: Sequence[Episode],
    number: int,
    args: argparse.Namespace,
    folder: Path,
) -> list[Episode]:
    """Return the wins of a round, which has a file for every few starts, with draws of its own."""
    wins = list[Episode]()
    for first in tqdm(range(0, len(starts), STARTS_TOGETHER), desc=f"round {number}", unit="part"):
        path = folder / f"{first:04}.jsonl"
        if not path.exists():
            seed = Random(f"{args.seed}/{number}/{first}").getrandbits(32)
            imagination = Imagination(model, args.imagined_steps, args.tries, seed)
            write_episodes(path, imagination.wins(policy, starts[first : first + STARTS_TOGETHER]))
        wins += recorded_episodes([path])
    return wins


def clone_of(model: WorldModel, episodes: Sequence[Episode], args: argparse.Namespace, path: Path) -> LatentPolicy:
    """Clone episodes, or read the policy that was cloned from them."""
    torch.manual_seed(args.seed)
    policy = LatentPolicy(model.model)
    if path.exists():
        policy.load_state_dict(torch.load(path))
        return policy
    with torch.inference_mode():
        chosen = [one for episode in tqdm(episodes, unit="episode") for one in demonstrated(model, episode)]
    clone(policy, chosen, args.epochs, args.rate, Random(args.seed))
    buffer = BytesIO()
    torch.save(policy.state_dict(), buffer)
    write_atomic(path, buffer.getvalue())
    return policy


def _alfworld(paths: Sequence[Path], option: str) -> list[Episode]:
    return train_only((one for one in recorded_episodes(paths) if one.env == "alfworld"), option)


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
    by_game = {
        "won": {arm: [100.0 * plays[game.name][arm]["won"] for game in games] for arm in ARMS},
        "steps": {arm: [float(len(plays[game.name][arm]["actions"])) for game in games] for arm in ARMS},
    }
    return {
        "n": len(games),
        "demonstrations": spec["count"],
        **over_runs([by_game]),
        "by_game": by_game,
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
