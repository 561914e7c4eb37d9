"""Every key of a text run's configuration does what it says, from the file to what reaches model and optimisers.

`shows` names the keys that a test is about; a key without a test is a failure.
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

from loopwm.text.training.config import TrainingConfig
from tests.training.consequences.watched import SHOWN


def test_every_key_has_a_test_of_its_consequence():
    for path in Path(__file__).parent.glob("test_*.py"):
        import_module(f"{__package__}.{path.stem}")
    keys = {"system"}
    for section, kind in get_type_hints(TrainingConfig).items():
        if dataclasses.is_dataclass(kind):
            keys |= {f"{section}.{field.name}" for field in dataclasses.fields(kind)}
    assert keys == SHOWN
