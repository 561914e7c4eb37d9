"""Run `python -m data_prep`; print one line if a package of the extra `data` is missing."""

from __future__ import annotations

import sys

from loopwm.records.command import missing_package


def main(arguments: list[str] | None = None) -> int:
    try:
        from data_prep.main import main as run
    except ModuleNotFoundError as error:
        return missing_package(error, "data")
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
