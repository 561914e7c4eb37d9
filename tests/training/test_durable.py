"""What a run leaves is on the disk before it has its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loopwm.pixel.checkpoint import save_checkpoint
from loopwm.pixel.system import make_system
from loopwm.pixel.twisted.model import TwistedConfig
from loopwm.pixel.twisted.system import TwistedCoefficients
from loopwm.records.files import publish
from loopwm.records.frames import FrameSpace
from loopwm.records.run_folder import RunFolder
from loopwm.text.model.tokenizer import load_tokenizer
from loopwm.text.training.config import load_config
from loopwm.text.training.program import TextProgram, export_model


class Disk:
    """Which files and folders were synced, by inode, and what of a renamed folder was not yet when it got its name."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.synced: set[int] = set()
        self.renamed: list[Path] = []
        self.missing: list[str] = []
        fsync, rename = os.fsync, Path.rename

        def syncing(opened: int) -> None:
            fsync(opened)
            self.synced.add(os.fstat(opened).st_ino)

        def renaming(path: Path, target: Path) -> Path:
            everything = [path, *path.rglob("*")]
            self.missing += [str(p) for p in everything if p.stat().st_ino not in self.synced]
            self.renamed.append(Path(target))
            self.synced.discard(Path(target).parent.stat().st_ino)  # the name itself is not on the disk yet
            return rename(path, target)

        patch.setattr(os, "fsync", syncing)
        patch.setattr(Path, "rename", renaming)

    def is_named(self, path: Path) -> bool:
        return path in self.renamed and path.parent.stat().st_ino in self.synced


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


def test_a_checkpoint_is_on_the_disk_with_all_its_files_before_it_counts(disk, tmp_path):
    files = RunFolder(tmp_path, "step", 2)
    folder = files.begin_checkpoint(3)
    (folder / "inner").mkdir(parents=True)
    for name in ("progress.json", "inner/weights"):
        (folder / name).write_text(name)
    files.finish_checkpoint(3)
    assert disk.missing == []
    assert [disk.is_named(path) for path in files.checkpoints()] == [True]


def test_an_exported_text_model_is_on_the_disk_before_it_has_its_name(disk, config_file, tmp_path):
    model = TextProgram(load_config(config_file)).objective.model
    for _ in range(2):  # the second replaces the first
        export_model(model, load_tokenizer(), tmp_path / "model")
    assert disk.missing == []
    assert disk.is_named(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").stat().st_size > 0
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_exported_pixel_model_is_on_the_disk_before_it_has_its_name(disk, tmp_path):
    config = TwistedConfig(dim=32, heads=2, mlp_dim=64, codes=8, patch=(2, 2))
    system = make_system("twisted", config, TwistedCoefficients(), FrameSpace("toy", "1", (4, 6, 1), 2))
    save_checkpoint(system, tmp_path / "model")
    assert disk.missing == []
    assert disk.is_named(tmp_path / "model")


def test_a_file_takes_the_place_of_another(disk, tmp_path):
    for text in ("old", "new"):
        (tmp_path / "x.tmp").write_text(text)
        publish(tmp_path / "x.tmp", tmp_path / "x")
    assert (tmp_path / "x").read_text() == "new"
    assert disk.missing == []
    assert disk.is_named(tmp_path / "x")
