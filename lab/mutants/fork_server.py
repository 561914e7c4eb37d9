"""Run pytest in forks of a process that has imported the packages of others: imports take longer than most tests.

Run as a file. Nothing of this project may be imported before the fork: it is read again for each fault.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys

PACKAGES = (
    "accelerate", "datasets", "fastapi", "gymnasium", "httpx", "prometheus_client", "pytest", "safetensors.torch",
    "scienceworld", "tensorboard", "torch", "torch.utils.tensorboard", "transformers.generation.utils",
    "transformers.modeling_utils", "transformers.tokenization_utils_fast", "uvicorn", "yaml",
)  # fmt: skip


def main(log: str) -> None:
    """Run the requests of standard input, one a line; print exit statuses. Output of pytest goes to the file `log`."""
    for package in PACKAGES:
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ctrl-C, through `finally`
    gc.freeze()  # collecting in a fork would copy every page
    for line in sys.stdin:
        arguments, seconds = json.loads(line)
        if not (pid := os.fork()):
            _run(log, arguments, seconds)
        try:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # processes that tests started
        print(status, flush=True)


def _run(log: str, arguments: list[str], seconds: int) -> None:
    """Run pytest and exit; after `seconds` the system kills this process with SIGALRM."""
    import pytest

    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.alarm(seconds)
    for stream, path in ((0, os.devnull), (1, log), (2, log)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), stream)
    status = pytest.main(arguments)
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
