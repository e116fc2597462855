"""loragate: gate a finished LoRA adapter by entropy, token by token (SCALE).

The public names below are imported on first use, so that `import loragate` and the command line start at once.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
