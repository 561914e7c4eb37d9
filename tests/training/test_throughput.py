"""Rates by the wall clock, and rows dealt to processes by what they cost."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from loopwm.runtime import product_rate
from loopwm.text.data.data_loader import LoaderState, deal
from loopwm.text.data.tree import IGNORED
from loopwm.text.model.flops import row_flops
from loopwm.text.training.config import load_config
from loopwm.text.training.program import TextProgram
from loopwm.trainer.trainer import Throughput, Trainer


def test_throughput_counts_all_time_since_the_last_log() -> None:
    now = 10.0
    throughput = Throughput(roof=1000.0, clock=lambda: now)
    now = 12.0
    assert throughput.add(100, 400) == {"tokens_per_s": 50, "flops_per_token": 4, "roof_share": 0.2}
    now = 20.0
    assert throughput.add(100, 800) == {"tokens_per_s": 20, "flops_per_token": 6, "roof_share": 0.12}
    throughput.restart()
    now = 21.0
    assert throughput.add(50, None) == {"tokens_per_s": 50}


def test_product_rate_is_below_that_of_a_product_alone() -> None:
    assert 1e8 < product_rate("no", torch.device("cpu")) < 1e14
    assert 1e8 < product_rate("bf16", torch.device("cpu")) < 1e14


def test_run_logs_flops_of_its_rows_and_share_of_the_roof(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a sum over the tokens of all rows, one by one."""
    monkeypatch.setattr("loopwm.trainer.trainer.product_rate", lambda precision, device: 1e9)
    settings = ["run={steps: 4, log_every: 2, eval_every: 2, eval_batches: 1, mixed_precision: 'no'}"]
    config = load_config(config_file, settings)
    Trainer(config, TextProgram, tmp_path / "run").run()
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    train = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in train] == [2, 4]
    assert not any("flops" in record for record in records)
    program = TextProgram(config)
    tokens = flops = 0.0
    for step, (batches, _) in enumerate(itertools.islice(program.global_batches(LoaderState()), 2)):
        for batch in batches:
            plan = program.depth_plan(step, batch)
            for row, loops in enumerate(plan.loops):
                places = [i for i, branch in enumerate(batch.branch[row].tolist()) if branch >= 0]
                keys = sum(int(batch.positions[row, i]) + 1 for i in places)
                targets = sum(int(label) != IGNORED for label in batch.label[row])
                tokens += len(places)
                flops += row_flops(program.model_config, len(places), keys, targets, loops, min(loops, plan.mu_bwd))
    assert train[0]["flops_per_token"] == pytest.approx(flops / tokens, rel=1e-5)
    expected = train[0]["flops_per_token"] * train[0]["tokens_per_s"] / 1e9
    assert train[0]["roof_share"] == pytest.approx(expected)


def cheapest(costs: list[float], hands: int, least: int) -> float:
    """Return the cost of the busiest hand in the best of all ways to deal."""
    ways = itertools.product(range(hands), repeat=len(costs))
    fair = (way for way in ways if all(way.count(hand) >= least for hand in range(hands)))
    return min(
        max(sum(c for c, h in zip(costs, way, strict=True) if h == hand) for hand in range(hands)) for way in fair
    )


@pytest.mark.parametrize(("hands", "least"), [(1, 3), (2, 1), (2, 3), (3, 2)])
def test_deal_is_near_the_best_of_all_ways(hands: int, least: int) -> None:
    """LPT is within 4/3 of the best without a least number of rows (Graham, 1969)."""
    rng = np.random.default_rng(0)
    for _ in range(6):
        costs = rng.uniform(1, 4, 7).tolist()
        dealt = deal(costs, hands, least)
        assert sorted(itertools.chain(*dealt)) == list(range(7))
        assert all(len(rows) >= least and rows == sorted(rows) for rows in dealt)
        busiest = max(sum(costs[row] for row in rows) for rows in dealt)
        assert busiest <= 1.34 * cheapest(costs, hands, least)


def test_deal_gives_a_costly_row_company_where_each_hand_needs_two() -> None:
    assert deal([100.0, 1.0, 1.0, 1.0], 2, 2) == [[0, 3], [1, 2]]


def test_processes_share_the_rows_of_one_by_cost(config_file: Path) -> None:
    """The rows and their indices are those of one process; the busiest one costs little more than the mean."""
    program = TextProgram(load_config(config_file, ["batch={rows: 32, tokens: 64, micro_batches: 8}"]))
    alone, shared = program.global_batches(LoaderState()), program.global_batches(LoaderState(), processes=4)
    for step, ((one, loader_state), (four, same)) in enumerate(itertools.islice(zip(alone, shared, strict=False), 4)):
        assert loader_state == same
        assert len(one) == len(four) == 8
        tokens = [{}, {}]
        for found, batches in zip(tokens, (one, four), strict=True):
            for batch in batches:
                real = batch.branch >= 0
                found |= {i: sorted(batch.tokens[r][real[r]].tolist()) for r, i in enumerate(batch.row_ids)}
        assert tokens[0] == tokens[1]
        costs = []
        for process in range(4):
            rows = [(batch, r, i) for batch in four[process::4] for r, i in enumerate(batch.row_ids)]
            costs.append(sum(cost_of(program, step, batch, r, i) for batch, r, i in rows))
        assert max(costs) < 1.1 * sum(costs) / 4


def cost_of(program, step: int, batch, row: int, row_id: int) -> float:
    real = batch.branch[row] >= 0
    (loops,) = program._draw(step, (row_id,)).loops
    keys, targets = int((batch.positions[row] + 1)[real].sum()), int((batch.label[row] != IGNORED).sum())
    return row_flops(program.model_config, int(real.sum()), keys, targets, loops, min(loops, 1))
