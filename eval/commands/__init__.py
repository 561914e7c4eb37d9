"""Commands of `python -m eval`, other than reports and pixels."""
