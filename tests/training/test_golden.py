from __future__ import annotations

import json

import pytest

from tests.training.golden import FILE, losses


def test_a_tiny_run_has_the_losses_it_had(tmp_path):
    """Processors may differ. Where a change is meant to change the losses: python -m tests.training.golden."""
    stored, found = json.loads(FILE.read_text(encoding="utf-8")), losses(tmp_path)
    assert found.keys() == stored.keys()
    for kind, terms in stored.items():
        assert found[kind].keys() == terms.keys()
        for term, expected in terms.items():
            assert found[kind][term] == pytest.approx(expected, rel=1e-3), f"{kind} {term}"
