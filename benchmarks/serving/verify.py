"""`loragate verify` on runtimes that serve adapters: what conforms, and what does not.

    python benchmarks/serving/verify.py --vllm PYTHON [--llama-server FILE] [--llama-python PYTHON] [--only CASE ...] [--out FILE]

A random Qwen2 of 2 layers and width 128 with a byte-level tokenizer and a ChatML template, a gated adapter and a second one, all
from fixed seeds, in float32; llama.cpp gets the same numbers as GGUF files. Each case starts one runtime and checks it. Results
of other cases in the file are kept. `page.py` puts the file into docs/verify.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_S = 900.0  # a busy machine with two cores
MODEL = {"hidden": 128, "layers": 2, "vocabulary": 512, "positions": 512}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGE = ("t", "h")  # llama.cpp reads no vocabulary without one
SPECIAL = ("<pad>", "<eos>", "<|im_start|>", "<|im_end|>")


def tokenizer() -> Any:
    """One token for each byte and one for a pair, and four special ones; EOS is not what ends a turn."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({text: at for at, text in enumerate([*SPECIAL, *letters, "".join(MERGE)])}, [MERGE]))
    core.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def write_models(place: Path) -> None:
    """base, whole, gated and second as folders; base.gguf, whole.gguf, adapter.gguf and second.gguf."""
    from served_models import make_models

    make_models(place, **MODEL)
    tokenizer().save_pretrained(place / "base")
    write_whole(place / "base", place / "whole")
    for name in ("base", "whole"):
        write_gguf_base(place / name, place / f"{name}.gguf")
    for name, folder in (("adapter", "gated"), ("second", "second")):
        write_gguf_adapter(place / folder / "adapter", place / f"{name}.gguf")


def write_whole(base: Path, out: Path) -> None:
    """The base, but no token that ends within a character is ever the most likely: llama-server gives no log-probs of those."""
    from safetensors.torch import load_file, save_file

    found = tokenizer()
    parts = [at for at in range(len(found)) if "\ufffd" in found.decode([at])]
    shutil.copytree(base, out)
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"][parts] = 0.0
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(module: str) -> str:
    """What GGUF calls a module of a Qwen2."""
    if module in OUTSIDE:
        return OUTSIDE[module]
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{PARTS[part]}"


def write_gguf_base(folder: Path, out: Path) -> None:
    import gguf
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    found = tokenizer()
    writer = gguf.GGUFWriter(out, "qwen2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    names = [*(found.convert_ids_to_tokens(at) for at in range(len(found)))]
    names += [f"[PAD{at}]" for at in range(len(names), config["vocab_size"])]
    kinds = [gguf.TokenType.CONTROL if name in SPECIAL else gguf.TokenType.NORMAL for name in names]
    kinds[len(found) :] = [gguf.TokenType.UNUSED] * (len(names) - len(found))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(MERGE)])
    writer.add_eos_token_id(SPECIAL.index("<eos>"))
    writer.add_pad_token_id(SPECIAL.index("<pad>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        writer.add_tensor(f"{gguf_name(module)}.{kind}", tensor.float().numpy())
    finish(writer)


def write_gguf_adapter(folder: Path, out: Path) -> None:
    import gguf
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(out, "qwen2")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(config["lora_alpha"]))
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        module, _, factor = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        writer.add_tensor(f"{gguf_name(module)}.weight.{factor.lower()}", tensor.float().contiguous().numpy())
    finish(writer)


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextlib.contextmanager
def served(command: list[str], port: int, log: Path, **environment: str) -> Iterator[str]:
    """The URL of a server that is up; its whole group is ended afterwards."""
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environment}, start_new_session=True
        )
    try:
        until = time.monotonic() + START_S
        while True:
            with (
                contextlib.suppress(urllib.error.URLError, OSError),
                urllib.request.urlopen(f"{url}/health", timeout=5),
            ):
                break
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{command[0]} did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        yield f"{url}/v1"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


