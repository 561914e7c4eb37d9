"""A Dask cluster whose worker is killed in the middle collects the same episodes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from data_prep.__main__ import main

OPTIONS = ("--split", "train", "--policy", "noisy-expert", "--episodes-per-task", "12", "--max-steps", "4")
TASKS = ("find-non-living-thing", "lifespan-longest-lived")


def collect(out: Path, *options: str) -> int:
    return main(["collect", "scienceworld", *OPTIONS, "--tasks", *TASKS, "--out", str(out), *options])


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(tmp_path: Path) -> None:
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        victim = next(iter(cluster.workers.values())).pid

        def kill_when_work_began() -> None:
            while not list((tmp_path / "dask").glob("[!.]*.xz")):
                time.sleep(0.02)
            os.kill(victim, signal.SIGKILL)

        killer = threading.Thread(target=kill_when_work_began)
        killer.start()
        assert collect(tmp_path / "dask", "--dask", cluster.scheduler_address) == 0
        killer.join()
    assert collect(tmp_path / "alone") == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "alone").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "dask").iterdir() if path.name[0] != "."}
