"""The training program of text worlds, its losses, and export."""
