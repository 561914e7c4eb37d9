from __future__ import annotations

import shutil
import tarfile
import tomllib
import zlib
from pathlib import Path

import pytest

from data_prep import solutions
from lab.__main__ import main
from tests.fixtures.episodes import contents
from tests.fixtures.toy import Toy, collect_toy


def pack(folder: Path, out: Path, *options: str) -> int:
    return main(["pack", "--folder", str(folder), "--out", str(out), *options])


def unpack(path: Path, out: Path) -> int:
    return main(["unpack", str(path), "--out", str(out)])


def part(folder: Path, out: Path) -> None:
    """A pack of the folder when its first file alone was there."""
    earlier = out.with_name("earlier") / folder.name
    shutil.copytree(folder, earlier)
    for later in (*earlier.glob("*-000[1-9]0.jsonl.xz"), *earlier.glob("failed/*")):
        later.unlink()
    assert pack(earlier, out) == 0


@pytest.fixture
def collected(tmp_path: Path, toy: None) -> Path:
    assert collect_toy(tmp_path / "some", "--tasks", "walk") == 0
    (tmp_path / "some" / "manifest.json").unlink()
    return tmp_path / "some"


def test_unpacked_files_are_those_that_were_packed_and_failures_stay_known(collected: Path, tmp_path: Path) -> None:
    assert pack(collected, tmp_path / "p.tar.xz") == 0
    assert unpack(tmp_path / "p.tar.xz", tmp_path / "new") == 0
    assert contents(tmp_path / "new" / "some") == contents(collected)
    assert "walk-00010.txt" in contents(tmp_path / "new")


def test_collecting_goes_on_where_a_pack_ends(collected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part(collected, tmp_path / "p.tar.xz")
    assert unpack(tmp_path / "p.tar.xz", tmp_path / "new") == 0
    assert set(contents(tmp_path / "new")) == {"plan.json", "walk-00000.jsonl.xz"}
    kept = (tmp_path / "new" / "some" / "walk-00000.jsonl.xz").stat().st_mtime_ns
    assert collect_toy(tmp_path / "new" / "some", "--tasks", "walk") == 0
    assert (tmp_path / "new" / "some" / "walk-00000.jsonl.xz").stat().st_mtime_ns == kept
    assert contents(collected).items() <= contents(tmp_path / "new" / "some").items()


def test_packs_of_the_same_files_are_the_same_bytes_and_parts_are_the_whole(collected: Path, tmp_path: Path) -> None:
    part(collected, tmp_path / "a.tar.xz")
    for name, *options in (("b", "--without", str(tmp_path / "a.tar.xz")), ("c",), ("d",)):
        assert pack(collected, tmp_path / f"{name}.tar.xz", *options) == 0
    assert (tmp_path / "c.tar.xz").read_bytes() == (tmp_path / "d.tar.xz").read_bytes()
    for name in ("a", "b"):
        assert unpack(tmp_path / f"{name}.tar.xz", tmp_path / "new") == 0
    assert contents(tmp_path / "new" / "some") == contents(collected)


def test_what_is_there_is_left_alone_and_another_plan_is_refused(
    collected: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pack(collected, tmp_path / "p.tar.xz") == 0
    there = tmp_path / "new" / "some" / "walk-00000.jsonl.xz"
    there.parent.mkdir(parents=True)
    there.write_text("mine")
    assert unpack(tmp_path / "p.tar.xz", tmp_path / "new") == 0
    assert there.read_text() == "mine"
    (there.parent / "plan.json").write_text("{}")
    assert unpack(tmp_path / "p.tar.xz", tmp_path / "new") == 2
    assert "plan.json: must have the plan of" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["cut", "other", "climbs"])
def test_a_file_that_is_no_pack_is_one_line(
    collected: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.tar.xz"
    assert pack(collected, path) == 0
    if damage == "climbs":
        with tarfile.open(path, "w:xz") as archive:
            archive.add(collected / "plan.json", "../plan.json")
    else:
        path.write_bytes(path.read_bytes()[:-40] if damage == "cut" else b"no pack")
    capsys.readouterr()
    assert unpack(path, tmp_path / "new") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: ")
    assert error.count("\n") == 1


def test_a_folder_that_was_not_collected_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pack(tmp_path, tmp_path / "p.tar.xz") == 2
    assert "must be a folder of collected episodes with a plan.json" in capsys.readouterr().err
    assert not (tmp_path / "p.tar.xz").exists()


def test_packed_solutions_are_never_asked_for(
    tmp_path: Path, toy: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "solutions"
    assert collect_toy(tmp_path / "a", "--tasks", "walk", "--solutions", str(kept)) == 0
    packed = tmp_path / "packed" / "solutions-toy.jsonl.xz"
    assert main(["pack", "--solutions", str(kept / "toy"), "--out", str(packed)]) == 0
    assert "25 solutions" in capsys.readouterr().out
    monkeypatch.setattr(solutions, "PACKED", packed.parent)
    solutions.packed_solutions.cache_clear()
    Toy.solved.clear()
    assert collect_toy(tmp_path / "b", "--tasks", "walk") == 0
    solutions.packed_solutions.cache_clear()
    assert Toy.solved == []
    assert contents(tmp_path / "a").items() >= {n: c for n, c in contents(tmp_path / "b").items() if "xz" in n}.items()


def test_unpack_without_packs_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lab.data.unpack.PACKED", tmp_path)
    assert main(["unpack", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: packs: must be named")


def test_wheel_data_is_small_and_without_packs():
    root = Path(__file__).parents[3]
    globs = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folders = {package: root / package.replace(".", "/") for package in globs}
    files = [file for package, names in globs.items() for name in names for file in folders[package].glob(name)]
    assert not any(file.name.endswith(".tar.xz") for file in files)
    assert sum(len(zlib.compress(file.read_bytes())) for file in files if file.is_file()) < 18_000_000
