"""Pixel worlds on the looped core: frames as patch tokens, and how the next frame is chosen."""
