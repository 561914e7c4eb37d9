"""Planning with imagined worlds: which candidate action to try first, which plan to follow, where to look.

`order_actions` changes an agent's own order only for refusals that the model trusts and for losses, and drops nothing:
an agent that is asked too often by an unsure model loses more than it gains. `best_plan` and `beam_search` weigh points
by how surely a plan gets there (whether actions are carried out matters more than whether every text is right: what
a closed drawer holds cannot be known), and keep the agent's choice where none are expected. `chances` finds things.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, NamedTuple

from loopwm.records.refusals import is_refused
from loopwm.records.template import FormatError, Transition
from loopwm.worlds.protocol import Imagined, RowWorlds, Worlds

if TYPE_CHECKING:  # it imports torch, which planning over HTTP does without
    from loopwm.worlds.local import LocalWorlds

LOSS = 2.0
"""Risk of an action that is imagined to lose points: above that of any refusal, which costs a step only."""


def imagine(worlds: Worlds, actions: Sequence[str]) -> list[Imagined]:
    """Imagine each action alone after the first row of `worlds`, which stays as it is. actions: at least one."""
    with closing(worlds.fork([0] * len(actions))) as forks:
        return forks.step(actions)


def refusal_risk(imagined: Imagined) -> float:
    """Return the probability of a refusal: the trust in one that was imagined, or what the acceptance head says."""
    by_text = (imagined.trust or 0.0) if is_refused(imagined.observation) else 0.0
    return by_text if imagined.acceptance is None else max(by_text, 1.0 - imagined.acceptance)


def risk(imagined: Imagined) -> float:
    """Return LOSS for an action that is imagined to lose points, else the risk of a refusal, in [0, 1]."""
    return LOSS if imagined.reward is not None and imagined.reward < 0 else refusal_risk(imagined)


def order_actions(worlds: Worlds, actions: Sequence[str], bound: float = 0.93) -> list[int]:
    """Return the indices of candidate actions in the order to try them.

    Args:
        worlds: worlds whose first row is the agent's state.
        actions: candidates, the one that the agent prefers first.
        bound: actions whose risk of refusal reaches it come last, those of less risk first among them; losses last. On
            dev games 126 of 128 refusals whose text was trusted so came true; 0.5 lost an agent points.
    """
    if len(actions) < 2:
        return list(range(len(actions)))
    risks = [risk(step) for step in imagine(worlds, actions)]
    return sorted(range(len(actions)), key=lambda place: risks[place] if risks[place] >= bound else 0.0)


class Plan(NamedTuple):
    """Imagined steps of a plan.

    points: expected, each mean reward weighed by the chance of the steps up to it; what is refused pays nothing.
    chance: that all actions are carried out, or, without acceptance heads, that all observations are right. over:
    nothing can follow.
    """

    steps: tuple[Transition, ...] = ()
    points: float = 0.0
    chance: float = 1.0
    over: bool = False

    def after(self, action: str, imagined: Imagined) -> Plan:
        """Return the plan with one more step; without acceptance, a text that was cut has no trust, and chance 0.

        Raises FormatError for worlds that predict no rewards.
        """
        if imagined.reward is None and imagined.finish != "full":
            raise FormatError("worlds", "must predict rewards, which needs a checkpoint with prediction heads")
        sure = imagined.trust if imagined.acceptance is None else imagined.acceptance
        chance = self.chance * (sure or 0.0)
        over = imagined.ends or imagined.finish == "full" or not imagined.accepted
        mean = imagined.reward if imagined.expected_reward is None else imagined.expected_reward
        paid = mean if mean is not None and imagined.accepted else 0.0
        steps = (*self.steps, Transition(action, imagined.observation))
        return Plan(steps, self.points + chance * paid, chance, over)


def best_plan(worlds: RowWorlds, plans: Sequence[Sequence[str]], least: float = 0.0) -> int | None:
    """Return the index of the plan with the most expected points, None if none has more than `least`.

    A plan goes on to its first action that is refused or ends the episode.

    Args:
        worlds: worlds whose first row is the agent's state, which stays as it is.
        plans: actions of each.
        least: points that following a plan has to bring.
    """
    imagined = [Plan() for _ in plans]
    with closing(worlds.fork([0] * len(plans))) as forks:
        for k in range(max(map(len, plans), default=0)):
            rows = [row for row, plan in enumerate(plans) if k < len(plan) and not imagined[row].over]
            if not rows:
                break
            actions = [plans[row][k] for row in rows]
            for row, action, step in zip(rows, actions, forks.step(actions, rows=rows), strict=True):
                imagined[row] = imagined[row].after(action, step)
    best = max(range(len(plans)), key=lambda row: imagined[row].points, default=None)
    return best if best is not None and imagined[best].points > least else None


def beam_search(
    worlds: RowWorlds, propose: Callable[[Sequence[Transition]], Sequence[str]], width: int = 8, depth: int = 3
) -> Plan:
    """Return the plan with the most expected points that a beam search finds, the empty plan if none is expected.

    Args:
        worlds: worlds whose first row is the agent's state, which stays as it is.
        propose: returns the actions to try after imagined steps.
        width: plans that are continued at each depth, those with the most points and, among equals, the surest.
        depth: most actions of a plan.
    """
    best, beam = Plan(), [Plan()]
    with ExitStack() as opened:
        rows = opened.enter_context(closing(worlds.fork([0])))
        for _ in range(depth):
            tries = [(row, action) for row, plan in enumerate(beam) for action in propose(plan.steps)]
            if not tries:
                break
            grown = opened.enter_context(closing(rows.fork([row for row, _ in tries])))
            steps = grown.step([action for _, action in tries])
            plans = [beam[row].after(action, step) for (row, action), step in zip(tries, steps, strict=True)]
            best = max(best, *plans, key=lambda plan: plan.points)
            alive = [place for place, plan in enumerate(plans) if not plan.over]
            best_places = sorted(alive, key=lambda place: (-plans[place].points, -plans[place].chance))[:width]
            beam, rows = [plans[place] for place in best_places], opened.enter_context(closing(grown.fork(best_places)))
    return best


def chances(
    worlds: LocalWorlds, plans: Sequence[Sequence[str]], shows: Callable[[str], bool], samples: int = 16, seed: int = 0
) -> list[float]:
    """Return how probably each plan's last observation shows what is looked for: a share of sampled observations.

    Args:
        worlds: worlds whose first row is the agent's state, which stays as it is.
        plans: actions of each, at least one.
        shows: whether an observation shows it.
        samples: drawn of each plan.
        seed: of the draws.
    """
    with closing(worlds.fork([0] * len(plans))) as forks:
        for k in range(max(map(len, plans), default=0)):
            rows = [row for row, plan in enumerate(plans) if k < len(plan)]
            forks.step([plans[row][k] for row in rows], decode=False, rows=rows)
        return [sum(map(shows, texts)) / samples for texts in forks.sample(samples, seed)]
