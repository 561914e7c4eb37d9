"""Simulators of frames, by name."""
