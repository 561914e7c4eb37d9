"""Episodes from simulators, and from episodes the tokenizer, token shards and evaluation windows."""
