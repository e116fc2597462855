"""Evaluation: scores and what may be concluded from them.

The names are imported on first use: grading processes live in this package and must not load torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
