"""InputError: invalid user input."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input. The message is one line that names the file, field or limit; commands print it and exit with 2."""
