"""Run `python -m eval`; print one line if a package of the extra `eval` is missing."""

from __future__ import annotations

import sys
from functools import partial

from loopwm.records.command import run_main

main = partial(run_main, "eval.main", "eval")

if __name__ == "__main__":
    sys.exit(main())
