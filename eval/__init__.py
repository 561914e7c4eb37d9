"""Evaluate text world models: predict windows, score them and print the paper's rows. Run `python -m eval --help`."""
