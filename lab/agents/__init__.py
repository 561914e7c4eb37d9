"""Text agents in real and imagined worlds."""
