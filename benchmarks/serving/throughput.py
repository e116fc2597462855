"""Throughput and latency in vLLM: base, plain adapter, gated adapter and vLLM's own LoRA, alternating in short blocks of one run.

    python benchmarks/serving/throughput.py [--rounds 9] [--dtype float32] [--out FILE]
    python benchmarks/serving/throughput.py --base FOLDER      # a real base, under a random adapter of rank 16 on all layers

"vllm" is the plain adapter by vLLM's own products on a CPU, which the plugin replaces there; "strengths" is the plain adapter with
another strength for each sequence of the batch.
One offline engine with all slots filled serves all in turn, in an order that changes from round to round, so that a busy
machine slows all alike. On a CPU, time is this process's CPU time with one thread; elsewhere it is wall time. Reported are
medians of tokens per second, and the medians and quartiles of the per-round ratios.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from served_models import make_models, real_models

CASES = {"decode, 16 sequences": (16, 16, 16), "prefill, 4 prompts of 192": (4, 192, 1), "one sequence": (1, 16, 16)}
"""{case: (sequences, prompt tokens, new tokens)}"""
CONTESTANTS = ("base", "adapter", "gated", "strengths", "vllm")


def ratio(speeds: dict[str, list[float]], name: str, to: str) -> dict[str, Any]:
    """Median and quartiles of the speed of one to that of another, round by round."""
    ratios = [one / other for one, other in zip(speeds[name], speeds[to])]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {"median": round(statistics.median(ratios), 3), "quartiles": [round(low, 3), round(high, 3)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--base", type=Path, help="folder of a real base in place of a random one")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    import torch
    import vllm
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform

    from loragate.serving.layers import GatedPunica

    on_cpu = current_platform.is_cpu()
    if on_cpu:
        torch.set_num_threads(1)
    clock = time.process_time if on_cpu else time.perf_counter
    with tempfile.TemporaryDirectory() as scratch:
        sizes = {"hidden": options.hidden, "layers": options.layers, "vocabulary": 2048}
        if options.base:
            place = real_models(Path(scratch), options.base, rank=options.rank)
        else:
            place = make_models(Path(scratch), **sizes, rank=options.rank)
        folders = {"gated": str(place / "gated"), "adapter": str(place / "gated" / "adapter")}
        llm = vllm.LLM(
            model=str(place / "base"),
            skip_tokenizer_init=True,
            enable_lora=True,
            enable_prefix_caching=True,
            block_size=32 if on_cpu else None,  # its own 128 would leave short prompts out of the prefix cache
            max_loras=len(folders),
            max_lora_rank=options.rank,
            dtype=options.dtype,
            max_num_seqs=16,
        )
        if on_cpu:
            torch.set_num_threads(1)
        owners: dict[str, Any] = {"base": None} | {
            name: LoRARequest(name, number, folder) for number, (name, folder) in enumerate(folders.items(), 1)
        }
        owners["vllm"] = owners["adapter"]

        def adapters(name: str, sequences: int) -> Any:
            """The adapter of each sequence."""
            if name != "strengths":
                return owners[name]
            found = [copy.copy(owners["adapter"]) for _ in range(sequences)]
            for place, one in enumerate(found):
                one.lora_path += f"@constant={0.25 + place / 8!r}"
            return found

        def stock(self: GatedPunica, *given: Any, **named: Any) -> Any:
            return self.punica.add_lora_linear(*given, **named)

        draw = torch.Generator().manual_seed(0)

        def block(name: str, case: str) -> tuple[float, float]:
            """(tokens per second, seconds) of one batch; new prompts each time, so that no prefix is cached."""
            sequences, given, wanted = CASES[case]
            prompts = [
                {"prompt_token_ids": torch.randint(3, 2048, (given,), generator=draw).tolist()}
                for _ in range(sequences)
            ]
            sampling = vllm.SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True, detokenize=False)
            gc.collect()
            with patch.object(GatedPunica, "add_lora_linear", stock) if name == "vllm" else nullcontext():
                began = clock()
                llm.generate(prompts, sampling, lora_request=adapters(name, sequences), use_tqdm=False)
                spent = clock() - began
            return sequences * (given if wanted == 1 else wanted) / spent, spent

        cases = {}
        for case in CASES:
            for name in CONTESTANTS:
                block(name, case)
            speeds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
            spent: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
            for round_ in range(options.rounds):
                turn = round_ % len(CONTESTANTS)
                order = CONTESTANTS[turn:] + CONTESTANTS[:turn]
                # forwards and backwards: what drifts within a round hits all alike
                both = {name: [0.0, 0.0] for name in order}
                for name in (*order, *reversed(order)):
                    speed, seconds = block(name, case)
                    both[name][0] += seconds
                    both[name][1] = speed * seconds
                for name, (seconds, tokens) in both.items():
                    speeds[name].append(2 * tokens / seconds)
                    spent[name].append(seconds / 2)
            cases[case] = {
                "tokens_per_second": {name: round(statistics.median(speeds[name]), 1) for name in CONTESTANTS},
                "milliseconds_per_step": {
                    name: round(1000 * statistics.median(spent[name]) / CASES[case][2], 2) for name in CONTESTANTS
                },
                "gated_to_adapter": ratio(speeds, "gated", "adapter"),
                "strengths_to_adapter": ratio(speeds, "strengths", "adapter"),
                "adapter_to_base": ratio(speeds, "adapter", "base"),
                "adapter_to_vllm": ratio(speeds, "adapter", "vllm"),
            }
            print(case, json.dumps(cases[case]))
    record = {
        "vllm": vllm.__version__,
        "model": options.base.name
        if options.base
        else f"random Qwen2, {options.layers} layers, hidden {options.hidden}",
        "adapter": f"random, rank {options.rank}, all linear layers",
        "dtype": options.dtype,
        "time": "CPU time, one thread" if on_cpu else "wall time",
        "rounds": options.rounds,
        "machine": f"{os.cpu_count()} {platform.machine()} CPU cores" if on_cpu else torch.cuda.get_device_name(),
        "cases": cases,
    }
    print(json.dumps(record, indent=2))
    if options.out:
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
