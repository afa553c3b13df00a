"""The hooks in a worker's model runner, with a runner of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from tests.stage.test_rows import new, step
from triptych.engine.seams import SeamError
from triptych.scheduling.config import StageConfig
from triptych.scheduling.output import Refused
from triptych.stage.hooks import StageHooks, StageStep

WIDTH = 2


class Runner:
    """As much of vLLM's model runner as a stage touches."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.input_batch = SimpleNamespace(req_ids=["a", "b"], prev_sampled_token_ids=torch.tensor([[7], [8]]))
        self.input_ids = SimpleNamespace(gpu=torch.arange(16))
        self.fed: dict[str, Any] = {}

    def get_model(self) -> Any:
        return self.model

    def _model_forward(self, **fed: Any) -> torch.Tensor:
        self.fed = fed
        return torch.arange(8.0).reshape(4, WIDTH)


class Feeling:
    """A model that sees chunks."""

    def stage_inputs(self, rows: Any, input_ids: torch.Tensor, inputs_embeds: Any) -> torch.Tensor:
        self.rows = rows
        return torch.ones(len(input_ids), WIDTH)


class Speaking:
    """A model that says more than tokens."""

    def stage_outputs(self, rows: Any, hidden: torch.Tensor, sampled: Any) -> Any:
        self.sampled = sampled
        return [{"codes": {"audio": hidden[row.offset : row.offset + row.length]}} for row in rows]


def output(tokens: list[list[int]]) -> ModelRunnerOutput:
    return ModelRunnerOutput(req_ids=["a", "b"], req_id_to_index={"a": 0, "b": 1}, sampled_token_ids=tokens)


def made(model: Any, **config: Any) -> tuple[Runner, StageStep]:
    runner = Runner(model)
    return runner, StageStep(runner, StageConfig(id=1, role="both", processor="x:y", **config))


def run(stage: StageStep, runner: Runner, result: Any, *, embeds: torch.Tensor | None = None) -> Any:
    stage.begin(step([new("a", 3), new("b", 1)], a=3, b=1))
    runner._model_forward(input_ids=None if embeds is not None else torch.arange(4), inputs_embeds=embeds)
    return stage.end(result)


def test_a_stock_model_gives_the_hidden_state_that_each_token_was_sampled_from() -> None:
    runner, stage = made(object(), take="hidden")
    said = run(stage, runner, output([[1], [2]])).pooler_output
    assert [each["hidden"].tolist() for each in said] == [[[4.0, 5.0]], [[6.0, 7.0]]]
    assert runner.fed["input_ids"].tolist() == [0, 1, 2, 3]


def test_a_stock_model_of_a_stage_that_takes_nothing_is_left_alone() -> None:
    runner, stage = made(object())
    assert run(stage, runner, output([[1], [2]])).pooler_output is None


def test_a_model_that_sees_chunks_feeds_embeddings_as_long_as_the_padded_batch() -> None:
    model = Feeling()
    runner, stage = made(model)
    stage.begin(step([new("a", 3, chunk={"x": 1}), new("b", 1)], a=3, b=1))
    runner._model_forward(input_ids=torch.arange(6))
    assert runner.fed["input_ids"] is None
    assert runner.fed["inputs_embeds"].tolist() == [[1.0, 1.0]] * 4 + [[0.0, 0.0]] * 2
    assert [row.information for row in model.rows] == [{"x": 1}, None]


def test_embeddings_go_into_vllms_own_buffer_where_it_has_one() -> None:
    buffer = torch.zeros(6, WIDTH)
    runner, stage = made(Feeling())
    run(stage, runner, output([[1], [2]]), embeds=buffer)
    assert runner.fed["inputs_embeds"] is buffer
    assert buffer.tolist() == [[1.0, 1.0]] * 4 + [[0.0, 0.0]] * 2


def test_what_a_model_says_is_a_copy_and_has_the_order_of_the_requests() -> None:
    model = Speaking()
    runner, stage = made(model)
    said = run(stage, runner, output([[1], [2]])).pooler_output
    assert said[0]["codes"]["audio"].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert said[1]["codes"]["audio"].tolist() == [[6.0, 7.0]]
    assert model.sampled == [[1], [2]]


def test_a_request_whose_prompt_is_not_through_says_nothing_yet() -> None:
    runner, stage = made(Speaking())
    stage.begin(step([new("a", 9), new("b", 1)], a=3, b=1))
    runner._model_forward(input_ids=torch.arange(4))
    assert [each is None for each in stage.end(output([[], [2]])).pooler_output] == [True, False]


def test_a_generation_stage_samples_no_tokens() -> None:
    runner, stage = made(Speaking(), worker="generation")
    assert run(stage, runner, output([[1], [2]])).sampled_token_ids == [[], []]


