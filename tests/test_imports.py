"""Imports point one way, simulators load late, and one file alone loops the block."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("loopwm", "data_prep", "eval", "serve")

FORBIDDEN = {
    "loopwm": ("eval", "serve", "data_prep"),
    "loopwm.core": ("loopwm.text", "loopwm.pixel", "loopwm.training", "transformers", "tokenizers"),
    "loopwm.text": ("loopwm.training", "loopwm.pixel"),
    "loopwm.text.format": ("torch", "numpy", "transformers", "tokenizers", "loopwm.core"),
    "loopwm.pixel": ("loopwm.training", "loopwm.text"),
    "loopwm.pixel.frames": ("torch", "transformers", "gymnasium", "loopwm.core"),
    "eval": ("serve", "data_prep", "loopwm.training"),
    "serve": ("eval", "data_prep", "loopwm.training"),
    "data_prep": ("eval", "serve", "loopwm"),
}
ALLOWED = {
    "data_prep": ("loopwm.text.format", "loopwm.pixel.frames"),
    "eval": ("loopwm.training.config", "loopwm.training.twisted_config", "loopwm.training.agent_config"),
    "eval.pixels.playing": ("loopwm.training.real_world",),  # measures agents where they learned
    "eval.real_world": ("data_prep.environments", "data_prep.episodes", "data_prep.errors"),  # plays simulators
    "loopwm.training.real_world": ("data_prep.environments", "data_prep.errors"),  # an agent in training plays them
    "eval.recorded": ("data_prep.episodes", "data_prep.errors"),  # whole episodes, read as they were written
}
SIMULATORS = (
    *("scienceworld", "textworld", "alfworld", "fast_downward"),
    *("crafter", "minatar", "ale_py", "minigrid", "vizdoom", "craftax", "jax"),
)
SIMULATOR_HOME = "data_prep.environments"
LOOPED_BLOCK = ("loopwm.core.looped", "block")
"""The module that loops the block, and the attribute that holds it."""


@dataclass(frozen=True)
class Import:
    name: str
    line: int
    inside_function: bool


def inside(name: str, *parents: str) -> bool:
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


def imports(tree: ast.AST, inside_function: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, inside_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (Import(f"{base}.{alias.name}", node.lineno, inside_function) for alias in node.names)
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports(node, inside_function or function)


def faults(module: str, source: str) -> list[str]:
    """What is wrong with a module, one line each."""
    tree = ast.parse(source)
    allowed = [name for package, names in ALLOWED.items() if inside(module, package) for name in names]
    found = []
    for item in imports(tree):
        place = f"{module}:{item.line}: {item.name}"
        if item.name.startswith("."):
            found.append(f"{place}: relative imports hide where they point")
        for package, targets in FORBIDDEN.items():
            if inside(module, package) and inside(item.name, *targets) and not inside(item.name, *allowed):
                found.append(f"{place}: {package} must not import it")
        late = item.inside_function and inside(module, SIMULATOR_HOME)
        if inside(item.name, *SIMULATORS) and not late:
            found.append(f"{place}: simulators are imported inside functions of {SIMULATOR_HOME}")
    home, attribute = LOOPED_BLOCK
    if module != home:
        uses = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == attribute]
        found += [f"{module}:{node.lineno}: .{attribute}: only {home} runs the looped block" for node in uses]
    return found


def modules() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path.read_text()


def test_imports_point_one_way_and_one_file_loops_the_block():
    sources = dict(modules())
    assert set(sources) >= {LOOPED_BLOCK[0], "loopwm.text.format", "serve.app", "eval.metrics", SIMULATOR_HOME}
    assert [fault for module, source in sources.items() for fault in faults(module, source)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("loopwm.training.trainer", "import eval.metrics"),
        ("loopwm.core.looped", "from loopwm.text import format"),
        ("loopwm.core.state", "def f():\n    import transformers"),
        ("loopwm.text.format", "import torch"),
        ("loopwm.pixel.frames", "import torch"),
        ("data_prep.shards", "from loopwm.text.tokenizer import load_tokenizer"),
        ("data_prep.shards", "from loopwm.text import tokenizer"),
        ("data_prep.collect_frames", "from loopwm.pixel.replay import Replay"),
        ("data_prep.environments.scienceworld", "from scienceworld import ScienceWorldEnv"),
        ("data_prep.environments.pixel_crafter", "import crafter"),
        ("eval.harness", "def f():\n    import alfworld.agents"),
        ("eval.studies.training", "from loopwm.training import trainer"),
        ("eval.consistency", "from data_prep.environments import make_environment"),
        ("eval.real_world", "from data_prep.windows import cut_window"),
        ("serve.app", "from eval import metrics"),
        ("serve.app", "from . import engine"),
        ("loopwm.text.modeling", "def f(core, h):\n    for layer in core.block:\n        h = layer(h)"),
    ],
)
def test_an_offence_is_found(module, source):
    assert len(faults(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("data_prep.windows", "from loopwm.text.format import clean\nfrom loopwm.text import format"),
        ("data_prep.environments.scienceworld", "def f():\n    from scienceworld import ScienceWorldEnv"),
        ("data_prep.collect_frames", "from loopwm.pixel.frames import write_episode"),
        ("loopwm.core.looped", "def f(self):\n    return self.block"),
        ("eval.studies.protocol", "from loopwm.training.config import load_config"),
        ("eval.real_world", "from data_prep.environments import make_environment"),
        ("serve.app", "from loopwm.text import world\nfrom loopwm.core.block import Block"),
    ],
)
def test_what_is_allowed_is_not_blamed(module, source):
    assert faults(module, source) == []
