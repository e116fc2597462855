"""Requests in vLLM's front end, without vLLM: strengths, refusals, folders written anew, and the log."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import loragate as lg
from loragate.errors import LoragateError
from loragate.serving import frontend, hooks
from tiny import tiny_adapter, tiny_base


def finished(coroutine: Any) -> Any:
    """What a coroutine that waits for nothing returns."""
    with pytest.raises(StopIteration) as caught:
        coroutine.send(None)
    return caught.value.value


def adapter(name: str, path: str) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=1, lora_path=path)


def server(**served: str) -> Any:
    """A server of {name: path}, and what vLLM's own look-up of a model says there."""
    models = SimpleNamespace(lora_requests={name: adapter(name, path) for name, path in served.items()})
    return SimpleNamespace(models=models, create_error_response=lambda message, param: (message, param))


def asked(model: str, **fields: Any) -> Any:
    """A request as vLLM's protocol holds it: what it knows is a field, the rest lies in `model_extra`."""
    return SimpleNamespace(
        model=model, temperature=0.5, vllm_xargs=fields.pop("vllm_xargs", None), model_extra={"unknown": 1, **fields}
    )


def found(model: str, **fields: Any) -> Any:
    request = asked(model, **fields)
    look_up = lambda self, request: self.models.lora_requests.get(request.model)  # noqa: E731
    one = frontend.find_adapter(look_up, server(gated="/g", calm="/g@unit"), request)
    for left in (request.model_extra, request.vllm_xargs or {}):
        assert not any(name.startswith("lora_") for name in left), "what is applied is not applied twice"
    return one and (one.lora_name, one.lora_path)


def test_the_strength_of_a_request_stands_behind_its_folder() -> None:
    assert found("gated", lora_scale=0.6) == ("gated", "/g@constant=0.6")
    assert found("gated", vllm_xargs={"lora_scale": -2, "other": 1}) == ("gated", "/g@constant=-2.0")
    assert found("gated", lora_gates="unit") == ("gated", "/g@unit")
    assert found("gated@clip=:1") == ("gated@clip=:1", "/g@clip=:1")
    assert found("gated") == ("gated", "/g")
    assert found("calm") == ("calm", "/g@unit")
    assert found("base") is None
    for path, limits in (("/g", (-math.inf, math.inf)), ("/g@constant=0.6", (0.6, 0.6)), ("/g@unit", (0.0, 1.0))):
        assert hooks.limits_of(path) == limits


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("gated", {"lora_scale": "0.6"}, "finite number, found '0.6'"),
        ("gated", {"lora_scale": True}, "finite number, found True"),
        ("gated", {"lora_scale": math.nan}, "finite number, found nan"),
        ("gated", {"lora_scale": 10**400}, "finite number, found 1000"),
        ("gated", {"lora_scale": 1e39}, "finite number, found 1e"),
        ("gated", {"vllm_xargs": {"lora_scale": [1]}}, r"finite number, found \[1\]"),
        ("gated", {"lora_gates": "constant=1e39"}, "takes finite numbers"),
        ("gated", {"lora_gates": "unti"}, "did you mean 'unit'"),
        ("gated", {"lora_gates": 0.5}, "takes the name of an override"),
        ("gated", {"lora_scale": 1, "lora_gates": "unit"}, "two overrides of λ"),
        ("gated", {"lora_scales": 1}, "did you mean 'lora_scale'"),
        ("gated", {"lora_scale": 1, "vllm_xargs": {"lora_scale": 2}}, "carries an override"),
        ("gated@unit", {"lora_scale": 1}, "gated@unit carries an override of λ in its name"),
        ("calm", {"lora_scale": 1}, "calm carries an override of λ in its name"),
        ("base", {"lora_scale": 1}, "base: no adapter is asked for"),
    ],
)
def test_a_strength_that_cannot_be_is_a_bad_request(model: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        found(model, **fields)


def test_names_with_an_override_are_served_without_being_loaded() -> None:
    async def unknown(self: Any, request: Any) -> str:
        return "404"

    def told(name: str) -> Any:
        return finished(frontend.check_model(unknown, server(gated="/g", calm="/g@unit"), SimpleNamespace(model=name)))

    assert told("gated@constant=0.5") is None
    assert "did you mean 'unit'" in told("gated@unti")[0]
    assert "carries an override of λ already" in told("calm@off")[0]
    for name in ("gated", "other@unit", "base@unit", None):
        assert told(name) == "404", "vLLM's own answer"


def test_a_card_is_shown_of_what_would_be_answered() -> None:
    """And of no strength of a base, nor of an adapter whose name has one: `loragate verify` finds out by it."""
    pytest.importorskip("fastapi")
    one = server(gated="/g", calm="/g@unit").models

    class Card(SimpleNamespace):
        def model_dump(self) -> dict[str, Any]:
            return vars(self)

    async def show_available_models() -> Any:
        return SimpleNamespace(data=[Card(id=name, root="/") for name in ("base", "gated", "calm")])

    one.show_available_models = show_available_models
    routes: dict[str, Any] = {}
    router = SimpleNamespace(get=lambda path, **_: functools.partial(routes.__setitem__, path))
    frontend.add_routes(router)
    (show,) = routes.values()
    raw = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(openai_serving_models=one)))
    answers = {name: finished(show(name, raw)) for name in ("gated", "gated@unit", "base@unit", "calm@off", "gatde")}
    assert [reply.status_code for reply in answers.values()] == [200, 200, 404, 400, 404]
    assert b"calm carries an override of" in answers["calm@off"].body
    assert b"did you mean 'gated'?; served are base, gated, calm" in answers["gatde"].body


