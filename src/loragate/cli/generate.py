"""`loragate generate`: text from a gated folder, a plain adapter or a base."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loragate.cli.arguments import Command
from loragate.cli.display import printable
from loragate.cli.hub import on_disk
from loragate.cli.models import (
    adapter_record,
    base_named,
    dtype_argument,
    explained,
    load_adapter,
    load_base,
    load_tokenizer,
    pick_device,
    quiet_logging,
    require_not_an_adapter,
    require_place,
    revision_for,
    revision_of_base,
)
from loragate.cli.options import ModelOptions
from loragate.cli.places import is_adapter, is_gated
from loragate.cli.quantization import base_arguments, check_quantization
from loragate.errors import ConfigError

DEFAULT_NEW_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ModelOptions):
    """Settings of `loragate generate`.

    Attributes:
        model: gated folder, PEFT adapter or base model, or owner/name[@revision] of one on the hub.
        prompt: the user's turn; "-" reads it from standard input.
        prompts: file with one prompt per line, instead of prompt.
        raw: pass the prompt to the model unchanged, without the chat template.
        samples: answers per prompt.
        temperature: sampling temperature; 0 is greedy.
        top_p: nucleus sampling threshold.
        max_new_tokens: token limit of an answer; 0 takes 512. An answer ends at the model's last position, too.
        seed: seed of the sampling.
        batch_size: sequences generated at a time.
        lambda_constant: replace every λ by this number (0: the base, 1: the plain adapter).
        lambda_min: raise every λ to at least this.
        lambda_max: lower every λ to at most this.
        base: where the base model is, instead of the recorded one.
        json: one JSON object per answer instead of text.
    """

    model: str
    prompt: str = ""
    prompts: str = ""
    raw: bool = False
    samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 0
    seed: int = 0
    batch_size: int = 16
    lambda_constant: float | None = None
    lambda_min: float | None = None
    lambda_max: float | None = None
    base: str = ""
    json: bool = False


def run(options: GenerateOptions) -> int:
    """Generate and print; finish reasons go to stderr."""
    check_quantization(options)
    prompts = read_prompts(options)
    quiet_logging()
    from contextlib import nullcontext

    from loragate.data import prompt_ids, render_prompt
    from loragate.gates import gate_override
    from loragate.generation import SamplingConfig, TransformersEngine

    sampling = SamplingConfig(
        temperature=options.temperature,
        top_p=options.top_p,
        max_new_tokens=options.max_new_tokens or DEFAULT_NEW_TOKENS,
        samples=options.samples,
        seed=options.seed,
    )
    model, tokenizer, gated = load_any(options)
    override = (options.lambda_constant, options.lambda_min, options.lambda_max)
    overriding: Any = nullcontext()
    if any(value is not None for value in override):
        if not gated:
            raise ConfigError(f"--lambda-… has no effect: {options.model} carries no gates")
        overriding = gate_override(model, options.lambda_min, options.lambda_max, options.lambda_constant)
    if options.raw:
        begin = tokenizer.bos_token_id
        prompts = [tokenizer.bos_token + text if begin in prompt_ids(text, tokenizer)[:1] else text for text in prompts]
    else:
        if tokenizer.chat_template is None:
            raise ConfigError("the tokenizer has no chat template; give one with --chat-template FILE, or use --raw")
        prompts = [
            render_prompt([{"role": "user", "content": prompt}], tokenizer, system=options.system) for prompt in prompts
        ]
    engine = TransformersEngine(model, tokenizer, batch_size=options.batch_size)
    with overriding:
        samples = engine.generate(prompts, sampling)
    # a file gets the answers as they are; on a terminal they must not act
    shown = printable if sys.stdout.isatty() else str
    for sample in samples:
        if options.json:
            record = {
                "prompt": sample.question,
                "sample": sample.sample,
                "text": sample.text,
                "finish_reason": sample.finish_reason,
                "tokens": len(sample.token_ids),
                "entropy": None if sample.entropy is None else round(sample.entropy, 4),
            }
            print(shown(json.dumps(record, ensure_ascii=False)))
        else:
            print(shown(sample.text))
    cut = sum(sample.finish_reason == "length" for sample in samples)
    if cut:
        print(
            f"loragate: {cut} of {len(samples)} answers reached the limit of {sampling.max_new_tokens} tokens, or the model's "
            "last position",
            file=sys.stderr,
        )
    return 0


def read_prompts(options: GenerateOptions) -> list[str]:
    """The prompts of the command line."""
    if bool(options.prompt) == bool(options.prompts):
        raise ConfigError("give either --prompt TEXT or --prompts FILE")
    if options.prompt:
        return [sys.stdin.read().strip() if options.prompt == "-" else options.prompt]
    try:
        lines = Path(options.prompts).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--prompts {options.prompts}: cannot be read ({error.strerror})") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts {options.prompts}: the file holds no prompt")
    return prompts


def load_any(options: Any) -> tuple[Any, Any, bool]:
    """(model, tokenizer, whether it is gated) of a gated folder, an adapter or a base."""
    from loragate.gates.schema import read_gate_config

    name = on_disk(options.model)
    folder = Path(name)
    require_place("model", name)
    if not is_adapter(folder):
        require_not_an_adapter(name)
    device = pick_device(options.device)
    trust, quantization = options.trust_remote_code, getattr(options, "quantization", "none")
    dtype = dtype_argument(options.dtype, device, quantization)
    how: dict[str, Any] = {"dtype": dtype, "device": device, "trust": trust, "quantization": quantization}
    words: dict[str, Any] = {"chat_template": options.chat_template, "trust": trust}
    if is_gated(folder):
        recorded = read_gate_config(folder)["base"]
        base = options.base or recorded["id"]
        with explained("gated adapter", name):
            model = load_gated_on(folder, options.base, recorded, **how)
        places = [str(folder / "adapter" / "tokenizer"), str(folder / "adapter"), base]
        return model, load_tokenizer(places, revision=revision_for(name, options.base), **words), True
    if (folder / "adapter_config.json").is_file() or options.base:
        record = adapter_record(name)
        base = base_named(options.base, record, options.model)
        revision = revision_of_base(record, base)
        model = load_adapter(load_base(base, revision=revision, **how), name)
        return model, load_tokenizer([name, base], revision=revision, **words), False
    model = load_base(name, **how)
    return model, load_tokenizer([name], **words), False


def load_gated_on(folder: Path, given: str, recorded: dict[str, Any], *, device: str, **how: Any) -> Any:
    """A gated folder on a device; `given` is the base asked for, `recorded` what the folder says of its base."""
    from loragate.gates import load_gated
    from loragate.gates.hub import split_base

    base, revision = split_base(given) if given else (recorded["id"], recorded.get("revision"))
    lost = not base or (Path(base).is_absolute() and not Path(base).exists())
    # where the base is lost, load_gated says so best
    arguments = {} if lost else base_arguments(base, device=device, revision=revision, **how)
    model = load_gated(folder, base=given or None, **arguments)
    return model if "device_map" in arguments else model.to(device)


COMMAND = Command(
    name="generate",
    summary="Generate text from a gated adapter, a plain adapter or a base model.",
    options=GenerateOptions,
    run=run,
    examples=(
        'loragate generate --model gated --prompt "What is 7 * 8?"',
        "loragate generate --model gated --prompts questions.txt --samples 4 --temperature 0.6 --json",
    ),
    common=(
        "prompt prompts raw samples temperature max_new_tokens seed lambda_constant base dtype quantization device json"
    ),
)
