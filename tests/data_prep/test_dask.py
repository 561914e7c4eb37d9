"""A Dask cluster whose worker is killed in the middle collects the same episodes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from data_prep.__main__ import main
from tests.fixtures.episodes import contents

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
    assert contents(tmp_path / "dask") == contents(tmp_path / "alone")


@pytest.mark.slow
def test_threads_of_a_worker_play_worlds_of_their_own(tmp_path: Path) -> None:
    from distributed import LocalCluster

    with LocalCluster(n_workers=1, threads_per_worker=2, processes=True, dashboard_address=None) as cluster:
        assert collect(tmp_path / "threads", "--dask", cluster.scheduler_address) == 0
    assert collect(tmp_path / "alone") == 0
    assert contents(tmp_path / "threads") == contents(tmp_path / "alone")
