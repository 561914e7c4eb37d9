"""Names of things in observations: what the entity metrics and the answerable rule are counted on.

Environments declare them (`data_prep/environments/base.py:Declared`). Of one that does not, what a thing is called is
not known, so it has no entity metrics.
"""

from __future__ import annotations

from pathlib import Path

from data_prep.environments import declared
from loopwm.records.names import Names

DATA = Path(__file__).parents[1] / "data"


def names_of(env: str) -> Names | None:
    """How names are found in this environment; None if they are not known."""
    return declared(env).names
