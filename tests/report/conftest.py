from typing import Any

import pytest


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every figure as it was when it was saved."""
    from matplotlib.figure import Figure

    kept: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **how: (kept.append(self), save(self, *args, **how)))
    return kept
