"""An adapter merged into its base: the written model computes the adapter, whatever it changes, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

import loragate as lg
from beside import BESIDE, loaded, make
from loragate.doctor.static import examine_static
from loragate.errors import ConfigError, LoragateError
from loragate.models import Loading, ModelRef, merge, open_base, open_model, open_tokenizer, output_difference, resolve
from loragate.models.output_difference import compare, compute_log_probs, make_probe_prompts, write_tokenizer
from loragate.training.run import save_tokenizer
from tiny import (
    TEMPLATE,
    TURN_END,
    chatml_tokenizer,
    logits,
    run,
    tiny_adapter,
    tiny_base,
    tiny_tokenizer,
    write_adapter,
    write_base,
)

NEAR = {"rtol": 1e-4, "atol": 1e-4}
IDS = torch.tensor([[5, 9, 20, 33, 7, 100, 4, 8]])


@pytest.mark.parametrize("kind", BESIDE)
def test_the_merged_model_computes_the_adapter(tmp_path: Path, kind: str) -> None:
    base, adapter = make(tmp_path, kind)
    expected = logits(loaded(kind, adapter), IDS)
    merge.merge_and_save(ModelRef(str(base)), adapter, tmp_path / "merged")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(found, IDS), expected, rtol=1e-4, atol=1e-4)


def test_a_merged_model_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    base, adapter = make(tmp_path, "embeddings and head")
    right = merge.base_weights

    def without_change(ref: Any, **arguments: Any) -> Any:
        return right(type(ref)(str(base)), **arguments)

    monkeypatch.setattr(merge, "base_weights", without_change)
    with pytest.raises(LoragateError, match=r"merged into .* does not compute what the adapter on its base does"):
        merge.merge_and_save(ModelRef(str(base)), adapter, tmp_path / "merged")


def test_a_merged_model_is_exported_with_its_figure(tmp_path: Path, fails: Any, capsys: Any) -> None:
    base, adapter = make(tmp_path, "modules to save")
    chatml_tokenizer().save_pretrained(base)
    expected = logits(loaded("modules to save", adapter), IDS)
    line = ("export", adapter, "--to", "merged", "--out")
    assert "--skip-comparison has no effect" in fails(*line, tmp_path / "out", "--skip-comparison")
    run(*line, tmp_path / "out")
    assert "the base with the adapter merged into it, as it is" in capsys.readouterr().out
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), IDS), expected, **NEAR)
    assert "nats per token apart" in (tmp_path / "out" / "README.md").read_text()
    run(*line, tmp_path / "half", "--dtype", "bfloat16")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert half.dtype == torch.bfloat16


def test_a_merged_model_reads_texts_as_the_adapter_did(tmp_path: Path, fails: Any, monkeypatch: Any) -> None:
    """An adapter's own tokenizer, whose class says nothing of a model, comes beside a model whose class splits otherwise."""
    write_base(tmp_path / "base")
    write_adapter(tmp_path / "adapter", tmp_path / "base")
    save_tokenizer(tiny_tokenizer(), tmp_path / "adapter")
    line = ("export", tmp_path / "adapter", "--to", "merged", "--out")
    run(*line, tmp_path / "out")
    given = open_tokenizer(resolve(tmp_path / "adapter"))
    for found in (AutoTokenizer.from_pretrained(tmp_path / "out"), open_tokenizer(resolve(tmp_path / "out"))):
        assert found("w3 w4 w5").input_ids == given("w3 w4 w5").input_ids == [8, 9, 10]
        assert found.chat_template == given.chat_template
    monkeypatch.setattr(output_difference, "ANY_MODEL", None)  # with which no form reads the same
    said = fails(*line, tmp_path / "other")
    assert "reads other token ids from the tokenizer that was written (Qwen2Tokenizer) than the given one" in said
    assert not (tmp_path / "other").exists()


def test_a_chat_template_that_comes_back_in_another_form_is_the_same(tmp_path: Path) -> None:
    """Line ends of Windows are read as plain ones from a file, and a list of one template as that."""
    for template in (f"{TEMPLATE}\r\n{{# ends #}}", {"default": TEMPLATE}):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        assert write_tokenizer(tokenizer, tmp_path) == ""
    tokenizer.save_pretrained = lambda folder: tiny_tokenizer().save_pretrained(folder)
    tokenizer.chat_template = f"{TEMPLATE} w9"
    assert "reads another chat template" in write_tokenizer(tokenizer, tmp_path)


