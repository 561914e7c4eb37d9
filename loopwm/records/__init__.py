"""The ground floor: what is read and written, in one place each. Nothing here needs torch."""
