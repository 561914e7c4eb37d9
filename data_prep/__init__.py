"""Collect episodes from simulators; make the tokenizer, token shards and evaluation windows from them."""
