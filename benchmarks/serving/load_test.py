"""Load test of `loragate serve` on loopback: many clients at once, every reply compared with its single-client reply.

    python benchmarks/serving/load_test.py [--clients 200] [--rounds 8] [--per-client 4] [--out FILE]
    python benchmarks/serving/load_test.py --clients 32 --rounds 8 --per-client 8      # about 2,000 requests
    python benchmarks/serving/load_test.py --gated FOLDER --clients 32 --speed-rounds 6 [--out FILE]

Clients ask greedily for base, plain adapter, two gated adapters and an override, some of them at a strength of its own
("gated×0.5" is the field lora_scale of 0.5), in an order of their own. First
each request is sent alone and its reply kept; then `clients` threads send requests at once, for `rounds` rounds. Counted
are errors, replies that differ from the one given alone, latencies, and the resident memory of the server and all its children
after each round. Steady means: the last half of the rounds grew by less than 1 % of the size.

With --gated the requests go to a gated folder of one's own, its adapter, its base and two overrides of it, and ask word
problems. With --speed-rounds all clients then ask one name at a time, plain adapter and gated adapter in turns of an
order that changes: what slows the machine slows both. Reported are medians of tokens per second and of the ratio of a turn.

vLLM hands out its KV cache block by block, oldest first, and on a CPU a block is resident once it was written: memory then
grows with every request until the whole cache has been used once. --blocks keeps the cache so small that this is over after
the first round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from served_models import make_models

STRENGTHS = ("adapter×0.5", "adapter×-0.5", "gated×0.5", "gated×1.5")
NAMES = ("base", "adapter", "gated", "second", "gated@unit", *STRENGTHS)
REAL_NAMES = ("base", "adapter", "gated", "gated@unit", "gated@constant=0.5", *STRENGTHS)


class Server:
    """`loragate serve` as a child, ready when it prints its client lines."""

    def __init__(self, gated: Path, second: Path | None, port: int, blocks: int, base: Path | None = None) -> None:
        command = [sys.executable, "-m", "loragate", "serve", str(gated)]
        command += ["--adapters", f"second={second}"] if second else []
        command += ["--base", str(base)] if base else []
        command += ["--dtype", "float32", "--port", str(port), f"--vllm-args=--num-gpu-blocks-override {blocks}"]
        settings = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            command, env={**settings, **os.environ}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        ready = threading.Event()

        def read() -> None:
            for line in self.process.stdout or ():
                self.lines = [*self.lines[-200:], line]
                if line.startswith("print(client"):
                    ready.set()
            ready.set()

        threading.Thread(target=read, daemon=True).start()
        if not ready.wait(600) or not any(line.startswith("print(client") for line in self.lines):
            self.stop()
            raise SystemExit("the server did not start:\n" + "".join(self.lines))

    def ask(self, name: str, prompt: str, tokens: int, whole: bool = False) -> tuple[str, int]:
        """The answer and its length in tokens; with `whole` the server goes on past the end of the answer."""
        model, _, scale = name.partition("×")
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        if scale:
            body["lora_scale"] = float(scale)
        if whole:
            body["ignore_eos"] = True
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=600) as reply:
            answer = json.loads(reply.read())
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]

    def memory_mib(self) -> dict[str, float]:
        """Resident memory of the server and everything under it, by process name, and as "total"."""
        children: dict[int, list[int]] = {}
        sizes: dict[int, tuple[str, float]] = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
                    stat, pages = rest.split(), int((folder / "statm").read_text().split()[1])
                except (OSError, IndexError):
                    continue
                sizes[int(folder.name)] = name, pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
                children.setdefault(int(stat[1]), []).append(int(folder.name))
        found, waiting = {"total": 0.0}, [self.process.pid]
        while waiting:
            one = waiting.pop()
            name, size = sizes.get(one, ("", 0.0))
            found["total"] += size
            found[f"{name} {len(found)}"] = size
            waiting += children.get(one, [])
        return found

    def stop(self) -> None:
        self.process.terminate()  # SIGINT is ignored by what a script starts in the background
        self.process.wait(120)


def random_words(draw: random.Random) -> str:
    return " ".join(f"w{draw.randrange(500)}" for _ in range(draw.randrange(4, 40)))


def word_problem(draw: random.Random) -> str:
    """A question of one step, with an answer begun: its continuation depends on the adapter."""
    who, what = draw.choice(["Ann", "Ben", "Cora", "Dan"]), draw.choice(["apples", "coins", "books", "shells"])
    many, more = draw.randrange(10, 90), draw.randrange(2, 40)
    return f"Question: {who} has {many} {what} and buys {more} more. How many {what} does {who} have now?\nAnswer:"


def measure(
    server: Server,
    names: Sequence[str],
    prompts: Sequence[str],
    clients: int,
    rounds: int,
    per_client: int,
    tokens: int,
) -> dict[str, Any]:
    """Alone first, then all at once."""
    jobs = [(name, prompt) for prompt in prompts for name in names]
    alone = {job: server.ask(*job, tokens)[0] for job in jobs}
    distinct = [len({alone[name, prompt] for name in names}) for prompt in prompts]
    errors: list[str] = []
    differing: list[str] = []
    seconds: list[float] = []

    def client(number: int) -> None:
        own = random.Random(number)
        for _ in range(per_client):
            job = own.choice(jobs)
            began = time.monotonic()
            try:
                text, _ = server.ask(*job, tokens)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
                continue
            seconds.append(time.monotonic() - began)
            if text != alone[job]:
                differing.append(job[0])

    memory, wall = [server.memory_mib()], []
    for round_ in range(rounds):
        began = time.monotonic()
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(client, range(round_ * clients, (round_ + 1) * clients)))
        wall.append(time.monotonic() - began)
        memory.append(server.memory_mib())
        counted = f"{len(errors)} errors, {len(differing)} other replies"
        print(f"round {round_ + 1}: {wall[-1]:.0f} s, {counted}, {memory[-1]['total']:.0f} MiB", flush=True)
    totals = [one["total"] for one in memory]
    growth = totals[-1] / totals[len(totals) // 2] - 1
    ordered = sorted(seconds)
    return {
        "clients": clients,
        "requests": rounds * clients * per_client,
        "tokens_per_request": tokens,
        "models": list(names),
        "distinct_answers_per_prompt_median": statistics.median(distinct),
        "errors": len(errors),
        "first_errors": errors[:3],
        "replies_that_differ": len(differing),
        "requests_per_second": round(rounds * clients * per_client / sum(wall), 2),
        "latency_s": {p: round(ordered[int(len(ordered) * q)], 2) for p, q in (("p50", 0.5), ("p95", 0.95))},
        "memory_mib": [round(value) for value in totals],
        "memory_mib_by_process": {
            name: [round(one.get(name, 0)) for one in memory] for name in memory[-1] if name != "total"
        },
        "growth_of_last_half": round(growth, 4),
        "steady": growth < 0.01,
    }


def compare_speed(server: Server, prompts: Sequence[str], clients: int, rounds: int, tokens: int) -> dict[str, Any]:
    """Tokens per second of plain and gated adapter, all clients asking for one name at a time.

    Short answers cost more a token, as the prompt is read for fewer of them. vLLM is therefore made to give both as many.
    """
    speeds: dict[str, list[float]] = {"adapter": [], "gated": []}

    def turn(name: str) -> float:
        began = time.monotonic()
        with ThreadPoolExecutor(clients) as pool:
            made = sum(
                pool.map(lambda at: server.ask(name, prompts[at % len(prompts)], tokens, True)[1], range(clients))
            )
        return made / (time.monotonic() - began)

    for round_ in range(rounds):
        for name in sorted(speeds, reverse=bool(round_ % 2)):
            speeds[name].append(turn(name))
        print(f"speed round {round_ + 1}:", {name: round(found[-1], 1) for name, found in speeds.items()}, flush=True)
    ratios = [gated / plain for gated, plain in zip(speeds["gated"], speeds["adapter"])]
    return {
        "rounds": rounds,
        "tokens_per_second": {name: round(statistics.median(found), 1) for name, found in speeds.items()},
        "gated_to_adapter": {
            "median": round(statistics.median(ratios), 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
        },
    }


def processor() -> str:
    """What the machine calls its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--per-client", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--blocks", type=int, default=300)
    parser.add_argument("--port", type=int, default=18765)
    parser.add_argument("--prompts", type=int, default=20, help="different prompts")
    parser.add_argument("--gated", type=Path, help="gated folder to serve in place of random models")
    parser.add_argument("--base", type=Path, help="its base as a plain folder, where it is a GGUF file (vLLM)")
    parser.add_argument("--speed-rounds", type=int, default=0, help="turns of plain and gated adapter, afterwards")
    parser.add_argument("--models", nargs="+", choices=sorted({*NAMES, *REAL_NAMES}), help="ask only these")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = options.models or list(REAL_NAMES if options.gated else NAMES)
    draw = random.Random(0)
    prompts = [(word_problem if options.gated else random_words)(draw) for _ in range(options.prompts)]
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        gated, second = (options.gated, None) if options.gated else (make_models(place) / "gated", place / "second")
        server = Server(gated, second, options.port, options.blocks, options.base)
        try:
            found = measure(server, names, prompts, options.clients, options.rounds, options.per_client, options.tokens)
            if options.speed_rounds:
                found["throughput"] = compare_speed(
                    server, prompts, options.clients, options.speed_rounds, options.tokens
                )
        finally:
            server.stop()
    machine = f"{os.cpu_count()} {platform.machine()} CPU cores, {processor()}"
    record = {"engine": "vllm", "kv_cache_blocks": options.blocks, **found, "machine": machine}
    print(json.dumps(record, indent=2))
    if options.out:
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if found["errors"] or found["replies_that_differ"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
