"""Scores of windows and their paired differences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eval.commands.harness import RunSettings
from eval.models.checkpoint import CheckpointPredictor
from eval.scores.suites import Suite, load_suite
from lab.agents.imagination import fed_back
from lab.studies.differences import ALL, Difference, differences, means
from lab.studies.window_scores import Scores, add_losses, latent_norms, nll, read_scores, score, select_windows
from loopwm.records import template
from loopwm.records.template import ContextKind, Transition, window_context
from loopwm.records.windows import Window

HORIZONS = (1, 3)


def settings(context_kind: ContextKind = "observed", batch_size: int = 2) -> RunSettings:
    return RunSettings("tiny", context_kind, HORIZONS, None, 0, batch_size)


@pytest.mark.parametrize("context_kind", ["observed", "snapshot"])
def test_window_losses_are_those_of_whole_prompts_without_a_cache(
    checkpoint: Path, windows_file: Path, context_kind: ContextKind
) -> None:
    predictor = CheckpointPredictor(checkpoint, 3)
    model, tokenizer = predictor.world_model.model, predictor.world_model.tokenizer
    windows = list(load_suite(str(windows_file)).windows)
    for window, row in zip(windows, nll(predictor, windows, context_kind, HORIZONS), strict=True):
        for k in HORIZONS:
            prompt = template.render_prompt(window_context(window, context_kind), window["actions"][:k])
            target = window["observations"][k - 1] + template.END
            ids, wanted = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, target))
            with torch.no_grad():
                logits = model(torch.tensor([ids + wanted]), depth=3).logits[0, len(ids) - 1 : -1]
            expected = torch.nn.functional.cross_entropy(logits, torch.tensor(wanted), reduction="sum")
            assert row[k][0] == pytest.approx(expected.item(), abs=1e-3)
            assert row[k][1] == len(wanted)


def score_and_loss(predictor: CheckpointPredictor, suite: Suite, windows: list[Window], out: Path) -> None:
    score(predictor, suite, windows, settings(), out)
    add_losses(predictor, windows, settings(), out)


def test_scoring_interrupted_anywhere_ends_with_the_same_scores(
    checkpoint: Path, windows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.models.checkpoint.LONGEST_OBSERVATION", 4)
    suite = load_suite(str(windows_file))
    windows = select_windows(suite, settings())
    predictor = CheckpointPredictor(checkpoint)
    score_and_loss(predictor, suite, windows, tmp_path)
    whole = read_scores(windows, HORIZONS, tmp_path)
    assert whole["nats"].shape == (5, 2)
    path = tmp_path / "nats.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    score_and_loss(predictor, suite, windows, tmp_path)
    again = read_scores(windows, HORIZONS, tmp_path)
    np.testing.assert_allclose(again["nats"], whole["nats"], rtol=1e-5)
    before = path.read_bytes()
    monkeypatch.setattr(CheckpointPredictor, "begin", None)
    monkeypatch.setattr(CheckpointPredictor, "predict", None)
    score_and_loss(predictor, suite, windows, tmp_path)
    assert path.read_bytes() == before


def test_a_difference_counts_only_with_bounds_off_zero_and_all_seeds_agreeing() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=(3, 400, 2))

    def arm(*shifts: float) -> list[Scores]:
        return [{"nats": base[i] + shift + 0.1 * rng.normal(size=(400, 2))} for i, shift in enumerate(shifts)]

    def over_all(ours: list[Scores], theirs: list[Scores]) -> Difference:
        (found,) = (
            d for d in differences(("a", "b"), "observed", ours, theirs, HORIZONS, range(400)) if d.horizon == ALL
        )
        return found

    better = over_all(arm(0.2, 0.2, 0.2), arm(0, 0, 0))
    assert better.counts
    assert better.low < better.difference < better.high
    assert better.difference == pytest.approx(0.2, abs=0.02)
    assert np.mean(better.by_seed) == pytest.approx(better.difference)
    assert over_all(arm(-0.2, -0.2, -0.2), arm(0, 0, 0)).counts
    assert not over_all(arm(0, 0, 0), arm(0, 0, 0)).counts
    one_against = over_all(arm(0.4, 0.4, -0.2), arm(0, 0, 0))
    assert one_against.low > 0
    assert not one_against.counts


def test_pairing_removes_what_windows_have_in_common() -> None:
    """Windows differ by 10, arms by 0.1: unpaired bounds would be fifty times as wide."""
    windows = 10 * np.random.default_rng(1).normal(size=(200, 2))
    (d, *_) = differences(("a", "b"), "observed", [{"em": windows + 0.1}], [{"em": windows}], HORIZONS, range(200))
    assert d.high - d.low < 1e-9


def test_means_are_over_windows_and_seeds_and_horizons() -> None:
    scores = [{"em": np.array([[1.0, 0.0], [1.0, 1.0]])}, {"em": np.array([[0.0, 0.0], [0.0, 0.0]])}]
    found = {m.horizon: (m.mean, m.by_seed) for m in means("a", "observed", scores, HORIZONS)}
    assert found == {ALL: (0.375, (0.75, 0.0)), 1: (0.5, (1.0, 0.0)), 3: (0.25, (0.5, 0.0))}


def test_fed_back_text_is_imagined_as_if_it_had_been_observed(
    checkpoint: Path, windows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.models.checkpoint.LONGEST_OBSERVATION", 5)
    checkpointed = CheckpointPredictor(checkpoint)
    predictor = fed_back(checkpointed, str(checkpoint), "observed")
    windows = list(load_suite(str(windows_file)).windows)[:2]
    world_model = checkpointed.world_model
    for window, prediction in zip(windows, predictor.predict(windows, "observed", (1, 2)), strict=True):
        context = window_context(window, "observed")
        first = world_model.decode(world_model.advance(world_model.encode([context]), window["actions"][:1]), 5)[0]
        longer = template.Context(
            context.goal, context.observation, (*context.history, Transition(window["actions"][0], first))
        )
        second = world_model.decode(world_model.advance(world_model.encode([longer]), window["actions"][1:2]), 5)[0]
        assert prediction.texts == {1: first, 2: second}


def test_fed_back_text_over_the_context_limit_drops_the_oldest_steps(
    checkpoint: Path, windows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.models.checkpoint.LONGEST_OBSERVATION", 30)
    monkeypatch.setattr(template, "CONTEXT_LIMIT", 100)
    monkeypatch.setattr(template.fit_context, "__defaults__", (100, 1))
    window = load_suite(str(windows_file)).windows[4]
    predictor = fed_back(CheckpointPredictor(checkpoint), str(checkpoint), "observed")
    predictions = predictor.predict([window], "observed", (1, 2, 3, 4, 5))
    assert sorted(predictions[0].texts) == [1, 2, 3, 4, 5]


def test_latents_are_followed_far_beyond_the_windows_own_actions(checkpoint: Path, windows_file: Path) -> None:
    predictor = CheckpointPredictor(checkpoint, 2)
    windows = list(load_suite(str(windows_file)).windows)
    norms = latent_norms(predictor, windows, "observed", 50, 2)
    assert len(norms.mean) == len(norms.largest) == 51
    assert all(0 < mean <= largest for mean, largest in zip(norms.mean, norms.largest, strict=True))
    assert max(norms.largest) < 10 * norms.largest[0]
    world = predictor.world_model.encode([window_context(w, "observed") for w in windows], 2)
    assert norms.mean[0] == pytest.approx(world.latent.square().mean((1, 2)).sqrt().mean().item(), rel=1e-3)
