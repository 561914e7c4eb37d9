"""Imports point one way, simulators load late, and one file alone loops the block."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from data_prep.environments import ENVIRONMENTS, declared

ROOT = Path(__file__).parents[1]
PACKAGES = ("loopwm", "data_prep", "eval", "serve", "lab")

MAY_IMPORT = {
    "loopwm": ("loopwm.worlds", "loopwm.text", "loopwm.records", "loopwm.runtime"),  # `loopwm.load`
    "loopwm.records": (),
    "loopwm.runtime": ("loopwm.records",),
    "loopwm.core": ("loopwm.runtime",),
    "loopwm.trainer": ("loopwm.core", "loopwm.records", "loopwm.runtime"),
    "loopwm.text": ("loopwm.core", "loopwm.records", "loopwm.trainer", "loopwm.runtime"),
    "loopwm.pixel": ("loopwm.core", "loopwm.records", "loopwm.trainer", "loopwm.runtime"),
    "loopwm.worlds": ("loopwm.text", "loopwm.core", "loopwm.records"),
    "loopwm.training": (
        *("loopwm.text", "loopwm.pixel", "loopwm.trainer", "loopwm.core", "loopwm.records", "loopwm.runtime"),
    ),
    "loopwm.pretrained": ("loopwm.text",),
    "data_prep": ("loopwm.records",),
    "eval.scores": ("loopwm.records", "data_prep.environments"),  # what an environment says of itself
    "eval.models": (
        *("eval.scores", "loopwm.worlds", "loopwm.text", "loopwm.core", "loopwm.records", "loopwm.runtime"),
    ),
    "eval.commands": ("eval.models", "eval.scores", "loopwm.worlds", "loopwm.records"),
    "eval": ("loopwm.records",),
    "serve.engine": (
        *("loopwm.text.model", "loopwm.text.world_batch", "loopwm.text.drafts", "loopwm.text.decoding"),
        *("serve.limits", "loopwm.core", "loopwm.runtime"),
    ),
    "serve.generation": ("serve.engine", "loopwm.text.decoding", "loopwm.core", "loopwm.records"),
    "serve.worlds": (
        *("serve.generation", "serve.engine", "serve.limits", "loopwm.text", "loopwm.core", "loopwm.records"),
        "loopwm.worlds.protocol",
    ),
    "serve.http": ("serve.generation", "serve.worlds", "serve.playground", "serve.pixels.games", "loopwm.records"),
    "serve.pixels": ("serve.generation", "serve.worlds", "loopwm.pixel", "loopwm.records"),
    "serve": ("loopwm.worlds", "loopwm.text", "loopwm.core", "loopwm.records", "loopwm.runtime"),
    "lab": ("loopwm", "data_prep", "eval", "serve"),  # and nothing imports it
}
"""What of ours a package may import besides itself and what lies in it; the innermost package that is named counts."""

WITHOUT = {
    "loopwm.records": ("torch", "transformers", "tokenizers", "gymnasium"),
    "loopwm.records.template": ("numpy",),
    "loopwm.worlds.protocol": ("torch", "transformers", "tokenizers"),
    "loopwm.worlds.http": ("torch", "transformers", "tokenizers"),
    "loopwm.worlds.gym": ("torch", "transformers", "tokenizers"),
    "loopwm.core": ("transformers", "tokenizers"),
    "loopwm.text.memory": ("torch", "transformers", "tokenizers"),
}
SIMULATORS = (
    *sorted({package for name in ENVIRONMENTS for package in declared(name).packages}),
    *("crafter", "minatar", "ale_py", "minigrid", "craftax", "jax"),
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


def package_of(module: str) -> str:
    """The innermost package with a rule that a module lies in."""
    return max((package for package in MAY_IMPORT if inside(module, package)), key=len)


def faults(module: str, source: str) -> list[str]:
    """What is wrong with a module, one line each."""
    tree, package = ast.parse(source), package_of(module)
    without = [name for part, names in WITHOUT.items() if inside(module, part) for name in names]
    found = []
    for item in imports(tree):
        place = f"{module}:{item.line}: {item.name}"
        if item.name.startswith("."):
            found.append(f"{place}: relative imports hide where they point")
        ours = inside(item.name, *PACKAGES) and item.name not in PACKAGES
        if (ours and not inside(item.name, package, *MAY_IMPORT[package])) or inside(item.name, *without):
            found.append(f"{place}: {package} must not import it")
        late = item.inside_function and inside(module, SIMULATOR_HOME)
        if inside(item.name, *SIMULATORS) and not late and not inside(module, "lab.benchmarks"):
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


def test_product_tests_do_not_import_lab():
    paths = [path for path in (ROOT / "tests").rglob("*.py") if not path.is_relative_to(ROOT / "tests/lab")]
    names = {path: [item.name for item in imports(ast.parse(path.read_text()))] for path in paths}
    assert [path for path in paths if any(inside(name, "lab", "tests.lab") for name in names[path])] == []


def test_imports_point_one_way_and_one_file_loops_the_block():
    sources = dict(modules())
    assert set(sources) >= {LOOPED_BLOCK[0], "loopwm.records.template", "serve.http.app", "eval.scores.metrics"}
    assert [fault for module, source in sources.items() for fault in faults(module, source)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("loopwm.trainer.trainer", "import eval.scores.metrics"),
        ("loopwm.pixel.gym", "def f():\n    from data_prep.environments.pixels import by_name"),
        ("loopwm.trainer.trainer", "from loopwm.text.model import modeling"),
        ("loopwm.core.looped", "from loopwm.records import template"),
        ("loopwm.core.kv_cache", "def f():\n    import transformers"),
        ("loopwm.records.template", "import numpy"),
        ("loopwm.records.frames", "import torch"),
        ("loopwm.records.files", "from loopwm.core import block"),
        ("loopwm.pixel.replay", "from loopwm.text.data import tree"),
        ("data_prep.tokenize", "from loopwm.text.model.tokenizer import load_tokenizer"),
        ("data_prep.collect_frames", "from loopwm.pixel.replay import Replay"),
        ("data_prep.environments.scienceworld.environment", "from scienceworld import ScienceWorldEnv"),
        ("data_prep.environments.pixels.crafter", "import crafter"),
        ("eval.commands.harness", "def f():\n    import alfworld.agents"),
        ("eval.scores.rows", "from eval.models.base import Predictor"),
        ("eval.commands.tabulate", "from lab.reports import runs"),
        ("eval.commands.compare", "def f():\n    import lab.pixels.calibration"),
        ("loopwm.text.world", "from lab.studies import planner"),
        ("serve.start", "from lab import main"),
        ("eval.scores.metrics", "from data_prep.windows import cut_window"),
        ("serve.http.app", "from eval.scores import metrics"),
        ("serve.http.app", "from . import worlds"),
        ("serve.engine.batch", "from serve.generation import service"),
        ("serve.engine.forward", "from loopwm.text.training import program"),
        ("serve.generation.service", "from serve.worlds import store"),
        ("serve.http.openai", "from serve.engine.requests import Finish"),
        ("serve.http.bodies", "from loopwm.core import Fixed"),
        ("loopwm.text.model.modeling", "def f(core, h):\n    for layer in core.block:\n        h = layer(h)"),
    ],
)
def test_an_offence_is_found(module, source):
    assert len(faults(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("data_prep.windows", "import loopwm\nfrom loopwm.records.template import clean"),
        ("data_prep.environments.scienceworld.environment", "def f():\n    from scienceworld import ScienceWorldEnv"),
        ("loopwm.core.looped", "def f(self):\n    return self.block"),
        (
            "lab.studies.study_protocol",
            "from loopwm.trainer import trainer\nfrom loopwm.text.training.config import load_config",
        ),
        ("eval.scores.metrics", "from data_prep.environments import declared"),
        ("eval.__main__", "from eval.commands import run\nfrom eval import models"),
        ("serve.worlds.sessions", "from loopwm.text import world\nfrom serve.engine.forward import ForwardGenerator"),
    ],
)
def test_what_is_allowed_is_not_blamed(module, source):
    assert faults(module, source) == []
