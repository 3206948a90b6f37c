"""For `actors.api.http.proxy_limits`."""

from actors.api.core.receiving import Bodies as Bodies
from actors.api.core.receiving import IncomingRequest as IncomingRequest
