"""An encoder-cache connector for vLLM that survives what its storage and its peers do.

    --ec-transfer-config '{"ec_connector": "TriptychECConnector", "ec_role": "ec_producer",
        "ec_connector_module_path": "triptych.engine.ec_connector",
        "ec_connector_extra_config": {"shared_storage_path": "/dev/shm/my-deployment"}}'

vLLM makes one object of the class in the scheduler's process and one in each worker. On a producer the worker publishes
each encoder output in the store and the scheduler announces, at the end of a request, those that are really there. On a
consumer the scheduler reads and verifies (see ec_intake), and the worker is handed the bytes: it opens no file.

The answer's `ec_transfer_params` has the form of vLLM's own ECExampleConnector.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver, collect_ec_item_metadata
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.request import RequestStatus

from triptych.engine.ec_format import item_key
from triptych.engine.ec_intake import Feature, Intake
from triptych.engine.ec_settings import EcSettings
from triptych.engine.ec_stats import EcPromMetrics, EcStats
from triptych.engine.ec_store import EcStore, Expected, Item, PublishRefused

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

# Below "vllm", where vLLM's log handlers are.
logger = init_logger(f"vllm.{__name__}")

# vLLM may look so many tokens beyond a step's own for what a drafter needs.
_LOOKAHEAD = 64
_ANSWERED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass
class StepMetadata(ECConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's connector tells the workers' in one step."""

    loads: dict[str, Item] = field(default_factory=dict)
    republish: tuple[str, ...] = ()


