"""What a run leaves is on the disk before it has its name."""

from __future__ import annotations

import os
import re
import resource
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eval.scores.predictions import append_lines
from loopwm.pixel.checkpoint import save_checkpoint
from loopwm.pixel.system import make_system
from loopwm.pixel.twisted.model import TwistedConfig
from loopwm.pixel.twisted.system import TwistedCoefficients
from loopwm.records.errors import InputError
from loopwm.records.files import publish, write_lines, writing
from loopwm.records.frames import FrameSpace
from loopwm.records.run_folder import RunFolder
from loopwm.text.model.tokenizer import load_tokenizer
from loopwm.text.training.config import load_config
from loopwm.text.training.program import TextProgram, export_model
from loopwm.trainer.trainer import Trainer


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


MOST = 20_000
"""Bytes of a file on the full disk."""


@contextmanager
def full_disk() -> Iterator[None]:
    """A limit on the size of files: to whoever writes more, in Python or not, the system reports an error.

    It holds for the whole process, so no fixture sets it: the output of the tests may be a file, too.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refused(path: Path) -> str:
    return f"^{re.escape(str(path))}: .*; make room on the disk and rerun the command$"


def test_a_checkpoint_on_a_full_disk_is_named(config_file, tmp_path):
    with full_disk(), pytest.raises(InputError, match=refused(tmp_path / "checkpoints" / "tmp-step-00000001")):
        Trainer(load_config(config_file, ["run.steps=1", "data.dev=[]"]), TextProgram, tmp_path).run()
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_a_torch_file_on_a_full_disk_is_named(tmp_path):
    with full_disk(), pytest.raises(InputError, match=refused(tmp_path / "x")), writing(tmp_path / "x"):
        torch.save(torch.zeros(MOST), tmp_path / "x")


def test_a_model_on_a_full_disk_is_named_and_the_old_one_stays(config_file, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    text = TextProgram(load_config(config_file)).objective.model
    config = TwistedConfig(dim=64, heads=2, mlp_dim=256, codes=8, patch=(2, 2))
    pixel = make_system("twisted", config, TwistedCoefficients(), FrameSpace("toy", "1", (4, 6, 1), 2))
    for export in (lambda path: export_model(text, load_tokenizer(), path), lambda path: save_checkpoint(pixel, path)):
        with full_disk(), pytest.raises(InputError, match=refused(tmp_path / "model")):
            export(tmp_path / "model")
        assert [path.name for path in (tmp_path / "model").iterdir()] == ["old"]


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.jsonl.xz"])
def test_lines_on_a_full_disk_are_named_and_old_ones_stay(tmp_path, name):
    path = tmp_path / name
    write_lines(path, ["old"])
    before = path.read_bytes()
    with full_disk(), pytest.raises(InputError, match=refused(path)):
        write_lines(path, (secrets.token_hex(100) for _ in range(1000)))
    assert path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_lines_appended_on_a_full_disk_are_named(tmp_path):
    with full_disk(), pytest.raises(InputError, match=refused(tmp_path / "metrics.jsonl")):
        RunFolder(tmp_path, "step", 2).log(1, {"text": "x" * MOST})
    with full_disk(), pytest.raises(InputError, match=refused(tmp_path / "predictions.jsonl")):
        append_lines(tmp_path / "predictions.jsonl", [{"text": "x" * MOST}])


def test_other_errors_of_writing_stay_what_they_are(tmp_path):
    with pytest.raises(FileNotFoundError), writing(tmp_path / "x"):
        (tmp_path / "no folder" / "x").write_text("")
    with pytest.raises(RuntimeError, match="other"), writing(tmp_path / "x"):
        raise RuntimeError("other")


def test_an_exported_text_model_is_in_bfloat16(config_file, tmp_path):
    model = TextProgram(load_config(config_file)).objective.model
    export_model(model, load_tokenizer(), tmp_path / "model")
    types = {tensor.dtype for path in (tmp_path / "model").glob("*.safetensors") for tensor in load_file(path).values()}
    assert types == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}, "training goes on unrounded"


def test_writing_passes_other_hidden_errors_on(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="os error 13"), writing(tmp_path / "model"):
        raise RuntimeError("I/O error: Permission denied (os error 13)")
    with pytest.raises(InputError, match="model: write failed; make room"), writing(tmp_path / "model"):
        raise RuntimeError("I/O error: No space left on device (os error 28)")