def test_a_tokenizer_of_few_words_is_written(tmp_path: Path) -> None:
    """It refuses other texts, as it has no token for the unknown."""
    words = {word: index for index, word in enumerate(("<eos>", "a", "b"))}
    core = Tokenizer(models.WordLevel(words, unk_token="<none>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    assert write_tokenizer(tokenizer, tmp_path) == ""
    words["a"], words["b"] = words["b"], words["a"]
    swapped = Tokenizer(models.WordLevel(words, unk_token="<none>"))
    swapped.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    other = PreTrainedTokenizerFast(tokenizer_object=swapped, eos_token="<eos>")
    tokenizer.save_pretrained = other.save_pretrained
    assert "reads other token ids" in write_tokenizer(tokenizer, tmp_path)


def test_a_warning_of_a_written_tokenizer_comes_once(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(output_difference, "active_template", lambda tokenizer: str(id(tokenizer)))  # never alike
    for name in ("checkpoint-1", "checkpoint-2"):
        save_tokenizer(tiny_tokenizer(), tmp_path / name)
    assert caplog.text.count("reads another chat template") == 1


def test_a_merged_model_ends_its_answers_where_the_adapter_does(tmp_path: Path) -> None:
    """At the end of a turn that the chat template writes and the base's settings do not name, and at the recorded token."""
    write_base(tmp_path / "base", tokenizer=chatml_tokenizer())
    model = write_adapter(tmp_path / "adapter", tmp_path / "base")
    lg.attach_gates(model, lg.GateConfig(-1, 2))
    lg.save_gates(model, tmp_path / "gated", base_id=str(tmp_path / "base"), stop_token_ids=[9])
    run("export", f"{tmp_path / 'gated'}@constant=0.5", "--to", "merged", "--out", tmp_path / "out")
    named = GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id
    assert GenerationConfig.from_pretrained(tmp_path / "base").eos_token_id == 1
    assert named == [1, TURN_END, 9]


def test_an_adapter_that_rounding_takes_away_is_not_merged(tmp_path: Path) -> None:
    """Its deltas are a tenth of a step between two weights in bf16; far below the limit, which knows no size of an adapter."""
    tiny_base().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    model = tiny_adapter()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(3e-3 if "lora_B" in name else 1)
    write_adapter(tmp_path / "adapter", tmp_path / "base", model)
    place = (ModelRef(str(tmp_path / "base")), tmp_path / "adapter")
    with pytest.raises(LoragateError, match=r"loses half .*of .* moves its base.*--dtype float32"):
        merge.merge_and_save(*place, tmp_path / "half")
    found = merge.merge_and_save(*place, tmp_path / "whole", Loading(dtype="float32"))
    assert found.adapter_effect is not None
    assert found.mean_difference < found.adapter_effect / 100


def test_what_peft_does_not_merge_is_refused_in_a_sentence(tmp_path: Path) -> None:
    tiny_base().save_pretrained(tmp_path / "base")
    model = tiny_adapter(lora_bias=True, target_modules=["o_proj"])  # which has no bias
    write_adapter(tmp_path / "adapter", tmp_path / "base", model)
    with pytest.raises(LoragateError, match=r"cannot be merged into .*bias.*evaluate with the adapter unmerged"):
        merge.merge_and_save(ModelRef(str(tmp_path / "base")), tmp_path / "adapter", tmp_path / "out")


def test_an_error_names_the_adapter_that_was_given(tmp_path: Path, fails: Any) -> None:
    write_base(tmp_path / "base")
    write_adapter(tmp_path / "adapter", tmp_path / "base", alora_invocation_tokens=[9, 20])
    said = fails("export", tmp_path / "adapter", "--to", "merged", "--out", tmp_path / "out", status=1)
    assert f"{tmp_path / 'adapter'} cannot be merged into" in said
    assert "loragate-export-" not in said


def test_a_base_that_is_an_adapter_and_one_beside_an_adapter(tmp_path: Path, fails: Any) -> None:
    ids = torch.tensor([[5, 9, 20, 33]])
    write_base(tmp_path / "base")
    write_adapter(tmp_path / "first", tmp_path / "base")
    write_adapter(tmp_path / "second", tmp_path / "first", seed=5)
    said = fails("export", tmp_path / "second", "--to", "merged", "--out", tmp_path / "out")
    assert f"loragate export {tmp_path / 'first'} --to merged --out FOLDER" in said
    assert "itself an adapter" in fails("doctor", tmp_path / "first", "--quick", "--base", tmp_path / "first")
    (found,) = examine_static(str(tmp_path / "second"))[1]
    assert (found.code, "itself an adapter; merge it" in found.message) == ("base-unreachable", True)
    # weights and adapter in one folder, as some trainers leave them
    write_base(tmp_path / "both")
    write_adapter(tmp_path / "both", tmp_path / "both", target_modules=["q_proj"])
    other = write_adapter(tmp_path / "other", tmp_path / "both", seed=5, target_modules=["v_proj"])
    found = open_model(resolve(tmp_path / "other")).model
    assert torch.equal(logits(found, ids), logits(other, ids))
    assert found.config._name_or_path == str(tmp_path / "both")
    assert merge.merge_and_save(ModelRef(str(tmp_path / "both")), tmp_path / "both", tmp_path / "merged") is not None


def test_a_base_in_four_bits_is_unpacked(tmp_path: Path, fails: Any) -> None:
    pytest.importorskip("bitsandbytes")
    base, adapter = make(tmp_path, "factors alone")
    line = ("export", adapter, "--to", "merged", "--base")
    packed = open_base(ModelRef(str(base)), Loading(device="cpu", quantization="4bit"))
    packed.save_pretrained(tmp_path / "packed")
    chatml_tokenizer().save_pretrained(tmp_path / "packed")
    said = fails(*line, tmp_path / "packed", "--out", tmp_path / "out")
    assert "is a 4bit base, whose packed weights would round a merged adapter away" in said
    assert not (tmp_path / "out").exists()
    run(*line, tmp_path / "packed", "--out", tmp_path / "out", "--dtype", "float32")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not hasattr(written.config, "quantization_config")


@pytest.mark.parametrize("stored", ["8bit", "4bit"])
@pytest.mark.parametrize("merged_into", ["packed", "plain"])
def test_the_distance_from_the_adapter_on_a_packed_base_is_said(
    tmp_path: Path, stored: Any, merged_into: str, fails: Any, capsys: Any
) -> None:
    """Of a packed base that is unpacked, and of the plain one where the adapter was trained on a packed one."""
    pytest.importorskip("bitsandbytes")
    base, adapter = make(tmp_path, "factors alone")
    chatml_tokenizer().save_pretrained(base)
    how = Loading(device="cpu", quantization=stored)
    line = ["export", adapter, "--to", "merged", "--dtype", "float32", "--out", tmp_path / "out"]
    if merged_into == "packed":
        half = Loading(device="cpu", quantization=stored, dtype="bfloat16")  # which 4-bit layers compute in ever after
        open_base(ModelRef(str(base)), half).save_pretrained(tmp_path / "packed")
        chatml_tokenizer().save_pretrained(tmp_path / "packed")
        line, how = [*line, "--base", tmp_path / "packed"], Loading(device="cpu")
        assert f"is {'an' if stored == '8bit' else 'a'} {stored} base already" in fails(*line, "--quantization", "4bit")
        if stored == "8bit":  # whose layers do not multiply in fp32, asked for or not
            place = ModelRef(str(tmp_path / "packed"))
            with pytest.raises(ConfigError, match="stored in 8 bits"):
                open_base(place, Loading(device="cpu", dtype="float32"))
            assert open_base(place, how).dtype == torch.bfloat16
    else:
        line += ["--quantization", stored]
    run(*line)
    beside = open_model(resolve(adapter, tmp_path / merged_into if merged_into == "packed" else base), how).model
    prompts = make_probe_prompts(beside.config, {})
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    apart = compare(*(compute_log_probs(model, prompts) for model in (beside, written)), torch.float32).mean_difference
    assert apart > 1e-3  # a limit of rounding, which the written model is far below
    said = f"with the base unpacked; {apart:.2g} from the adapter on the {stored} base"
    assert said in " ".join(capsys.readouterr().out.split())
    assert said in (tmp_path / "out" / "README.md").read_text()


def test_a_quantisation_is_of_a_merged_model_alone(tmp_path: Path, fails: Any) -> None:
    _, adapter = make(tmp_path, "factors alone")
    said = fails("export", adapter, "--constant", "0.5", "--out", tmp_path / "out", "--quantization", "4bit")
    assert "--quantization measures a merged model and has no effect with --to peft" in said
