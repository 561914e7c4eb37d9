"""Statistics of training rows equal counts over the batches."""

from __future__ import annotations

import itertools

from lab.data.row_statistics import main, statistics
from loopwm.text.data.data_loader import LoaderState
from loopwm.text.training.config import load_config
from loopwm.text.training.program import TextProgram


def test_statistics_count_what_the_batches_hold(config_file, capsys):
    program = TextProgram(load_config(config_file))
    batches = [b for group, _ in itertools.islice(program.global_batches(LoaderState()), 5) for b in group]
    found = statistics(program, 5)
    assert found.tokens == sum(int((b.branch >= 0).sum()) for b in batches)
    assert found.padded == sum(b.tokens.numel() for b in batches)
    assert found.rows == sum(len(b.row_ids) for b in batches)
    assert found.served == sum(b.targets for b in batches) == sum(found.by["horizon"].values())
    assert found.transitions == sum(len(b.trunk_steps.row) for b in batches)
    assert main(["--config", str(config_file), "--steps", "5"]) == 0
    shown = capsys.readouterr().out
    assert f"in a served format: {found.served / found.tokens:.1%}" in shown
    assert "scienceworld 100.0%" in shown
    assert "targets by task: toy 100.0%" in shown
    assert main(["--config", str(config_file), "--steps", "0"]) == 2
    without = load_config(config_file, ["model.overrides={slots_in_trunk: false}"])
    deferred = statistics(TextProgram(without), 5)
    assert deferred.served == sum(n for name, n in deferred.by["horizon"].items() if name != "trunk")
