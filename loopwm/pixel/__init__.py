"""Pixel worlds on the looped core: a folder or module a system, shared parts beside them."""
