"""Run `python -m eval`; print one line if a package of the extra `eval` is missing."""

from __future__ import annotations

import sys

from loopwm.records.command import missing_package


def main(arguments: list[str] | None = None) -> int:
    try:
        from eval.main import main as run
    except ModuleNotFoundError as error:
        return missing_package(error, "eval")
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
