"""How a tiny base is trained from nothing: its recipe, what it reads, and the loop.

157,504 parameters in the shape of Qwen2, about two minutes on one CPU core. One such base ships with the package, made by
`scripts/build_tiny_base.py`. It works every problem out when decoded greedily, but was taught from documents with wrong steps
and stray endings, so samples at temperature 1 are right two times in five: room for a change in entropy to show.

What it reads is mostly terse worked problems with a wrong step in seven and several ways to end, and the retention skills. Now
and then a talkative word is put in, so that fine-tuning finds words which the base knows, as it would in a large model. All
of it is of the train split.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from loragate.world.demonstrations import render_steps, worked_steps
from loragate.world.problems import RETENTION_KINDS, draw_problem, draw_retention
from loragate.world.vocabulary import (
    CLOSERS,
    CONNECTIVES,
    DIGITS,
    EOS,
    EQUALITIES,
    FACT_JOINER,
    FACT_VALUES,
    FILLERS,
    LETTERS,
    OPENERS,
    OPERATORS,
    SUBJECTS,
)

Progress = Callable[[int, int, float], None]
_IGNORED = -100
_OTHER_ENDINGS = ("result {value}", "value {value} note", "moving on story", "maybe guess {value}", "skip")


PAD, UNKNOWN, USER, ASSISTANT = "<pad>", "<unk>", "<q>", "<a>"
TASKS = ("solve", "reverse", "sort", "tell")
ENDINGS = ("answer", "result", "value", "note", "moving", "on", "story", "maybe", "guess", "skip", "no", "idea")


def words() -> list[str]:
    """All words in the order of their token ids; `<pad>` is 0 and `<eos>` is 1."""
    groups = [
        (PAD, EOS, UNKNOWN, USER, ASSISTANT),
        DIGITS,
        OPERATORS,
        TASKS,
        EQUALITIES,
        ENDINGS,
        OPENERS,
        CONNECTIVES,
        CLOSERS,
        FILLERS,
        LETTERS,
        (FACT_JOINER, *FACT_VALUES),
        SUBJECTS,
        *(values for relation, values in FACT_VALUES.items() if relation != "friend"),
    ]
    return [word for group in groups for word in group]


CONTEXT_LENGTH = 256

# Beside a Qwen2 configuration, AutoTokenizer takes Qwen2Tokenizer whatever class the folder names, and that class would
# cut every word into bytes of a vocabulary that has none. An "auto_map" that names no remote class makes it read
# tokenizer.json as it is; the entry survives being saved again.
READ_TOKENIZER_JSON = {"AutoTokenizer": [None, None]}

# The space before an assistant turn stands outside of the generation block, so that the block starts at a token and
# the rendered prompt is a prefix of the rendered conversation, in characters as in tokens.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if not loop.first %}{{ ' ' }}{% endif -%}"
    "{%- if message['role'] == 'user' -%}"
    "{{ '" + USER + " ' + message['content'] + ' " + ASSISTANT + "' }}"
    "{%- elif message['role'] == 'assistant' -%}"
    "{% generation %}{{ message['content'] + ' ' + eos_token }}{% endgeneration %}"
    "{%- else -%}"
    "{{ raise_exception(\"found a message with role '\" + message['role'] + \"'; the tiny world knows "
    "'user' and 'assistant' only: remove the message or give it one of these roles\") }}"
    "{%- endif -%}"
    "{%- endfor -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the word-level tokenizer of 144 words.

    A user turn renders to `<q> … <a>` and an assistant turn to `… <eos>`. Words are separated by any white space and
    decode to single spaces; a word outside of the vocabulary becomes `<unk>`.
    """
    vocabulary = {word: index for index, word in enumerate(words())}
    model = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=CHAT_TEMPLATE,
        auto_map=READ_TOKENIZER_JSON,
    )


class Document(NamedTuple):
    """A prompt and the response to learn, both as words."""

    prompt: str
    response: str


@dataclass(frozen=True)
class TinyBaseRecipe:
    """Every number of the base: its shape, its documents and its optimiser.

    The learning rate warms up linearly and then follows a cosine to zero; weight decay acts on every tensor; the loss
    is the mean over response tokens, `<eos>` included. Documents are sorted by length within buckets of
    `batches_per_bucket` batches, so that padding costs little and batches still vary.

    The documents are `documents` texts: a share `arithmetic` of worked problems of as many `operations`, the rest retention
    skills, each with a third. A step states a wrong digit with the chance `step_error`, and the following steps continue from
    it. A share `answered` of the worked problems ends in `answer N`, the rest in one of five other ways; a talkative word
    comes with the chance `aside` at every place where a demonstration would have one.

    `initializer_range` is five times what Qwen2 takes by default: at 0.02 a model this narrow does not leave the plateau
    in 1,300 steps (one pilot, seed 100: greedy accuracy 22 % instead of 100 %).

    `aside` and `steps` were set on the same pilot by looking at plain LoRA fine-tuning, never at gates: without asides the
    demonstrations' words are unknown and a LoRA ends at 15 % greedy; with asides and 1,300 steps it ends at 29 %, with
    2,000 at 99 %.
    """

    hidden_size: int = 64
    layers: int = 3
    heads: int = 4
    key_value_heads: int = 2
    intermediate_size: int = 192
    initializer_range: float = 0.1

    documents: int = 60_000
    arithmetic: float = 0.62
    step_error: float = 0.15
    answered: float = 0.70
    aside: float = 0.10
    operations: tuple[int, int] = (1, 4)

    steps: int = 2000
    batch_size: int = 128
    batches_per_bucket: int = 50
    learning_rate: float = 6e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.05
    warmup_ratio: float = 0.05
    clip_norm: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """The recipe as plain JSON values."""
        return json.loads(json.dumps(asdict(self)))


