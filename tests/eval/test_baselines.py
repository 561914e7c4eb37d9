"""The baselines on hand-made windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval.models.baselines import Copy, Markov, load_markov
from eval.models.markov import build_tables
from loopwm.records.errors import InputError
from loopwm.records.windows import Window
from tests.fixtures.windows import MakeWindow, episode


@pytest.fixture
def markov(tmp_path: Path) -> Markov:
    path = tmp_path / "train.jsonl"
    path.write_text(
        episode(("go north", "A."), ("go north", "B."), ("go south", "B."), ("open door", "Open."))
        + episode(("go north", "A."), ("go west", "B."), ("go east", "B."))
        + episode(*[("open door", "Refused.")] * 9, ("dance", "Refused."), policy="noisy-expert")
    )
    return Markov(build_tables([path]))


def predict(predictor: Copy | Markov, window: Window, context_kind: Any = "observed") -> dict[int, str]:
    return predictor.predict([window], context_kind, range(1, len(window["actions"]) + 1))[0].texts


def test_copy_repeats_the_last_observation(make_window: MakeWindow) -> None:
    for context_kind in ("observed", "snapshot"):
        assert set(predict(Copy(), make_window(), context_kind).values()) == {"The fridge is now open."}
    first = make_window(history=[(None, "Start.")])
    assert predict(Copy(), first)[1] == "Start."


def test_markov_falls_back_from_action_to_verb_to_all_and_experts_come_first(
    make_window: MakeWindow, markov: Markov
) -> None:
    window = make_window(actions=["go north", "go up", "open door", "dance", "sing"])
    assert predict(markov, window) == {1: "A.", 2: "B.", 3: "Open.", 4: "Refused.", 5: "B."}


def test_markov_table_does_not_depend_on_the_order_of_episodes(tmp_path: Path) -> None:
    episodes = [episode(("go", "B.")), episode(("go", "A."))]
    hashes = set()
    for name, lines in (("a", episodes), ("b", episodes[::-1])):
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        hashes.add(build_tables([tmp_path / f"{name}.jsonl"])["scienceworld"].sha256)
    assert len(hashes) == 1


def test_markov_refuses_other_splits_and_environments_without_a_table(make_window: MakeWindow, tmp_path: Path) -> None:
    path = tmp_path / "dev.jsonl"
    path.write_text(episode(("go", "A."), split="dev"))
    with pytest.raises(InputError, match=r"dev.jsonl: line 1: split"):
        build_tables([path])
    path.write_text(episode(("go", "A.")) + episode((" ", "A.")))
    with pytest.raises(InputError, match=r"dev.jsonl: line 2: action: must not be empty"):
        build_tables([path])
    path.write_text(episode(("go", "A.")))
    with pytest.raises(InputError, match="must hold episodes of 'alfworld', which has no markov table"):
        load_markov([make_window(env="alfworld")], [path])
