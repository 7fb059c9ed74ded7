"""The rule that data planes import only the contract names every other room, also those that come later."""

from __future__ import annotations

import pkgutil
import tomllib
from pathlib import Path

import controld


def test_the_import_rules_name_every_room() -> None:
    rules = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]["importlinter"]
    contract = next(rule for rule in rules["contracts"] if rule["name"].startswith("data planes"))
    rooms = {f"controld.{module.name}" for module in pkgutil.iter_modules(controld.__path__)} - {"controld.contract"}
    assert set(contract["forbidden_modules"]) == rooms
