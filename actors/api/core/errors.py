"""The error of a request that is refused, with its HTTP status."""

from collections.abc import Mapping
from types import MappingProxyType


class HttpError(Exception):
    """An error answer for cases without an exception of their own."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        after_s: int | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        again = {} if after_s is None else {"Retry-After": str(after_s)}
        self.status, self.code, self.param, self.headers = status, code, param, again | dict(headers)
