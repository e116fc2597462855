"""Stage I (adapters) and Stage II (gates): trainers, settings, run folders.

Names are imported on first use: the settings alone must not pull in torch and the trainer libraries.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
