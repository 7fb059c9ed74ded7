"""OpenAPI 3.1, generated from the routes."""

from __future__ import annotations

import re
from typing import Any

from controld import __version__
from controld.admin.routes import Route

_DESCRIPTIONS = {
    200: "done",
    201: "created",
    400: "a field is malformed; the problem names it",
    404: "no such thing",
    410: "it was kept once and is gone",
    422: "understood and refused; the problem says why",
    503: "not now; the problem says why",
}


def _operation(route: Route) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", route.path)
    ]
    parameters += [
        {
            "name": parameter.name,
            "in": "query",
            "required": parameter.required,
            "description": parameter.description,
            "schema": {"type": "string"},
        }
        for parameter in route.query
    ]
    problem = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    content = {route.media_type: {"schema": {} if "json" in route.media_type else {"type": "string"}}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "responses": {
            str(status): {"description": _DESCRIPTIONS[status], "content": content if status < 300 else problem}
            for status in route.statuses
        },
    }
    operation["responses"]["default"] = {"description": "a problem", "content": problem}
    if parameters:
        operation["parameters"] = parameters
    if route.body:
        body = {"application/json": {"schema": {"type": "object"}}}
        operation["requestBody"] = {"required": True, "description": route.body, "content": body}
    return operation


def build_openapi(routes: tuple[Route, ...]) -> dict[str, Any]:
    """The document for these routes."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    text = {"type": "string"}
    problem = {
        "type": "object",
        "required": ["type", "title", "status", "code"],
        "properties": {"type": text, "title": text, "status": {"type": "integer"}, "code": text, "hint": text},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "controld admin API", "version": __version__},
        "paths": paths,
        "components": {"schemas": {"Problem": problem}},
    }
