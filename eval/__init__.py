"""Evaluation of text world models: windows in, metrics beside the paper's rows out. Run `python -m eval --help`."""
