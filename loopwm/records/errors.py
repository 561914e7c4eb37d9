"""InputError: invalid user input; other errors that are raised as one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class InputError(ValueError):
    """Bad input. The message is one line that names the file, field or limit; commands print it and exit with 2."""


@contextmanager
def naming(where: str, kinds: type[Exception] | tuple[type[Exception], ...] = InputError) -> Iterator[None]:
    """Raise InputError, whose message starts with `where`, for errors of these kinds inside the block."""
    try:
        yield
    except kinds as error:
        raise InputError(f"{where}{error}") from error


@contextmanager
def loading(path: Path) -> Iterator[None]:
    """Convert errors of the loaders to InputError: they raise many types for a damaged file or folder."""
    try:
        yield
    except Exception as error:
        raise InputError(f"{path}: {' '.join(str(error).split())[:300]}") from error
