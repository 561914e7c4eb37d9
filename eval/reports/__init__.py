"""Pages about finished runs."""
