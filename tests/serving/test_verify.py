"""`loragate verify` passes an honest server and catches each planted fault."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from served_fake import FakeServer, running

import loragate as lg
from loragate.cli.main import main
from loragate.errors import ConfigError, LoragateError
from loragate.serving.settings import VerifySettings
from loragate.serving.verify.checks import Checks, Prompts
from loragate.serving.verify.endpoint import Endpoint
from loragate.serving.verify.llama_cpp import LlamaCpp
from loragate.serving.verify.served import Answer, Prompt, Step, Target, compare_answers
from tiny import shake, tiny_adapter, tiny_base, tiny_tokenizer, write_adapter, write_base

ENOUGH = ("--prompts", "1", "--tokens", "4", "--dtype", "float32", "--json")


@pytest.fixture(scope="module")
def served(once):
    """A folder with base/ of one layer, adapter/ and other/ on it, and gated/."""

    def fill(root):
        base = tiny_base(num_hidden_layers=1)
        write_base(root / "base", base)
        model = lg.attach_gates(
            write_adapter(root / "adapter", root / "base", tiny_adapter(base=base)), lg.GateConfig(-3, 2)
        )
        lg.save_gates(shake(model, 0.5), root / "gated", adapter_source=root / "adapter", base_id=str(root / "base"))
        write_adapter(root / "other", root / "base", tiny_adapter(7, tiny_base(num_hidden_layers=1)))

    return once("served", fill)


@pytest.fixture(scope="module")
def folders(served):
    """(adapter, another adapter) on one base."""
    return served / "adapter", served / "other"


def verify(capsys, url, adapter, *more):
    """(exit status, {check: verdict}, checks) of a run."""
    capsys.readouterr()
    status = main(["verify", str(adapter), "--endpoint", url, *ENOUGH, *map(str, more)])
    record = json.loads(capsys.readouterr().out)
    verdicts = {}
    for one in record["checks"]:  # a check of several models fails where one of them does
        if verdicts.get(one["name"]) != "FAILS":
            verdicts[one["name"]] = one["verdict"]
    return status, verdicts, record["checks"]


@pytest.mark.parametrize("dialect", ["vllm", "llama"])
def test_an_honest_server_passes(dialect, folders, capsys):
    adapter, other = folders
    with running(FakeServer(adapter, {"other": other}, dialect=dialect)) as url:
        status, verdicts, checks = verify(capsys, url, adapter, "--adapters", f"other={other}")
    assert set(verdicts.values()) == {"passes", "–"}, checks
    assert status == 0
    labels = {"base", "adapter", "other", "adapter at 0", "adapter at 0.5", "adapter at 1"}
    parity = [one for one in checks if one["name"].startswith("parity")]
    assert {one["of"] for one in parity} == labels
    assert all(one["figure"] < 1e-5 for one in parity)


@pytest.mark.parametrize("more", [{"target_modules": ["q_proj", "embed_tokens"]}, {"trainable_token_indices": [2, 3]}])
def test_an_adapter_of_the_embeddings_is_checked(more, served, tmp_path, capsys):
    adapter = tiny_adapter(base=tiny_base(num_hidden_layers=1), **more)
    write_adapter(tmp_path / "adapter", served / "base", adapter)
    with running(FakeServer(tmp_path / "adapter")) as url:
        status, _, checks = verify(capsys, url, tmp_path / "adapter")
    parity = {one["of"]: one["verdict"] for one in checks if one["name"].startswith("parity")}
    assert parity["adapter"] == "passes", checks
    assert status == 0


@pytest.mark.parametrize("fault", ["", "field ignored"])
def test_strengths_as_a_field_of_the_request(fault, folders, capsys):
    adapter, _ = folders
    with running(FakeServer(adapter, fault=fault)) as url:
        status, verdicts, checks = verify(capsys, url, adapter, "--strength-by", "lora_scale")
    assert status == int(bool(fault)), checks
    assert {one["of"] for one in checks if one["name"].startswith("parity")} >= {"adapter at 0", "adapter at 0.5"}
    failed = {name for name, verdict in verdicts.items() if verdict == "FAILS"}
    assert failed == (
        {"parity with transformers", "zero is the base", "isolation: with transformers"} if fault else set()
    )


def test_a_server_of_the_bare_standard_is_read_by_its_text(folders, capsys):
    adapter, _ = folders
    with running(FakeServer(adapter, dialect="plain")) as url:
        status, verdicts, checks = verify(capsys, url, adapter)
    assert verdicts["parity with transformers"] == verdicts["mixed batch"] == verdicts["chat template"] == "passes", (
        checks
    )
    assert verdicts["zero is the base"] == "not measured"
    assert status == 0


@pytest.mark.parametrize(
    ("fault", "caught_by"),
    [
        ("template, does not stop, last adapter in a batch", {"chat template", "stop tokens", "mixed batch"}),
        ("adapter ignored", {"parity with transformers", "isolation: with transformers"}),
        ("zero is not zero", {"parity with transformers", "zero is the base", "isolation: with transformers"}),
        ("cache over strengths", {"isolation: with transformers"}),
        ("cache over adapters", {"isolation: with transformers"}),
    ],
)
def test_a_planted_fault_is_caught(fault, caught_by, folders, capsys):
    adapter, _ = folders
    with running(FakeServer(adapter, fault=fault)) as url:
        status, verdicts, checks = verify(capsys, url, adapter)
    failed = {name for name, verdict in verdicts.items() if verdict == "FAILS"}
    assert failed == caught_by, checks
    assert status == 1


@pytest.mark.parametrize(("fault", "dialect"), [("no log-probs", "plain"), ("leaves tokens out", "llama")])
def test_a_server_without_log_probs_proves_nothing(fault, dialect, folders, capsys):
    adapter, _ = folders
    with running(FakeServer(adapter, fault=fault, dialect=dialect)) as url:
        status, verdicts, checks = verify(capsys, url, adapter)
    assert verdicts.pop("chat template") == verdicts.pop("stop tokens") == "passes"  # which need none
    assert set(verdicts.values()) == {"not measured"}, checks
    assert status == 1
    with running(FakeServer(adapter, fault="no log-probs", dialect="plain")) as url:
        assert main(["verify", str(adapter), "--endpoint", url, *ENOUGH[:-1]]) == 1
    assert "the adapter was not compared" in capsys.readouterr().out


def given(reply, place, value):
    """The reply with another value at the end of a path of keys."""
    *path, last = place
    at = reply
    for key in path:
        at = at[key]
    at[last] = value
    return reply


LOGPROBS = "choices", 0, "logprobs"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((*LOGPROBS, "token_logprobs"), ["-1.0x"] * 60, "another form than OpenAI's (ValueError: could not convert"),
        ((*LOGPROBS, "token_logprobs"), [math.nan] * 60, "is nan)"),
        (LOGPROBS, [-1.0], "another form than OpenAI's (AttributeError"),
        ((*LOGPROBS, "tokens"), ["token_id:99999"] * 60, "base answered with token 99999, and the base here has"),
        (("usage", "completion_tokens"), "none", "another form than OpenAI's (TypeError"),
        (("choices",), [], "another form than OpenAI's (IndexError"),
        (("error",), {"message": "overloaded"}, "answered with an error, or no object: '{"),
    ],
)
def test_a_reply_of_another_form_is_an_error_in_a_sentence(place, value, message, folders, fails, monkeypatch):
    adapter, _ = folders
    server = FakeServer(adapter)
    honest = server.complete
    monkeypatch.setattr(server, "complete", lambda body: given(honest(body), place, value))
    with running(server) as url:
        said = fails("verify", adapter, "--endpoint", url, *ENOUGH, status=1)
    assert message in said
    assert "a fault of loragate" not in said


def test_a_server_that_breaks_off_or_lists_no_model_is_told(folders, fails, monkeypatch):
    adapter, _ = folders
    server = FakeServer(adapter, fault="breaks off")
    with running(server) as url:
        assert "broke off its answer" in fails("verify", adapter, "--endpoint", url, *ENOUGH, status=1)
        monkeypatch.setattr(server, "answer", lambda path, body: {"data": None})
        assert "lists no model" in fails("verify", adapter, "--endpoint", url, *ENOUGH, status=1)


def test_a_server_that_counts_no_tokens_does_not_fail_for_it(folders, capsys, monkeypatch):
    adapter, _ = folders
    server = FakeServer(adapter, dialect="plain")
    honest = server.answer
    silent = {"choices": [{}], "usage": None}
    monkeypatch.setattr(server, "answer", lambda path, body: silent if "chat" in path else honest(path, body))
    with running(server) as url:
        status, verdicts, _ = verify(capsys, url, adapter)
    assert (status, verdicts["chat template"]) == (0, "not measured")


def test_an_empty_list_that_leaves_adapters_on_is_caught(folders, capsys):
    adapter, _ = folders
    with running(FakeServer(adapter, fault="empty list is full strength", dialect="llama")) as url:
        status, verdicts, checks = verify(capsys, url, adapter)
    assert verdicts["zero is the base"] == verdicts["parity with transformers"] == "FAILS"
    (base,) = [one for one in checks if one["name"].startswith("parity") and one["of"] == "base"]
    assert base["note"] == "nearer to adapter"
    assert status == 1


def test_a_gated_adapter_and_its_override(served, capsys):
    with running(FakeServer(served / "gated")) as url:
        status, verdicts, _ = verify(capsys, url, served / "gated", "--served-adapter", "adapter")
        assert status == 0
        assert verdicts["one is the adapter"] == "not measured"
        status, verdicts, _ = verify(capsys, url, f"{served / 'gated'}@unit", "--served-adapter", "adapter")
    assert status == 1
    assert verdicts["parity with transformers"] == "FAILS"


def test_zero_is_not_the_base_where_no_strength_reaches(served, tmp_path, capsys):
    """An adapted head, and what a gated adapter leaves ungated, keep full strength, as the documentation says."""
    head = tiny_adapter(
        base=tiny_base(num_hidden_layers=1, tie_word_embeddings=False), target_modules=["q_proj", "lm_head"]
    )
    write_base(tmp_path / "base", tiny_base(num_hidden_layers=1, tie_word_embeddings=False))
    write_adapter(tmp_path / "head", tmp_path / "base", head)
    partly = write_adapter(tmp_path / "plain", served / "base", tiny_adapter(base=tiny_base(num_hidden_layers=1)))
    lg.attach_gates(partly, lg.GateConfig(-3, 2, target_modules=["q_proj"]))
    lg.save_gates(shake(partly), tmp_path / "partly", base_id=str(served / "base"))
    for name, module in (("head", "lm_head"), ("partly", "self_attn.k_proj")):
        with running(FakeServer(tmp_path / name)) as url:
            status, verdicts, checks = verify(capsys, url, tmp_path / name, "--served-adapter", "adapter")
        assert verdicts["zero is the base"] == "not measured", checks
        (zero,) = [one for one in checks if one["name"] == "zero is the base"]
        assert "no strength reaches" in zero["note"]
        assert module in zero["note"]
        assert status == 0, checks


def test_table_and_record(folders, capsys, tmp_path):
    adapter, _ = folders
    with running(FakeServer(adapter, fault="does not stop")) as url:
        call = ["verify", str(adapter), "--endpoint", url, *ENOUGH[:-1], "--out", str(tmp_path / "out")]
        assert main([*call, "--limit", "1e-12"]) == 1
        shown = capsys.readouterr().out
        assert "vLLM 0.0-fake serving" in shown
        assert "it goes on after '<eos>' (1)" in shown
        assert shown.strip().endswith("FAILS: stop tokens, parity with transformers, isolation: with transformers")
    record = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert record["runtime"] == "vLLM 0.0-fake"
    assert record["passes"] is False
    assert {one["limit"] for one in record["checks"] if one["unit"] == "nats"} == {1e-12, None}


def test_what_cannot_be_checked_is_refused(folders, served, fails):
    adapter, _ = folders
    assert "either --endpoint URL or --llama-cpp" in fails("verify", adapter)
    assert "is no adapter" in fails("verify", served / "base", "--endpoint", "http://127.0.0.1:1/v1")
    assert "does not answer" in fails("verify", adapter, "--endpoint", "http://127.0.0.1:1/v1", status=1)
    assert "does not answer (nonnumeric port" in fails(
        "verify", adapter, "--endpoint", "http://127.0.0.1:1a/v1", status=1
    )
    assert "--lora has no effect" in fails("verify", adapter, "--endpoint", "http://127.0.0.1:1", "--lora", "a.gguf")
    assert "--adapters has no effect" in fails("verify", adapter, "--llama-cpp", "b.gguf", "--adapters", "a=b")
    by = ("--strength-by", "lora_scale")
    assert "--strength-by has no effect" in fails("verify", adapter, "--llama-cpp", "b.gguf", *by)
    if importlib.util.find_spec("llama_cpp") is None:
        assert "pip install llama-cpp-python" in fails("verify", adapter, "--llama-cpp", "base.gguf")
    assert "expected a URL" in fails("verify", adapter, "--endpoint", "localhost:8000")
    with running(FakeServer(adapter)) as url:
        assert "serves no model 'mine', it serves base, adapter" in fails(
            "verify", adapter, "--endpoint", url, "--served-adapter", "mine"
        )
        assert "--adapters other=…" in fails("verify", adapter, "--endpoint", url, "--adapters", f"other={adapter}")


def test_answers_are_compared_up_to_where_they_part():
    def answer(*steps):
        return Answer(tuple(Step(token, top[token], top) for token, top in steps), None)

    near, far = {"a": -0.7, "b": -0.7001}, {"a": -0.1, "b": -3.0}
    swapped = {"a": -0.7001, "b": -0.7}
    tie = compare_answers(answer(("a", near), ("c", {"c": -1.0})), answer(("b", swapped), ("d", {"d": -2.0})))
    assert tie.has_diverged
    assert tie.largest == pytest.approx(1e-4)
    assert compare_answers(answer(("a", far)), answer(("b", swapped))).largest == pytest.approx(2.3)
    assert compare_answers(answer(), answer()) is None
    assert compare_answers(answer(("a", {"a": -1.0})), answer(("b", {"b": -1.0}))).largest == float("inf")


def test_noise_of_a_batch_that_is_no_rounding_excuses_nothing():
    class Restless:
        targets, parallel, calls = (Target("base"), Target("adapter")), True, 0

        def complete(self, target, prompt, tokens, **how):
            self.calls += 1
            return Answer((Step("a", -float(self.calls), {}),), None)

    prompts = Prompts(tiny_tokenizer(), 64, 4)
    settings = VerifySettings(adapter="x", dtype="bfloat16", prompts=1, tokens=4)
    checks = Checks(Restless(), prompts, lambda served: {}, settings)
    assert [one.verdict for one in checks.batches()] == ["FAILS", "FAILS"]


def fake_library(llama):
    """llama-cpp-python with this class of models."""
    library = ModuleType("llama_cpp")
    library.Llama, library.__version__ = llama, "0.0-fake"
    library.__spec__ = importlib.util.spec_from_loader("llama_cpp", loader=None)
    return library


@pytest.mark.parametrize("fault", ["", "scale ignored"])
def test_llama_cpp_in_this_process(fault, served, monkeypatch, tmp_path, capsys):
    models = FakeServer(served / "adapter")

    class Llama:
        """What is used of llama-cpp-python's class."""

        def __init__(self, model_path, *, n_ctx, logits_all, verbose, lora_path=None, lora_scale=1.0):
            assert logits_all
            self.n_ctx = n_ctx
            self.target = (None, None) if lora_path is None else ("adapter", None if fault else lora_scale)

        def generate(self, tokens, temp, repeat_penalty):
            own = list(tokens)
            assert len(own) + 4 <= self.n_ctx
            while True:
                with models.acting(*self.target) as model:
                    self.scores = model(torch.tensor([own])).logits[0].numpy()
                self.n_tokens = len(own)
                own.append(int(np.argmax(self.scores[-1])))
                yield own[-1]

        def create_completion(self, prompt, max_tokens, temperature, logit_bias):
            assert set(logit_bias) == {models.tokenizer.eos_token_id}
            return {"choices": [{"finish_reason": "stop"}], "usage": {"completion_tokens": 1}}

        def create_chat_completion(self, messages, max_tokens, temperature):
            return {"usage": {"prompt_tokens": len(models.chat_ids(messages))}}

    monkeypatch.setitem(sys.modules, "llama_cpp", fake_library(Llama))
    files = [tmp_path / "base.gguf", tmp_path / "adapter.gguf"]
    call = ["verify", str(served / "adapter"), *ENOUGH, "--llama-cpp", str(files[0]), "--lora", str(files[1])]
    assert main(call) == 2
    for path in files:
        path.touch()
    capsys.readouterr()
    assert main(call) == int(bool(fault))
    checks = json.loads(capsys.readouterr().out)["checks"]
    failed = {(one["name"], one["of"]) for one in checks if one["verdict"] == "FAILS"}
    parity = {("parity with transformers", f"adapter at {strength}") for strength in ("0", "0.5")}
    assert failed >= parity if fault else not failed
    assert ("zero is the base", "adapter at 0") in failed or not fault
    other_base = [one["name"] for one in checks if "if it holds that base in fewer bits" in one["note"]]
    assert other_base == ["parity with transformers"] * bool(fault)


