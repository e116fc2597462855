"""A tiny base, an adapter, rows and questions on disk, and a sweep's command line over them."""

from __future__ import annotations

import json
import random
from pathlib import Path

from loragate.files import file_sha256
from tiny import VOCABULARY, tiny_adapter, tiny_base, tiny_rows, tiny_tokenizer

QUESTIONS = 33


def make_place(root: Path) -> Path:
    """Files of everything that a sweep needs; the answers are words that the adapter often gives."""
    tiny_base().save_pretrained(root / "base")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(root / "base")
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tiny_rows(24)))
    model = tiny_adapter(0)
    model.peft_config["default"].base_model_name_or_path = str(root / "base")
    model.save_pretrained(root / "one")
    write_questions(root / "dev.jsonl", tokenizer, 1)
    (root / "sweep.yaml").write_text("logging_steps: 1\n")
    return root


def write_questions(path: Path, tokenizer, seed: int) -> None:
    """Questions of random words; the gold is one answer that the adapter samples."""
    from loragate.generation import SamplingConfig, TransformersEngine

    draw = random.Random(seed)
    prompts = [
        " ".join(f"w{draw.randrange(VOCABULARY - 5)}" for _ in range(draw.randint(7, 9))) for _ in range(QUESTIONS)
    ]
    texts = [f"<user> {prompt} <assistant> " for prompt in prompts]
    config = SamplingConfig(temperature=0.4, max_new_tokens=1, seed=99)
    samples = TransformersEngine(tiny_adapter(0), tokenizer).generate(texts, config)
    rows = [{"prompt": p, "answer": sample.text or "w1"} for p, sample in zip(prompts, samples, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(place: Path, out: Path, *more: str, ranges: str = "-3,2;0,1", seeds: str = "0,1") -> list[str]:
    """`loragate sweep …` without the program's name; few steps, one-word answers."""
    given = [
        "sweep",
        *("--adapter", str(place / "one")),
        *("--data", str(place / "train.jsonl")),
        *("--dev-data", str(place / "dev.jsonl")),
        *("--dev-grader", "exact"),
        *("--dev-samples", "2"),
        *("--dev-max-new-tokens", "1"),
        f"--ranges={ranges}",
        *("--seeds", seeds),
        *("--learning-rate", "5e-2"),
        *("--batch-size", "8"),
        *("--k", "20"),
        *("--save-steps", "2"),
        *("--config", str(place / "sweep.yaml")),
        *("--out", str(out)),
    ]
    for flag in more:
        if flag.startswith("--") and flag in given:  # a flag is given once; the test's own holds
            del given[given.index(flag) : given.index(flag) + 2]
        elif flag.startswith("--ranges="):
            given = [word for word in given if not word.startswith("--ranges=")]
    return [*given, *more]


def numbers(out: Path) -> dict[str, object]:
    """Everything of a sweep that does not depend on time or place: gates, scores and the choice."""
    found: dict[str, object] = {}
    for path in sorted((out / "trials").glob("*/gated/gates.safetensors")):
        found[path.parent.parent.name] = file_sha256(path)
    results = out / "dev" / "results.json"
    if results.is_file():
        rows = json.loads(results.read_text())["results"]
        found["scores"] = {f"{row['variant']} {row['control']}": row["question_scores"] for row in rows}
        found["selection"] = json.loads((out / "selection.json").read_text())
    return found


def stamps(out: Path) -> dict[str, tuple[int, int]]:
    """{slug: (inode, time of change)} of the finished trials."""
    found = {}
    for path in sorted((out / "trials").glob("*/gated/gate_config.json")):
        stat = path.stat()
        found[path.parent.parent.name] = (stat.st_ino, stat.st_mtime_ns)
    return found


def work(out: Path) -> tuple[dict[str, tuple[int, int]], int]:
    """What changes whenever a trial gets further: the finished ones, and the lengths of the logs of training."""
    return stamps(out), sum(path.stat().st_size for path in (out / "trials").glob("*/run/metrics.jsonl"))


def sweep(argv: list[str]) -> int:
    """Run the command in this process."""
    from loragate.cli.arguments import parse
    from loragate.cli.main import check_options
    from loragate.cli.sweep import COMMAND

    options, _ = parse(COMMAND, argv[1:])
    check_options("sweep", COMMAND, options)
    return COMMAND.run(options)


COMMAND_LINE = (
    "import sys, torch; torch.set_num_threads(1)\n"
    "from loragate.cli.arguments import parse\n"
    "from loragate.cli.sweep import COMMAND\n"
    "sys.exit(COMMAND.run(parse(COMMAND, sys.argv[2:])[0]))"
)
"""For `python -c`, followed by what `arguments` gives."""
