"""Worlds of frames, played in the terminal beside their simulators."""
