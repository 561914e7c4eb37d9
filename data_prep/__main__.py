"""Run `python -m data_prep`; print one line if a package of the extra `data` is missing."""

from __future__ import annotations

import sys
from functools import partial

from loopwm.records.command import run_main

main = partial(run_main, "data_prep.main", "data")

if __name__ == "__main__":
    sys.exit(main())
