"""How far vLLM lies from transformers: log-probs of every prompt and generated token, over the ways in which gates are served.

    python benchmarks/serving/agreement.py [--out FILE] [--only CASE ...]

A random Qwen2 of 2 layers and width 128 with random adapters and random gates of strong effect, all from fixed seeds, in
float32 (the tiny base of the package has heads of 16, and vLLM's attention on a CPU starts at 32). Each case is one engine in a
process of its own: it decodes 4 prompts greedily, 24 tokens each, all its rows in one batch; transformers then runs over the
very same tokens. Written are, for each row, the largest difference of a log-prob in nats and the generated tokens that are not
transformers' own most likely ones; and how far transformers lies from itself, with its cache and without.
`page.py` puts the file into docs/serving.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

PROMPTS = [[5 + (7 * row + 11 * place) % 130 for place in range(36 + row)] for row in range(4)]
NEW_TOKENS = 24
WHOLE = {"max_loras": 3, "enable_prefix_caching": True, "block_size": 32}
PIECES = {
    "max_loras": 1,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "max_model_len": 128,
}
RANKS = {"max_loras": 3, "enable_prefix_caching": True, "tensor_parallel_size": 2}
ROWS = ("base", "plain", "wide", "narrow")
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "all slots filled": (ROWS, WHOLE),
    "prefix cache": (ROWS, WHOLE),
    "one slot, chunked prefill": (ROWS, PIECES),
    "other granularities": (("module", "global", "some"), WHOLE),
    "two ranks": (ROWS, RANKS),
    "two ranks, sharded adapters": (ROWS, {**RANKS, "fully_sharded_loras": True}),
    "adapter four times as strong": (("base", "strong"), WHOLE),
}
"""{case: (rows, settings of vLLM)}"""
GATES: dict[str, tuple[int, dict[str, Any]]] = {
    "wide": (1, {"lower": -6, "upper": 3}),
    "narrow": (2, {"lower": -1, "upper": 2, "tau": 0.5}),
    "module": (3, {"lower": -3, "upper": 2, "granularity": "module"}),
    "global": (4, {"lower": -3, "upper": 2, "granularity": "global"}),
    "some": (5, {"lower": -3, "upper": 2, "target_modules": ["k_proj", "up_proj", "o_proj"]}),
    "strong": (1, {"lower": -6, "upper": 3}),
}
"""{row: seed of adapter and gates, settings of the gates}; `plain` is the adapter inside `wide`."""
RANK = 4


def write_models(place: Path) -> None:
    """The base and a folder for every row but `plain`."""
    from served_models import make_models, write_gated
    from transformers import AutoModelForCausalLM

    import loragate as lg

    make_models(place, rank=RANK)
    for name, (seed, settings) in GATES.items():
        base = AutoModelForCausalLM.from_pretrained(place / "base", dtype="float32").eval()
        strength = 4 if name == "strong" else 1
        write_gated(place, name, base, lg.GateConfig(**settings), seed=seed, rank=RANK, strength=strength)


def folder_of(place: Path, name: str) -> Path:
    return place / "wide" / "adapter" if name == "plain" else place / name


def decode(place: Path, case: str) -> list[list[dict[str, Any]]]:
    """In a process of its own: what vLLM answers, one list per row."""
    import vllm
    from vllm.lora.request import LoRARequest

    from loragate.serving.parity import greedy

    rows, settings = CASES[case]
    llm = vllm.LLM(
        model=str(place / "base"),
        skip_tokenizer_init=True,
        dtype="float32",
        enable_lora=True,
        max_lora_rank=8,
        **settings,
    )
    adapters = [
        None if name == "base" else LoRARequest(name, at, str(folder_of(place, name)))
        for at, name in enumerate(rows, 1)
    ]
    answers = greedy(llm, PROMPTS, adapters, NEW_TOKENS)
    if case == "prefix cache":
        answers = greedy(llm, PROMPTS, adapters, NEW_TOKENS, prompt_logprobs=False)
    return [[asdict(one) for one in row] for row in answers]


def in_a_process(place: Path, case: str) -> list[list[dict[str, Any]]]:
    out = place / "answers.json"
    ranks = CASES[case][1].get("tensor_parallel_size", 1)
    cores = sorted(os.sched_getaffinity(0))
    if ranks > len(cores):
        raise SystemExit(f"{case}: {ranks} ranks need a processor each; leave this case out with --only")
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(ranks > 1)),
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind" if ranks == 1 else "|".join(str(core) for core in cores[:ranks]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, __file__, "--decode", case, "--models", str(place), "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case}: vLLM failed\n{done.stderr[-4000:]}")
    found: list[list[dict[str, Any]]] = json.loads(out.read_text(encoding="utf-8"))
    return found


def reference(place: Path, name: str) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    import loragate as lg

    if name not in ("base", "plain"):
        return lg.load_gated(place / name, base=str(place / "base"), dtype="float32").eval()
    base = AutoModelForCausalLM.from_pretrained(place / "base", dtype="float32").eval()
    return base if name == "base" else PeftModel.from_pretrained(base, folder_of(place, name)).eval()


def own_rounding(place: Path, name: str) -> float:
    """How far transformers lies from itself: its greedy answers token by token with a cache, against one pass over them."""
    import torch

    model, furthest = reference(place, name), 0.0
    for prompt in PROMPTS:
        ids, cache, told = list(prompt), None, []
        with torch.no_grad():
            for at in range(len(prompt) + NEW_TOKENS - 1):
                found = model(torch.tensor([ids[at : at + 1]]), past_key_values=cache, use_cache=True)
                cache = found.past_key_values
                told.append(found.logits[0, -1].log_softmax(-1))
                if at + 1 == len(ids):
                    ids.append(int(told[-1].argmax()))
            whole = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        own = torch.tensor(ids[1:]).unsqueeze(-1)
        furthest = max(furthest, float((torch.stack(told).gather(1, own) - whole.gather(1, own)).abs().max()))
    return float(f"{furthest:.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--decode", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.decode:
        options.out.write_text(json.dumps(decode(options.models, options.decode)), encoding="utf-8")
        return

    import importlib.metadata

    import torch

    from loragate.evaluation.agreement import Served, compare
    from loragate.serving.plugin import vllm_version

    cases: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        write_models(place)
        for case in options.only:
            answers = in_a_process(place, case)
            cases[case] = {}
            for name, row in zip(CASES[case][0], answers, strict=True):
                found = compare(reference(place, name), [Served(**one) for one in row])
                cases[case][name] = {
                    # from the prefix cache there are none of the prompt
                    "prompt": float(f"{found.prompt:.2e}") if row[0]["prompt_logprobs"] else None,
                    "generated": float(f"{found.generated:.2e}"),
                    "tokens": found.tokens,
                    "other_greedy_choices": found.mismatches,
                }
                print(case, name, json.dumps(cases[case][name]), flush=True)
        names = dict.fromkeys(name for case in options.only for name in CASES[case][0])
        rounding = {name: own_rounding(place, name) for name in names}
    record = {
        "vllm": vllm_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "dtype": "float32",
        "prompts": len(PROMPTS),
        "prompt_tokens": [len(PROMPTS[0]), len(PROMPTS[-1])],
        "new_tokens": NEW_TOKENS,
        "adapter_rank": RANK,
        "machine": f"{os.cpu_count()} {platform.machine()} CPU cores",
        "largest_difference_of_a_log_prob": cases,
        "transformers_with_and_without_cache": rounding,
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
