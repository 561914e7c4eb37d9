"""The simulated collection runs every chunk on the cluster and measures what it costs."""

from __future__ import annotations

import pytest

pytest.importorskip("distributed")

from lab.benchmarks.dask_load import Load, measure


def test_dask_load_runs_all_chunks_on_the_nodes() -> None:
    load = measure(nodes=2, chunks=10, seconds=0.05)
    assert load.wall >= 10 / 2 * 0.05  # two nodes with a thread each cannot be faster
    assert 0 < load.chunk < 1
    assert load.idle < 2


def test_dask_load_shortest_chunk_grows_with_the_workers() -> None:
    load = Load(nodes=100, chunks=1000, wall=10.0, idle=0.1, chunk=0.002)
    assert load.shortest(3200) == pytest.approx(6.4)
