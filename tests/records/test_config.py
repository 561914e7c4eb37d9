"""A configuration is what its file and the command line say, or one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from loopwm.records.config import read_sections, typed
from loopwm.records.errors import InputError


@dataclass(frozen=True)
class Choice:
    precision: Literal["no", "bf16"] = "bf16"


@pytest.mark.parametrize("said", ["precision=no", "precision='no'", "precision=off"])
def test_the_word_no_can_be_said_where_yaml_reads_a_truth_value(said, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("precision: bf16\n")
    assert typed(Choice, read_sections(path, [said])) == Choice("no")
    with pytest.raises(InputError, match=r"precision: must be one of no, bf16.*got 'yes'"):
        typed(Choice, read_sections(path, ["precision=yes"]))
