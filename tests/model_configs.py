"""The configurations in tests/data/configs, whole or changed."""

import json
from pathlib import Path

from expert_cache_shim.commands import plan_config, plan_families

CONFIGS = Path(__file__).parent / "data" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def values(name: str, **changes) -> dict:
    """A config.json as a dictionary; a change to None takes the field out."""
    found = json.loads((CONFIGS / f"{name}.json").read_text()) | changes
    return {field: value for field, value in found.items() if value is not None}


def model(name: str, **changes) -> plan_families.Model:
    return plan_families.describe(plan_config.Fields(values(name, **changes), "config.json"))