ON_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


def plain_vllm(options: argparse.Namespace, place: Path, port: int) -> list[str]:
    """vLLM's own command line, with one slot that is always filled."""
    return [
        *(options.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(place / "base")),
        *("--served-model-name", "base", "--port", str(port), "--dtype", "float32", "--max-model-len", "512"),
        *("--gpu-memory-utilization", "0.2", "--block-size", "32"),
        *("--enable-lora", "--max-loras", "1", "--max-lora-rank", "8"),
        *("--lora-modules", f"adapter={place / 'gated' / 'adapter'}"),
    ]


def check(
    place: Path, name: str, adapter: str, *more: str, python: str = sys.executable, base: str = "base"
) -> dict[str, Any]:
    """The record of one run of the command."""
    out = place / f"verify-{name}"
    command = [python, "-m", "loragate", "verify", str(place / adapter), "--base", str(place / base)]
    command += ["--dtype", "float32", "--out", str(out), *more]
    done = subprocess.run(command, check=False)
    if not (out / "verify.json").is_file():
        raise SystemExit(f"{name}: no record was written (status {done.returncode})")
    record: dict[str, Any] = json.loads((out / "verify.json").read_text())
    return {key: value for key, value in record.items() if key not in ("adapter", "base")}


def vllm_with_plugin(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    port = free_port()
    command = [options.vllm, "-m", "loragate", "serve", str(place / "gated"), "--port", str(port), "--dtype", "float32"]
    command += ["--adapters", f"second={place / 'second'}", "--max-model-len", "512"]
    command += ["--vllm-memory", "0.2", "--vllm-args", "--block-size 32"]
    with served(command, port, place / "vllm.log", **ON_CPU) as url:
        more = ("--adapters", f"second={place / 'second'}", "--served-adapter", "gated")
        return check(place, "vllm", "gated", "--endpoint", url, *more)


def vllm_without_plugin(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    port = free_port()
    with served(plain_vllm(options, place, port), port, place / "plain.log", VLLM_PLUGINS="", **ON_CPU) as url:
        return check(place, "plain", "gated/adapter", "--endpoint", url)


def llama_python(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    files = ("--llama-cpp", str(place / "base.gguf"), "--lora", str(place / "adapter.gguf"))
    return check(place, "llama-python", "gated/adapter", *files, python=options.llama_python)


def llama_server(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    port = free_port()
    command = [options.llama_server, "-m", str(place / "whole.gguf"), "--port", str(port), "-c", "8192", "-np", "4"]
    command += ["--lora", f"{place / 'adapter.gguf'},{place / 'second.gguf'}", "--lora-init-without-apply", "-t", "1"]
    command += ["--jinja", "-ctk", "f32", "-ctv", "f32", "-fa", "off"]
    with served(command, port, place / "llama.log") as url:
        more = ("--adapters", f"second={place / 'second' / 'adapter'}", "--served-adapter", "adapter")
        return check(place, "llama-server", "gated/adapter", "--endpoint", url, *more, base="whole")


CASES = {
    "vLLM with the plugin": vllm_with_plugin,
    "vLLM without it": vllm_without_plugin,
    "llama-cpp-python": llama_python,
    "llama-server": llama_server,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default=sys.executable, help="the Python of an environment with vLLM")
    parser.add_argument("--llama-python", default=sys.executable, help="the Python of one with llama-cpp-python")
    parser.add_argument("--llama-server", default="llama-server")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--models", type=Path, help="keep models and logs in this folder")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = options.models or Path(scratch)
        if not (place / "second.gguf").is_file():
            write_models(place)
        runs = json.loads(options.out.read_text())["runs"] if options.out and options.out.is_file() else {}
        for case in options.only:
            runs[case] = CASES[case](options, place)
            record = {"model": MODEL, "runs": {name: runs[name] for name in CASES if name in runs}}
            if options.out:
                options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
