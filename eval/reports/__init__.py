"""Pages about finished and unfinished runs: what was predicted, beside peers and beside the paper."""
