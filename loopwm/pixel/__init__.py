"""Pixel world models on the looped core: one folder per system, shared modules beside them."""
