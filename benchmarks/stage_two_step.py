"""One Stage-II step against what users would run instead: FLOPs, saved activations, paired time.

    python benchmarks/stage_two_step.py [--vocabulary 32768 131072] [--repeats 7] [--out FILE]

Shape: Qwen2, hidden 512, intermediate 2048, 8 layers, 2 sequences of 512 tokens, the last 75 % of each is response, LoRA
rank 16 on all linears, fp32. A step is forward and backward without the optimiser. FLOPs and bytes are counted, so they
repeat exactly; times are medians of alternating runs in one process, the first of each left out.

Contestants: a LoRA step on full logits (transformers' own loss), a LoRA step through TRL's fused head, gates done naively
(gate on the module output, full logits, autograd), and this package's gates and head.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

import loragate as lg
from loragate.losses import StatisticsRequest, add_statistics_forward

HIDDEN, LAYERS, BATCH, SEQUENCE, RESPONSE, RANK, K = 512, 8, 2, 512, 0.75, 16, 100


def adapter(vocabulary: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    lora = LoraConfig(
        r=RANK, lora_alpha=RANK, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return get_peft_model(Qwen2ForCausalLM(config), lora).train()


def batch(vocabulary: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, : int(SEQUENCE * (1 - RESPONSE))] = -100
    return {"input_ids": ids, "labels": labels}


def lora_step(vocabulary: int):
    model, data = adapter(vocabulary), batch(vocabulary)
    return model, lambda: model(**data).loss


def trl_step(vocabulary: int):
    from trl.trainer.utils import add_fused_lm_head

    model, data = adapter(vocabulary), batch(vocabulary)
    add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy", "is_top1"))

    def loss() -> torch.Tensor:
        out = model(**data, fused_lm_head=True)
        return -out.log_probs.sum() / out.label_mask.sum()

    return model, loss


def naive_step(vocabulary: int):
    """λ·(B A x) on the module's output by forward hooks, top-k entropy of full logits, plain autograd."""
    model, data = adapter(vocabulary), batch(vocabulary)
    model.requires_grad_(False)
    gates = torch.nn.ParameterList()
    for layer in [module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "base_layer")]:
        weight = torch.nn.Parameter(torch.randn(layer.in_features) * 1e-6)
        gates.append(weight)

        def forward(x, layer=layer, weight=weight):
            lam = lg.gate_coefficient(x.detach() @ weight, -6, 3, 1.0)
            delta = layer.lora_B["default"](layer.lora_A["default"](x)) * layer.scaling["default"]
            return layer.base_layer(x) + lam.unsqueeze(-1) * delta

        layer.forward = forward
    model.gates = gates

    def loss() -> torch.Tensor:
        logits = model(input_ids=data["input_ids"]).logits[:, :-1]
        return lg.topk_entropy(logits[data["labels"][:, 1:] != -100], K).mean()

    return model, loss


def loragate_step(vocabulary: int):
    model, data = adapter(vocabulary), batch(vocabulary)
    lg.attach_gates(model, lg.GateConfig(-6, 3))
    add_statistics_forward(model.get_base_model())
    request = StatisticsRequest(K, ("topk_entropy",), ("topk_entropy",))

    def loss() -> torch.Tensor:
        stats = model(**data, statistics=request)
        return stats.topk_entropy.sum() / stats.mask.sum()

    return model, loss


CONTESTANTS = {"lora": lora_step, "lora_trl": trl_step, "gates_naive": naive_step, "gates_loragate": loragate_step}


def counted(model: torch.nn.Module, loss) -> tuple[float, float]:
    """(FLOPs of forward and backward, bytes of tensors kept for the backward, parameters left out)."""
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    counter = FlopCounterMode(display=False)
    with counter:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            value = loss()
        saved = sum(kept.values())
        value.backward()
    model.zero_grad(set_to_none=True)
    flops = float(counter.get_total_flops())
    if any(hasattr(module, "lora_gate") for module in model.modules()):
        tokens = int(BATCH * SEQUENCE * RESPONSE)
        flops += 2 * tokens * K * HIDDEN  # embedding_bag of the sparse backward, which the counter does not know
    return flops, float(saved)


def timed(model: torch.nn.Module, loss) -> float:
    began = time.perf_counter()
    loss().backward()
    seconds = time.perf_counter() - began
    model.zero_grad(set_to_none=True)
    return seconds


def measure(vocabulary: int, repeats: int) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    steps = {}
    for name, make in CONTESTANTS.items():
        model, loss = make(vocabulary)
        flops, saved = counted(model, loss)
        rows[name] = {"gflop": flops / 1e9, "saved_mib": saved / 2**20}
        steps[name] = (model, loss)
        gc.collect()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 1):
        for name, (model, loss) in steps.items():
            seconds = timed(model, loss)
            if turn:
                times[name].append(seconds)
    for name, row in rows.items():
        row["seconds"] = statistics.median(times[name])
        row["time_ratio"] = statistics.median(a / b for a, b in zip(times[name], times["lora"], strict=True))
        row["flop_ratio"] = row["gflop"] / rows["lora"]["gflop"]
        row["saved_ratio"] = row["saved_mib"] / rows["lora"]["saved_mib"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "stage_two_step.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": options.threads,
        "repeats": options.repeats,
    }
    for vocabulary in options.vocabulary:
        rows = measure(vocabulary, options.repeats)
        results[str(vocabulary)] = rows
        print(f"vocabulary {vocabulary}")
        print(f"{'':<16}{'GFLOP':>9}{'ratio':>7}{'saved MiB':>11}{'ratio':>7}{'seconds':>9}{'ratio':>7}")
        for name, row in rows.items():
            print(
                f"{name:<16}{row['gflop']:>9.1f}{row['flop_ratio']:>7.2f}{row['saved_mib']:>11.0f}{row['saved_ratio']:>7.2f}"
                f"{row['seconds']:>9.2f}{row['time_ratio']:>7.2f}"
            )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
