"""A full or broken disk, a kill at a write, or a torn file: one line that names the file, and the old or new state."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from eval.models.endpoint import ReplyCache
from loopwm.core.exit_rules import Fixed
from loopwm.records.command import exit_status
from loopwm.records.episodes import write_episodes
from loopwm.records.template import Context
from serve.limits import WorldLimits
from serve.worlds.sqlite import StorageError, WorldFile
from serve.worlds.store import WorldLog, WorldStore
from tests.fixtures.faults import Fault, FaultyProcess, Outcome
from tests.fixtures.shards import TOY_CONFIG, toy_episode, write_toy_shards
from tests.fixtures.windows import MakeWindow

FULL, BROKEN, KILL = errno.ENOSPC, errno.EIO, 0
REASONS = {
    FULL: ("No space left on device", "write failed", "disk is full", "disk I/O error"),  # SQLite says either
    BROKEN: ("Input/output error", "write failed", "disk I/O error"),
}
DATA_PREP = "data_prep.__main__:main"

Contents = Mapping[str, bytes]


def own_unit(file: str) -> str:
    return file


def unit_of_run(file: str) -> str:
    """A checkpoint and the exported model are whole folders."""
    return "/".join(Path(file).parts[: 2 if "checkpoints" in file else 1])


@dataclass(frozen=True)
class Writer:
    """A command that writes.

    arguments, old: of the command and of an earlier run, from the folder of inputs and that of the output. unit: name
    of what a file is part of, which is old or new as a whole. complete: file without which a reader refuses the folder.
    appended: files that grow.
    """

    target: str
    arguments: Callable[[Path, Path], list[str]]
    old: Callable[[Path, Path], list[str]] | None = None
    unit: Callable[[str], str] = own_unit
    complete: str = ""
    appended: tuple[str, ...] = ()

    def units(self, contents: Contents) -> dict[str, dict[str, bytes]]:
        """Return the files by unit, but those that grow."""
        units: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
        for file, content in contents.items():
            if not any(name in file for name in self.appended) and (not self.complete or self.complete in contents):
                units[self.unit(file)][file] = content
        return dict(units)


def collect_toy(_: Path, out: Path) -> list[str]:
    options = ["--split", "train", "--policy", "noisy-expert", "--episodes-per-task", "8"]
    return ["collect", "toy", *options, "--out", str(out)]


def collect_frames(_: Path, out: Path) -> list[str]:
    return ["collect", "catch", "--split", "train", "--episodes", "3", "--out", str(out)]


def tokenize(name: str) -> Callable[[Path, Path], list[str]]:
    return lambda inputs, out: ["tokenize", "--episodes", str(inputs / f"{name}.jsonl"), "--out", str(out)]


def import_logs(name: str) -> Callable[[Path, Path], list[str]]:
    return lambda inputs, out: ["import", "--logs", str(inputs / f"{name}.logs"), "--env", "shop", "--out", str(out)]


def evaluate(inputs: Path, out: Path) -> list[str]:
    # Half of three equal lines, which a kill leaves, tears one.
    options = ["--model", "copy", "--context", "observed", "--batch-size", "3", "--horizons", "1"]
    return ["run", *options, "--suite", str(inputs / "suite.jsonl"), "--out", str(out)]


def train(inputs: Path, out: Path) -> list[str]:
    return ["--config", str(inputs / "toy.yaml"), "--out", str(out)]


WRITERS = {
    "collect": Writer(DATA_PREP, collect_toy),
    "frames": Writer(DATA_PREP, collect_frames),
    "tokenize": Writer(DATA_PREP, tokenize("new"), tokenize("old"), lambda _: "", "index.json"),
    "import": Writer(DATA_PREP, import_logs("new"), import_logs("old"), lambda _: "", "train.jsonl.xz"),
    "eval": Writer("eval.__main__:main", evaluate, appended=("predictions.jsonl",)),
    "training": Writer(
        "loopwm.training.__main__:main",
        train,
        lambda inputs, out: [*train(inputs, out), "--max-minutes", "0"],
        unit_of_run,
        appended=("metrics.jsonl", "tensorboard"),
    ),
}


def log(name: str, number: int) -> str:
    steps = [{"observation": "A shop."}, *({"action": f"ring {i}", "observation": f"{name} {i}"} for i in range(3))]
    return json.dumps({"goal": f"{name} goal {number}", "steps": steps}) + "\n"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, make_window: MakeWindow) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    for name, first in (("old", 0), ("new", 5)):
        write_episodes(folder / f"{name}.jsonl", map(toy_episode, range(first, first + 5)))
        (folder / f"{name}.logs").write_text("".join(log(name, number) for number in range(30)))
    (folder / "suite.jsonl").write_text("".join(json.dumps(make_window(f"w{i}")) + "\n" for i in range(8)))
    write_toy_shards(folder / "shards", map(toy_episode, range(8)))
    run = TOY_CONFIG["run"] | {"steps": 2, "save_every": 1}
    data = TOY_CONFIG["data"] | {"train": [str(folder / "shards")]}
    (folder / "toy.yaml").write_text(yaml.safe_dump(TOY_CONFIG | {"data": data, "run": run}))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files that readers see, by name."""
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {str(name): (folder / name).read_bytes() for name in names if not any(map(is_temporary, name.parts))}


