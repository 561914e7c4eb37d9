"""Timings by hand, each run by `python -m lab.benchmarks.NAME`."""