def test_an_unknown_model_is_answered_with_the_adapters_that_are_served() -> None:
    """vLLM's own answer lists the base alone."""
    error = SimpleNamespace(code=404, message="Valid aliases: base.")

    async def unknown(self: Any, request: Any) -> Any:
        return SimpleNamespace(error=error)

    one = server(gated="/g", calm="/g@unit")
    one.models.base_model_paths = [SimpleNamespace(name="base")]
    finished(frontend.check_model(unknown, one, SimpleNamespace(model="gatde")))
    assert error.message == "The model `gatde` does not exist; did you mean 'gated'?; served are base, gated, calm"


def test_what_a_stream_cannot_be_given_is_refused_before_its_status(saved: Path) -> None:
    """A generator that fails has said 200 already."""

    async def served(self: Any, request: Any) -> None:
        return None

    def told(model: str, engine: Any, **fields: Any) -> Any:
        one = server(plain=str(saved / "adapter"), gated=str(saved / "gated"))
        one.engine_client = engine
        return finished(frontend.check_model(served, one, SimpleNamespace(**{**vars(asked(model)), **fields})))

    for model in ("plain@unit", "gated@no_such=0.5"):
        assert told(model, Engine(), stream=False) is None, "the error of the request itself"
        message, param = told(model, Engine(), stream=True)
        assert param == "model"
        assert "has no gates" in message or "no_such" in message
    assert told("plain", Engine(refuse=True), stream=True)[0] == "another base"
    assert (
        told("plain", None, stream=True, model_extra={"lora_scale": "x"})[0]
        == "lora_scale takes a finite number, found 'x'"
    )
    engine = Engine()
    assert told("gated@constant=0.5", engine, stream=True) is None
    assert len(engine.added) == 1


def test_all_strengths_of_a_folder_have_one_number() -> None:
    engine = SimpleNamespace()
    numbers = []

    async def add(self: Any, lora_request: Any) -> bool:
        numbers.append(lora_request.lora_int_id)
        return True

    for number, path in enumerate(("/g", "/p", "/g@unit", "/g@constant=0.5", "/p@constant=2.0", "/p@lower=0.5"), 1):
        request = SimpleNamespace(lora_name=path, lora_int_id=number, lora_path=path)
        assert finished(frontend.add_adapter(add, engine, request))
    assert [numbers.index(one) for one in numbers] == [0, 1, 0, 0, 1, 5], (
        "a constant for a part is in the slot, and not laid over it"
    )
    assert all(2**30 <= one < 2**31 for one in numbers)


def test_a_scale_that_does_not_reach_the_whole_adapter_is_refused(tmp_path: Path) -> None:
    """Its zero would not be the base: gates on some modules; an adapted head, embedding or expert. Names are what they say."""
    for name, modules, kept in (
        ("some", ["q_proj", "v_proj"], ["v_proj"]),
        ("whole", ["q_proj", "v_proj"], None),
        ("head", ["q_proj", "lm_head"], None),
        ("embedding", ["q_proj", "embed_tokens"], None),
    ):
        model = tiny_adapter(base=tiny_base(tie_word_embeddings=name in ("some", "whole")), target_modules=modules)
        model.save_pretrained(tmp_path / f"plain-{name}")
        lg.save_gates(lg.attach_gates(model, lg.GateConfig(-1, 2, target_modules=kept)), tmp_path / name, base_id="b")
    # an adapter on experts that are linear layers of their own, which vLLM fuses into a layer without λ
    weights = shutil.copytree(tmp_path / "plain-some", tmp_path / "plain-experts") / "adapter_model.safetensors"
    save_file({key.replace("v_proj", "experts.0.v_proj"): one for key, one in load_file(weights).items()}, weights)
    for name, reached in (
        ("some", False),
        ("plain-some", True),
        ("whole", True),
        ("head", False),
        ("plain-head", False),
        ("embedding", False),
        ("plain-embedding", False),
        ("plain-experts", False),
    ):
        request = adapter(name, str(tmp_path / name))
        if reached:
            assert frontend.apply_strength_fields(request, {"lora_scale": 0.5}, name).lora_path.endswith(
                "@constant=0.5"
            )
        else:
            with pytest.raises(ValueError, match=r"does not reach [12] of the adapter's modules"):
                frontend.apply_strength_fields(request, {"lora_scale": 0.5}, name)
    assert frontend.apply_strength_fields(adapter("some", str(tmp_path / "some")), {"lora_gates": "unit"}, "some")


