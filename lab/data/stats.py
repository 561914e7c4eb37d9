"""Count episodes, transitions, tokens, repetitions and lengths of contexts.

A context is what an agent saw before a transition, goal and all: the `observed` context, with its marks but without the
state slots, whose number depends on the model. Contexts over the limit lose their oldest steps. A repeated episode has
the variation and the actions of an earlier one; a repeated transition has variation, view before (look, inventory,
observation), action and observation of an earlier one.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from data_prep.environments import family_of
from data_prep.tokenize import TOKENIZER_FILE
from loopwm.records import template as template
from loopwm.records.episodes import Episode, read_episodes
from loopwm.records.files import atomic_write, line_files, write_lines
from loopwm.records.template import STEP_MARKS

EXAMPLE = "python -m lab stats --episodes data/episodes --out docs/statistics"

COLUMNS = ("episodes", "transitions", "tokens", "repeated episodes", "repeated transitions", "median context", "cut")

CountTokens = Callable[[str], int]


@dataclass
class Totals:
    """Sums over some episodes. contexts: tokens before each transition. tokens: of actions and observations."""

    episodes: int = 0
    transitions: int = 0
    tokens: int = 0
    repeated_episodes: int = 0
    repeated_transitions: int = 0
    contexts: list[int] = field(default_factory=list)

    def add(self, other: Totals) -> None:
        for name, value in vars(other).items():
            total = getattr(self, name)
            total += value  # in place: adding one by one must not copy the list each time
            setattr(self, name, total)

    @property
    def cut_share(self) -> float:
        """Return the share of contexts over the limit."""
        return float(np.mean(np.array(self.contexts) > template.CONTEXT_LIMIT)) if self.contexts else 0.0

    def row(self) -> list[str]:
        whole = max(self.episodes, 1), max(self.transitions, 1)
        return [
            f"{self.episodes:,}", f"{self.transitions:,}", f"{self.tokens:,}",
            f"{self.repeated_episodes / whole[0]:.1%}", f"{self.repeated_transitions / whole[1]:.1%}",
            f"{np.median(self.contexts):.0f}" if self.contexts else "-", f"{self.cut_share:.1%}",
        ]  # fmt: skip


class Counter:
    """Counts episodes one by one and remembers them to find repetitions."""

    def __init__(self, count_tokens: CountTokens) -> None:
        self._count_tokens = count_tokens
        self._episodes: set[int] = set()
        self._transitions: set[int] = set()

    def count(self, episode: Episode) -> Totals:
        key = episode.env, episode.task, episode.variation, episode.split
        actions = tuple(step.action for step in episode.steps)
        group = Totals(episodes=1, repeated_episodes=_seen(self._episodes, (key, actions)))
        length = sum(map(self._count_tokens, (episode.goal, episode.steps[0].observation))) + STEP_MARKS
        for before, step in zip(episode.steps, episode.steps[1:], strict=False):
            view = (before.look, before.inventory, before.observation)
            repeated = _seen(self._transitions, (key, view, step.action, step.observation))
            tokens = self._count_tokens(step.action or "") + self._count_tokens(step.observation)
            group.add(Totals(0, 1, tokens, 0, repeated, [length]))
            length += tokens + STEP_MARKS
        return group


def _seen(known: set[int], thing: object) -> int:
    """Return 1 for a known thing, else 0, and add it. 64-bit hashes: among millions a collision is negligible."""
    key = hash(thing)
    if key in known:
        return 1
    known.add(key)
    return 0


def token_counter(tokenizer_file: Path) -> CountTokens:
    tokenizer = Tokenizer.from_file(str(tokenizer_file))

    @lru_cache(maxsize=100_000)
    def count(text: str) -> int:
        return len(tokenizer.encode(template.clean(text), add_special_tokens=False).ids)

    return count


def count_groups(episodes: Iterable[Episode], count_tokens: CountTokens) -> dict[str, dict[str, Totals]]:
    """Return totals by environment, by split and policy, and by family."""
    counter = Counter(count_tokens)
    tables: dict[str, dict[str, Totals]] = defaultdict(lambda: defaultdict(Totals))
    for episode in episodes:
        group = counter.count(episode)
        tables["environment"][episode.env].add(group)
        tables["split and policy"][f"{episode.env}, {episode.split}, {episode.policy}"].add(group)
        tables["family"][f"{episode.env}, {family_of(episode.env, episode.task)}"].add(group)
    return {title: dict(sorted(groups.items())) for title, groups in tables.items()}


def markdown(tables: dict[str, dict[str, Totals]], picture: str) -> str:
    lines = ["# Episodes", ""]
    for title, groups in tables.items():
        if title == "family":  # statistics.json has them
            continue
        lines += [f"| {title} | " + " | ".join(COLUMNS) + " |", "| --- |" + " ---: |" * len(COLUMNS)]
        lines += [f"| {name} | " + " | ".join(group.row()) + " |" for name, group in groups.items()]
        lines.append("")
    lines += [
        "Tokens: of actions and observations. Context: goal, observations and actions before a transition with their "
        "marks, without the state slots that a model adds to each step. Cut: contexts over "
        f"{template.CONTEXT_LIMIT:,} tokens, which lose their oldest steps. Families: statistics.json.",
        "",
        f"![Lengths of contexts]({picture})",
    ]
    return "\n".join(lines)


def plot_contexts(groups: dict[str, Totals], path: Path) -> None:
    """Plot the share of transitions by length of the context before them to a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, group in groups.items():
        lengths = np.sort(group.contexts)
        axes.plot(lengths, np.arange(1, len(lengths) + 1) / len(lengths), label=name)
    axes.axvline(template.CONTEXT_LIMIT, color="grey", linestyle=":", label="limit")
    axes.set(xscale="log", xlabel="tokens of context before a transition", ylabel="share of transitions", ylim=(0, 1))
    axes.legend()
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120)


def _summary(group: Totals) -> dict[str, float]:
    sums = {name: value for name, value in asdict(group).items() if name != "contexts"}
    return {**sums, "cut_share": group.cut_share}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", nargs="+", type=Path, required=True, help="episode files or folders")
    parser.add_argument("--out", type=Path, required=True, help="folder of statistics.md, .json and .png")


def run(args: argparse.Namespace) -> None:
    files = tqdm(line_files(args.episodes), unit="file", desc="statistics")
    episodes = (episode for path in files for episode in read_episodes(path))
    tables = count_groups(episodes, token_counter(TOKENIZER_FILE))
    page = markdown(tables, "statistics.png")
    plot_contexts(tables["environment"], args.out / "statistics.png")
    summary = {title: {name: _summary(group) for name, group in groups.items()} for title, groups in tables.items()}
    write_lines(args.out / "statistics.json", [json.dumps(summary, indent=1)])
    write_lines(args.out / "statistics.md", [page])
    print(page)
