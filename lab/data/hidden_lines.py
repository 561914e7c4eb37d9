"""Lines that hidden states can hold, by environment. Of one without an entry, any text but an empty one is valid."""

from __future__ import annotations

import re

from data_prep.environments.alfworld.hidden import STATES

_NAME = r"[a-z]+ \d+"
_LIST = rf"(?:nothing|(?:a {_NAME}(?:, and |, )?)+)"
_STATE = rf"(?:{'|'.join(STATES.values())})"
_ALFWORLD = (
    rf"The {_NAME} is (?:closed|open)\. In it, you see {_LIST}\."
    rf"|(?:On|In) the {_NAME}, you see {_LIST}\."
    rf"|Facing the {_NAME}(?:, (?:and )?{_NAME})+\. Next to it, you see {_LIST}\."
    rf"(?: You took {_LIST} from the {_NAME}\.)*"
    rf"|The {_NAME} is (?:on|off|{_STATE}(?: and {_STATE})*)\."
)
LINES = {"alfworld": re.compile(_ALFWORLD)}


def unreadable_line(env: str, hidden_state: str) -> str | None:
    """Return the first line of a hidden state that its environment cannot have written."""
    lines = hidden_state.split("\n") if env in LINES else ()
    return next((line for line in lines if not LINES[env].fullmatch(line)), None)
