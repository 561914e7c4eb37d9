"""STORM on the looped core."""
