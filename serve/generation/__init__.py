"""Text and asyncio between HTTP and the engine."""
