"""Suites as tasks of lm-evaluation-harness, written by `python -m lab lm-eval-tasks`."""
