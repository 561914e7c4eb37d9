"""Common parts of all command lines: one-line errors and exit status 2."""

from __future__ import annotations

import argparse
import difflib
import gc
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from traceback import clear_frames
from typing import NoReturn

from loopwm.records.errors import InputError

DEVICES = ("auto", "cpu", "cuda")
"""Values of `--device`; `auto` takes a GPU if torch finds one."""


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are one line, without the usage, and name the nearest option."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        near = difflib.get_close_matches(unknown[1], self._options(), n=1) if unknown else ()
        suggestion = f" (did you mean {near[0]}?)" if near else ""
        self.exit(2, f"error: {' '.join(message.split())}{suggestion}\n")

    def _options(self) -> set[str]:
        """Return the long options of this parser and its subcommands: the outermost one reports unknown options."""
        options = {name for action in self._actions for name in action.option_strings if name.startswith("--")}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                options |= {name for command in action.choices.values() for name in command._options()}
        return options


def command_parser(
    prog: str,
    purpose: str,
    modules: Mapping[str, tuple[str, str]],
    arguments: Sequence[str] | None = None,
    formatter: type[argparse.HelpFormatter] = argparse.RawDescriptionHelpFormatter,
) -> Parser:
    """Build a parser of subcommands from the names of their modules and their purposes.

    A module has `EXAMPLE`, `add_arguments(parser)` and `run(args)`; its docstring is the command's help. Only that of
    the command in `arguments` (default: of the process) is imported: together they take seconds.
    """
    parser = Parser(prog=prog, description=purpose)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = (sys.argv[1:] if arguments is None else arguments)[:1]
    for name, (path, what_for) in modules.items():
        if [name] != list(chosen):
            commands.add_parser(name, help=what_for)
            continue
        module = import_module(path)
        command = commands.add_parser(
            name,
            help=what_for,
            description=module.__doc__,
            epilog=f"example: {module.EXAMPLE}",
            formatter_class=formatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def doc_parser(prog: str, doc: str | None, epilog: str | None = None) -> Parser:
    """Build a parser whose help shows the lines of a docstring as they are."""
    return Parser(prog=prog, description=doc, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter)


OURS = ("data_prep", "eval", "lab", "loopwm", "serve")


def missing_package(error: ModuleNotFoundError, extra: str) -> int:
    """Print one line on the missing package and its extra; return 2. Raises the error again for a module of ours."""
    package = (error.name or "").partition(".")[0]
    if package in OURS:
        raise error
    print(f"error: the package {package} is not installed: pip install 'loopwm[{extra}]'", file=sys.stderr)
    return 2


def run_main(module: str, extra: str, arguments: Sequence[str] | None = None) -> int:
    """Run `main` of a module; return 2 after one line if a package of the extra that it imports is missing."""
    try:
        return import_module(module).main(arguments)
    except ModuleNotFoundError as error:
        return missing_package(error, extra)


def exit_status(work: Callable[[], object], *more: type[Exception]) -> int:
    """Run the work; return 0, or 2 after one line on bad input, a full disk, or an error of the types in `more`."""
    wrong: tuple[type[Exception], ...] = (InputError, OSError, *more)
    try:
        work()
    except wrong as error:
        known = (error.filename, error.strerror) if isinstance(error, OSError) else ()  # without its number
        print("error:", ": ".join(filter(None, known)) or error, file=sys.stderr)
        # Since 3.13 Python reports files whose finalizer fails to write, too: on a full disk one line is enough.
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        clear_frames(error.__traceback__)
        gc.collect()
        sys.unraisablehook = hook
        return 2
    return 0


def _whole(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, got {text!r}")
    return int(text)


at_least_zero, positive = partial(_whole, 0), partial(_whole, 1)


def above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text!r}")
    return value
