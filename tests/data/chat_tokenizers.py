"""Small fast tokenizers with chat templates in the public formats, trained on the spot."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SENTENCES = [
    "What is two plus two? The answer is four.",
    "Write a function that adds two numbers and returns the sum.",
    "You are a helpful assistant. Think step by step, then answer.",
    "system user assistant model developer tool think",
    "Question and answer, line by line.\n\nThen another line.\n",
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen2.5 writes a system message of its own when the conversation has none.
CHATML_DEFAULT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    + CHATML
)
# Qwen2.5 also puts tool descriptions into that block.
CHATML_TOOLS = (
    "{% if tools %}<|im_start|>system\nYou are a helpful assistant.\n{{ tools | tojson }}<|im_end|>\n"
    "{% elif messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    + CHATML
)
# Llama 3.1 writes the date into a system block, with or without a system message.
LLAMA3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n{{ s }}<|eot_id|>"
    "{% for m in rest %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Qwen3 keeps reasoning in the last assistant turn only.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].lstrip() }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING_DEFAULT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    + THINKING
)
# Qwen3 opens a last answer without reasoning with an empty think block, and writes none into earlier turns; without
# enable_thinking the generation prompt holds the block.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}{% set answer = parts[-1].lstrip('\n') %}"
    "{% if loop.last %}<think>\n{{ parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' }}"
    "\n</think>\n\n{% endif %}{{ answer }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# DeepSeek-R1 opens reasoning in the generation prompt and removes it from answers.
OPENS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
PREAMBLE = "A chat follows.\n" + CHATML
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Templates of vision models read a list of content blocks and leave out plain text.
BLOCKS = (
    "{% for m in messages %}{{ m.role }}: {% for block in m.content %}{% if block.type == 'text' %}{{ block.text }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
# Llama 2: the system message stands inside of the user turn, here with a default.
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set s = 'Be helpful.' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}{{ bos_token }}[INST] "
    "{% if loop.first %}<<SYS>>\n{{ s }}\n<</SYS>>\n\n{% endif %}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)

CONTROL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
]


@cache
def _byte_level() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer.to_str()


def byte_level(
    template: str | None = CHATML, *, bos: str | None = None, eos: str | None = "<|endoftext|>", adds_bos=False
):
    """A GPT-like tokenizer; `adds_bos` puts BOS before plain text."""
    model = Tokenizer.from_str(_byte_level())
    if adds_bos:
        model.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, model.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token=bos, eos_token=eos, pad_token="<|endoftext|>", chat_template=template
    )


def space_adding(template: str | None = LLAMA2):
    """A SentencePiece-like tokenizer: it puts a space in front of every text, and BOS before plain text."""
    model = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    model.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=200,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=["\n", *map(chr, range(33, 127))],
        show_progress=False,
    )
    model.train_from_iterator(SENTENCES, trainer)
    model.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", model.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )


def learned(encoded, tokenizer) -> str:
    """Decode the labelled tokens."""
    labels = encoded["labels"] if isinstance(encoded, dict) else encoded.labels
    return tokenizer.decode([label for label in labels if label != -100], skip_special_tokens=False)


def decoded(encoded, tokenizer) -> str:
    ids = encoded["input_ids"] if isinstance(encoded, dict) else encoded.input_ids
    return tokenizer.decode(ids, skip_special_tokens=False)
