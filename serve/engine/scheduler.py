"""Which passes are taken next: fair between keys, and within a budget of tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable

from serve.engine.forward import ForwardBatch, WorkItem


class Scheduler:
    """Tasks in the order in which they came. Whose key has had the fewest tokens goes first."""

    def __init__(self) -> None:
        self.tasks: dict[WorkItem, None] = {}
        self._had: defaultdict[str, float] = defaultdict(float)

    def add(self, task: WorkItem) -> None:
        """A key without tasks begins level with those that have the least, whatever it had before."""
        keys = {other.ctx.key for other in self.tasks}
        if task.ctx.key not in keys:
            level = min((self._had[key] for key in keys), default=0.0)
            self._had[task.ctx.key] = max(self._had[task.ctx.key], level)
        self.tasks[task] = None

    def charge(self, keys: Iterable[str], tokens: float = 1.0) -> None:
        for key in keys:
            self._had[key] += tokens

    def settle(self) -> None:
        """Nobody waits and nothing runs: all are level again."""
        self._had.clear()

    def unbegun(self, budget: int, served: Collection[WorkItem]) -> list[WorkItem]:
        """Tasks that have not said yet which pass they need, in the order of their turns, as many as may come to
        something."""
        return [task for task in self._line(served) if not task.begun][:budget]

    def next(self, budget: int, served: Collection[WorkItem]) -> list[tuple[WorkItem, ForwardBatch]]:
        """The first, and those whose pass can be taken with its own, of at most `budget` tokens where passes can be
        cut; none of `served`."""
        chosen: list[tuple[WorkItem, ForwardBatch]] = []
        for task in self._line(served):
            if task.asked is None:
                continue
            asked = task.asked.within(budget)
            if not chosen or (asked.key == chosen[0][1].key and asked.tokens <= budget):
                chosen.append((task, asked))
                budget -= asked.tokens
            if budget <= 0:
                break
        return chosen

    def _line(self, served: Collection[WorkItem]) -> list[WorkItem]:
        """Stable, so that tasks of one key keep their order."""
        return sorted((task for task in self.tasks if task not in served), key=lambda task: self._had[task.ctx.key])

    def take_out(self, gone: Callable[[WorkItem], bool]) -> list[WorkItem]:
        out = [task for task in self.tasks if gone(task)]
        for task in out:
            self.remove(task)
        return out

    def remove(self, task: WorkItem) -> None:
        """Does nothing where it is gone already."""
        self.tasks.pop(task, None)
