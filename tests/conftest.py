"""Shared by all tests: worked numbers, and one thread so that runs compare bit for bit."""

import json
from importlib import resources
from typing import Any

import pytest


@pytest.fixture(scope="session")
def worked_examples() -> dict[str, Any]:
    """Hand-checkable numbers for attention and its companions, 10 decimal places."""
    return json.loads((resources.files("minigpt.inspection") / "examples.json").read_text(encoding="utf-8"))