def is_temporary(part: str) -> bool:
    return part.startswith((".", "tmp-")) or part.endswith(".tmp")


@dataclass(frozen=True)
class States:
    """Folders of the old and the new state, and their files."""

    old_folder: Path
    new_folder: Path
    old: Contents
    new: Contents


@pytest.fixture(scope="module")
def states(
    faulty_process: FaultyProcess, inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], States]:
    known: dict[str, States] = {}

    def states_of(name: str) -> States:
        if name not in known:
            writer, old, new = WRITERS[name], *map(tmp_path_factory.mktemp, (f"{name}-old", f"{name}-new"))
            if writer.old is not None:
                outcome = faulty_process.run(writer.target, writer.old(inputs, old))
                assert outcome.status == 0, outcome.stderr
                shutil.copytree(old, new, dirs_exist_ok=True)
            outcome = faulty_process.run(writer.target, writer.arguments(inputs, new))
            assert outcome.status == 0, outcome.stderr
            known[name] = States(old, new, contents(old), contents(new))
        return known[name]

    return states_of


def check_one_line(outcome: Outcome, *parts: str) -> None:
    """Check that the command failed with one line that has the parts."""
    assert outcome.status == 2, outcome.stderr
    assert "Traceback" not in outcome.stderr
    line = outcome.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    for part in parts:
        assert part in line


ERRORS_OF_FILES = {
    "collect": ("plan.json", "walk-00000", "manifest.json"),
    "frames": (".npz",),
    "tokenize": ("00000.tokens", "00000.episodes", "index.json"),
    "import": ("train.jsonl", "dev.jsonl"),
    "eval": ("run.json", "commits.json", "predictions.jsonl", "results.json", "report.md"),
    "training": ("metrics.jsonl", "tensorboard", "tmp-step-00000001", "progress.json", "model"),
}
KILLS_OF_FILES = {
    "collect": ("walk-00000",),
    "tokenize": ("00000.spans", "index.json"),
    "import": ("dev.jsonl", "train.jsonl"),
    "eval": ("predictions.jsonl",),
    "training": ("metrics.jsonl", "tmp-step-00000002", "model"),
}
CASES = [
    *((name, Fault("write", FULL, file)) for name, files in ERRORS_OF_FILES.items() for file in files),
    *((name, Fault("write", KILL, file)) for name, files in KILLS_OF_FILES.items() for file in files),
    *((name, Fault("rename", KILL, files[-1])) for name, files in KILLS_OF_FILES.items() if name != "eval"),
    ("tokenize", Fault("write", FULL, "arrow")),
    ("collect", Fault("sync", BROKEN, "walk-00000")),
    ("import", Fault("rename", BROKEN, "train.jsonl")),
    ("eval", Fault("sync", BROKEN, "predictions.jsonl")),
    ("training", Fault("sync", BROKEN, "tmp-step-00000001")),
    ("training", Fault("rename", BROKEN, "/model")),
    ("training", Fault("rename", KILL, ".model.")),
]


@pytest.mark.parametrize(("name", "fault"), CASES, ids=str)
def test_fault_leaves_the_old_or_the_new_state(
    name: str,
    fault: Fault,
    faulty_process: FaultyProcess,
    inputs: Path,
    states: Callable[[str], States],
    tmp_path: Path,
) -> None:
    writer, expected, out = WRITERS[name], states(name), tmp_path / "out"
    shutil.copytree(expected.old_folder, out)
    outcome = faulty_process.run(writer.target, writer.arguments(inputs, out), fault)
    if fault.error == KILL:
        assert outcome.status == -signal.SIGKILL
    else:
        check_one_line(outcome, tempfile.gettempdir() if fault.file == "arrow" else fault.file)
        assert any(reason in outcome.stderr.splitlines()[-1] for reason in REASONS[fault.error])
    old, new = writer.units(expected.old), writer.units(expected.new)
    for unit, files in writer.units(contents(out)).items():
        assert files in (old.get(unit), new.get(unit)), unit
    outcome = faulty_process.run(writer.target, writer.arguments(inputs, out))
    assert outcome.status == 0, outcome.stderr
    rerun = contents(out)
    if name == "training":
        assert losses(rerun) == losses(expected.new)
        assert writer.units(rerun).keys() == new.keys()
    else:
        assert rerun == expected.new


