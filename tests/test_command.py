"""The command `loopwm`."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

import loopwm
from loopwm import __version__
from loopwm.__main__ import COMMANDS, main
from loopwm.records.template import Context


def test_help_names_every_command_and_imports_no_torch() -> None:
    code = "import sys; from loopwm.__main__ import main; main(['--help']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, command in COMMANDS.items():
        assert f"loopwm {name} {command.example}" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_example_of_command_uses_options_that_it_has(name, capsys):
    words = shlex.split(COMMANDS[name].example)
    subcommands = [word for word in words[:1] if not word.startswith("--")]
    with pytest.raises(SystemExit) as end:
        main([name, *subcommands, "--help"])
    assert not end.value.code
    text = capsys.readouterr().out
    assert all(word in text for word in words if word.startswith("--"))


def test_completion_that_help_shows_completes_commands(capsys):
    main(["--help"])
    line = capsys.readouterr().out.splitlines()[-1].removeprefix("completion in bash: ")
    script = f'{line}; complete -p loopwm; compgen -W "$(complete -p loopwm | cut -d\\\' -f2)" e'
    shown = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[1:] == ["export", "eval"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_imports_no_slow_package(name):
    code = (
        "import sys\nfrom loopwm.__main__ import main\ntry:\n    main([sys.argv[1], '--help'])\nfinally:\n"
        "    slow = {'datasets', 'fastapi', 'httpx', 'mcp', 'numpy', 'scienceworld', 'torch', 'transformers'}\n"
        "    assert not slow & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_unknown_command_names_the_nearest(capsys):
    assert main(["sevre"]) == 2
    assert capsys.readouterr().err == "error: COMMAND: 'sevre' is unknown, did you mean serve?\n"


def test_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "--modle", "x"],
        ["eval", "run", "--model", "copy", "--suite", "x", "--context", "observed", "--out", "x", "--limmit", "3"],
        ["train", "--config", "x", "--out", "x", "--starts-from", "x"],
    ],
)
def test_unknown_option_names_the_nearest(command, capsys):
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith(("--model?)\n", "--limit?)\n", "--start-from?)\n"))


def test_load_of_the_shipped_checkpoint_answers_an_action():
    worlds = loopwm.load(device="cpu")
    worlds.begin([Context("Find a plant.", "This room is the kitchen. You see: a door to the hallway (closed).")])
    assert worlds.step(["open door to hallway"])[0].observation == "The door is now open."