class Pieces:
    """A tokenizer that reads back more tokens than it was asked to write: each token is a piece of several characters."""

    all_special_ids = ()

    def __init__(self, piece):
        self.piece = piece

    def __len__(self):
        return 1000

    def decode(self, ids):
        return "".join(self.piece for _ in ids)

    def __call__(self, text):
        return {"input_ids": [ord(character) for character in text]}


@pytest.mark.parametrize("piece", [" ab", "ab"])
def test_a_prompt_is_read_back_as_no_more_tokens_than_were_asked_for(piece):
    tokenizer = Pieces(piece)
    for tokens in (40, 272):
        prompt = Prompts(tokenizer, 1 << 20, 24).draw(tokens)
        assert tokens - 3 <= len(prompt.ids) <= tokens
        assert tokenizer(prompt.text)["input_ids"] == list(prompt.ids)


def test_what_llama_cpp_refuses_while_it_generates_is_an_error_in_a_sentence(monkeypatch, tmp_path):
    class Llama:
        def __init__(self, path, **how):
            pass

        def generate(self, ids, **how):
            raise RuntimeError("llama_decode returned 1")

        def create_completion(self, ids, **how):
            raise ValueError("Requested tokens (305) exceed context window of 304")

    monkeypatch.setitem(sys.modules, "llama_cpp", fake_library(Llama))
    for name in ("base.gguf", "adapter.gguf"):
        (tmp_path / name).touch()
    runtime = LlamaCpp(VerifySettings(adapter="x", llama_cpp=f"{tmp_path}/base.gguf", lora=f"{tmp_path}/adapter.gguf"))
    for how, said in (({}, "llama_decode returned 1"), ({"forced": 3}, "exceed context window")):
        with pytest.raises(LoragateError, match=rf"base\.gguf on a prompt of 2 tokens \(.*{said}"):
            runtime.complete(Target("base"), Prompt((5, 6), "a b"), 4, **how)


def test_adapters_of_llama_server_are_told_apart_by_their_ids():
    """Exports are all called alike, each in a folder of its own; which one is meant is asked for, not guessed."""
    endpoint = Endpoint.__new__(Endpoint)
    endpoint.url = "http://x"
    files = [{"id": 0, "path": "a/adapter.gguf"}, {"id": 1, "path": "b/adapter.gguf"}]
    by = {"0": "0", "1": "1", "a/adapter.gguf": "0"}
    assert {
        asked: endpoint._adapter_ids(VerifySettings(adapter="b/adapter", served_adapter=asked), files, [])["adapter"]
        for asked in by
    } == by
    with pytest.raises(ConfigError, match=r"several LoRA files called adapter, it has a/adapter.gguf \(id 0\), b/"):
        endpoint._adapter_ids(VerifySettings(adapter="b/adapter"), files, [])
    with pytest.raises(ConfigError, match=r"no LoRA file called other, it has .*; name one by its id with --adapters"):
        endpoint._adapter_ids(VerifySettings(adapter="b", served_adapter="1"), files, ["other"])
    assert endpoint._adapter_ids(VerifySettings(adapter="whatever"), files[:1], []) == {"base": "", "adapter": "0"}
