"""The page of the papers' settings is of the configurations, and says why a value is not the printed one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from loopwm.pixel.agents.config import agent_config
from loopwm.records.config import read_sections

ROOT = Path(__file__).parents[2]
SECTIONS = re.findall(
    r"^## (.*)\n\n.*?`(configs/[\w-]+\.yaml)`.*\n\n((?:\|.*\n)+)", (ROOT / "docs/pixels-settings.md").read_text(), re.M
)
ROWS = [
    (name, config, *(cell.strip() for cell in row.strip("|").split("|")))
    for name, config, table in SECTIONS
    for row in table.splitlines()[2:]
]


def test_every_system_has_its_settings() -> None:
    assert [config for _, config, _ in SECTIONS] == [
        "configs/storm-atari.yaml",
        "configs/edeline-agent-atari.yaml",
        "configs/twisted-agent-craftax-classic.yaml",
        "configs/twisted-agent-minatar.yaml",
    ]
    assert len(ROWS) > 90
    assert len({row[:3] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("section", "config", "key", "printed", "ours", "why"), ROWS, ids=lambda cell: cell[:40])
def test_a_row_is_of_its_configuration(section: str, config: str, key: str, printed: str, ours: str, why: str) -> None:
    made = agent_config(read_sections(ROOT / config))
    value = eval(key.strip("`"), {"__builtins__": {}}, vars(made))
    assert yaml.safe_load(ours) == (list(value) if isinstance(value, tuple) else value)
    assert why or yaml.safe_load(printed) == yaml.safe_load(ours), f"{section}: {key}: must say why it differs"