def losses(run: Contents) -> list[tuple[int, float]]:
    records = map(json.loads, run["metrics.jsonl"].splitlines())
    return [(record["step"], record["loss"]) for record in records]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("collect", "plan.json"),
        ("collect", "walk-00000.jsonl.xz"),
        ("eval", "run.json"),
        ("eval", "commits.json"),
        ("training", "config.yaml"),
        *(("training", f"step-00000002/{file}") for file in ("progress.json", "model.safetensors", "optimizer.bin")),
    ],
)
def test_torn_file_is_one_line(
    name: str,
    file: str,
    faulty_process: FaultyProcess,
    inputs: Path,
    states: Callable[[str], States],
    tmp_path: Path,
) -> None:
    writer, out = WRITERS[name], tmp_path / "out"
    shutil.copytree(states(name).new_folder, out)
    (path,) = out.rglob(file)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    if file == "commits.json":  # read when a prediction is missing
        (out / "predictions.jsonl").unlink()
    outcome = faulty_process.run(writer.target, writer.arguments(inputs, out))
    check_one_line(outcome, path.parent.name if "step-" in file else str(path))


LOG = WorldLog(Context("goal", "You are here."), Fixed(2))


def add_world(arguments: list[str]) -> int:
    """Add a world to a file. Return 3 after a line if the change is refused."""

    def work() -> None:
        store = WorldStore(WorldLimits(), file=WorldFile(Path(arguments[0])))
        store.add("me", LOG, 5)
        store.close()

    try:
        return exit_status(work)
    except StorageError as error:
        print(error, file=sys.stderr)
        return 3


def add_reply(arguments: list[str]) -> int:
    return exit_status(lambda: ReplyCache(Path(arguments[0])).put("key", "request", {"reply": "x" * 9000}))


@pytest.mark.parametrize("error", [FULL, BROKEN, KILL])
def test_worlds_file_has_a_change_or_not(error: int, faulty_process: FaultyProcess, tmp_path: Path) -> None:
    assert faulty_process.run(f"{__name__}:add_world", [str(tmp_path / "old")]).status == 0
    statuses, number = set(), 0
    while 0 not in statuses:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        shutil.copy(tmp_path / "old", folder / "worlds")
        fault = Fault("write", error, f"{number}/worlds", number)
        outcome = faulty_process.run(f"{__name__}:add_world", [str(folder / "worlds")], fault)
        statuses.add(outcome.status)
        if outcome.status == 2:  # before the service starts
            check_one_line(outcome, str(folder / "worlds"))
        elif outcome.status == 3:
            assert any(reason in outcome.stderr for reason in REASONS[error])
        store = WorldStore(WorldLimits(), file=WorldFile(folder / "worlds"))
        assert len(store) in ((1,) if outcome.status in (2, 3) else (1, 2) if outcome.status else (2,))
        assert all(session.log == LOG for session in store.of("me"))
        store.close()
    assert statuses == ({0, -signal.SIGKILL} if error == KILL else {0, 2, 3})


def test_torn_worlds_file_is_one_line(faulty_process: FaultyProcess, tmp_path: Path) -> None:
    path = tmp_path / "worlds"
    for _ in range(3):
        assert faulty_process.run(f"{__name__}:add_world", [str(path)]).status == 0
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)  # the first page has the tables, the others their rows
    path.write_bytes(content)
    check_one_line(faulty_process.run(f"{__name__}:add_world", [str(path)]), str(path))


@pytest.mark.parametrize("error", [FULL, KILL])
def test_reply_cache_has_a_reply_or_not(error: int, faulty_process: FaultyProcess, tmp_path: Path) -> None:
    statuses, number = set(), 0
    while 0 not in statuses:
        number += 1
        path = tmp_path / f"{number}.sqlite"
        outcome = faulty_process.run(f"{__name__}:add_reply", [str(path)], Fault("write", error, path.name, number))
        statuses.add(outcome.status)
        if error != KILL and outcome.status:
            check_one_line(outcome, str(path))
        reply = ReplyCache(path).get("key")
        assert reply in ((None, {"reply": "x" * 9000}) if outcome.status == -signal.SIGKILL else
                         (None,) if outcome.status else ({"reply": "x" * 9000},))  # fmt: skip
    assert len(statuses) == 2