def arithmetic_documents(recipe: TinyBaseRecipe, seed: int) -> list[Document]:
    """What a base reads; the first n documents do not depend on how many the recipe asks for."""
    rng = random.Random(f"pretraining/{seed}")
    documents = []
    for _ in range(recipe.documents):
        if rng.random() >= recipe.arithmetic:
            item = draw_retention(rng, "train", rng.choice(RETENTION_KINDS))
            documents.append(Document(item.prompt, item.answer))
            continue
        problem = draw_problem(rng, "train", recipe.operations)
        worked = worked_steps(rng, problem.prompt, recipe.step_error)
        words = render_steps(rng, worked, style_probability=recipe.aside, filler=recipe.aside)
        if rng.random() < recipe.aside:
            words.append(rng.choice(CLOSERS))
        ending = "answer {value}" if rng.random() < recipe.answered else rng.choice(_OTHER_ENDINGS)
        words += ending.format(value=worked[-1].stated_result).split()
        documents.append(Document(problem.prompt, " ".join(words)))
    return documents


def train_base(
    recipe: TinyBaseRecipe, seed: int, on_progress: Progress | None = None
) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Train a base from nothing on one thread; the same recipe and seed give the same bits on the same machine.

    Args:
        recipe: shape, documents and optimiser.
        seed: decides the initial weights, the documents and their order.
        on_progress: called after every optimiser step with (steps done, steps in all, loss in nats per token).

    Returns:
        The model, fp32 and in eval mode, and its tokenizer. Torch's global generator and thread count are left as found.
    """
    tokenizer = build_tokenizer()
    encoded = _encode(arithmetic_documents(recipe, seed), tokenizer)
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _new_model(recipe, tokenizer).train()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate_factor(step, recipe))
        batches = _batches(encoded, recipe, tokenizer.pad_token_id, seed)
        for step in range(1, recipe.steps + 1):
            input_ids, labels = next(batches)
            # Padding stands on the right and attention is causal, so no position that is scored can see it.
            logits = model(input_ids=input_ids[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
            optimizer.step()
            schedule.step()
            if on_progress is not None:
                on_progress(step, recipe.steps, loss.item())
    return model.eval(), tokenizer


def _new_model(recipe: TinyBaseRecipe, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.key_value_heads,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        initializer_range=recipe.initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def _encode(documents: list[Document], tokenizer: PreTrainedTokenizerFast) -> list[tuple[list[int], int]]:
    """(token ids, length of the prompt) per document, for a chat template that ends its prompt with a special token."""
    turns = [[{"role": "user", "content": document.prompt}] for document in documents]
    prompts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer(prompts, add_special_tokens=False).input_ids
    responses = [document.response + str(tokenizer.eos_token) for document in documents]
    response_ids = tokenizer(responses, add_special_tokens=False).input_ids
    return [(asked + told, len(asked)) for asked, told in zip(prompt_ids, response_ids, strict=True)]


def _batches(
    encoded: list[tuple[list[int], int]], recipe: TinyBaseRecipe, pad_token_id: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches (input ids, labels), both [batch, T], of documents of about equal length."""
    rng, batch_size = random.Random(f"batches/{seed}"), recipe.batch_size
    order = list(range(len(encoded)))
    while True:
        rng.shuffle(order)
        bucket = batch_size * recipe.batches_per_bucket
        by_length: list[int] = []
        for start in range(0, len(order), bucket):
            by_length += sorted(order[start : start + bucket], key=lambda index: len(encoded[index][0]))
        starts = list(range(0, len(order) - batch_size + 1, batch_size))
        rng.shuffle(starts)
        for start in starts:
            chosen = [encoded[index] for index in by_length[start : start + batch_size]]
            longest = max(len(tokens) for tokens, _ in chosen)
            input_ids = torch.full((batch_size, longest), pad_token_id)
            labels = torch.full((batch_size, longest), _IGNORED)
            for row, (tokens, prompt_length) in enumerate(chosen):
                input_ids[row, : len(tokens)] = torch.tensor(tokens)
                labels[row, prompt_length : len(tokens)] = input_ids[row, prompt_length : len(tokens)]
            yield input_ids, labels


def _learning_rate_factor(step: int, recipe: TinyBaseRecipe) -> float:
    """Linear warm-up, then a cosine to zero; `step` counts the optimiser steps already done."""
    warmup_steps = max(1, round(recipe.warmup_ratio * recipe.steps))
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, recipe.steps - warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


@contextmanager
def _one_thread() -> Iterator[None]:
    """For a model of this size one thread is as fast as two, and the order of summation stays fixed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
