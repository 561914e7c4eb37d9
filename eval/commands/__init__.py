"""The commands of `python -m eval` that are neither studies nor reports."""
