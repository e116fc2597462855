"""vLLM's own command line, as in `python -m loragate.serving serve BASE --enable-lora`: what `loragate serve` starts.

vLLM's program asks for the version of a package called vllm, and ends where its build for the CPU goes by another name; and
not every build brings the program. Here the version is that of the build which is installed.
"""

from __future__ import annotations

import importlib.metadata
from pkgutil import resolve_name

from loragate.serving.plugin import vllm_version


def main() -> None:
    """Run vLLM's command line on this program's arguments."""
    known = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return known(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm" or not (found := vllm_version()):
                raise
            return found

    importlib.metadata.version = version
    resolve_name("vllm.entrypoints.cli.main:main")()


if __name__ == "__main__":
    main()
