"""A base in one GGUF file: read as transformers reads it, named in the artifact, refused before anything is unpacked."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

import loragate as lg
from loragate.cli.main import main
from loragate.doctor.static import examine_files
from loragate.errors import LoragateError
from loragate.models import (
    open_model,
    open_tokenizer,
    open_without_weights,
    resolve,
)
from tiny import write_rows

gguf_writer = pytest.importorskip("gguf", reason="gguf is not installed (pip install loragate[gguf])")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HIDDEN, MLP, LAYERS, HEADS = 64, 96, 2, 2


def write_gguf(path, *, architecture="llama", stored="Q8_0", parts=0, split="default", more=lambda writer: None):
    """A tiny random Llama with a byte-level tokenizer, its matrices stored in blocks of `stored`."""
    kind, random = gguf_writer.GGMLQuantizationType[stored], np.random.default_rng(0)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "he"]
    writer = gguf_writer.GGUFWriter(path, architecture)
    shape = {"context_length": 256, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": MLP}
    shape |= {"head_count": HEADS, "head_count_kv": HEADS, "rope_dimension_count": HIDDEN // HEADS}
    shape |= {"layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0, "vocab_size": len(tokens)}
    words = {"tokenizer_model": "gpt2", "tokenizer_pre": split, "token_list": tokens, "token_merges": ["h e"]}
    words |= {"token_types": [3, 3, 3] + [1] * (len(tokens) - 3), "chat_template": TEMPLATE}
    words |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    for name, value in (shape | words).items():
        getattr(writer, f"add_{name}")(value)
    if parts:
        writer.add_uint16("split.count", parts)
    more(writer)

    def matrix(name, rows, columns):
        values = random.standard_normal((rows, columns)).astype(np.float32) * 0.2
        block, size = gguf_writer.GGML_QUANT_SIZES[kind]
        try:
            raw = gguf_writer.quantize(values, kind)
        except NotImplementedError:  # stored types that the package cannot write are zeros
            raw = np.zeros((rows, columns // block * size), dtype=np.uint8)
        writer.add_tensor(name, raw, raw_dtype=kind)

    matrix("token_embd.weight", len(tokens), HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS - bool(parts)):  # the first of several parts lacks the end
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(HIDDEN, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{layer}.{name}.weight", HIDDEN, HIDDEN)
        matrix(f"blk.{layer}.ffn_gate.weight", MLP, HIDDEN)
        matrix(f"blk.{layer}.ffn_up.weight", MLP, HIDDEN)
        matrix(f"blk.{layer}.ffn_down.weight", HIDDEN, 96)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_rows(path, [{"prompt": f"{n}?", "response": f"he {n}"} for n in range(16)])
    return path


@pytest.fixture(scope="module")
def gated(file, rows, tmp_path_factory):
    """Made by the commands, from the file alone."""
    folder = tmp_path_factory.mktemp("runs")
    short = ["--learning-rate", "0.05", "--batch-size", "8", "--max-steps", "2", "--data", str(rows)]
    assert main(["sft", "--model", str(file), "--rank", "4", "--out", str(folder / "adapter"), *short]) == 0
    calibrate = ["calibrate", "--adapter", str(folder / "adapter"), "--ranges=-1,2", "--skip-selection"]
    assert main([*calibrate, "--out", str(folder / "gated"), *short]) == 0
    return folder / "gated"


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([[1, 50, 60, 70, 259]])).logits


def test_config_weights_tokenizer_and_template_come_from_the_file(file):
    loaded = open_model(resolve(str(file)))
    assert (loaded.kind, loaded.config.model_type, loaded.max_positions) == ("base", "llama", 256)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    tensor = next(tensor for tensor in gguf_writer.GGUFReader(file).tensors if tensor.name == "token_embd.weight")
    unpacked = gguf_writer.dequantize(tensor.data, tensor.tensor_type)
    assert np.array_equal(loaded.model.get_input_embeddings().weight.detach().numpy(), unpacked)
    assert loaded.endings.token_ids == {2}
    assert loaded.tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False).endswith(
        "<|im_end|>\n"
    )
    assert loaded.tokenizer("he<|im_end|>").input_ids == [259, 2]


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ("deepseek-llm", "splits a text by the rule 'deepseek-llm'"),
        ("default", "does not say by which rule"),
        ("gpt-2", ""),
        ("smollm", ""),
        ("llama-bpe", ""),
    ],
)
def test_a_rule_of_splitting_that_transformers_does_not_know_is_told_once(tmp_path, caplog, split, said):
    path = write_gguf(tmp_path / "tiny.gguf", split=split)
    for _ in range(2):
        open_tokenizer(resolve(str(path)))
    found = [one.getMessage() for one in caplog.records if "tokenizer.ggml.pre" in one.getMessage()]
    assert len(found) == bool(said)
    assert all(str(path) in one and said in one for one in found)


def test_a_rule_that_splits_digits_off_is_taken_from_the_file(tmp_path):
    tokens = {
        split: open_tokenizer(resolve(str(write_gguf(tmp_path / f"{split}.gguf", split=split)))).backend_tokenizer
        for split in ("gpt-2", "smollm")
    }
    pieces = {split: [text for text, _ in own.pre_tokenizer.pre_tokenize_str("a  12")] for split, own in tokens.items()}
    assert pieces == {"gpt-2": ["a", "Ġ", "Ġ12"], "smollm": ["a", "ĠĠ", "1", "2"]}


def test_the_artifact_names_the_file_and_loads_from_it(gated, file):
    base = json.loads((gated / "gate_config.json").read_text())["base"]
    assert base["id"] == str(file)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    assert base["file"] == {"name": file.name, "bytes": file.stat().st_size, "sha256": sha256}
    assert json.loads((gated / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(file)
    model = lg.load_gated(gated)
    assert not torch.equal(logits(model), logits(open_model(resolve(str(file))).model))


def test_a_merged_model_is_written_in_16_bits(gated, tmp_path):
    assert main(["export", str(gated.parent / "adapter"), "--to", "merged", "--out", str(tmp_path / "merged")]) == 0
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"


def test_gates_made_on_the_file_act_on_the_plain_folder(gated, file, tmp_path):
    """Which is made as the refusal of vLLM says."""
    with pytest.raises(LoragateError, match=r"vLLM needs .*found\.model\.save_pretrained\(\"FOLDER\"\)"):
        open_without_weights(resolve(str(file)))
    found = open_model(resolve(str(file)))
    found.model.save_pretrained(tmp_path)
    found.tokenizer.save_pretrained(tmp_path)
    assert torch.equal(logits(lg.load_gated(gated, base=tmp_path)), logits(lg.load_gated(gated)))
    plain, packed = (open_model(resolve(str(place))).tokenizer for place in (tmp_path, file))
    assert plain.chat_template == packed.chat_template == TEMPLATE
    assert plain("he 1<|im_end|>").input_ids == packed("he 1<|im_end|>").input_ids


@pytest.mark.parametrize(
    ("made", "words"),
    [({"architecture": "rwkv7"}, "rwkv7"), ({"stored": "I8"}, "I8"), ({"parts": 3}, "weights are missing")],
)
def test_what_cannot_be_unpacked_is_refused(tmp_path, made, words):
    path = write_gguf(tmp_path / "odd.gguf", **made)
    with pytest.raises(LoragateError, match=words):
        open_model(resolve(str(path)))


def test_an_adapter_for_llama_cpp_is_named(tmp_path, file):
    path = tmp_path / "adapter.gguf"
    writer = gguf_writer.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for refused in (
        lambda: resolve(str(path), expect="adapter"),
        lambda: resolve(str(path), str(file)),
        lambda: examine_files(str(path)),
        lambda: resolve(str(path)),
        lambda: resolve(str(tmp_path)),
    ):
        with pytest.raises(LoragateError, match=r"adapter for llama\.cpp.*PEFT adapter that it was converted from"):
            refused()


def test_a_file_that_was_cut_off_is_refused(file, tmp_path):
    cut = tmp_path / "cut.gguf"
    for content in (file.read_bytes()[:-5000], b"GGUF"):
        cut.write_bytes(content)
        with pytest.raises(LoragateError, match=r"cannot be (loaded|read)"):
            open_model(resolve(str(cut)))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(16, np.float32)), "rope_freqs.weight"),
        (lambda writer: writer.add_string("llama.rope.scaling.type", "yarn"), "llama.rope.scaling.type = yarn"),
        (lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(HIDDEN, np.float32)), "holds 1 biases"),
    ],
)
def test_file_of_which_transformers_would_make_another_model_is_refused(tmp_path, more, said):
    path = tmp_path / "base.gguf"
    write_gguf(path, more=more)
    with pytest.raises(LoragateError, match=said.replace(".", r"\.")):
        open_model(resolve(str(path)))


def test_file_whose_positions_are_not_scaled_is_read(tmp_path):
    path = tmp_path / "base.gguf"
    write_gguf(path, more=lambda writer: writer.add_string("llama.rope.scaling.type", "none"))
    assert open_model(resolve(str(path))).model is not None
