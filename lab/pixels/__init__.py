"""One-off measurements of pixel worlds."""