def test_no_strength_is_laid_over_the_adapter_of_an_encoder_of_pictures() -> None:
    """It has a batch of its own, and what it makes is kept for all requests with the adapter's name."""
    checked = []
    for towers, path, refused in (
        (False, "/p@constant=0.5", False),
        (True, "/p", False),
        (True, "/p@mlp=0.5", False),
        (True, "/p@constant=0.5", True),
        (True, "/p@unit", True),
    ):
        engine = SimpleNamespace(lora_config=SimpleNamespace(enable_tower_connector_lora=towers))
        call = functools.partial(frontend.validate_request, lambda self, one: checked.append(one), engine)
        if refused:
            with pytest.raises(ValueError, match="--enable-tower-connector-lora"):
                call(adapter("p", path))
        else:
            call(adapter("p", path))
    assert len(checked) == 5, "vLLM's own check comes first"


def test_other_gates_under_a_served_name_and_folder_are_refused() -> None:
    owner = SimpleNamespace()
    one, elsewhere = (SimpleNamespace(lora_name="math", lora_path=path) for path in ("/adapters/math", "/adapters/2"))
    for request, digest in ((one, "one"), (one, "one"), (elsewhere, "two")):
        frontend.require_unchanged(owner, request, digest)
    with pytest.raises(LoragateError, match="changed since it was served as 'math'"):
        frontend.require_unchanged(owner, one, "two")


def test_a_folder_written_anew_has_another_number_and_name(saved: Path, tmp_path: Path) -> None:
    place = shutil.copytree(saved / "gated", tmp_path / "moving")

    def number(name: str, path: str) -> tuple[str, int]:
        found = frontend.assign_adapter_id(adapter(name, path))
        return found.lora_name, found.lora_int_id

    first, other = number("moving", str(place)), number("other", str(saved / "adapter"))
    # by folder and files alone: an API server that saw no earlier state of the folder gives it the same name
    assert [name for name, _ in (first, other)] == [f"moving#{first[1]}", f"other#{other[1]}"]
    seen = {first[1], other[1]}
    for _ in range(2):
        record = place / "gate_config.json"
        record.write_text(record.read_text() + "\n")
        name, anew = number("moving", str(place))
        assert name == f"moving#{anew}"
        assert anew not in seen
        assert number("moving", f"{place}@unit") == (name, anew), "and for all that is laid over its λ"
        seen.add(anew)
    assert number("other", str(saved / "adapter")) == other


def test_what_is_kept_of_folders_written_anew_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend, "KEPT", 3)
    engine = Engine()
    for number in range(9):
        finished(engine.add_lora(adapter("m", f"/m{number}")))
        frontend.require_unchanged(engine, adapter("m", f"/m{number}"), "digest")
    assert len(engine._loragate_loaded) == len(engine._loragate_digests) == 3


def test_a_new_strength_by_name_reads_no_folder_again(saved: Path) -> None:
    processor, place = SimpleNamespace(lora_config=SimpleNamespace(enable_tower_connector_lora=False)), saved / "gated"
    for strength in ("0.5", "0.51", "0.52"):
        name = f"gated@constant={strength}"
        frontend.check_adapter(processor, adapter(name, f"{place}@constant={strength}"))
    assert [key[0] for key in processor._loragate_checked] == ["gated"]
    assert list(processor._loragate_digests) == [("gated", str(place))]


class Engine:
    """What `answer` takes of vLLM's AsyncLLM."""

    errored = False
    model_config = SimpleNamespace(served_model_name="base")

    def __init__(self, refuse: bool = False) -> None:
        self.added: list[Any] = []
        self.refuse = refuse
        self.input_processor = SimpleNamespace(lora_config=SimpleNamespace(enable_tower_connector_lora=False))

    async def add_lora(self, lora_request: Any) -> bool:
        if self.refuse:
            raise Exception("Call to add_lora method failed: another base")
        return await frontend.add_adapter(self.add, self, lora_request)

    @staticmethod
    async def add(self: Any, lora_request: Any) -> bool:
        self.added.append(lora_request)
        return True


