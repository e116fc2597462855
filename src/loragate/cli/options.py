"""Settings that several commands share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunOptions:
    """Where a training run takes its rows and model from, and where it writes.

    Attributes:
        data: prompts and responses: .jsonl, .json, .parquet or a hub id; messages, prompt-completion, alpaca or sharegpt.
        out: output folder; must be new or empty, or hold the run to resume.
        split: split of a hub data set.
        revision: branch, tag or commit of a hub data set.
        select: which rows --max-rows takes: "first" in the order of the data, or "shuffled", a subset drawn with a seed.
        select_seed: seed of that subset, so that it stays the same under every --seed; by default the seed itself.
        cache: folder for tokenised rows; "auto" keeps those of 10,000 rows and more in ~/.cache/loragate, "none" keeps none.
        data_workers: processes that tokenise; 0 takes one, and up to 8 for 10,000 rows and more.
        system: "none" renders without an injected default system message, "keep" as the template does.
        chat_template: jinja file to use instead of the tokenizer's template.
        dtype: auto, float32, bfloat16 or float16 of the base.
        quantization: none, 8bit or 4bit storage of the base (bitsandbytes); what is trained stays fp32.
        device: auto, cpu, cuda, cuda:1, mps.
        strategy: on several processes: ddp, fsdp2 or zero3; auto is what the launcher says, one process without one.
        processes: start so many processes on this machine (0: one, or every GPU when a strategy is given).
        resume: continue the unfinished run in the out folder.
        trust_remote_code: allow model code from the hub to run.
    """

    data: str = ""
    out: str = ""
    split: str = ""
    revision: str = ""
    select: str = "first"
    select_seed: int | None = None
    cache: str = "auto"
    data_workers: int = 0
    system: str = "none"
    chat_template: str = ""
    dtype: str = "auto"
    quantization: str = "none"
    device: str = "auto"
    strategy: str = "auto"
    processes: int = 0
    resume: bool = False
    trust_remote_code: bool = False
