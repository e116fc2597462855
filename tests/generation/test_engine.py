"""Samples do not depend on how they are batched, agree with `transformers`, and survive the file."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_decoders import CONFIG, PROMPTS, identities

from loragate.errors import ConfigError, DataError
from loragate.generation import Sample, SampleWriter, SamplingConfig, TransformersEngine, read_samples


def test_a_resumed_run_draws_the_same_samples(qwen2: Any, tokenizer: Any) -> None:
    engine = TransformersEngine(qwen2, tokenizer, batch_size=4)
    whole = engine.generate(PROMPTS, CONFIG)
    pending = {(s.question, s.sample) for s in whole[5:]}
    batches: list[list[Sample]] = []
    seen: list[tuple[int, int]] = []
    rest = engine.generate(
        PROMPTS,
        CONFIG,
        lambda *step: seen.append(step),
        pending=pending,
        on_samples=lambda batch: batches.append(list(batch)),
    )
    assert seen == [(4, 22), (8, 22), (12, 22), (16, 22), (20, 22), (22, 22)]
    assert identities(rest) == identities(whole[5:])
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4, 2]
    assert {s for batch in batches for s in batch} == set(rest)
    assert engine.generate(PROMPTS, CONFIG, pending=[]) == []
    with pytest.raises(DataError, match="question 0, sample 3"):
        engine.generate(PROMPTS, CONFIG, pending=[(0, 3)])


def test_greedy_equals_transformers_greedy(qwen2: Any, tokenizer: Any) -> None:
    samples = TransformersEngine(qwen2, tokenizer).generate(PROMPTS, SamplingConfig(0, max_new_tokens=20))
    for sample, prompt in zip(samples, PROMPTS):
        input_ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        expected = qwen2.generate(input_ids, do_sample=False, max_new_tokens=20)[0, input_ids.shape[1] :]
        assert list(sample.token_ids) == expected.tolist()


def test_entropy_equals_a_teacher_forced_forward(qwen2: Any, tokenizer: Any) -> None:
    samples = TransformersEngine(qwen2, tokenizer, batch_size=7).generate(PROMPTS, CONFIG)
    for sample in samples:
        prompt_ids = tokenizer(PROMPTS[sample.question])["input_ids"]
        with torch.no_grad():
            logits = qwen2(torch.tensor([prompt_ids + list(sample.token_ids)])).logits[0, len(prompt_ids) - 1 : -1]
        expected = torch.distributions.Categorical(logits=logits.double()).entropy().mean().item()
        assert sample.entropy == pytest.approx(expected, abs=1e-4)


def test_likelihoods_equal_a_forward_pass_of_each_pair_alone(qwen2: Any, tokenizer: Any) -> None:
    engine = TransformersEngine(qwen2, tokenizer, batch_size=2)
    likeliest = engine.generate([[5, 6, 7]], SamplingConfig(0, max_new_tokens=3))[0].token_ids
    pairs = [([5, 6, 7], likeliest), ([4], [5]), ([9, 10, 11, 12], [20, 21, 4])]
    found = engine.log_likelihoods(pairs)
    assert [greedy for _, greedy in found] == [True, False, False]
    for (before, after), (value, _) in zip(pairs, found, strict=True):
        with torch.no_grad():
            scores = qwen2(torch.tensor([[*before, *after]])).logits[0, len(before) - 1 : -1].log_softmax(-1)
        assert value == pytest.approx(scores.gather(-1, torch.tensor(after)[:, None]).sum().item(), abs=1e-4)


def test_further_stop_tokens_end_a_row_and_leave_the_text(qwen2: Any, tokenizer: Any) -> None:
    plain = TransformersEngine(qwen2, tokenizer).generate(PROMPTS, CONFIG)
    stop = Counter(token for s in plain for token in s.token_ids if token > 3).most_common(1)[0][0]
    qwen2.generation_config.eos_token_id = [1, 2]
    engine = TransformersEngine(qwen2, tokenizer, stop_token_ids=[stop])
    assert engine.endings.token_ids == {1, 2, stop}
    stopped = engine.generate(PROMPTS, CONFIG)
    assert any(s.token_ids[-1] == stop for s in stopped)
    for before, after in zip(plain, stopped):
        assert before.token_ids[: len(after.token_ids)] == after.token_ids
        assert f"w{stop}" not in after.text.split()
        assert not set(after.token_ids[:-1]) & engine.endings.token_ids


def test_the_models_own_generation_settings_are_left_out_and_restored(qwen2: Any, tokenizer: Any) -> None:
    expected = identities(TransformersEngine(qwen2, tokenizer).generate(PROMPTS, CONFIG))
    settings = qwen2.generation_config
    settings.update(repetition_penalty=5.0, top_k=1, min_new_tokens=15, bad_words_ids=[[7]])
    assert identities(TransformersEngine(qwen2, tokenizer).generate(PROMPTS, CONFIG)) == expected
    assert qwen2.generation_config is settings
    assert settings.repetition_penalty == 5.0


def test_a_peft_model_samples_with_its_adapter(qwen2: Any, tokenizer: Any) -> None:
    base = identities(TransformersEngine(qwen2, tokenizer).generate(PROMPTS, CONFIG))
    adapted = get_peft_model(qwen2, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    adapted.generation_config.repetition_penalty = 5.0
    settings = adapted.generation_config
    engine = TransformersEngine(adapted, tokenizer, batch_size=5)
    samples = engine.generate(PROMPTS, CONFIG)
    assert identities(samples) != base
    assert adapted.generation_config is settings
    with adapted.disable_adapter():
        assert identities(engine.generate(PROMPTS, CONFIG)) == base


def test_every_modules_mode_is_restored(qwen2: Any, tokenizer: Any) -> None:
    qwen2.train()
    qwen2.model.layers[0].eval()
    before = {name: module.training for name, module in qwen2.named_modules()}
    TransformersEngine(qwen2, tokenizer).generate(PROMPTS[:1], CONFIG)
    assert {name: module.training for name, module in qwen2.named_modules()} == before
    assert before["model.layers.1"]
    assert not before["model.layers.0.mlp"]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one rendered prompt"),
        ("w4 w5", "at least one rendered prompt"),
        (["w4", ""], "Prompt 1 is empty"),
        (["w4", "w4 " * 64], "Prompt 1 has 64 tokens.*64 positions"),
    ],
)
def test_prompts_that_cannot_be_continued(qwen2: Any, tokenizer: Any, prompts: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        TransformersEngine(qwen2, tokenizer).generate(prompts, CONFIG)


def test_a_long_prompt_lowers_the_token_limit_of_its_own_answers_alone(qwen2: Any, tokenizer: Any) -> None:
    """Every answer is the one that its prompt would get with its own limit, in the same batch or alone."""
    lengths, config = (3, 50, 9, 62, 5), replace(CONFIG, max_new_tokens=60, samples=2)
    prompts = [" ".join(f"w{4 + place % 7}" for place in range(length)) for length in lengths]
    engine = TransformersEngine(qwen2, tokenizer, stop_token_ids=[])
    engine.endings = replace(engine.endings, token_ids=frozenset([2]))  # nearly never drawn
    samples = engine.generate(prompts, config)
    for reuse in (True, False):
        other = TransformersEngine(qwen2, tokenizer, batch_size=3, reuse_prompts=reuse)
        other.endings = engine.endings
        assert identities(other.generate(prompts, config)) == identities(samples)
    for sample in samples:
        room = min(60, 64 - lengths[sample.question])
        assert len(sample.token_ids) <= room
        assert (sample.finish_reason == "length") == (sample.token_ids[-1] != 2)
        assert sample.finish_reason == "stop" or len(sample.token_ids) == room
    limited = {len(s.token_ids) for s in samples if s.finish_reason == "length"}
    assert min(limited) == 2
    assert max(limited) > 50


@pytest.mark.parametrize("reuse", [True, False])
def test_a_stop_text_that_is_a_special_token_ends_the_answer(qwen2: Any, tokenizer: Any, reuse: bool) -> None:
    """Answers are decoded without special tokens, where the text would never be found."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    config = replace(CONFIG, samples=20)
    engine = TransformersEngine(qwen2, tokenizer, reuse_prompts=reuse)
    whole, ended = engine.generate(PROMPTS, config), 0
    for before, after in zip(whole, engine.generate(PROMPTS, replace(config, stop=("<stop>", "<eos>"))), strict=True):
        assert after.token_ids == before.token_ids[: len(after.token_ids)]
        assert (after.finish_reason == "stop_text") == (3 in before.token_ids) == (after.token_ids[-1] == 3)
        assert (after.finish_reason == "stop") == (after.token_ids[-1] in engine.endings.token_ids)
        ended += after.finish_reason == "stop_text"
    assert ended


