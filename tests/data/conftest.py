"""Fixtures of the data tests."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def write(tmp_path):
    """Write bytes, text or a list of rows (as JSON lines) to a file of the given name."""

    def write_file(name, content):
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_file


@pytest.fixture
def talk():
    """Build messages from (role, content) pairs given as keyword-like alternation: user first."""

    def messages(*contents, system=None):
        roles = ("user", "assistant")
        turns = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
        return ([{"role": "system", "content": system}] if system else []) + turns

    return messages
