"""Numbers at and beyond the borders of every field that the API's description has: refused by name, or answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fixtures.models import random_model
from tests.serve.http.test_http import completion
from tests.serve.worlds.test_worlds import create

Json = dict[str, Any]

EXTREME = ("0", "-1", "0.5", "1e-320", "1e-46", "1e300", "-1e300", "NaN", "1e400", str(2**63 - 1), str(2**63), "9" * 50)
"""As a body has them."""

NUMBER = "NUMBER"
"""Stands in a body where a number is to be put."""

TALK = [{"role": "system", "content": "g"}, {"role": "assistant", "content": "o"}, {"role": "user", "content": "go"}]
"""The smallest talk that is one: what the description cannot say."""

JSON_TYPE = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def client(serving) -> Iterator[httpx.Client]:
    """So few tokens fit that answers of any length are short."""
    model = random_model(prediction_heads=True, monitor_head=True, exit_gate=True, max_position_embeddings=64)
    with serving(model) as client:
        yield client


class Description:
    """Of the API: which bodies there are, and which numbers in them."""

    def __init__(self, told: Json) -> None:
        self._schemas = told["components"]["schemas"]
        self.bodies = {
            path: self._whole(operation["requestBody"]["content"]["application/json"]["schema"])
            for path, operations in told["paths"].items()
            for operation in operations.values()
            if "requestBody" in operation
        }

    def numbers(self, schema: Json) -> Iterator[tuple[Any, Json, list[str]]]:
        """Bodies with NUMBER in the place of one of their numbers, its schema, and the names on the way to it."""
        schema = self._whole(schema)
        for one in schema.get("anyOf", schema.get("oneOf", [])):
            yield from self.numbers(one)
        if schema.get("type") in ("integer", "number"):
            yield NUMBER, schema, []
        if schema.get("type") == "array" and schema.get("maxItems") != 0:
            for item, found, names in self.numbers(schema["items"]):
                yield [item], found, names
        fields = schema.get("properties", {})
        drawn = {"temperature": 1, "max_tokens": 4}  # else nothing is drawn, or as many tokens as fit
        given = {name: value for name, value in drawn.items() if name in fields}
        for name, field in fields.items():
            for value, found, names in self.numbers(field):
                yield {**self.least(schema), **given, name: value}, found, [name, *names]

    def least(self, schema: Json) -> Any:
        """The smallest valid value."""
        schema = self._whole(schema)
        if "const" in schema or "enum" in schema:
            return schema.get("const", schema.get("enum", [None])[0])
        if "anyOf" in schema or "oneOf" in schema:
            return self.least(schema.get("anyOf", schema.get("oneOf"))[0])
        if schema["type"] == "object":
            return {name: self.least(schema["properties"][name]) for name in schema.get("required", ())}
        if schema["type"] == "array":
            return [self.least(schema["items"])]
        return {"string": "user", "integer": 1, "number": 0.5, "boolean": False}[schema["type"]]

    def _whole(self, schema: Json) -> Json:
        name = schema.get("$ref", "").rpartition("/")[2]
        return self._schemas[name] if name else schema


def borders(schema: Json) -> list[str]:
    """Numbers beside, at and beyond what the schema allows, and extreme ones."""
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    limits = [schema[name] for name in names if name in schema]
    near = [str(int(limit) + step) for limit in limits for step in (-1, 0, 1)]
    return list(dict.fromkeys([*near, *EXTREME]))


def allowed(schema: Json, text: str) -> bool:
    number = float(text)
    if not abs(number) < float("inf") or (schema["type"] == "integer" and not text.lstrip("-").isdigit()):
        return False
    exact = int(text) if schema["type"] == "integer" else number
    return (
        schema.get("minimum", exact) <= exact <= schema.get("maximum", exact)
        and exact > schema.get("exclusiveMinimum", -float("inf"))
        and exact < schema.get("exclusiveMaximum", float("inf"))
    )


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def ask(client: httpx.Client, path: str, body: Json, number: str) -> httpx.Response:
    """In a world of its own where it is about one."""
    talks = {name: TALK for name in ("messages", "input") if name in body}
    content = json.dumps(body | talks).replace(f'"{NUMBER}"', number)
    if "{name}" in path or '"world"' in content:
        world = create(client, goal="g", observation="o")
        path, content = path.replace("{name}", world), content.replace('"world": "user"', f'"world": "{world}"')
    return client.post(path, content=content, headers=JSON_TYPE)


@pytest.mark.slow
def test_no_number_at_any_border_is_more_than_a_wrong_field(client):
    told = Description(client.get("/openapi.json").json())
    expected = completion(client, max_tokens=8)["choices"]
    asked, statuses = 0, set()
    for path, body in told.bodies.items():
        for made, schema, names in told.numbers(body):
            for text in borders(schema):
                response = ask(client, path, made, text)
                where = f"{path} {names} {text}: {response.status_code} {response.text}"
                json.loads(response.text, parse_constant=no_constant)
                right = (404,) if path == "/v1/games" else (200, 201)  # no packaged game has the name of this model
                assert response.status_code in (*right, 400), where
                if not allowed(schema, text):
                    assert response.status_code == 400, where
                    assert names[0] in str(response.json()["error"]["param"]), where
                asked += 1
                statuses.add(response.status_code)
    assert asked > 500
    assert statuses == {200, 201, 400, 404}
    assert completion(client, max_tokens=8)["choices"] == expected
