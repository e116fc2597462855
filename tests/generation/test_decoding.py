"""The engine's own loop against `transformers.generate`: equal samples for every batch, prompts read once, rows dropped."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from peft import IA3Config, LoraConfig, get_peft_model
from tiny_decoders import SHAPE, identities
from transformers.cache_utils import DynamicLayer

import loragate as lg
from loragate.generation import Sample, SamplingConfig, TransformersEngine
from loragate.generation.transformers_engine import DROP_SHARE, GROWTH, GrowingLayer, find_supported_decoder
from loragate.models.passes import find_longrope_length
from loragate.world.base import load_base
from loragate.world.problems import draw_problems
from tiny import shake, tiny_adapter

# between 1 and 13 tokens, so that a sliding window of 8 is passed while prompts are read, in answers, and never
PROMPTS = [" ".join(f"w{(5 * i + 3 * j) % 20 + 4}" for j in range(count)) for i, count in enumerate((4, 13, 1, 9))]
CONFIG = SamplingConfig(max_new_tokens=12, samples=3, seed=5)
STOPS = [5, 7, 9]
OWN_LOOP: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: tf.Qwen2Config(**SHAPE),
    "llama": lambda: tf.LlamaConfig(**SHAPE, head_dim=16),
    "qwen3": lambda: tf.Qwen3Config(**SHAPE, head_dim=8),
    "mistral-window": lambda: tf.MistralConfig(**SHAPE, sliding_window=8),
    "gemma2-alternating": lambda: tf.Gemma2Config(**SHAPE, head_dim=8, sliding_window=8),
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(
        **SHAPE, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    ),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=24, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=1, initializer_range=0.4
    ),
}
LEFT_TO_GENERATE: dict[str, Callable[[], Any]] = {
    "phi3-own-inputs": lambda: tf.Phi3Config(**SHAPE),
    "mamba-states": lambda: tf.MambaConfig(
        vocab_size=24, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0, eos_token_id=1
    ),
    "lfm2-convolutions": lambda: tf.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
}


def build(config: Any) -> Any:
    torch.manual_seed(1)
    return tf.AutoModelForCausalLM.from_config(config).eval()


def drawn(model: Any, tokenizer: Any, config: SamplingConfig = CONFIG, prompts: Any = PROMPTS, **options: Any) -> Any:
    return TransformersEngine(model, tokenizer, stop_token_ids=STOPS, **options).generate(prompts, config)


@contextmanager
def shapes_read(model: Any) -> Iterator[list[tuple[int, int]]]:
    """(rows, positions) of every forward pass."""
    seen: list[tuple[int, int]] = []
    hook = model.register_forward_pre_hook(
        lambda _module, _args, given: seen.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    try:
        yield seen
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *((name, CONFIG) for name in OWN_LOOP),
        ("qwen2", replace(CONFIG, temperature=0.7, top_p=0.8)),
        ("qwen2", replace(CONFIG, temperature=0.0, samples=1)),
    ],
)
def test_samples_are_those_of_generate_whatever_the_batch(name: str, config: SamplingConfig, tokenizer: Any) -> None:
    model = build(OWN_LOOP[name]())
    assert find_supported_decoder(model) is model
    expected = drawn(model, tokenizer, config, reuse_prompts=False)
    assert config != CONFIG or {s.finish_reason for s in expected} == {"stop", "length"}, (
        "rows leave at different times"
    )
    assert [(s.question, s.sample) for s in expected] == [
        (question, sample) for question in range(len(PROMPTS)) for sample in range(config.samples)
    ]
    for size in (1, 4, 64):
        found = drawn(model, tokenizer, config, batch_size=size)
        assert identities(found) == identities(expected)
        for one, other in zip(found, expected, strict=True):
            assert one.entropy == pytest.approx(other.entropy, abs=1e-5)


@pytest.mark.parametrize("own_loop", [True, False])
def test_a_row_that_has_ended_is_not_fed_past_a_table_of_positions(own_loop: bool, tokenizer: Any) -> None:
    """Each answer fills the positions that its own prompt leaves; the longest prompt ends first and its batch goes on."""
    model = build(OWN_LOOP["gpt2"]())
    prompts = [" ".join(["w4"] * count) for count in (62, 30, *[4] * 18)]  # too few end early to leave the batch
    config = SamplingConfig(temperature=0.0, max_new_tokens=64)

    def unending(prompts: list[str], batch_size: int) -> list[Sample]:
        engine = TransformersEngine(model, tokenizer, batch_size, reuse_prompts=own_loop)
        engine.endings = replace(engine.endings, token_ids=frozenset([11]))  # no token of these answers
        return engine.generate(prompts, config)

    together = unending(prompts, 20)
    assert [len(s.token_ids) for s in together] == [2, 34, *[60] * 18]
    assert {s.finish_reason for s in together} == {"length"}
    assert identities(unending(prompts[:3], 1)) == identities(together[:3])
    assert {s.token_ids for s in together[2:]} == {together[2].token_ids}


@pytest.mark.parametrize("kind", [tf.LlamaConfig, tf.Phi3Config])  # one of the own loop, and one left to `generate`
def test_a_row_beyond_the_short_rope_changes_no_other(kind: Any, tokenizer: Any) -> None:
    length = {"original_max_position_embeddings": 16}
    factors = {"short_factor": [1.0] * 4, "long_factor": [5.0] * 4}
    rope = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 10000.0, **factors, **length}
    # a prompt of 4 tokens and its answer stay within 16, two begin there and pass them, and two are beyond from the beginning
    prompts = [*PROMPTS, *(" ".join(f"w{3 * j % 20 + 4}" for j in range(count)) for count in (20, 30))]
    model = build(kind(**SHAPE, rope_parameters=rope, **length))
    assert find_longrope_length(model) == 16
    expected = identities(drawn(model, tokenizer, CONFIG, prompts, batch_size=1))
    assert identities(drawn(model, tokenizer, CONFIG, prompts, batch_size=64)) == expected
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    pairs = [(row[:-1], row[-1:]) for row in ids if len(row) > 1]
    alone, together = (TransformersEngine(model, tokenizer, size).log_likelihoods(pairs) for size in (1, 64))
    assert [value for value, _ in together] == pytest.approx([value for value, _ in alone], abs=1e-4)


def test_other_ropes_do_not_depend_on_the_longest_row(qwen2: Any) -> None:
    assert find_longrope_length(qwen2) is None
    assert find_longrope_length(build(OWN_LOOP["gpt2"]())) is None


@pytest.mark.parametrize("name", LEFT_TO_GENERATE)
def test_models_that_carry_more_than_a_cache_are_left_to_generate(name: str, tokenizer: Any) -> None:
    model = build(LEFT_TO_GENERATE[name]())
    assert find_supported_decoder(model) is None
    with shapes_read(model) as seen:
        found = drawn(model, tokenizer)
    assert identities(found) == identities(drawn(model, tokenizer, reuse_prompts=False))
    assert {rows for rows, _ in seen} == {12}


def test_each_prompt_is_read_once_and_ended_rows_leave(qwen2: Any, tokenizer: Any) -> None:
    with shapes_read(qwen2) as seen:
        found = drawn(qwen2, tokenizer)
    assert seen[0] == (4, 13), "four prompts, not twelve rows"
    assert {positions for _, positions in seen[1:]} == {1}
    rows = [count for count, _ in seen[1:]]
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < rows[0]
    for step, count in enumerate(rows, start=1):
        running = sum(len(sample.token_ids) > step for sample in found)
        assert running <= count
        assert count - running < max(1, DROP_SHARE * count)
    assert len(rows) == max(len(sample.token_ids) for sample in found) - 1
    with shapes_read(qwen2) as before:
        drawn(qwen2, tokenizer, reuse_prompts=False)
    assert before[0] == (12, 13)
    assert {count for count, _ in before} == {12}


def test_a_question_cut_by_a_batch_and_a_resumed_run_read_no_more_than_they_need(qwen2: Any, tokenizer: Any) -> None:
    whole = drawn(qwen2, tokenizer)
    with shapes_read(qwen2) as seen:
        assert identities(drawn(qwen2, tokenizer, batch_size=4)) == identities(whole)
    # longest prompt first: 1 1 1 3 | 3 3 0 0 | 0 2 2 2
    assert [(rows, positions) for rows, positions in seen if positions > 1] == [(2, 13), (2, 9), (2, 4)]
    pending = [(s.question, s.sample) for s in whole if (s.question + s.sample) % 2]
    with shapes_read(qwen2) as seen:
        rest = TransformersEngine(qwen2, tokenizer, stop_token_ids=STOPS).generate(PROMPTS, CONFIG, pending=pending)
    assert seen[0] == (4, 13)
    assert identities(rest) == [one for one, s in zip(identities(whole), whole) if (s.question, s.sample) in pending]


def test_a_growing_cache_holds_what_a_dynamic_one_does() -> None:
    plain, growing = DynamicLayer(), GrowingLayer()
    generator = torch.Generator().manual_seed(0)
    rows, copied = 3, []
    for step, count in enumerate((5, 1, GROWTH, 2, 1, 1)):
        if step == 4:
            rows = 2
            for layer in (plain, growing):
                layer.batch_select_indices(torch.tensor([2, 0]))
        before = growing.buffers["keys"].data_ptr() if step not in (0, 4) else None
        new = [torch.randn(rows, 2, count, 4, generator=generator) for _ in range(2)]
        for one, other in zip(plain.update(*new), growing.update(*new), strict=True):
            assert torch.equal(one, other)
        assert plain.get_seq_length() == growing.get_seq_length()
        copied.append(growing.buffers["keys"].data_ptr() != before)
    assert copied == [True, False, True, False, True, False], "a step with free positions copies nothing"


def test_the_tiny_worlds_model_draws_the_same_tokens_with_adapter_and_gates() -> None:
    base, tokenizer = load_base()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": item.prompt}], tokenize=False, add_generation_prompt=True
        )
        for item in draw_problems("test", 4, (4, 4), seed=0)
    ]
    config = SamplingConfig(max_new_tokens=48, samples=3, seed=2)
    torch.manual_seed(2)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
    shake(lg.attach_gates(model, lg.GateConfig(-3, 1)))
    expected = identities(drawn(model, tokenizer, config, prompts, reuse_prompts=False))
    assert len({len(tokens) for *_, tokens, _ in expected}) > 4
    for size in (5, 64):
        assert identities(drawn(model, tokenizer, config, prompts, batch_size=size)) == expected


def test_which_models_the_loop_takes(qwen2: Any) -> None:
    lora = tiny_adapter()
    assert find_supported_decoder(lora) is lora.get_base_model()
    assert find_supported_decoder(tiny_adapter(use_dora=True)) is not None
    assert find_supported_decoder(tiny_adapter(alora_invocation_tokens=[4, 5])) is None
    ia3 = IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])
    assert find_supported_decoder(get_peft_model(tiny_adapter().unload(), ia3)) is None
    small = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 24}
    assert find_supported_decoder(tf.T5ForConditionalGeneration(tf.T5Config(**small))) is None

    def forward(_self: Any, **given: Any) -> Any:
        return type(qwen2).forward(qwen2, **given)

    forward.state_per_row = True  # type: ignore[attr-defined]
    qwen2.forward = types.MethodType(forward, qwen2)
    assert find_supported_decoder(qwen2) is None
    del qwen2.forward
    assert find_supported_decoder(qwen2) is qwen2
    qwen2.lm_head.weight.ds_id = 0  # how DeepSpeed's ZeRO-3 marks a shard
    assert find_supported_decoder(qwen2) is None
