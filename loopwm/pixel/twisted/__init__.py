"""TWISTED: patch tokens, one-shot decoding of the next frame."""
