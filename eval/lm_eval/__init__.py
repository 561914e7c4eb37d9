"""Suites as tasks of lm-evaluation-harness, written by `python -m eval lm-eval-tasks`."""
