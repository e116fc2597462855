"""Tiny random models, adapters, tokenizer and rows for the tests."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from contextlib import contextmanager

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import loragate as lg

VOCABULARY = 160


def tiny_base(seed: int = 0, **overrides):
    """A random two-layer Qwen2 with tied embeddings, fp32, eval mode."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "eos_token_id": 1,
        **overrides,
    }
    return Qwen2ForCausalLM(Qwen2Config(**settings)).eval()


def tiny_adapter(seed: int = 0, base=None, name: str = "default", **lora):
    """A PeftModel on a tiny base whose LoRA factors are random and not zero."""
    base = base if base is not None else tiny_base()
    torch.manual_seed(seed + 1)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False, **lora}
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings), adapter_name=name)
    return model.eval()


def tiny_gated(lower: float, upper: float, scale: float = 0.3, seed: int = 2):
    """`tiny_adapter` with gates whose parameters are random, so that λ is of all kinds."""
    return shake(lg.attach_gates(tiny_adapter(), lg.GateConfig(lower, upper)), scale, seed)


def is_packed(layer) -> bool:
    """Whether bitsandbytes has packed a linear layer's weight for inference on a CPU."""
    return bool(getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False))


def tiny_tokenizer(vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Word-level tokenizer with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>"] + [f"w{i}" for i in range(vocabulary - 5)]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _fast(core, TEMPLATE)


TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<user> {{ m['content'] }} {% else %}"
    "<assistant> {{ m['content'] }} <eos> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


WITH_SYSTEM = "{% if messages[0]['role'] != 'system' %}w50 w51 w52 w53 {% endif %}" + TEMPLATE.replace(
    "{% else %}", "{% elif m['role'] == 'system' %}w50 {{ m['content'] }} {% else %}"
)
"""As Qwen2.5 and SmolLM2 have it: without a system message the template writes one of its own."""


def _fast(core, template):
    tokens = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    # with this map AutoTokenizer reads tokenizer.json as it is, beside any model
    more = {"padding_side": "left", "auto_map": {"AutoTokenizer": [None, None]}}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template, **tokens, **more)


TURN_END = 5
"""Id of `<|im_end|>` in `chatml_tokenizer`."""


def chatml_tokenizer() -> PreTrainedTokenizerFast:
    """`tiny_tokenizer` as the base models of Qwen have it: EOS is `<eos>`, and the chat template ends a turn with `<|im_end|>`."""
    tokenizer = tiny_tokenizer()
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    words = core["model"]["vocab"]
    words["<|im_end|>"] = words.pop("w0")
    core["added_tokens"].append({**core["added_tokens"][0], "id": TURN_END, "content": "<|im_end|>"})
    template = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] }} <|im_end|>")
    changed = type(tokenizer.backend_tokenizer).from_str(json.dumps(core))
    return _fast(changed, template.replace("<|im_end|> <eos>", "<|im_end|>"))


def ending_base(**overrides):
    """A base that ends its turn by `<|im_end|>` at every third token or so, whatever stands before it, and never by EOS.

    A feature that is nearly constant takes the place of a bias on the head.
    """
    base = tiny_base(tie_word_embeddings=False, **overrides)
    width = base.config.hidden_size
    with torch.no_grad():
        base.model.embed_tokens.weight[:, 0] = 300.0
        base.lm_head.weight[:, 0] = 0.0
        base.lm_head.weight[TURN_END, 0] = 4.2 / width**0.5
        base.lm_head.weight[base.config.eos_token_id, 0] = -40.0 / width**0.5
    return base


def tiny_rows(count: int, seed: int = 0):
    """Conversations of random words; responses of different lengths."""
    draw = random.Random(seed)

    def words(low, high):
        return " ".join(f"w{draw.randrange(VOCABULARY - 5)}" for _ in range(draw.randint(low, high)))

    return [
        {"messages": [{"role": "user", "content": words(2, 6)}, {"role": "assistant", "content": words(3, 9)}]}
        for _ in range(count)
    ]


def write_rows(path, rows):
    """The path, with the rows in it as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rehearsal_rows(name):
    """The made-up rows of a task, which tiny recipes ask."""
    from loragate.recipes import QUESTIONS

    return [json.loads(line) for line in (QUESTIONS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def write_base(folder, base=None, tokenizer=None, **shape):
    """A base with its tokenizer in a folder."""
    (base or tiny_base(**shape)).save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)


def write_adapter(folder, base, model=None, **lora):
    """An adapter in a folder, which names its base; returns the model."""
    model = model or tiny_adapter(**lora)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    return model


def shake(model, size: float = 0.3, seed: int = 3, adapter_name: str | None = None):
    """Random gates that act; of size 0 they are the plain adapter. Returns the model."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lg.gate_parameters(model, adapter_name).values():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * size)
    return model


def load_script(path):
    """The module of a script outside of the package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*argv):
    """A command that comes to its end."""
    from loragate.cli.main import main

    assert main([str(argument) for argument in argv]) == 0


def gate_values(model):
    """The gates as they are now."""
    return {name: parameter.detach().clone() for name, parameter in lg.gate_parameters(model).items()}


def same(found, expected):
    """Whether two dictionaries of tensors are equal bit for bit."""
    return found.keys() == expected.keys() and all(torch.equal(value, expected[name]) for name, value in found.items())


def logits(model, token_ids):
    with torch.no_grad():
        return model(input_ids=token_ids).logits


@contextmanager
def scripts_of(*folders):
    """import_module for scripts of these folders, which import each other as neighbours; they are forgotten afterwards."""
    own = {path.stem for folder in folders for path in folder.glob("*.py")}
    hidden = {name: sys.modules.pop(name) for name in own & sys.modules.keys()}
    before = sys.path[:]
    sys.path[:0] = [str(folder) for folder in folders]
    try:
        yield importlib.import_module
    finally:
        sys.path[:] = before  # scripts put further folders there
        for name in own & sys.modules.keys():
            del sys.modules[name]
        sys.modules.update(hidden)
