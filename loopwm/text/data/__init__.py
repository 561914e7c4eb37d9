"""Data of text runs: from token shards to batches."""
