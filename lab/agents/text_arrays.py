"""Texts as arrays of code points, so that vector environments pass any text between processes.

Gymnasium's arrays contain indices into the characters that a space can draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.spaces.utils import flatten, flatten_space, unflatten
from gymnasium.vector.utils import read_from_shared_memory
from numpy.typing import NDArray

from loopwm.worlds.gym import AnyText

NO_CHARACTER = -1


@flatten_space.register
def _array_space(space: AnyText) -> spaces.Box:
    return spaces.Box(NO_CHARACTER, 0x10FFFF, (space.max_length,), np.int32)


@flatten.register
def _to_array(space: AnyText, x: str) -> NDArray[np.int32]:  # type: ignore[misc]
    points = np.frombuffer(x.encode("utf-32-le", "surrogatepass"), np.int32)
    return np.concatenate((points, np.full(space.max_length - len(points), NO_CHARACTER, np.int32)))


@unflatten.register
def _to_text(space: AnyText, x: NDArray[np.int32]) -> str:  # type: ignore[misc]
    return x[x != NO_CHARACTER].tobytes().decode("utf-32-le", "surrogatepass")


class _SharedTexts(Sequence[str]):
    """Texts in shared memory, read once and overwritten later; a copy is a tuple."""

    def __init__(self, space: AnyText, rows: NDArray[np.int32]) -> None:
        self._space, self._rows = space, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return _to_text(self._space, self._rows[index])

    def __deepcopy__(self, memo: dict[int, Any]) -> tuple[str, ...]:
        return tuple(self)


@read_from_shared_memory.register  # type: ignore[arg-type]  # a sequence, as a tuple is
def _in_shared_memory(space: AnyText, shared_memory: Any, n: int = 1) -> _SharedTexts:
    rows = np.frombuffer(shared_memory.get_obj(), np.int32).reshape(n, space.max_length)
    return _SharedTexts(space, rows)
