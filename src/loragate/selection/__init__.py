"""Choosing among candidates on held-out evidence, with the untouched adapter always among them."""

from loragate.selection.choose import Choice, choose

__all__ = ["Choice", "choose"]
