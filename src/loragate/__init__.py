"""loragate: gate a finished LoRA adapter by entropy, token by token (SCALE).

The public names below are imported on first use, so that `import loragate` and the command line start at once.
"""

import logging

import lazy_loader

# bitsandbytes says at PEFT's import, on processors with AVX512-BF16, that it lacks a kernel which nothing here uses: see
# gates.keep_unpacked
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda said: "gemm_4bit_forward" not in str(said.msg))

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
