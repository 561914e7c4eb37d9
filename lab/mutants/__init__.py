"""Faults planted one at a time, to see which the tests find."""
