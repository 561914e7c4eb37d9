"""Reports: what they say of full and partial runs, what they escape, what they refuse."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main as eval_main
from eval.scores.rows import summarize_pairs
from lab.__main__ import main
from lab.reports.analysis import difference, em_by_length, length_class, worst
from lab.reports.blocks import word_diff
from lab.reports.groups import make_groups
from lab.reports.markdown import escape
from lab.reports.runs import Run, SuiteStore, check_run
from lab.reports.sections import lacking_baseline
from tests.fixtures.windows import MakeWindow, WriteSuite, episode

SCRIPT = "<script>alert('|')</script>"
Edit = Callable[[Path, Callable[[dict[str, Any]], object]], None]


def evaluate(suite: Path, out: Path, *options: str) -> Path:
    arguments = ["--suite", str(suite), "--context", "observed", "--out", str(out), *options]
    assert eval_main(["run", "--model", "copy", *arguments]) == 0
    return out


def report(suite: Path, out: Path, *arguments: Path | str) -> int:
    return main(["report", *map(str, arguments), "--suites", str(suite), "--out", str(out)])


def load(suite: Path, folder: Path) -> Run:
    return check_run(folder, SuiteStore([suite])).score()


@pytest.fixture
def edit() -> Edit:
    """Changes every record of a run's predictions in place."""

    def change(folder: Path, how: Callable[[dict[str, Any]], object]) -> None:
        path = folder / "predictions.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            how(record)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    return change