@pytest.mark.parametrize("end", ["<stop>", "w5 w6"])
def test_an_answer_ends_where_the_chat_template_ends_a_turn(qwen2: Any, tokenizer: Any, end: str) -> None:
    """The answers are those without a template, cut: at a token of its own, or where ordinary tokens spell the text."""
    plain = TransformersEngine(qwen2, tokenizer).generate(PROMPTS, replace(CONFIG, samples=20))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} " + end + " {% endfor %}"
    if end == "<stop>":
        tokenizer.add_special_tokens({"additional_special_tokens": [end]})
    engine = TransformersEngine(qwen2, tokenizer)
    assert (engine.endings.token_ids, engine.endings.texts) == (({1, 3}, ()) if end == "<stop>" else ({1}, (end,)))
    ended = 0
    for before, after in zip(plain, engine.generate(PROMPTS, replace(CONFIG, samples=20)), strict=True):
        assert after.token_ids == before.token_ids[: len(after.token_ids)]
        assert end not in after.text
        spelled = end in tokenizer.decode(after.token_ids, skip_special_tokens=end != "<stop>")
        ended += spelled
        assert (after.finish_reason == "stop") == (spelled or after.token_ids[-1] == 1)
    assert ended


def test_engine_refuses_a_model_that_cannot_stop(qwen2: Any, make_tokenizer: Any) -> None:
    qwen2.generation_config.eos_token_id = None
    with pytest.raises(ConfigError, match="pass stop_token_ids"):
        TransformersEngine(qwen2, make_tokenizer(pad_token="<pad>"))
    assert TransformersEngine(qwen2, make_tokenizer(), stop_token_ids=[3]).endings.token_ids == {3}


