"""Text between HTTP and the engine: prompts, tokens to text, streams, rate limits."""
