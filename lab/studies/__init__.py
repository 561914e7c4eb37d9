"""Studies: one command runs a written-down protocol and writes table, plot and JSON. See docs/evaluation.md."""
