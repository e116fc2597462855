"""Sections of diagnoses, from the records of `loragate diagnose` (plain data)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loragate.report.page.content import Section


def diagnosis_section(record: Mapping[str, Any], anchor: str, title: str) -> Section:
    """What one diagnosis found."""
    return Section(anchor, title, ())


def diagnosis_statements(record: Mapping[str, Any]) -> list[str]:
    """Its conclusions in plain words."""
    return list(record.get("conclusions", ()))
