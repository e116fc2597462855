"""Random models to serve in these benchmarks: a base, a plain adapter and two gated ones, with a word-level tokenizer.

Random weights answer in word salad at the cost of real ones; gates are drawn strongly, so that mixing up two adapters, or
losing the gates, changes almost every answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import loragate as lg

GATES = {"gated": (1, -3.0, 2.0), "second": (2, -1.0, 3.0)}
"""{folder: seed of adapter and gates, L, U}; `gated/adapter` is the plain adapter."""


def make_models(
    place: Path, *, hidden: int = 128, layers: int = 2, vocabulary: int = 512, rank: int = 8, positions: int = 256
) -> Path:
    """Write base, gated and second into `place`; returns it."""
    base = _base(hidden, layers, vocabulary, positions)
    base.save_pretrained(place / "base")
    _tokenizer(vocabulary).save_pretrained(place / "base")
    for name, (seed, lower, upper) in GATES.items():
        write_gated(
            place, name, _base(hidden, layers, vocabulary, positions), lg.GateConfig(lower, upper), seed=seed, rank=rank
        )
    return place


def real_models(place: Path, base: Path, *, rank: int) -> Path:
    """The same names for a real base: base as a link, and one random gated adapter of it; returns `place`."""
    (place / "base").symlink_to(base.resolve(), target_is_directory=True)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    seed, lower, upper = GATES["gated"]
    write_gated(place, "gated", model, lg.GateConfig(lower, upper), seed=seed, rank=rank)
    return place


def write_gated(
    place: Path, name: str, base: Any, config: lg.GateConfig, *, seed: int, rank: int = 8, strength: int = 1
) -> None:
    """A random adapter with random gates for `base` into place/name; `strength` multiplies alpha, half the rank else."""
    torch.manual_seed(seed)
    lora = LoraConfig(
        r=rank,
        lora_alpha=strength * rank // 2,
        target_modules="all-linear",
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, lora).eval()
    lg.attach_gates(model, config)
    for key, parameter in lg.gate_parameters(model).items():
        parameter.data.normal_(0, 1.5 / base.config.hidden_size**0.5 if key.endswith("weight") else 0.5)
    lg.save_gates(model, place / name, base_id=str(place / "base"))


def _base(hidden: int, layers: int, vocabulary: int, positions: int) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=positions,
        initializer_range=1.2 / hidden**0.5,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).eval()


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>"] + [f"w{index}" for index in range(vocabulary - 3)]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # AutoTokenizer then reads tokenizer.json as it is, beside any model
    kept = {"auto_map": {"AutoTokenizer": [None, None]}}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left", **kept
    )
