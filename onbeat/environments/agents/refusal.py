"""An error that an agent's client is answered, in the form of OpenAI's interface."""

from __future__ import annotations

import msgspec


class Refusal(Exception):
    """`code` is one of the codes below, which docs/environments.md lists.

    unsupported          a field or a value that the policy's sampling has no place for; param names it
    invalid              a body that is none of the endpoint's; param names the field
    body_too_large       a body beyond the limit
    too_many_requests    more requests of an agent, or larger ones, than may wait for their turn
    invalid_api_key      a key that no session has
    session_ended        the session is over: the trajectory has its turns, or the agent has returned
    rewritten_history    the request isn't what was told before, and something new
    model_not_found      a model other than the policy
    not_found            a path that the door doesn't serve
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "unsupported", param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> bytes:
        error = {"message": self.message, "type": "invalid_request_error", "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})
