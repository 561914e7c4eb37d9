"""Reading, refusing and sampling windows."""

from __future__ import annotations

import gzip
import json
import lzma
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eval.scores.suites import load_suite
from loopwm.records.errors import InputError
from loopwm.records.windows import NULLABLE, check_runnable, game_of, stratified_sample
from tests.fixtures.windows import MakeWindow, WriteSuite


def test_plain_gzip_and_xz_hold_the_same_windows(make_window: MakeWindow, write_suite: WriteSuite) -> None:
    plain = write_suite([make_window("a"), make_window("b")])
    gz, xz = plain.with_name("suite.jsonl.gz"), plain.with_name("suite.jsonl.xz")
    gz.write_bytes(gzip.compress(plain.read_bytes()))
    xz.write_bytes(lzma.compress(plain.read_bytes()))
    suites = [load_suite(str(path)) for path in (plain, gz, xz)]
    assert all(suite.windows == suites[0].windows and suite.name == "suite" for suite in suites)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"goal": 3}, "goal"),
        ({"goal": ...}, "goal: missing"),
        ({"env": 3}, "env"),
        ({"look": ["a"]}, "look"),
        ({"variation": 1.5}, "variation"),
        ({"history": []}, "history"),
        ({"history": [{"action": "look", "observation": "x"}]}, "history[0].action"),
        ({"history": [{"action": None, "observation": "x"}, {"action": " ", "observation": "x"}]}, "history[1].action"),
        ({"history": [{"action": None}]}, "history[0].observation"),
        ({"actions": [], "observations": [], "rewards": [], "dones": []}, "actions"),
        ({"actions": ["a", "b", "c", "d", ""]}, "actions[4]"),
        ({"observations": ["x"]}, "observations"),
        ({"rewards": [0, 0, 0, 0, "1"]}, "rewards[4]"),
        ({"rewards": [0, 0, 0, 0, True]}, "rewards[4]"),
        ({"rewards": [0, 0, 0, 0, float("nan")]}, "rewards[4]: must be a finite number, got nan"),
        ({"dones": [0] * 5}, "dones[0]"),
    ],
)
def test_a_bad_window_is_one_line_with_file_line_and_field(
    make_window: MakeWindow, write_suite: WriteSuite, change: dict[str, Any], named: str
) -> None:
    bad = {key: value for key, value in {**make_window("bad"), **change}.items() if value is not ...}
    path = write_suite([make_window("good"), bad])
    with pytest.raises(InputError) as error:
        load_suite(str(path))
    assert str(error.value).startswith(f"{path}: line 2: {named}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("broken.jsonl", b'{"id": 1\n'),
        ("list.jsonl", b"[1]\n"),
        ("latin.jsonl", b'{"id": "\xff"}\n'),
        ("plain.jsonl.gz", b"not gzip"),
        ("torn.jsonl.gz", gzip.compress(b'{"id": "x"}\n' * 999, mtime=0)[:-20]),
        ("plain.jsonl.xz", b"not xz"),
        ("empty.jsonl", b""),
    ],
)
def test_a_corrupt_file_is_one_line_that_names_it(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        load_suite(str(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_an_id_occurs_once(make_window: MakeWindow, write_suite: WriteSuite) -> None:
    with pytest.raises(InputError, match=r"id: must be unique, got 'a' twice"):
        load_suite(str(write_suite([make_window("a"), make_window("a")])))


def test_nullable_fields_may_be_absent(make_window: MakeWindow, write_suite: WriteSuite) -> None:
    window = {k: v for k, v in make_window().items() if k not in NULLABLE}
    read = load_suite(str(write_suite([window]))).windows[0]
    assert [read[field] for field in NULLABLE] == [None] * 4  # type: ignore[literal-required]


@pytest.mark.parametrize(
    ("context_kind", "fields", "named"),
    [
        ("snapshot", {"look": None}, "look"),
        ("snapshot", {"inventory": None}, "inventory"),
        ("full", {}, "hidden_state"),
        ("briefed", {}, "hidden_state_start"),
    ],
)
def test_a_context_refuses_a_null_field_it_needs_by_name(
    make_window: MakeWindow, context_kind: Any, fields: dict[str, None], named: str
) -> None:
    with pytest.raises(InputError, match=f"window w: {named}.*{context_kind}"):
        check_runnable([make_window(**fields)], context_kind, [1])


def test_only_a_horizon_that_is_asked_for_can_be_too_long(make_window: MakeWindow) -> None:
    short = make_window("short", actions=["a"], observations=["b"], rewards=[0], dones=[False])
    check_runnable([short], "observed", [1])
    with pytest.raises(InputError, match="window short: actions: has 1"):
        check_runnable([short], "observed", [1, 2])


def test_limit_is_seeded_and_keeps_the_shares_of_families(make_window: MakeWindow) -> None:
    sizes = {"Incline": 60, "Grow": 30, "Find": 10}
    windows = [make_window(f"{f}{i}", family=f) for f, size in sizes.items() for i in range(size)]
    drawn = stratified_sample(windows, 20, seed=0)
    assert Counter(window["family"] for window in drawn) == {"Incline": 12, "Grow": 6, "Find": 2}
    assert drawn == stratified_sample(windows, 20, seed=0) != stratified_sample(windows, 20, seed=1)
    assert [w["id"] for w in drawn] == [w["id"] for w in windows if w in drawn]
    assert len(stratified_sample(windows, 7, seed=0)) == 7
    assert stratified_sample(windows, 1000, seed=0) == windows


@pytest.mark.parametrize("limit", [1, 2, 9, 20, 39])
def test_limit_never_splits_a_pair(make_window: MakeWindow, limit: int) -> None:
    names = [f"s/{i}/{end}" for i in range(20) for end in ("fact", "counterfact")]
    windows = [make_window(name, family="Melt" if i < 12 else "Grow") for i, name in enumerate(names)]
    drawn = Counter(window["id"].rsplit("/", 1)[0] for window in stratified_sample(windows, limit, seed=0))
    assert set(drawn.values()) == {2}
    assert len(drawn) == max(1, limit // 2)


def test_windows_of_one_variation_are_of_one_game_and_so_are_pairs(make_window: MakeWindow) -> None:
    a, b = make_window("a", variation=3), make_window("b", variation=3)
    assert game_of(a) == game_of(b) != game_of(make_window("c", variation=4))
    assert game_of(a) != game_of(make_window("d", variation=3, task="melt"))
    assert game_of(make_window("p/fact")) == game_of(make_window("p/counterfact")) != game_of(make_window("q/fact"))


def test_committed_suites_can_be_read(tmp_path: Path) -> None:
    suites = Path(load_suite.__code__.co_filename).parent / "suites"
    for path in suites.glob("*.jsonl.gz"):
        suite = load_suite(path.name.removesuffix(".jsonl.gz"))
        assert len({json.dumps(window["actions"]) + window["id"] for window in suite.windows}) == len(suite.windows)
