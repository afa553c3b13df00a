"""Doubles of what a processor is called with: the adapter's state and options, and a request."""

from __future__ import annotations

from typing import Any


class Connector:
    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config


class Adapter:
    """What of the adapter a processor touches: its state by external id, and the connector's options."""

    def __init__(self, **options: int) -> None:
        self.request_payload: dict[str, Any] = {}
        self.connector = Connector({"extra": options})

    def cleanup_sender(self, external_req_id: str) -> None:
        self.request_payload.pop(external_req_id, None)


class Request:
    def __init__(self, external_req_id: str = "ext", *, resumable: bool = True, information: Any = None) -> None:
        self.external_req_id = external_req_id
        self.resumable = resumable
        self.additional_information = information
        self.model_intermediate_buffer: Any = None
