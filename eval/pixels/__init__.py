"""Measurements and pictures of pixel worlds."""
