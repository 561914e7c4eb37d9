"""Names of things in observations, the basis of the entity metrics and the answerable rule.

Environments declare them (`data_prep/environments/base.py:Declared`). One that does not has no entity metrics.
"""

from __future__ import annotations

from pathlib import Path

from data_prep.environments import declared
from loopwm.records.names import Names

DATA = Path(__file__).parents[1] / "data"


def names_of(env: str) -> Names | None:
    """Return the environment's names; None if unknown."""
    return declared(env).names
