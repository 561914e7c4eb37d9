"""Pixel worlds, measured: accuracy of the next frame by decoder, studies of it, pictures."""
