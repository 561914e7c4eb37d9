"""Studies: one command per protocol; each writes tables, plots and JSON. See docs/evaluation.md."""
