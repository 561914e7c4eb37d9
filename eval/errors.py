"""The one error of this package that is the user's to mend."""

from __future__ import annotations


class EvalError(ValueError):
    """Bad input. The message is one line that names the file, field or limit; commands print it and exit with 2."""
