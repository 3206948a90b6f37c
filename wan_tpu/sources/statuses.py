"""Classify HTTP statuses by whose fault they are: the caller's or the server's."""

_TRY_AGAIN = {408, 429}  # Time-outs and "too many requests": below 500, but caused by a busy server.
_NOT_IMPLEMENTED = 501  # Above 500, but the server will never do it.


def is_refusal(status: int) -> bool:
    """Return whether a status says that the request itself is wrong, and would be refused again."""
    return (400 <= status < 500 and status not in _TRY_AGAIN) or status == _NOT_IMPLEMENTED
