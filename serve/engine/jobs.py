"""Work with the model beside requests for tokens: it queues, and others come in between its passes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class SharedPass(Protocol):
    """A pass that one piece of work asks for and others of the same key can take with it."""

    @property
    def key(self) -> Hashable: ...

    def run(self, others: Sequence[Any]) -> list[Any]:
        """Results for itself and for these others, of the same kind and key."""


Steps = Generator[SharedPass | None, Any, T]
"""Work with the model that yields before every pass: None takes the pass itself, a SharedPass is sent its result."""


class Job:
    """Work and who gets its result; nobody once it is cancelled, and no more passes."""

    def __init__(self, steps: Steps[Any], deliver: Callable[[Any], None]) -> None:
        self.steps, self.deliver = steps, deliver
        self.asked: SharedPass | None = None
        self.begun = self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def advance(self, result: Any) -> bool:
        """On to the next pass with the result of the last, or what it raised; whether there is a next one. What the
        work raises is its result, which whoever asked for it tells or logs."""
        self.begun = True
        if self.cancelled:
            return False
        try:
            self.asked = self.steps.throw(result) if isinstance(result, Exception) else self.steps.send(result)
        except StopIteration as end:
            self.deliver(end.value)
            return False
        except Exception as error:
            self.deliver(error)
            return False
        return True
