"""MkDocs hooks: pages that live outside docs/, and an API reference with one page for each package.

Pages are written for GitHub, where a link may lead to any file. On the site, links to pages outside docs/
lead to their copies; links to other files become the file's path, since the site does not contain them.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
COPIES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CODE_OF_CONDUCT.md": "CODE_OF_CONDUCT.md",
    "SECURITY.md": "SECURITY.md",
    "loopwm/pretrained/README.md": "model-card.md",
}
"""Site page of each page that lives outside docs/."""

PACKAGES = ("loopwm", "data_prep", "eval", "serve")
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Append the API reference to the navigation."""
    config.nav.append({"API": [{package: f"reference/{package}.md"} for package, _ in packages()]})
    return config


def on_files(files: Files, config: Any) -> Files:
    for source, page in COPIES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=site_links(text, source)))
    code = (ROOT / "examples/minimal.py").read_text(encoding="utf-8")
    page = f"# The model in one file\n\n`examples/minimal.py`:\n\n```python\n{code}```\n"
    files.append(File.generated(config, "minimal.md", content=page))
    for package, modules in packages():
        body = "\n\n".join(f"::: {module}" for module in modules)
        files.append(File.generated(config, f"reference/{package}.md", content=f"# {package}\n\n{body}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = page.file.src_uri
    return markdown if page.file.generated_by else site_links(markdown, f"docs/{source}")


def site_links(text: str, source: str) -> str:
    """Rewrite the links of a page at `source`, relative to the project, for the site."""

    def rewritten(match: re.Match[str]) -> str:
        label, link = match.groups()
        path, mark, anchor = link.partition("#")
        if not path or "://" in link or link.startswith("mailto:"):
            return match.group()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / target).exists():
            raise PluginError(f"{source}: link to {link}, which does not exist")
        here = COPIES.get(source, source.removeprefix("docs/"))
        if target in COPIES or (target.startswith("docs/") and (ROOT / target).is_file()):
            there = COPIES.get(target, target.removeprefix("docs/"))
            return f"{label}({posixpath.relpath(there, posixpath.dirname(here) or '.')}{mark}{anchor})"
        words = label[1:-1].strip("`")
        return f"`{target}`" if words == target else f"{words} (`{target}`)"

    return LINK.sub(rewritten, text)


def packages() -> Iterator[tuple[str, list[str]]]:
    """Yield each package with its public modules that document something."""
    for init in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")):
        folder = init.parent
        package = ".".join(folder.relative_to(ROOT).parts)
        modules = [f"{package}.{path.stem}" for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")]
        modules = [name for name in modules if documented(ROOT / (name.replace(".", "/") + ".py"))]
        if modules:
            yield package, modules


def documented(path: Path) -> bool:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is not None
