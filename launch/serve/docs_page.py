"""The page /docs: every path and the fields of its body, from the server's OpenAPI description (/openapi.json)."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>lp: endpoints</title>
<style>
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; }
table { border-collapse: collapse; } td, th { border: 1px solid #8888; padding: .1rem .5rem; text-align: left; }
</style></head><body><h1>lp: endpoints</h1>
<p>The same for programs: <a href="/openapi.json">/openapi.json</a>. Null is the same as nothing. Fields that are not
named here are ignored, but for those in the lists of what is refused.</p>
"""


def docs_page(description: dict[str, Any]) -> str:
    """HTML of the page /docs: each endpoint's fields with types, limits and defaults, and the fields that it refuses.

    Args:
        description: the server's OpenAPI description, as `FastAPI.openapi()` returns it.
    """
    schemas = description.get("components", {}).get("schemas", {})
    parts = [HEAD]
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2>{escape(method.upper())} {escape(path)}</h2>\n")
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            if content:
                parts += _fields(_schema(content["schema"], schemas), schemas)
    return "".join([*parts, "</body></html>\n"])


def _schema(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """The schema itself, where one refers to another by name."""
    name = schema.get("$ref", "").rpartition("/")[2]
    return dict(schemas[name]) if name else schema


def _fields(schema: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    required = schema.get("required", [])
    yield "<table><tr><th>field</th><th>what it takes</th><th>default</th></tr>\n"
    for name, each in schema.get("properties", {}).items():
        default = "required" if name in required else repr(each["default"]) if each.get("default") is not None else ""
        cells = (f"<code>{escape(name)}</code>", escape(_kind(each, schemas)), escape(default))
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n"
    yield "</table>\n"
    if refused := dict(_refused(schema, schemas)):
        yield "<p>Refused where they would change the text: "
        yield ", ".join(f"<code>{escape(name)}</code> ({escape(remedy)})" for name, remedy in refused.items())
        yield ".</p>\n"


def _refused(schema: dict[str, Any], schemas: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """What is refused of a body, and of the objects in its fields: names with remedies."""
    for name, remedy in schema.get("x-refused", {}).items():
        yield prefix + name, remedy
    for name, each in schema.get("properties", {}).items():
        for kind in [each, *each.get("anyOf", [])]:
            inner = kind.get("items", kind)
            if "$ref" in inner:
                yield from _refused(_schema(inner, schemas), schemas, f"{prefix}{name}.")


def _kind(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """A type and its limits, in words."""
    if "$ref" in schema:
        inner = _schema(schema, schemas)
        return "{" + ", ".join(inner.get("properties", {})) + "}" if "properties" in inner else _kind(inner, schemas)
    if "anyOf" in schema:
        return " or ".join(_kind(each, schemas) for each in schema["anyOf"] if each.get("type") != "null")
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        kind = f"list of ({_kind(schema.get('items', {}), schemas)})"
    limits = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    found = [f"{sign} {schema[name]:g}" for name, sign in limits.items() if name in schema]
    found += [f"at most {schema[name]}" for name in ("maxItems", "maxLength") if name in schema]
    return " ".join([kind, ", ".join(found)]).strip()