async def collect(stream: AsyncGenerator[Any, None], into: list[Any]) -> None:
    async for one in stream:
        into.append(one)


@pytest.mark.parametrize("kind", ["DELTA", "FINAL_ONLY"])
def test_the_log_has_a_line_for_each_request(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(self: Any, prompt: Any, sampling_params: Any, request_id: str, *, lora_request: Any) -> Any:
        for tokens in ([5], [6, 7]) if kind == "DELTA" else ([5, 6, 7],):
            outputs = [SimpleNamespace(token_ids=tokens), SimpleNamespace(token_ids=tokens)]
            yield SimpleNamespace(outputs=outputs, prompt_token_ids=[1] * 9, num_cached_tokens=4, finished=True)

    lines: list[str] = []
    monkeypatch.setattr(frontend.log, "info", lambda text, *values: lines.append(text % values))
    engine = Engine()
    sampling = SimpleNamespace(temperature=1.0, output_kind=SimpleNamespace(name=kind))
    for one in (adapter("math", "/m@constant=0.5"), adapter("math", "/m"), None):
        finished(collect(frontend.answer(answer, engine, "p", sampling, "r1", lora_request=one), []))
    told = "9 prompt tokens (4 cached), 6 tokens, 0.00 s"
    assert lines == [
        f"request r1: model base, adapter math, strength constant=0.5, {told}",
        f"request r1: model base, adapter math, strength as it is, {told}",
        f"request r1: model base, adapter none, strength none, {told}",
    ]
    assert len(engine.added) == 1, "loaded once, before its first request"
    with pytest.raises(ValueError, match=r"^another base$"):
        finished(
            collect(frontend.answer(answer, Engine(True), "p", sampling, "r2", lora_request=adapter("m", "/m")), [])
        )


def test_what_is_embedded_is_loaded_as_what_is_generated() -> None:
    """A part of an adapter has a slot of its own there too: under one number, the slot would be that of either."""

    async def answer(self: Any, prompt: Any, pooling_params: Any, request_id: str, *, lora_request: Any) -> Any:
        yield lora_request and lora_request.lora_int_id

    engine, numbers = Engine(), list[Any]()
    for one in (adapter("p", "/p"), adapter("p@mlp=0.0", "/p@mlp=0.0"), adapter("p", "/p@constant=0.5"), None):
        finished(collect(frontend.answer(answer, engine, "p", None, "r1", lora_request=one), numbers))
    assert numbers[0] == numbers[2] != numbers[1]
    assert numbers[3] is None
    assert [one.lora_int_id for one in engine.added] == numbers[:2]


def test_a_clip_of_a_plain_adapter_is_refused_before_vllm_takes_the_request(saved: Path) -> None:
    async def taken(self: Any, prompt: Any, sampling_params: Any, request_id: str, lora_request: Any) -> Any:
        yield pytest.fail("taken")

    for override in ("unit", "constant=0.5"):
        request = adapter("plain", f"{saved / 'adapter'}@{override}")
        stream = frontend.answer(taken, Engine(), "p", SimpleNamespace(temperature=1.0), "r1", lora_request=request)
        with (
            pytest.raises(ValueError, match="has no gates")
            if override == "unit"
            else pytest.raises(pytest.fail.Exception)
        ):
            finished(collect(stream, []))


def test_what_an_engine_refuses_to_load_has_the_client_s_name() -> None:
    async def absent(self: Any, lora_request: Any) -> bool:
        raise Exception(f"Loading lora {lora_request.lora_name} failed: No adapter found for {lora_request.lora_path}")

    with pytest.raises(RuntimeError, match=r"^Loading lora m failed: No adapter found for /m$"):
        frontend.add_adapter(absent, SimpleNamespace(), adapter("m", "/m")).send(None)


def test_what_an_engine_refuses_to_load_is_the_client_s_error() -> None:
    async def loaded(self: Any, request: Any) -> Any:
        return SimpleNamespace(error=SimpleNamespace(code=500, type="InternalServerError", message=message))

    message = "Call to add_lora method failed: schema version 99"
    for errored, told in (
        (False, (400, "BadRequestError", "schema version 99")),
        (True, (500, "InternalServerError", message)),
    ):
        served = SimpleNamespace(engine_client=SimpleNamespace(errored=errored))
        error = finished(frontend.load_adapter(loaded, served, None)).error
        assert (error.code, error.type, error.message) == told
    message = "Call to add_lora method failed: Worker failed with error 'no 'x'', please check the stack trace above for the cause"
    assert frontend._reason(message) == "no 'x'"
