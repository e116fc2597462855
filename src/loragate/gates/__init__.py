"""Gates on a LoRA adapter: the signed map, the fused operation, attachment to PEFT, the artifact on disk.

The names are imported on first use: ranges and settings alone must not pull in torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
