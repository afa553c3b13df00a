"""The one state of a request that vLLM does not have: it waits for its next chunk."""

from __future__ import annotations

from vllm.v1.request import RequestStatus

_NAME = "WAITING_FOR_CHUNK"
_VALUE = -1  # below PREEMPTED, so that `RequestStatus.is_finished` is false


def register_status() -> RequestStatus:
    """Give vLLM's `RequestStatus` the member WAITING_FOR_CHUNK, once; every stage does this when it is built.

    vLLM's own scheduler never meets it: such requests are outside its queues. Raises RuntimeError where another
    package has taken the name or the value for something else.
    """
    members = RequestStatus.__members__
    if _NAME in members:
        member = members[_NAME]
        if RequestStatus.is_finished(member):
            raise RuntimeError(f"RequestStatus.{_NAME} is there already, with a value that means finished")
        return member
    if _VALUE in RequestStatus._value2member_map_:
        raise RuntimeError(f"RequestStatus has another member with the value {_VALUE}")
    member = int.__new__(RequestStatus, _VALUE)
    member._name_ = _NAME
    member._value_ = _VALUE
    RequestStatus._member_names_.append(_NAME)
    RequestStatus._member_map_[_NAME] = member
    RequestStatus._value2member_map_[_VALUE] = member
    type.__setattr__(RequestStatus, _NAME, member)
    return member
