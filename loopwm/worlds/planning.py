"""Planning with imagined worlds: which of an agent's candidate actions to try first.

Only refusals that the model trusts and losses change the agent's own order, and nothing is dropped: an agent that is
asked too often by an unsure model loses more than it gains. Where a thing is looked for, what is imagined to be found
decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from loopwm.records.refusals import is_refused
from loopwm.worlds.protocol import Imagined, Worlds

if TYPE_CHECKING:  # it imports torch, which planning over HTTP does without
    from loopwm.worlds.local import LocalWorlds

LOSS = 2.0
"""Risk of an action that is imagined to lose points: above that of any refusal, which costs a step only."""


def imagine(worlds: Worlds, actions: Sequence[str]) -> list[Imagined]:
    """Imagine each action alone after the first row of `worlds`, which stays as it is. actions: at least one."""
    forks = worlds.fork([0] * len(actions))
    try:
        return forks.step(actions)
    finally:
        forks.close()


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


def chances(
    worlds: LocalWorlds,
    plans: Sequence[Sequence[str]],
    shows: Callable[[str], bool],
    samples: int = 16,
    seed: int = 0,
) -> list[float]:
    """Return how probably each plan's last observation shows what is looked for: a share of sampled observations.

    Args:
        worlds: worlds whose first row is the agent's state, which stays as it is.
        plans: actions of each, at least one.
        shows: whether an observation shows it.
        samples: drawn of each plan.
        seed: of the draws.
    """
    forks = worlds.fork([0] * len(plans))
    try:
        for k in range(max(map(len, plans), default=0)):
            rows = [row for row, plan in enumerate(plans) if k < len(plan)]
            forks.step([plans[row][k] for row in rows], decode=False, rows=rows)
        return [sum(map(shows, texts)) / samples for texts in forks.sample(samples, seed)]
    finally:
        forks.close()
