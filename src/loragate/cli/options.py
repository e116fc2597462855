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
        system: "none" renders without an injected default system message, "keep" as the template does.
        chat_template: jinja file to use instead of the tokenizer's template.
        dtype: auto, float32, bfloat16 or float16 of the base.
        device: auto, cpu, cuda, cuda:1, mps.
        resume: continue the unfinished run in the out folder.
        trust_remote_code: allow model code from the hub to run.
    """

    data: str = ""
    out: str = ""
    split: str = ""
    revision: str = ""
    system: str = "none"
    chat_template: str = ""
    dtype: str = "auto"
    device: str = "auto"
    resume: bool = False
    trust_remote_code: bool = False
