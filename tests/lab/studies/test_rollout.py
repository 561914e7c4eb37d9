"""Rollouts of whole episodes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eval.models.base import Copy
from eval.models.checkpoint import CheckpointPredictor
from eval.scores.predictions import Prediction, read_records
from lab.__main__ import main
from lab.agents.imagination import FedBack, Imagination, PredictorWorlds, fed_back
from lab.studies import rollout
from lab.studies.rollout import WAYS, RolloutSettings, imagine_batch, roll_out, select_starts, start_windows
from loopwm.records.episodes import Episode, Step, write_episodes
from loopwm.records.errors import InputError
from loopwm.records.template import ContextKind, window_context
from loopwm.records.windows import Window

LENGTHS = (7, 2, 5, 1, 3)


def episode(variation: int, length: int, env: str = "scienceworld") -> Episode:
    look = f"You are in room {variation}."
    steps = [Step(None, look, 0, False, look, "Nothing.")]
    steps += [Step(f"go to room {k}", f"You are in room {k}.", 10 * k, k == length) for k in range(1, length + 1)]
    return Episode(env, "walk", variation, "test", "gold", "Walk.", tuple(steps))


@pytest.fixture
def episodes_file(tmp_path: Path) -> Path:
    path = tmp_path / "episodes.jsonl.xz"
    write_episodes(path, [episode(i, length) for i, length in enumerate(LENGTHS)])
    return path


@pytest.fixture
def starts(episodes_file: Path) -> list[Window]:
    return select_starts([episodes_file], settings())


def settings(model: str = "model", context: ContextKind = "observed", depth_limit: int = 6) -> RolloutSettings:
    return RolloutSettings(model, context, depth_limit, None, 0, 2)


class Oracle:
    """Knows the truth; `lies_from` on, in what it was shown and asked, it does not tell it."""

    def __init__(self, lies_from: int = 99) -> None:
        self.lies_from = lies_from
        self.calls = 0

    @property
    def identity(self) -> Mapping[str, str | int]:
        return {}

    def predict(
        self, windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]
    ) -> list[Prediction]:
        self.calls += 1
        return [Prediction({k: self._text(window, k) for k in horizons}) for window in windows]

    def _text(self, window: Window, horizon: int) -> str:
        step = len(window["history"]) - 1 + horizon
        told = any(shown["observation"] == "A lie." for shown in window["history"])
        lie = told or (step >= self.lies_from and horizon == 1)
        return "A lie." if lie else f"You are in room {window['actions'][horizon - 1].split()[-1]}."


def rows(results: Mapping[str, Any], way: str) -> dict[int, tuple[int, float]]:
    return {row["depth"]: (row["n"], row["em"]) for row in results["rows"] if row["way"] == way}


def test_each_depth_is_over_the_episodes_that_are_that_long(starts: list[Window], tmp_path: Path) -> None:
    results = roll_out(Oracle(), starts, settings(), tmp_path / "out")
    for way in WAYS:
        assert rows(results, way) == {1: (5, 1), 2: (4, 1), 3: (3, 1), 4: (2, 1), 5: (2, 1), 6: (1, 1)}
    assert results["n"] == 5
    assert len(read_records(tmp_path / "out" / "latent" / "predictions.jsonl")) == 6 + 2 + 5 + 1 + 3


def test_what_is_fed_back_is_part_of_the_next_question_and_latent_steps_are_not(
    starts: list[Window], tmp_path: Path
) -> None:
    results = roll_out(Oracle(lies_from=3), starts, settings(), tmp_path / "out")
    assert rows(results, "latent") == {k: (n, 1) for k, (n, _) in rows(results, "latent").items()}
    assert rows(results, "fed_back") == {1: (5, 1), 2: (4, 1), 3: (3, 0), 4: (2, 0), 5: (2, 0), 6: (1, 0)}
    right = [1, 2 / 5, 1, 2 / 3, 2 / 6]  # of 1, 5, 2, 3 and 6 steps
    assert results["episodes"]["fed_back"]["em"] == pytest.approx(sum(right) / 5)
    assert results["latent_minus_fed_back"][0]["difference"] == pytest.approx(1 - sum(right) / 5)


@pytest.mark.parametrize("way", WAYS)
def test_a_rollout_equals_single_predictions_at_depths_both_cover(
    way: str,
    checkpoint: Path,
    starts: list[Window],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches of ragged episodes are padded; that must not show."""
    monkeypatch.setattr("eval.models.checkpoint.LONGEST_OBSERVATION", 5)
    predictor = CheckpointPredictor(checkpoint)
    chosen = predictor if way == "latent" else fed_back(predictor, str(checkpoint), "snapshot")
    records = imagine_batch(chosen, starts, "snapshot")
    for window in starts:
        depths = tuple(range(1, len(window["actions"]) + 1))
        (alone,) = chosen.predict([window], "snapshot", depths)
        assert {k: records[window["id"], k]["prediction"] for k in depths} == alone.texts
        (short,) = chosen.predict([window], "snapshot", depths[:2])
        assert short.texts == {k: alone.texts[k] for k in depths[:2]}


