"""How a tiny base is trained from nothing: `scripts/build_tiny_base.py` makes the shipped one with it."""