class Outline(HTMLParser):
    """Ids, tags that are opened, and what a page refers to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.targets: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("href", "src", "xlink:href"):
                self.targets.append(value or "")


def test_a_page_is_whole_by_itself_and_escapes_what_models_say(suite_path: Path, tmp_path: Path, edit: Edit) -> None:
    a, b = (evaluate(suite_path, tmp_path / name) for name in "ab")
    edit(a, lambda record: record.update(prediction=SCRIPT))
    assert report(suite_path, tmp_path / "out", a, b) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    outline = Outline(page)
    assert "alert(" in page
    assert "script" not in outline.tags
    assert len(outline.ids) == len(set(outline.ids))
    assert {target[0] for target in outline.targets} == {"#"}
    assert {target[1:] for target in outline.targets} <= set(outline.ids)
    assert not re.search(r"url\((?!#)", page)
    text = (tmp_path / "out" / "report.md").read_text()
    images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert images
    assert all((tmp_path / "out" / name).read_text().startswith("<svg") for name in images)
    outside_code = [line for line in text.splitlines() if not line.startswith("    ")]
    assert not any("<script" in line for line in outside_code)


def test_a_partial_run_is_shown_with_what_it_has(suite_path: Path, tmp_path: Path) -> None:
    whole = evaluate(suite_path, tmp_path / "whole")
    part = evaluate(suite_path, tmp_path / "part")
    (part / "results.json").unlink()
    lines = (part / "predictions.jsonl").read_bytes().splitlines(keepends=True)
    (part / "predictions.jsonl").write_bytes(b"".join(lines[:53]) + lines[53][:40])
    before = (part / "predictions.jsonl").read_bytes()
    run = load(suite_path, part)
    assert (run.windows, run.window_count, run.finished) == (10, 40, False)
    assert all(row["n"] == 10 for row in run.rows if row["family"] == "overall")
    assert report(suite_path, tmp_path / "out", whole, part) == 0
    assert "partial: 10 of 40 windows" in (tmp_path / "out" / "report.html").read_text()
    assert (part / "predictions.jsonl").read_bytes() == before


def test_a_report_without_the_strongest_baseline_says_so(suite_path: Path, tmp_path: Path) -> None:
    group = make_groups([run := load(suite_path, evaluate(suite_path, tmp_path / "a"))], run)[0]
    assert (
        lacking_baseline(group) == "suite, observed: no run of retrieve-names is shown, the strongest baseline there."
    )
    faced = replace(run, spec={**run.spec, "model": "retrieve-names"})
    assert lacking_baseline(make_groups([run, faced], run)[0]) == ""
    elsewhere = replace(faced, spec={**faced.spec, "context": "snapshot"})
    assert lacking_baseline(make_groups([run, elsewhere], run)[0]).startswith("suite, observed: ")
    assert report(suite_path, tmp_path / "page", tmp_path / "a") == 0
    assert "the strongest baseline there" in (tmp_path / "page" / "report.md").read_text()


def test_a_finished_run_keeps_its_rows(suite_path: Path, tmp_path: Path) -> None:
    run = load(suite_path, evaluate(suite_path, tmp_path / "a", "--limit", "9", "--horizons", "1,3"))
    assert (run.windows, run.window_count, run.finished, run.horizons) == (9, 9, True, [1, 3])
    assert list(run.rows) == json.loads((tmp_path / "a" / "results.json").read_text())["rows"]


def test_differences_pair_the_windows_both_have(suite_path: Path, tmp_path: Path, edit: Edit) -> None:
    a, b = evaluate(suite_path, tmp_path / "a"), evaluate(suite_path, tmp_path / "b", "--limit", "10")
    edit(a, lambda record: record.update(prediction=record["target"]))
    found = difference(load(suite_path, a), load(suite_path, b), "em", 5)
    assert found is not None
    assert (found.n, found.a, found.b) == (10, 1.0, 0.0)
    assert (found.low, found.high) == pytest.approx((1.0, 1.0))


def test_the_reference_of_another_suite_is_the_same_model(
    suite_path: Path, make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path
) -> None:
    other_suite = write_suite([make_window("x")], "other.jsonl")
    here, found, there = tmp_path / "here", tmp_path / "found", tmp_path / "there"
    train = tmp_path / "train.jsonl"
    train.write_text(episode(*[("go", "A.")] * 6))
    evaluate(suite_path, here)
    assert eval_main(["run", "--model", "retrieve", "--train-episodes", str(train), *_on(other_suite, found)]) == 0
    evaluate(other_suite, there)
    store = SuiteStore([suite_path, other_suite])
    runs = [check_run(folder, store).score() for folder in (here, found, there)]
    groups = make_groups(runs, runs[0])
    assert [(group.suite, group.reference.folder.name) for group in groups] == [("suite", "here"), ("other", "there")]


def _on(suite: Path, out: Path) -> list[str]:
    return ["--suite", str(suite), "--context", "observed", "--out", str(out)]


def test_runs_that_share_a_name_are_told_apart(suite_path: Path, tmp_path: Path) -> None:
    runs = [load(suite_path, evaluate(suite_path, tmp_path / name)) for name in ("a", "b")]
    assert make_groups(runs, runs[1])[0].names == ["copy, observed (a)", "copy, observed (b)"]


def test_a_pair_counts_when_both_its_windows_are_right(
    make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path, edit: Edit
) -> None:
    windows = []
    for i in range(4):
        fact, other = make_window(f"s/w{i}/fact"), make_window(f"s/w{i}/counterfact")
        other["observations"] = [*other["observations"][:-1], "The door is closed."]
        windows += [fact, other]
    suite = write_suite([*windows, make_window("s/lonely/fact")])
    folder = evaluate(suite, tmp_path / "a")
    right = {"s/w0/fact", "s/w0/counterfact", "s/w1/fact", "s/lonely/fact"}
    edit(folder, lambda r: r.update(prediction=r["target"] if r["id"] in right else "You wait."))
    pairs = summarize_pairs(load(suite, folder).items)
    assert pairs is not None
    shares = [pairs[name] for name in ("both", "fact", "counterfact", "same")]
    assert (shares, pairs["n"], pairs["games"]) == ([0.25, 0.5, 0.25, 0.5], 4, 4)


def test_suites_without_pairs_have_none(suite_path: Path, tmp_path: Path) -> None:
    assert summarize_pairs(load(suite_path, evaluate(suite_path, tmp_path / "a")).items) is None


def test_every_item_is_in_one_class_of_length(suite_path: Path, tmp_path: Path) -> None:
    items = load(suite_path, evaluate(suite_path, tmp_path / "a")).items
    assert sum(mean.n for mean in em_by_length(items) if mean is not None) == len(items)
    assert [length_class("a " * n) for n in (0, 5, 6, 80, 81, 900)] == [0, 0, 1, 4, 5, 5]


def test_the_worst_are_wrong_and_come_in_order(suite_path: Path, tmp_path: Path) -> None:
    items = load(suite_path, evaluate(suite_path, tmp_path / "a")).items
    found = worst(items, 30)
    scores = [item.scores["f1"] for item in found]
    assert (len(found), scores) == (30, sorted(scores))
    assert max(scores) <= min(item.scores["f1"] for item in items if item not in found)


@pytest.mark.parametrize(
    ("reference", "prediction"),
    [("", "a"), ("a b", ""), ("  you see: a\n\tcup.", "you see a cup"), ("a b c", "a b c"), ("x-y", "x.y\u2028z")],
)
def test_a_word_diff_holds_both_texts(reference: str, prediction: str) -> None:
    spans = word_diff(reference, prediction)
    assert "".join(span.text for span in spans if span.kind != "added") == reference
    assert "".join(span.text for span in spans if span.kind != "missing") == prediction


def test_a_changed_word_is_all_that_differs() -> None:
    spans = word_diff("The red door is open.", "The blue door is open.")
    assert [span.text for span in spans if span.kind != "same"] == ["red ", "blue "]


def test_markdown_shows_special_characters_as_they_are() -> None:
    assert escape("a|b *c* <d>\n[e]") == r"a\|b \*c\* \<d\> \[e\]"


def _foreign_target(record: dict[str, Any]) -> None:
    record["target_sha256"] = "0" * 64


def _foreign_prompt(record: dict[str, Any]) -> None:
    record["prompt_sha256"] = "0" * 64


def _foreign_window(record: dict[str, Any]) -> None:
    record["id"] += "x"


def _foreign_horizon(record: dict[str, Any]) -> None:
    record["horizon"] += 5


@pytest.mark.parametrize(
    ("how", "named"),
    [(_foreign_target, "target_sha256"), (_foreign_prompt, "prompt_sha256"), (_foreign_window, "id"),
     (_foreign_horizon, "horizon")],
)  # fmt: skip
def test_predictions_that_are_not_of_the_suite_are_refused(
    suite_path: Path, tmp_path: Path, edit: Edit, capsys: pytest.CaptureFixture[str],
    how: Callable[[dict[str, Any]], None], named: str,
) -> None:  # fmt: skip
    folder = evaluate(suite_path, tmp_path / "a")
    edit(folder, how)
    capsys.readouterr()
    _refused(report(suite_path, tmp_path / "out", folder), tmp_path, capsys, f"{named}: ")


def test_a_suite_of_another_version_is_refused(
    suite_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = evaluate(suite_path, tmp_path / "a")
    spec = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**spec, "suite": "scienceworld-500"}))
    suite_path.write_text(suite_path.read_text().replace("boil water", "boil lead"))
    capsys.readouterr()
    _refused(report(suite_path, tmp_path / "out", folder), tmp_path, capsys, "another version of 'scienceworld-500'")


@pytest.mark.parametrize(
    ("gone", "named"),
    [(["run.json"], "no run.json"), (["predictions.jsonl"], "no predictions"), (["predictions.jsonl", ""], "no pred")],
)
def test_an_empty_run_is_refused(
    suite_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], gone: list[str], named: str
) -> None:
    folder = evaluate(suite_path, tmp_path / "a")
    (folder / gone[0]).unlink()
    if len(gone) > 1:
        (folder / gone[0]).write_text(gone[1])
    capsys.readouterr()
    _refused(report(suite_path, tmp_path / "out", folder), tmp_path, capsys, named)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["{a}", "{a}"], "given twice"), (["{a}", "--against", "{b}"], "--against"), ([], "RUN"), (["{b}"], "{b}")],
)
def test_bad_arguments_of_a_report_are_refused(
    suite_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    places = {"a": str(evaluate(suite_path, tmp_path / "a")), "b": str(tmp_path / "b")}
    capsys.readouterr()
    try:
        status: Any = report(suite_path, tmp_path / "out", *(part.format(**places) for part in arguments))
    except SystemExit as stop:  # argparse
        status = stop.code
    _refused(status, tmp_path, capsys, named.format(**places))


def _refused(status: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], named: str) -> None:
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert status == 2
    assert len(errors) == 1
    assert named in errors[0]
    assert not (tmp_path / "out").exists()


def test_report_run_of_several_commits_names_them(suite_path: Path, tmp_path: Path) -> None:
    out = evaluate(suite_path, tmp_path / "run")
    found = json.loads((out / "results.json").read_text())
    found["provenance"]["commits"] = [{}, {"commit": "third"}]
    (out / "results.json").write_text(json.dumps(found))
    assert report(suite_path, tmp_path / "page", out) == 0
    assert "| -, third |" in (tmp_path / "page/report.md").read_text()


def test_report_refused_windows_are_counted(make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path) -> None:
    suite = write_suite([*(make_window(f"w{i}") for i in range(10)), make_window("null", look=None, inventory=None)])
    out = evaluate(suite, tmp_path / "run", "--context", "snapshot")
    assert report(suite, tmp_path / "page", out) == 0
    assert "Refused, because they could not be shown: copy, snapshot, 1." in (tmp_path / "page/report.md").read_text()


def test_report_intervals_over_windows_are_refused(
    suite_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = evaluate(suite_path, tmp_path / "run")
    found = json.loads((out / "results.json").read_text())
    del found["intervals"]
    (out / "results.json").write_text(json.dumps(found))
    capsys.readouterr()
    assert report(suite_path, tmp_path / "page", out) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "got 'over windows'" in error


def test_report_with_seen_table_splits_unseen_windows(
    make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path
) -> None:
    seen, unseen = make_window("s", [(None, "Start.")]), make_window("n", [(None, "Begin.")])
    suite, train = write_suite([seen, unseen]), tmp_path / "train.jsonl"
    train.write_text(episode(*zip(seen["actions"], seen["observations"], strict=True)))
    build = ["build-seen", "--episodes", str(train), "--suites", str(suite), "--out", str(tmp_path)]
    assert main(build) == 0
    table = str(tmp_path / "seen-suite.json.gz")
    out = evaluate(suite, tmp_path / "run", "--seen", table)
    assert report(suite, tmp_path / "page", out, "--seen", table) == 0
    assert "Unseen and seen" in (tmp_path / "page" / "report.md").read_text()


def test_report_of_a_run_with_unknown_episodes_says_unknown(
    make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The committed table says what is unseen to one run; what the other was trained on, its results do not know."""
    monkeypatch.setattr("eval.scores.seen.DATA", tmp_path)
    suite, train = write_suite([make_window("s", [(None, "Start.")]), make_window("n")]), tmp_path / "train.jsonl"
    train.write_text(episode(("a", "b")))
    other = evaluate(suite, tmp_path / "other")
    assert main(["build-seen", "--episodes", str(train), "--suites", str(suite), "--out", str(tmp_path)]) == 0
    known = evaluate(suite, tmp_path / "known")
    assert report(suite, tmp_path / "page", known, other) == 0
    (line,) = [line for line in (tmp_path / "page/report.md").read_text().splitlines() if "| unknown |" in line]
    assert line.count("unknown") == 10
    assert report(suite, tmp_path / "alone", other) == 0
    assert "Unseen and seen" not in (tmp_path / "alone" / "report.md").read_text()
