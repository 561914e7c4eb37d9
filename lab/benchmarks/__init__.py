"""Benchmarks, each run by `python -m lab.benchmarks.NAME`."""
