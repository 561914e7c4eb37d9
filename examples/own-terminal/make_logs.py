"""Run commands in a real shell, in temporary folders, and write logs for `loopwm train`: a world that is no game.

    python examples/own-terminal/make_logs.py --seeds 0-39 --out logs.jsonl

Each session begins in a home folder with files and folders of random names. An observation is the output of the
command, and the prompt after it, as a terminal shows them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

STEPS = 25
FOLDERS = ("archive", "backup", "data", "docs", "drafts", "inbox", "logs", "music", "photos", "plans", "reports", "src")
STEMS = ("agenda", "budget", "cake", "diary", "essay", "figures", "guests", "hours", "ideas", "journal", "letter",
         "memo", "notes", "orders", "prices", "quotes", "recipes", "sales", "todo", "visits")  # fmt: skip
ENDINGS = ("txt", "md", "csv", "log")
WORDS = ("apple", "bridge", "candle", "dragon", "engine", "forest", "garden", "harbor", "island", "jacket", "kettle",
         "lemon", "mirror", "needle", "orange", "pepper", "quartz", "river", "saddle", "table")  # fmt: skip
COMMANDS = (
    ("ls", 5), ("cat {file}", 5), ("cd {folder}", 4), ("cd ..", 3), ("pwd", 1), ("wc -l {file}", 3), ("rm {file}", 2),
    ("mkdir {new_folder}", 2), ("rmdir {folder}", 1), ("touch {new_file}", 2), ("echo {word} >> {file}", 3),
    ("echo {word} > {new_file}", 2), ("mv {file} {folder}", 3), ("mv {file} {new_file}", 2), ("cp {file} {folder}", 2),
    ("cp {file} {new_file}", 2), ("head -n 1 {file}", 2), ("sort {file}", 2), ("grep {word} {file}", 2),
    ("cat {new_file}", 1), ("cd {new_folder}", 1), ("ls {folder}", 3), ("grep -c {letter} {file}", 1),
)  # fmt: skip


class Shell:
    """A shell whose home is a temporary folder; each command is a process, so the working folder is carried along."""

    def __init__(self, home: Path) -> None:
        self.home, self.here = home, home

    def run(self, command: str) -> str:
        """Return what a terminal shows after the command."""
        done = subprocess.run(
            ["bash", "-c", f"{command}\npwd > $HOME/.pwd"],
            cwd=self.here, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
            env={"HOME": str(self.home), "PATH": "/usr/bin:/bin", "LC_ALL": "C"},
        )  # fmt: skip
        self.here = Path((self.home / ".pwd").read_text().strip())
        errors = done.stderr.replace("bash: line 1: ", "bash: ")
        output = (done.stdout + errors).replace(str(self.home), "/home/ada")
        return f"{output.rstrip()}\n{self.prompt()}".lstrip()

    def prompt(self) -> str:
        inside = self.here.relative_to(self.home)
        return f"ada:~{'' if inside == Path() else f'/{inside}'}$"


def furnish(home: Path, rng: Random) -> None:
    """Create folders and files of random names and lines."""
    folders = [home, *(home / name for name in rng.sample(FOLDERS, 3))]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    for stem in rng.sample(STEMS, 7):
        lines = rng.sample(WORDS, rng.randint(1, 4))
        (rng.choice(folders) / f"{stem}.{rng.choice(ENDINGS)}").write_text("".join(f"{line}\n" for line in lines))


def choose(shell: Shell, rng: Random) -> str:
    """Draw a command; most of its names exist in the working folder."""
    inside = sorted(path for path in shell.here.iterdir() if path.name[0] != ".")
    files, folders = ([p.name for p in inside if p.is_file()], [p.name for p in inside if p.is_dir()])
    new_file = f"{rng.choice(STEMS)}.{rng.choice(ENDINGS)}"
    names = {
        "file": rng.choice(files or [new_file]), "folder": rng.choice(folders or list(FOLDERS)), "new_file": new_file,
        "new_folder": rng.choice(FOLDERS), "word": rng.choice(WORDS), "letter": rng.choice("aeiou"),
    }  # fmt: skip
    allowed = [(text, weight) for text, weight in COMMANDS if shell.here != shell.home or text != "cd .."]
    (command,) = rng.choices([text for text, _ in allowed], [weight for _, weight in allowed])
    return command.format(**names)


def session(seed: int) -> dict[str, Any]:
    """Return the line of one session, which begins with a list of all files."""
    rng = Random(seed)
    with TemporaryDirectory() as folder:
        shell = Shell(Path(folder).resolve())
        furnish(shell.home, rng)
        steps: list[dict[str, Any]] = [{"observation": shell.run("ls *")}]
        for _ in range(STEPS):
            command = choose(shell, rng)
            steps.append({"action": command, "observation": shell.run(command)})
    return {"goal": "Use the terminal.", "task": "terminal", "seed": seed, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-39", metavar="FIRST-LAST")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    first, last = map(int, arguments.seeds.split("-"))
    with arguments.out.open("w", encoding="utf-8") as file:
        for seed in range(first, last + 1):
            file.write(json.dumps(session(seed)) + "\n")


if __name__ == "__main__":
    main()