def test_a_generation_stage_whose_model_says_nothing_is_named() -> None:
    runner, stage = made(object(), worker="generation")
    with pytest.raises(ValueError, match="object has no `stage_outputs`"):
        run(stage, runner, output([[1], [2]]))


def test_outputs_that_are_not_one_for_each_request_are_refused() -> None:
    class Short:
        def stage_outputs(self, rows: Any, hidden: Any, sampled: Any) -> Any:
            return [None]

    runner, stage = made(Short())
    with pytest.raises(ValueError):
        run(stage, runner, output([[1], [2]]))


def test_a_request_whose_chunk_cannot_be_used_fails_alone() -> None:
    class Picky(Speaking):
        def stage_inputs(self, rows: Any, input_ids: torch.Tensor, inputs_embeds: Any) -> None:
            rows[0].fail("too wide")
            rows[0].fail("and too long")

    runner, stage = made(Picky())
    said = run(stage, runner, output([[1], [2]])).pooler_output
    assert said[0] == Refused("too wide")
    assert said[1]["codes"]["audio"].tolist() == [[6.0, 7.0]]


def test_a_model_that_says_nothing_else_can_refuse_too() -> None:
    class Mute:
        def stage_inputs(self, rows: Any, input_ids: torch.Tensor, inputs_embeds: Any) -> None:
            rows[1].fail("no")

    runner, stage = made(Mute())
    assert run(stage, runner, output([[1], [2]])).pooler_output == [None, Refused("no")]


def test_a_step_without_a_forward_pass_leaves_the_output_as_it_is() -> None:
    runner, stage = made(Speaking())
    run(stage, runner, output([[1], [2]]))
    stage.begin(step(finished={"a", "b"}))
    empty = output([])
    assert stage.end(empty) is empty
    assert empty.pooler_output is None
    assert stage.known == 0


class Later(AsyncModelRunnerOutput):  # type: ignore[misc]
    def __init__(self, whole: Callable[[], ModelRunnerOutput]) -> None:
        self._whole = whole

    def get_output(self) -> ModelRunnerOutput:
        return self._whole()


def test_with_asynchronous_scheduling_the_output_comes_with_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    event = SimpleNamespace(record=lambda: waited.append("recorded"), synchronize=lambda: waited.append("waited"))
    monkeypatch.setattr(torch, "Event", lambda: event)
    model = Speaking()
    runner, stage = made(model)
    later = run(stage, runner, Later(lambda: output([[7], [8]])))
    assert waited == ["recorded"]
    whole = later.get_output()
    assert waited == ["recorded", "waited"]
    assert model.sampled.tolist() == [[7], [8]]
    assert whole.sampled_token_ids == [[7], [8]]
    assert whole.pooler_output[1]["codes"]["audio"].tolist() == [[6.0, 7.0]]


def test_the_newer_model_runner_is_refused_with_what_to_do() -> None:
    class Worker(StageHooks):
        def __init__(self) -> None:
            self.use_v2_model_runner = True

    with pytest.raises(SeamError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        Worker().init_device()


class FakeBase:
    """In the place of vLLM's worker, behind the hooks."""

    def __init__(self, model: Any, *, eager: bool = False, embeds: bool = False, speculative: Any = None) -> None:
        self.use_v2_model_runner = False
        config = {"stage": {"id": 1, "role": "receiver"}}
        self.vllm_config = SimpleNamespace(
            additional_config=config,
            speculative_config=speculative,
            model_config=SimpleNamespace(enforce_eager=eager),
        )
        self.model_runner = Runner(model)
        self.model_runner.enable_prompt_embeds = embeds  # type: ignore[attr-defined]
        self.model_runner.supports_mm_inputs = False  # type: ignore[attr-defined]

    def init_device(self) -> None:
        pass

    def load_model(self) -> None:
        pass


class Worker(StageHooks, FakeBase):
    """Of a test."""


@pytest.mark.parametrize("options", [{"eager": True}, {"embeds": True}])
def test_a_model_with_embeddings_of_its_own_starts_where_they_are_looked_at(options: dict[str, bool]) -> None:
    Worker(Feeling(), **options).load_model()


def test_elsewhere_it_is_refused_with_what_to_do() -> None:
    with pytest.raises(SeamError, match="--enable-prompt-embeds"):
        Worker(Feeling()).load_model()
    Worker(object()).load_model()


def test_speculative_decoding_is_refused() -> None:
    with pytest.raises(ValueError, match="without speculative decoding"):
        Worker(object(), speculative=object()).init_device()
    Worker(object()).init_device()
