"""Text generation between HTTP and the engine: prompts, detokenization, streams, rate limits."""
