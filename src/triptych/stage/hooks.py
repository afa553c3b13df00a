"""A stage's part of vLLM's worker: a mixin before one of vLLM's own, and what it hooks of the model runner.

Only the first model runner (V1) has the place where a forward pass can be seen; on a GPU it is chosen with
VLLM_USE_V2_MODEL_RUNNER=0, which the launcher sets. Private names: `triptych.engine.seams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from triptych.engine.seams import WORKER, SeamError, require
from triptych.scheduling.config import StageConfig, stage_config
from triptych.scheduling.output import Refused
from triptych.stage.model import GivesOutputs, Output, Row, Sampled, TakesInputs
from triptych.stage.outputs import StageAsyncOutput, attach, on_host
from triptych.stage.rows import Requests, placed

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Base
else:
    _Base = object


class StageHooks(_Base):  # type: ignore[misc]
    """Before vLLM's worker class. `stage` is there once the device is."""

    stage: StageStep

    def init_device(self) -> None:
        """As vLLM's. Raises SeamError where this vLLM, or its model runner, does not fit; ValueError for a wrong
        configuration of the stage."""
        require(WORKER)
        if self.use_v2_model_runner:
            raise SeamError(
                "a stage needs vLLM's first model runner: start the engine with VLLM_USE_V2_MODEL_RUNNER=0 "
                "in its environment"
            )
        config = stage_config(self.vllm_config.additional_config)
        if self.vllm_config.speculative_config is not None:
            raise ValueError("a stage samples one token of a request in a step: start it without speculative decoding")
        super().init_device()
        self.stage = StageStep(self.model_runner, config)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's. Raises SeamError where the model's embeddings would not be looked at."""
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        eager = self.vllm_config.model_config.enforce_eager
        embeds = runner.enable_prompt_embeds or runner.supports_mm_inputs
        if isinstance(runner.get_model(), TakesInputs) and not (eager or embeds):
            raise SeamError(
                f"{type(runner.get_model()).__name__} makes its own embeddings, and one that is compiled for tokens "
                "looks at none: start the engine with --enable-prompt-embeds, or with --enforce-eager"
            )

    def execute_model(self, scheduler_output: Any) -> Any:
        self.stage.begin(scheduler_output)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self.stage.end(super().sample_tokens(grammar_output))


class StageStep:
    """One step of a stage's model runner after the other: what the model is shown, and what it says."""

    def __init__(self, runner: Any, config: StageConfig) -> None:
        """Hooks the runner's forward pass."""
        self._runner = runner
        self._config = config
        self._requests = Requests()
        self._rows: Mapping[str, Row] = {}
        self._step: tuple[list[Row], torch.Tensor] | None = None
        self._forward = runner._model_forward
        runner._model_forward = self.forward

    @property
    def known(self) -> int:
        """How many requests something is kept of."""
        return len(self._requests)

    def begin(self, scheduler_output: Any) -> None:
        """A step is about to be executed."""
        self._step = None
        self._rows = self._requests.step(scheduler_output)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **more: Any,
    ) -> Any:
        """The forward pass, in place of the runner's."""
        rows = placed(self._rows, self._runner.input_batch.req_ids)
        model = self._runner.get_model()
        if rows and isinstance(model, TakesInputs):
            count = rows[-1].offset + rows[-1].length
            made = model.stage_inputs(
                rows, self._runner.input_ids.gpu[:count], None if inputs_embeds is None else inputs_embeds[:count]
            )
            if made is not None:
                input_ids, inputs_embeds = None, _in_place(made, input_ids, inputs_embeds)
        output = self._forward(
            input_ids=input_ids,
            positions=positions,
            intermediate_tensors=intermediate_tensors,
            inputs_embeds=inputs_embeds,
            **more,
        )
        hidden = output[0] if isinstance(output, tuple) else output
        if rows and isinstance(hidden, torch.Tensor):
            self._step = rows, hidden
        return output

    def end(self, output: Any) -> Any:
        """What the runner gives its scheduler, with what the model says beside it."""
        step, self._step = self._step, None
        if step is None:
            return output
        rows, hidden = step
        if isinstance(output, ModelRunnerOutput):
            said = self._said(rows, hidden, output.sampled_token_ids)
            if said is not None:
                attach(output, on_host(said), tokens=self._config.worker == "ar")
        elif isinstance(output, AsyncModelRunnerOutput):
            said = self._said(rows, hidden, self._runner.input_batch.prev_sampled_token_ids)
            if said is not None:
                copies = on_host(said, wait=False)
                copied = torch.Event()
                copied.record()
                return StageAsyncOutput(output, copies, copied.synchronize)
        return output

    def _said(self, rows: list[Row], hidden: torch.Tensor, sampled: Sampled) -> list[Output | Refused] | None:
        """One output for each row; None where this stage's model says nothing but tokens."""
        model = self._runner.get_model()
        said: list[Output]
        if isinstance(model, GivesOutputs):
            said = list(model.stage_outputs(rows, hidden, sampled))
        elif self._config.take == "hidden":
            said = [{"hidden": hidden[row.offset + row.length - 1 : row.offset + row.length]} for row in rows]
        elif self._config.worker == "generation":
            raise ValueError(f"{type(model).__name__} has no `stage_outputs`: a generation stage's model needs it")
        elif any(row.failure for row in rows):
            said = [None] * len(rows)
        else:
            return None
        return [
            Refused(row.failure) if row.failure else output if row.samples else None
            for row, output in zip(rows, said, strict=True)
        ]


def _in_place(made: torch.Tensor, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
    """The embeddings where the forward pass looks for them: in vLLM's own buffer, where it has one (captured graphs
    read no other), and as long as the batch is with its padding."""
    if inputs_embeds is not None:
        inputs_embeds[: made.shape[0]].copy_(made)
        return inputs_embeds
    padding = (0 if input_ids is None else input_ids.shape[0]) - made.shape[0]
    return made if padding <= 0 else torch.nn.functional.pad(made, (0, 0, 0, padding))
