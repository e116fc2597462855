"""A base, an adapter and gates that the commands made."""

import json

import pytest

from tiny import run, tiny_rows, write_base, write_rows


@pytest.fixture(scope="session")
def made(once):
    """A folder with base/, the same rows in three formats, and adapter/ and gated/ as `sft` and `calibrate` left them."""

    def fill(root):
        write_base(root / "base")
        rows = tiny_rows(20)
        write_rows(root / "messages.jsonl", rows)
        plain = [{"prompt": r["messages"][0]["content"], "completion": r["messages"][1]["content"]} for r in rows]
        write_rows(root / "plain.jsonl", plain)
        alpaca = [{"instruction": row["prompt"], "input": "", "output": row["completion"]} for row in plain]
        (root / "alpaca.json").write_text(json.dumps(alpaca))
        data = [
            "--data",
            root / "messages.jsonl",
            "--batch-size",
            4,
            "--per-device-train-batch-size",
            4,
            "--max-length",
            64,
        ]
        run("sft", "--model", root / "base", *data, "--learning-rate", "5e-3", "--out", root / "adapter")
        gates = ["--ranges", "-3,2", "--skip-selection", "--learning-rate", "5e-2", "--k", 20, "--out", root / "gated"]
        run("calibrate", "--adapter", root / "adapter", *data, *gates)

    return once("made-by-commands", fill)