class TriptychECConnector(ECConnectorBase):  # type: ignore[misc]
    """See the module's text. Settings: triptych.engine.ec_settings."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        settings = EcSettings.parse(vllm_config.ec_transfer_config.ec_connector_extra_config)
        model = vllm_config.model_config
        if model.is_encoder_decoder:
            raise ValueError("TriptychECConnector does not serve encoder-decoder models")
        self._model = model
        self._dtype = str(model.dtype).removeprefix("torch.")
        self._width = settings.width
        self._store = EcStore(settings.shared_storage_path, _namespace(settings, model, self._dtype), settings.limits)
        if self.is_producer:
            removed = self._store.recover()
            if removed:
                logger.info("EC store: removed %d unfinished files of writers that are gone", removed)
        # The rest is the scheduler's.
        self._counters: Counter[str] = Counter()
        self._resolver = PlaceholderMetadataResolver(model)
        self._window = vllm_config.scheduler_config.max_num_batched_tokens + _LOOKAHEAD
        self._republish: set[str] = set()
        self._intake = Intake(
            self._store,
            wait_s=settings.wait_s,
            metadata_wait_s=settings.metadata_wait_s,
            counters=self._counters,
            logger=logger,
        )
        if role == ECConnectorRole.SCHEDULER:
            logger.info("EC store: %s (%s)", self._store.directory, vllm_config.ec_transfer_config.ec_role)

    def shutdown(self) -> None:
        """Let go of the store."""
        self._store.close()

    # Scheduler

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether the request can be scheduled now as far as encoder outputs go."""
        if self.is_producer:
            self._look_after(request, num_computed_tokens)
        if not self.is_consumer:
            return True
        count = len(request.mm_features)
        features = self._intake.features(request.request_id, count) or self._features(request)
        return self._intake.admit(
            request.request_id,
            features,
            preemptions=request.num_preemptions,
            computed=num_computed_tokens,
            window=self._window,
        )

    def has_cache_item(self, identifier: str) -> bool:
        """Whether vLLM has to load this item rather than encode it."""
        return self._intake.has(identifier)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """vLLM has reserved room in its encoder cache for an item, to be loaded or to be encoded."""
        self._intake.claim(request.request_id, request.mm_features[index].identifier)

    def take_unavailable_requests(self) -> set[str]:
        """Requests that have to fail: something they need is not to be had."""
        return self._intake.take_failed()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """What the workers have to do in this step."""
        republish = tuple(self._republish)
        self._republish.clear()
        return StepMetadata(self._intake.take_loads(scheduler_output.free_encoder_mm_hashes), republish)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended; on a producer, announce its items that are in the store."""
        self._intake.finish(request.request_id)
        if not self.is_producer or request.status not in _ANSWERED or not request.mm_features:
            return False, None
        items: dict[str, dict[str, Any]] = collect_ec_item_metadata(request.mm_features, self._resolver)
        announced = {identifier: entry for identifier, entry in items.items() if self._store.renew(identifier)}
        self._counters["announced/published"] += len(announced)
        if withheld := len(items) - len(announced):
            self._counters["announced/withheld"] += withheld
        usage = self._store.usage()
        self._counters["store_bytes"], self._counters["store_items"] = usage.bytes, usage.items
        self._counters["store_evicted_bytes"] = usage.evicted_bytes
        self._counters["store_evicted_items"] = usage.evicted_items
        return False, announced or None

    def get_ec_connector_stats(self) -> EcStats | None:
        """Counts since the last call."""
        if not self._counters:
            return None
        stats = EcStats(dict(self._counters))
        self._counters.clear()
        return stats

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> EcStats:
        """Counts as they arrive in the process that reports them."""
        return EcStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> EcPromMetrics:
        """The metrics that report them."""
        return EcPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _look_after(self, request: Request, computed: int) -> None:
        """An item that vLLM still has in its cache is not encoded again: have it published again if it is gone."""
        for feature in request.mm_features:
            position = feature.mm_position
            if position.offset + position.length > computed and not self._store.contains(feature.identifier):
                self._republish.add(feature.identifier)

    def _features(self, request: Request) -> Sequence[Feature]:
        return tuple(
            Feature(
                identifier=feature.identifier,
                start=feature.mm_position.offset,
                end=feature.mm_position.offset + feature.mm_position.length,
                expected=self._expected(feature),
                raw=self._has_media(feature),
            )
            for feature in request.mm_features
        )

    def _expected(self, feature: MultiModalFeatureSpec) -> Expected:
        width = self._width or _output_width(self._model, feature.modality)
        return Expected(feature.mm_position.get_num_embeds(), width, self._dtype)

    def _has_media(self, feature: MultiModalFeatureSpec) -> bool:
        """Whether a feature carries what the encoder needs, not only what sizes its place in the prompt."""
        if not feature.data:
            return False
        sizing = self._resolver.fields_for(feature.modality)
        return any(element.data is not None for name, element in feature.data.items() if name not in sizing)

    # Worker

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Put this step's items into the worker's cache."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        for identifier, item in metadata.loads.items():
            header = item.header
            rows = torch.frombuffer(item.payload, dtype=getattr(torch, header.dtype)).view(header.rows, header.width)
            if current_platform.device_type != "cpu":
                with gpu_sync_allowed():
                    rows = rows.to(_device())
            encoder_cache[identifier] = rows

    def start_save_caches(self, **kwargs: Any) -> None:
        """Publish again what the worker has and the store has lost."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        encoder_cache = kwargs["encoder_cache"]
        for identifier in metadata.republish:
            if identifier in encoder_cache:
                self._publish(identifier, encoder_cache[identifier])

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Publish an item that was just encoded. Never raises: what is not published is not announced."""
        if self.is_producer:
            self._publish(mm_hash, encoder_cache[mm_hash])

    def _publish(self, identifier: str, output: torch.Tensor) -> None:
        # Every tensor-parallel rank has the same rows.
        if get_tp_group().rank_in_group != 0:
            return
        name = item_key(identifier).hex()[:16]
        if output.dim() != 2:
            logger.warning("EC item %s not published: it has %d dimensions, not 2", name, output.dim())
            return
        with gpu_sync_allowed():
            # Consumers would convert to the model's type anyway, when they merge the rows into their embeddings.
            rows = output.detach().to(device="cpu", dtype=getattr(torch, self._dtype)).contiguous()
        count, width = rows.shape
        try:
            new = self._store.publish(
                identifier, self._dtype, count, width, memoryview(rows.view(torch.uint8).numpy()).cast("B")
            )
        except PublishRefused as error:
            logger.warning("EC item %s not published (%s)", name, error)
            return
        if new:
            logger.info("EC published: item %s, %d rows of %d, %d bytes", name, count, width, rows.nbytes)


def _namespace(settings: EcSettings, model: ModelConfig, dtype: str) -> str:
    """What keeps engines apart that cannot exchange items, however they are configured."""
    served = model.served_model_name
    name = settings.namespace or (served if isinstance(served, str) else served[0])
    return "\0".join((name, ",".join(model.architectures), dtype, str(model.get_inputs_embeds_size())))


def _output_width(model: ModelConfig, modality: str) -> int:
    """Values per row of encoder output: the model's width; vision encoders with deepstack add their levels to it."""
    width: int = model.get_inputs_embeds_size()
    if modality not in ("image", "video"):
        return width
    thinker = getattr(model.hf_config, "thinker_config", model.hf_config)
    levels = getattr(getattr(thinker, "vision_config", None), "deepstack_visual_indexes", None) or ()
    return width * (1 + len(levels))


def _device() -> torch.device:
    """The worker's own device: a bare device type would mean the first one."""
    return torch.device(current_platform.device_type, current_platform.current_device())