def test_a_stop_text_ends_the_answer_and_changes_no_token_before_it(qwen2: Any, tokenizer: Any) -> None:
    """The answers are those without stop texts, cut; a text may be spelled by several tokens or by part of one."""
    config = SamplingConfig(temperature=1.0, max_new_tokens=16, samples=3, seed=3)
    whole = TransformersEngine(qwen2, tokenizer, batch_size=5).generate(PROMPTS, config)
    long = next(sample for sample in whole if len(sample.text) > 12)
    for stop in (long.text[5:9], long.text[6:7], "no such text"):
        cut = TransformersEngine(qwen2, tokenizer, batch_size=5).generate(
            PROMPTS, replace(config, stop=(stop, "absent"))
        )
        ended = 0
        for before, after in zip(whole, cut, strict=True):
            place = before.text.find(stop)
            if place < 0:
                assert after.token_ids == before.token_ids
                assert after.finish_reason == before.finish_reason
                continue
            ended += 1
            assert after.finish_reason == "stop_text"
            assert after.text == before.text[:place]
            assert after.token_ids == before.token_ids[: len(after.token_ids)]
            assert stop in tokenizer.decode(after.token_ids, skip_special_tokens=True)
            assert stop not in tokenizer.decode(after.token_ids[:-1], skip_special_tokens=True)
            assert after.entropy is not None
        assert (ended > 0) == (stop != "no such text")
    with pytest.raises(ConfigError, match="stop"):
        SamplingConfig(stop=("",))


SAMPLES = [
    Sample(0, 0, "answer 7", (4, 5, 1), "stop", 0.25),
    Sample(0, 1, "zwei\n\u2028Zeilen é \x0b", (6,), "length", 1.0 / 3.0),
    Sample(1, 0, "", (1,), "stop", 0.0),
]


def write(path: Path, samples: list[Sample]) -> None:
    with SampleWriter(path) as writer:
        writer.write(samples)


def test_round_trip_is_ordered(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "samples.jsonl"
    write(path, SAMPLES[::-1])
    assert read_samples(path) == SAMPLES


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_skipped_and_replaced(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "samples.jsonl"
    write(path, SAMPLES)
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_samples(path) == SAMPLES[:2]
    write(path, SAMPLES[2:])
    assert read_samples(path) == SAMPLES


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{torn", "line 2: not JSON"),
        ('{"question": 1}', "line 2: the key 'sample' is missing"),
        ("[1]", r"line 2: expected a block of keys, found \[1\]"),
    ],
)
def test_a_line_that_is_no_sample_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "samples.jsonl"
    write(path, SAMPLES[:1])
    kept = path.read_bytes() + f"{line}\n".encode()
    path.write_bytes(kept)
    with pytest.raises(DataError, match=message):
        read_samples(path)
    with pytest.raises(DataError, match=message):
        SampleWriter(path)
    assert path.read_bytes() == kept


def test_repeated_and_absent_samples_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with pytest.raises(DataError, match="There is no sample file"):
        read_samples(path)
    write(path, SAMPLES + SAMPLES[1:2])
    with pytest.raises(DataError, match="lines 2 and 4: both are sample 1 of question 0"):
        read_samples(path)
