"""loragate: gate a finished LoRA adapter by entropy, token by token (SCALE).

The public names below are imported on first use, so that `import loragate` and the command line start at once.
"""

import logging

import lazy_loader

# bitsandbytes says at PEFT's import, on processors with AVX512-BF16, that it lacks a kernel which nothing here uses: see
# gates.keep_unpacked
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda said: "gemm_4bit_forward" not in str(said.msg))
# and at every product of an 8-bit layer that its input is cast: once is enough
_told: set[str] = set()
logging.getLogger("bitsandbytes.autograd._functions").addFilter(
    lambda said: said.getMessage() not in _told and not _told.add(said.getMessage())  # type: ignore[func-returns-value]
)

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
