"""`python -m lab`, or one line where a package of the extras `eval` and `data` is not installed."""

from __future__ import annotations

import sys

from loopwm.records.command import missing_package


def main(arguments: list[str] | None = None) -> int:
    try:
        from lab.main import main as run
    except ModuleNotFoundError as error:
        return missing_package(error, "eval,data")
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