def test_a_checkpoint_feeds_back_as_any_predictor_does(
    checkpoint: Path,
    starts: list[Window],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("eval.models.checkpoint.LONGEST_OBSERVATION", 5)
    predictor = CheckpointPredictor(checkpoint)
    window = [starts[0]]
    one = fed_back(predictor, str(checkpoint), "observed").predict(window, "observed", (1, 2, 3))
    other = FedBack(predictor, Imagination(partial(PredictorWorlds, predictor))).predict(window, "observed", (1, 2, 3))
    assert one[0].texts == other[0].texts


def test_no_step_is_imagined_after_one_that_was_cut(starts: list[Window]) -> None:
    class Cut(Oracle):
        def predict(self, windows: Sequence[Window], *question: Any) -> list[Prediction]:
            return [Prediction({1: ""}, unanswered=frozenset({1})) for _ in windows]

    worlds = PredictorWorlds(Cut(), "scienceworld")
    worlds.begin([window_context(starts[0], "observed")])
    with pytest.raises(InputError, match="--model: a step was cut off at the token limit"):
        worlds.step(["look around"])


def test_a_stopped_rollout_goes_on_to_identical_files(starts: list[Window], tmp_path: Path) -> None:
    class Interrupted(Oracle):
        def predict(self, *question: Any) -> list[Prediction]:
            if self.calls == 2:
                raise KeyboardInterrupt
            return super().predict(*question)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = roll_out(Oracle(), starts, settings(), whole)
    with pytest.raises(KeyboardInterrupt):
        roll_out(Interrupted(), starts, settings(), killed)
    torn = (killed / "latent" / "predictions.jsonl").read_bytes()
    assert torn
    (killed / "latent" / "predictions.jsonl").write_bytes(torn[:-30])
    assert roll_out(Oracle(), starts, settings(), killed)["rows"] == expected["rows"]
    for way in WAYS:
        files = [folder / way / "predictions.jsonl" for folder in (whole, killed)]
        assert files[0].read_bytes() == files[1].read_bytes()
    finished = Oracle()
    assert roll_out(finished, starts, settings(), killed)["rows"] == expected["rows"]
    assert finished.calls == 0


def test_episodes_of_one_variation_keep_apart() -> None:
    windows = start_windows([episode(1, 3), episode(1, 2), episode(2, 0)], 30)
    assert [(window["id"][-1], len(window["actions"])) for window in windows] == [("0", 3), ("1", 2)]
    assert windows[0]["rewards"] == [10, 10, 10]
    assert windows[0]["dones"] == [False, False, True]


def command(episodes: Path, out: Path, *options: str) -> list[str]:
    options = ("--model", "copy", "--context", "observed", *options)
    return ["rollout", "--episodes", str(episodes), "--out", str(out), *options]


def test_the_command_writes_results_table_and_plot(
    episodes_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(command(episodes_file, out, "--depth-limit", "4", "--limit", "4")) == 0
    results = json.loads((out / "results.json").read_text())
    assert (results["n"], results["provenance"]["depth_limit"], results["context"]) == (4, 4, "observed")
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")
    report = capsys.readouterr().out
    assert report == (out / "report.md").read_text()
    assert "| mean of episodes | 4 | " in report


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ([episode(1, 0)], (), "--episodes: must have a step to imagine"),
        ([episode(1, 2), episode(1, 2, "alfworld")], (), "--episodes: must be of one environment, got alf"),
        ([episode(1, 2)], ("--context", "full"), "window scienceworld/walk/1/gold/0: hidden_state: is null"),
        (
            [episode(1, 2)],
            ("--context", "snapshot"),
            "--context: must be 'observed' for 'copy'",
        ),
        (
            [episode(1, 7)],
            ("--model", "openai:http://127.0.0.1:9#none"),
            "--shots: example fewshot-scienceworld/0006 has 5 actions, 7 are asked about; ask about as many",
        ),
    ],
)
def test_bad_input_is_one_line(
    content: list[Episode],
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "episodes.jsonl"
    write_episodes(path, content)
    assert main(command(path, tmp_path / "out", *options)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_model_is_asked_no_deeper_than_the_episodes_go(
    episodes_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[int]] = []

    def make(*args: Any) -> Copy:
        asked.append(list(args[-1]))
        return Copy()

    monkeypatch.setattr(rollout, "make_predictor", make)
    for limit in ("30", "4"):
        assert main(command(episodes_file, tmp_path / limit, "--depth-limit", limit)) == 0
    assert asked == [list(range(1, max(LENGTHS) + 1)), [1, 2, 3, 4]]


def test_a_line_that_is_no_episode_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_text('{"env": "scienceworld"}\n')
    assert main(command(path, tmp_path / "out")) == 2
    assert capsys.readouterr().err == f"error: {path}: line 1: task: missing\n"
