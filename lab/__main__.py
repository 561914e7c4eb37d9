"""`python -m lab`, or one line where a package of the extras `eval` and `data` is not installed."""

from __future__ import annotations

import sys
from functools import partial

from loopwm.records.command import run_main

main = partial(run_main, "lab.main", "eval,data")

if __name__ == "__main__":
    sys.exit(main())
