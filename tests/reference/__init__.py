"""Slow, independent models of what the package computes fast."""
