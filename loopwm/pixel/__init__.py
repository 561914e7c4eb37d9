"""Pixel worlds on the looped core: TWISTED, STORM and EDELINE, one module a system, shared parts beside them."""
