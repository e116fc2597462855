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
        select_seed: seed of the shuffled subset, which then stays the same under every --seed; by default --seed.
        cache: folder that caches tokenised rows; "auto" is ~/.cache/loragate, from 10,000 rows on; "none" caches
            nothing.
        data_workers: processes that tokenise; 0 takes one, and up to 8 for 10,000 rows and more.
        system: "none" leaves out a default system message that the template injects, "keep" keeps it.
        chat_template: jinja file to use instead of the tokenizer's template.
        dtype: auto, float32, bfloat16 or float16 of the base.
        quantization: none, 8bit or 4bit storage of the base (bitsandbytes); trained parameters stay fp32.
        device: auto, cpu, cuda, cuda:1, mps.
        strategy: on several processes: ddp, fsdp2 or zero3; auto follows the launcher, and is one process without a
            launcher.
        processes: number of processes on this machine (0: one, or one per GPU if a strategy is given).
        resume: continue the unfinished run in the out folder.
        trust_remote_code: run model code from the hub.
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
