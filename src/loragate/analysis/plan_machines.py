"""GPUs as a plan sees them: memory that a process can use, dense matrix throughput, bandwidth, the link to the other GPUs.

Throughput is the vendors' figure for dense bf16 (without sparsity, fp32 accumulation) and for fp32 outside tensor cores;
a plan multiplies it by a stated utilisation. Memory is what the driver leaves of the nominal size.
"""

from __future__ import annotations

from dataclasses import dataclass

from loragate.errors import ConfigError, nearest


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: as given on the command line.
        memory: GiB a process can use.
        half: dense bf16 TFLOP/s (fp16 where there is no bf16).
        single: fp32 TFLOP/s.
        link: GB/s to and from the other GPUs of the machine, one direction.
        bandwidth: GB/s between its memory and its cores, the vendors' figure.
        bf16: whether matrix products run in bf16 (else fp16 only).
    """

    name: str
    memory: float
    half: float
    single: float
    link: float
    bandwidth: float
    bf16: bool = True


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("b200", 178, 2250, 80, 900, 8000),
        Gpu("h200", 139, 989, 67, 450, 4800),
        Gpu("h100", 79, 989, 67, 450, 3350),
        Gpu("h100-pcie", 79, 756, 51, 64, 2000),
        Gpu("mi300x", 191, 1307, 163, 448, 5300),
        Gpu("a100-80", 79, 312, 19.5, 300, 2039),
        Gpu("a100-40", 39, 312, 19.5, 300, 1555),
        Gpu("l40s", 44, 362, 92, 32, 864),
        Gpu("a6000", 47, 155, 39, 56, 768),
        Gpu("a10", 22, 125, 31, 32, 600),
        Gpu("l4", 22, 121, 30, 32, 300),
        Gpu("5090", 31, 210, 105, 64, 1792),
        Gpu("4090", 23, 165, 83, 32, 1008),
        Gpu("3090", 23, 71, 36, 32, 936),
        Gpu("v100-32", 31, 125, 15.7, 150, 900, bf16=False),
        Gpu("t4", 14.5, 65, 8, 16, 320, bf16=False),
    )
}
ALIASES = {
    "h100-80": "h100",
    "h100-sxm": "h100",
    "a100": "a100-80",
    "rtx4090": "4090",
    "rtx3090": "3090",
    "v100": "v100-32",
}
UNNAMED = "a100-80"


def find_gpu(text: str) -> Gpu:
    """A GPU by name, or by its memory in GiB (throughput and link are then an A100's).

    Raises:
        ConfigError: for an unknown name or a size that is not positive.
    """
    key = text.strip().lower().replace(" ", "-").replace("_", "-").removeprefix("nvidia-").removesuffix("gb")
    if key in ALIASES or key in GPUS:
        return GPUS[ALIASES.get(key, key)]
    try:
        memory = float(key.removesuffix("gib").rstrip("-"))
    except ValueError as error:
        raise ConfigError(
            f"--gpu-memory must be GiB such as 24, or one of {', '.join(GPUS)}; found {text!r}{nearest(key, GPUS)}"
        ) from error
    if not 0 < memory < 1e5:
        raise ConfigError(f"--gpu-memory must be a positive number of GiB, found {text!r}")
    like = GPUS[UNNAMED]
    return Gpu(f"{memory:g} GiB", memory, like.half, like.single, like.link, like.bandwidth)
