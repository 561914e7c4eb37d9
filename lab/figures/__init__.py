"""Figures of pages, recomputed from what is stored beside them."""
