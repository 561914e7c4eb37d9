"""`python -m serve`; one error line if a package of the extra `serve` is missing."""

from __future__ import annotations

import sys
from functools import partial

from loopwm.records.command import run_main

main = partial(run_main, "serve.start", "serve")

if __name__ == "__main__":
    sys.exit(main())
