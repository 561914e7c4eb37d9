"""Looped transformer world models of text and pixel environments."""

__version__ = "0.2.0"
