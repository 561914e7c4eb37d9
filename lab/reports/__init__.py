"""Pages about several runs."""
