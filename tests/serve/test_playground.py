"""The playground's files as the service sends them; tests/browser drives the page."""

from __future__ import annotations

import json
import re

import pytest

from serve import playground
from serve.play import EXAMPLES


@pytest.mark.parametrize("path", playground.FILES)
def test_every_file_comes_with_a_policy_that_allows_no_inline_code_and_no_other_site(client, path):
    response = client.get(path)
    assert response.status_code == 200
    policy = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["content-type"].startswith(playground.FILES[path][1])


@pytest.mark.parametrize("page", ["/", "/docs"])
def test_a_page_loads_nothing_that_the_service_does_not_have(client, page):
    text = client.get(page).text
    named = [name for name in re.findall(r'(?:src|href)="([^"#]+)"', text) if not name.startswith("data:")]
    assert len(named) >= 2
    assert all(client.get(f"/{name}").status_code == 200 for name in named)


@pytest.mark.parametrize("path", playground.FILES)
def test_no_file_of_a_page_names_another_host(client, path):
    text = re.sub(r'xmlns(:\w+)?="[^"]*"', "", client.get(path).text)  # names of namespaces, which nothing loads
    assert not re.search(r"""\b\w+://|["'(=]//|@import""", text)


def test_every_page_that_the_service_sends_is_one_of_these(client):
    kinds = {
        path: client.get(path).headers["content-type"] for path in ("/docs", "/redoc", "/docs/oauth2-redirect", "/")
    }
    pages = {path for path, kind in kinds.items() if kind.startswith("text/html")}
    assert pages == {path for path, (_, kind) in playground.FILES.items() if kind == "text/html"}


@pytest.mark.parametrize("name", ["page.js", "docs.js"])
def test_a_page_never_turns_text_into_markup(name):
    script = (playground.FOLDER / name).read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|DOMParser", script)


def test_a_missing_file_has_the_envelope(client):
    response = client.get("/playground/none.js")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "unknown_url"


def test_every_example_starts_a_world(client):
    for example in json.loads(EXAMPLES.read_text(encoding="utf-8")):
        body = {"model": "tiny", **{field: example[field] for field in ("goal", "observation", "history")}}
        response = client.post("/v1/worlds", json=body)
        assert response.status_code == 201, response.text
        assert response.json()["steps_cut"] == 0
        assert len(example["actions"]) == len(example["observations"]) == 5
