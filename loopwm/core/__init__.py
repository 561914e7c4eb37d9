"""The looped transformer core: tensors only. It knows neither text nor pixels nor files."""

from loopwm.core.exit_rules import name_of as name_of
from loopwm.core.exit_rules import parse_rule as parse_rule
