"""`python -m serve`; one error line if a package of the extra `serve` is missing."""

from __future__ import annotations

import sys

from loopwm.records.command import missing_package


def main(arguments: list[str] | None = None) -> int:
    try:
        from serve.start import main as run
    except ModuleNotFoundError as error:
        return missing_package(error, "serve")
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
