"""Figures of pages are recomputed from stored results, and these from stored predictions."""

from __future__ import annotations

import json
import lzma
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from data_prep.solutions import PACKED
from data_prep.tokenize import TOKENIZER_FILE
from eval.__main__ import main as evaluate
from eval.models.checkpoint import checkpoint_hash
from lab.__main__ import main
from lab.data.stats import count_groups, markdown, token_counter
from lab.figures import command, predictions
from lab.figures.command import PAGES, STATISTICS, packed_episodes
from lab.figures.marks import Page
from lab.figures.predictions import Rescored
from lab.figures.sources import MissingError, Run, Store, interactions, mean_gain, mean_of, names_in
from lab.figures.studies import Copy, Difference, Percent, Study
from loopwm.records.errors import InputError

ROOT = Path(__file__).parents[3]
SUITE = "alfworld-probe"
NAME = f"{SUITE}--observed--track"
CHEAP = ("README.md", "docs/results/studies.md", "docs/results/pixels.md")
"""Pages whose figures need no predictions."""


@pytest.fixture(scope="module")
def track(tmp_path_factory) -> Path:
    """A finished run of a baseline on a small committed suite."""
    out = tmp_path_factory.mktemp("runs") / "track"
    arguments = ["run", "--model", "track", "--suite", SUITE, "--context", "observed", "--horizons", "1,5"]
    assert evaluate([*arguments, "--out", str(out)]) == 0
    return out


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the figures of pages are recomputed from, without predictions."""
    root = tmp_path / "checkout"
    for name in ("docs/results", "loopwm/pretrained", "configs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("predictions"))
    for name in PAGES:
        shutil.copy(ROOT / name, root / name)
    return root


@pytest.fixture
def figures(checkout, capsys) -> Callable[..., tuple[int, str]]:
    def call(*arguments: str) -> tuple[int, str]:
        status = main(["figures", "--root", str(checkout), *arguments])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return call


def plant(checkout: Path, page: str, state: str) -> tuple[str, str]:
    """Change a digit of the first figure of a state on a typed page; return true and shown text."""
    path = checkout / page
    text = path.read_text()
    figure = next(f for f in Page(page, text).figures(names_in(checkout)) if f.state == state and f.shown[-1].isdigit())
    wrong = figure.shown[:-1] + str((int(figure.shown[-1]) + 1) % 10)
    path.write_text(text[: figure.start] + wrong + text[figure.end :])
    return figure.shown, wrong


def test_figures_of_the_committed_pages_are_right(capsys) -> None:
    assert main(["figures", "--parts", "pages"]) == 0, capsys.readouterr().out


def test_figures_with_wrong_digits_on_pages_fail(checkout, figures, monkeypatch) -> None:
    monkeypatch.setattr(command, "PAGES", CHEAP)
    stored = Path("docs/results/data/predictions")
    shutil.copytree(ROOT / stored, checkout / stored)  # the picture of trust is drawn from them
    planted = [plant(checkout, page, state) for page in CHEAP[1:] for state in ("same", "copied")]
    planted.append(plant(checkout, "README.md", "same"))
    (checkout / "README.md").write_text((checkout / "README.md").read_text() + "\nIt is 7 times as fast.\n")
    status, output = figures("--parts", "pages")
    assert status == 2
    for true, wrong in planted:
        assert [line for line in output.splitlines() if f"shown {wrong}, recomputed {true}" in line]
    assert "shown 7, neither recomputed nor with a command" in output
    assert f"error: figures: {len(planted)} differs, 1 neither\n" in output


def test_typed_figures_of_claims_count_as_copied(checkout, monkeypatch) -> None:
    monkeypatch.setattr(command, "PAGES", ())
    page = checkout / command.CLAIMS_PAGE
    old = page.read_text()
    claims = checkout / "docs/results/data/claims.json"
    claims.write_text(claims.read_text().replace("EM +2.3 and +1.4", "EM +9.3 and +1.4"))
    content = command.generated(checkout)[command.CLAIMS_PAGE]
    page.write_text(content)
    figures = [figure for figure in command.pages_again(checkout) if figure.page == command.CLAIMS_PAGE]
    assert ["EM +9.3" in figure.shown for figure in figures if figure.state == "copied"].count(True) == 1
    assert all(figure.state == "same" for figure in figures if not figure.shown.startswith("|"))
    page.write_text(old)
    assert "differs" in {figure.state for figure in command.pages_again(checkout)}


def test_figures_write_puts_the_right_digits_back(checkout, figures, monkeypatch) -> None:
    monkeypatch.setattr(command, "PAGES", CHEAP)
    for page, state in ((CHEAP[0], "same"), (CHEAP[1], "copied"), (CHEAP[2], "same")):
        plant(checkout, page, state)
    readme = (checkout / "README.md").read_text()
    (checkout / "README.md").write_text(readme.replace("| ALFWorld, experts' paths | 500 | ", "| Wrong | 1 | ", 1))
    status, output = figures("--parts", "pages", "--write")
    assert status == 0, output
    for name in CHEAP:
        assert (checkout / name).read_text() == (ROOT / name).read_text()


def test_keep_of_other_weights_and_write_need_nobody(checkout, figures, track) -> None:
    """A run of new weights moves the old one to `previous`; pages follow, and its other runs are asked for."""
    folder = track.with_name("new")
    shutil.copytree(track, folder)
    for name in ("results.json", "run.json"):
        facts = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**facts, "model": "loopwm/pretrained"}))
    config = checkout / "loopwm/pretrained/generation_config.json"
    config.write_text(config.read_text() + "\n")
    results = json.loads((folder / "results.json").read_text())
    results["provenance"] |= {"model_sha256": checkpoint_hash(checkout / "loopwm/pretrained"), "depth": 2}
    (folder / "results.json").write_text(json.dumps(results))
    status, output = figures("--keep", str(folder), "--write", "--parts", "pages")
    name = f"{SUITE}--observed--loopwm-small"
    for suffix in (".json", ".jsonl.xz"):
        assert (checkout / f"docs/results/data/previous/{name}{suffix}").is_file()
    page = (checkout / "docs/results.md").read_text()
    rows = {row["horizon"]: 100 * row["em"] for row in results["rows"] if row["family"] == "absent"}
    assert f"| ALFWorld | 40 | {rows[1]:.1f} / {rows[5]:.1f} |" in page
    assert status == 2
    assert "alfworld-500--observed--loopwm-small: not stored of the weights that ship, but of" in output
    assert f"{name}: not stored" not in output


def remove_others(checkout: Path) -> None:
    """Remove all stored results but those of `track`."""
    for path in (checkout / "docs/results/data").glob("*--*--*.json"):
        if path.stem != NAME:
            path.unlink()


def test_results_without_predictions_are_not_stored(checkout, figures) -> None:
    remove_others(checkout)
    status, output = figures("--parts", "runs")
    assert status == 2
    assert f"{NAME}.json: predictions: shown results, predictions/{NAME}.jsonl.xz is missing" in output
    assert "error: figures: 1 not stored" in output


def test_a_part_without_figures_is_an_error(figures, tmp_path) -> None:
    status, output = figures("--parts", "runs", "--root", str(tmp_path))
    assert (status, f"error: {tmp_path}: must have figures of runs, found none" in output) == (2, True)


def test_figures_of_a_wrong_prediction_fail(checkout, figures, track) -> None:
    remove_others(checkout)
    status, output = figures("--keep", str(track), "--parts", "runs")
    assert status == 0, output
    path = checkout / f"docs/results/data/predictions/{NAME}.jsonl.xz"
    head, *lines = lzma.decompress(path.read_bytes()).decode().splitlines()
    shown = {(w["id"], k): w["observations"][k - 1] for w in Rescored.read(path).windows for k in (1, 5)}
    records = [json.loads(line) for line in lines]
    right = next(r for r in records if r["prediction"] == shown[r["id"], r["horizon"]])
    right["prediction"] = "Nothing happens at all."
    path.write_bytes(lzma.compress("\n".join([head, *map(json.dumps, records)]).encode()))
    status, output = figures("--parts", "runs")
    em = next(row["em"] for row in json.loads((track / "results.json").read_text())["rows"])
    assert status == 2
    lines = [line for line in output.splitlines() if f"rows overall {right['horizon']} em: shown" in line]
    assert lines, output
    if right["horizon"] == 1:
        assert lines[0].endswith(f"{NAME}.json: rows overall 1 em: shown {em}, recomputed {round(em - 0.005, 4)}")


def test_keep_of_results_that_do_not_follow_is_an_error(figures, track, tmp_path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(track, folder)
    results = json.loads((folder / "results.json").read_text())
    results["rows"][0]["em"] = 0.5
    (folder / "results.json").write_text(json.dumps(results))
    status, output = figures("--keep", str(folder), "--parts", "runs")
    assert (status, "results.json: must follow from predictions.jsonl" in output) == (2, True)


def test_keep_beyond_the_size_limit_is_an_error(checkout, figures, track, monkeypatch) -> None:
    monkeypatch.setattr(predictions, "LIMIT", 100)
    status, output = figures("--keep", str(track), "--parts", "runs")
    assert (status, "must take at most 100 bytes" in output) == (2, True)
    assert not (checkout / "docs/results/data/predictions").exists()


def test_keep_moves_results_of_other_weights(checkout, figures, track) -> None:
    stored = checkout / f"docs/results/data/{NAME}.json"
    old = json.loads(stored.read_text())
    old["provenance"]["model_sha256"] = "0" * 64
    stored.write_text(json.dumps(old))
    remove_others(checkout)
    assert figures("--keep", str(track), "--parts", "runs")[0] == 0
    assert json.loads((checkout / f"docs/results/data/previous/{NAME}.json").read_text()) == old


def test_predictions_of_another_suite_are_an_error(checkout, figures, track) -> None:
    figures("--keep", str(track), "--parts", "runs")
    path = checkout / f"docs/results/data/predictions/{NAME}.jsonl.xz"
    text = lzma.decompress(path.read_bytes()).decode()
    head, _, rest = text.partition("\n")
    changed = json.loads(head)
    changed["provenance"]["suite_sha256"] = "0" * 64
    path.write_bytes(lzma.compress(f"{json.dumps(changed)}\n{rest}".encode()))
    status, output = figures("--parts", "runs")
    assert (status, "suite_sha256: must be" in output) == (2, True)
    path.write_bytes(lzma.compress(text[: text[:-1].rindex("\n") + 1].encode()))
    status, output = figures("--parts", "runs")
    assert (status, ": missing" in output) == (2, True)


def test_figures_of_the_packs_are_counted(checkout, figures, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(command, "PACKED", tmp_path)
    shutil.copy(PACKED / "alfworld-dev-expert.tar.xz", tmp_path)
    page = checkout / STATISTICS
    page.parent.mkdir()
    text = markdown(count_groups(packed_episodes(), token_counter(TOKENIZER_FILE)), "picture.png")
    page.write_text(text)
    status, output = figures("--parts", "packs")
    assert (status, "10 of 14 figures recomputed" in output) == (0, True), output
    page.write_text(text.replace("| alfworld, dev, expert | 121 |", "| alfworld, dev, expert | 120 |"))
    status, output = figures("--parts", "packs")
    assert (status, "alfworld, dev, expert, episodes: shown 120, recomputed 121" in output) == (2, True)


def missing() -> None:
    raise MissingError("a run: not stored")


class Row:
    def __init__(self, em: float) -> None:
        self.em = Percent(em)


NAMES: dict[str, Any] = {"a": 12.34, "n": 1500, "low": -3.2, "missing": missing, "x": Row(50.0), "y": Row(61.25)}
NAMES |= {"rate": 1.5e-3, "copied": Copy(["", "exact"], [["one", "4.5 (3-5)"], ["two", "6"]])}


def states(text: str) -> list[tuple[str, str, str]]:
    return [(figure.shown, figure.again, figure.state) for figure in Page("p.md", text).figures(NAMES)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is 12.3 of 1,500.\n<!-- figures: a; n -->", [("12.3", "12.3", "same"), ("1,500", "1,500", "same")]),
        ("It is 12.4 (-3.2).\n<!-- figures: a; low -->", [("12.4", "12.3", "differs"), ("-3.2", "-3.2", "same")]),
        ("Up +12, 3 and 4.\n<!-- figures: a; ... -->", [("+12", "+12", "same"), *[(n, "", "neither") for n in "34"]]),
        (
            "- 7 a\n- 8 or 12\n<!-- figures: _; a -->",
            [("7", "", "neither"), ("8", "", "neither"), ("12", "12", "same")],
        ),
        ("It is 5.\n<!-- figures: missing() -->", [("5", "a run: not stored", "not stored")]),
        ("A range of 3-5: `make 7` [at](9.md)", [("3", "", "command"), ("5", "", "command")]),
        ("At T = 4 in 95 % of Python 3.11, 4.0M, x2: 6", [("6", "", "neither")]),
        (
            "By seed 0.5 and 7 steps.\n<!-- measured: make 7 -->\n\n8",
            [("0.5", "", "command"), ("7", "", "command"), ("8", "", "neither")],
        ),
        (
            "# A\n\n<!-- measured: make 7 -->\n\n7\n\n- 8\n\n# B\n\n9",
            [*[(n, "", "command") for n in "78"], ("9", "", "neither")],
        ),
        (
            "It is 1.5e-3, not 2e-3.\n<!-- figures: rate; rate -->",
            [("1.5e-3", "1.5e-3", "same"), ("2e-3", "0.0015", "differs")],
        ),
        ("It is 4.5.\n<!-- figures: copied.at('one', 'exact') -->", [("4.5", "4.5", "copied")]),
        ("```\n1\n```\n\n    bash 2\n\nThen 3", [("3", "", "neither")]),
        ("To make agents 37.4 % faster, `run` it.", [("37.4", "", "neither")]),
        ("It is 7: `python -m lab\nplan`", [("7", "", "command")]),
    ],
    ids=[
        "same",
        "differs",
        "rest",
        "left out",
        "missing",
        "hidden",
        "names",
        "block",
        "section",
        "power",
        "copy",
        "code",
        "prose",
        "two lines",
    ],
)
def test_numbers_of_text_are_compared_in_order(text, expected) -> None:
    assert states(text) == expected


TABLE = (
    "| | n | exact |\n| --- | --- | --- |\n| one | 3 | 50.0 |\n| two | | - / 61.3 |\n\n<!-- figures:\nrows: {}\n{}-->"
)


def test_cells_of_a_table_are_compared_by_row_and_column() -> None:
    rows = '[x, {row: y, exact: "- / {row.em:.2f}"}]'
    assert states(TABLE.format(rows, 'exact: "{row.em}"\nn: "{n}"\n')) == [
        ("3", "1500", "differs"), ("50.0", "50.0", "same"), ("- / 61.3", "- / 61.25", "differs"),
    ]  # fmt: skip
    assert states(TABLE.format("[null, y]", 'exact: "- / {row.em}"\n'))[-1] == ("- / 61.3", "- / 61.2", "differs")


def test_a_table_is_compared_with_its_copy() -> None:
    copy = Copy(["", "n", "exact"], [["one", "3", "50.0"], ["two", "", "- / 61.2"]])
    text = TABLE.partition("<!--")[0] + "<!-- figures: copied: some/table -->"
    figures = Page("p.md", text).figures({"copied": lambda _: copy})
    assert [(figure.shown, figure.again, figure.state) for figure in figures] == [
        ("3", "3", "copied"), ("50.0", "50.0", "copied"), ("- / 61.3", "- / 61.2", "differs"),
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"p\.md: line 5: must be behind a table of 2 rows, got 1"):
        Page("p.md", text.replace("| one | 3 | 50.0 |\n", "")).figures({"copied": lambda _: copy})


@pytest.mark.parametrize(("low", "high", "shown"), [(0.1, 2.0, "above"), (-3.0, -0.1, "below"), (-1.0, 2.0, "level")])
def test_a_difference_is_shown_with_its_verdict(low, high, shown) -> None:
    assert Difference(1.04, low, high).cell == f"+1.0 ({low} to {high}), {shown}"


def test_the_mean_of_differences_adds_their_variances() -> None:
    mean = mean_of(Difference(1.0, -2.0, 4.0), Difference(3.0, -1.0, 7.0))
    assert (mean.mean, mean.low, mean.high) == (2.0, -0.5, 4.5)


def gained(suite: str, gains: dict[str, int]) -> Run:
    """Return a run of a suite with a window for each game. gains: of exact match by game."""
    new, old = (
        {(game, 1): (game, float(right)) for game, right in of.items()} for of in (gains, dict.fromkeys(gains, 0))
    )
    return Run(cast("Store", FakeStore(new, old)), suite)


@dataclass
class FakeStore:
    new: dict[tuple[str, int], tuple[str, float]]
    old: dict[tuple[str, int], tuple[str, float]]

    def check_weights(self, name: str, weights: str) -> None:
        assert weights == "a"

    def weights_of(self, name: str) -> str:
        return "a"

    def exact(self, name: str, *, before: bool) -> dict[tuple[str, int], tuple[str, float]]:
        return self.old if before else self.new


def test_mean_gain_over_shared_games_is_as_wide_as_one_suite() -> None:
    gains = {f"game-{i}": i % 2 for i in range(40)}
    one = mean_gain([gained("alfworld-dev", gains)])
    two = mean_gain([gained("alfworld-dev", gains), gained("alfworld-dev-noisy", gains)])
    assert (two.mean, two.low, two.high) == pytest.approx((one.mean, one.low, one.high))
    assert one.mean == 50
    worlds = mean_gain([gained("alfworld-dev", gains), gained("scienceworld-dev", gains)])
    assert (worlds.high - worlds.low) / (one.high - one.low) == pytest.approx(0.5**0.5, abs=0.06)
    assert worlds == mean_gain([gained("alfworld-dev", gains), gained("scienceworld-dev", gains)])


MARKED = {
    "agents": "agents/look-ahead--{}.json",
    "search": "searches/alfworld--{}.json",
    "policies": "policies/alfworld--{}--seed-0.json",
}


@pytest.mark.parametrize("name", MARKED)
def test_a_run_named_by_weights_says_if_they_are_earlier(name: str, tmp_path: Path) -> None:
    (tmp_path / "loopwm").symlink_to(ROOT / "loopwm")
    ships = checkpoint_hash(ROOT / "loopwm/pretrained")
    for weights in (ships, "0" * 64):
        path = tmp_path / "docs/results/data" / MARKED[name].format(weights[:8])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"model_sha256": weights, "n": 7}))
    source = names_in(tmp_path)[name]
    assert (source(ships[:8]).games, source("0" * 8, earlier=True).games) == (7, 7)
    with pytest.raises(MissingError, match="not stored of the weights that ship, but of 00000000"):
        assert source("0" * 8).games
    with pytest.raises(MissingError, match="not stored of earlier weights, but of those that ship"):
        assert source(ships[:8], earlier=True).games
    with pytest.raises(MissingError, match="not stored"):
        assert source("1" * 8).games


def test_a_copied_study_is_named_as_such() -> None:
    stored = {"study": "s", "windows": 1, "seeds": 1, "differences": [], "costs": [], "transcribed": "a page"}
    with pytest.raises(InputError, match="study s: must be named copied_study"):
        Study(stored, copied=False)


def test_interactions_are_whole_rounds() -> None:
    assert interactions({"real": {"count": 8, "steps": 16, "total": 50_000}}) == 50_048


def test_cells_of_a_missing_row_are_not_stored() -> None:
    text = TABLE.format("[missing(), y]", 'exact: "{row}"\nn: "{row.n}"\n')
    assert states(text)[:2] == [("3", "a run: not stored", "not stored"), ("50.0", "a run: not stored", "not stored")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\n<!-- measured: by hand -->", r"p\.md: line 2: measured: must begin with a command, got by hand"),
        ("1 and 2\n<!-- figures: a -->", r"p\.md: line 2: must have an expression for each of 1, 2; got 1"),
        ("1\n<!-- figures: b -->", r"p\.md: line 2: b: NameError"),
        (TABLE.format("[x]", ""), "rows: must name all 2 rows of the table, got 1"),
        (TABLE.format("[x, y]", "EM: '{a}'\n"), "columns: must be of the table, got EM"),
        (TABLE.format("[x, y", ""), "must be YAML"),
    ],
)
def test_a_mark_that_cannot_be_read_is_one_line(text, message) -> None:
    with pytest.raises(Exception, match=message):
        states(text)
