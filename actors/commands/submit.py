"""`wan-tpu submit`: a batch as a job of the cluster, which goes on when this command or this machine goes away."""

import argparse
import asyncio
import logging
import shlex
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from actors.commands.arguments import (
    add_cluster_arguments,
    add_drive_arguments,
    find_jobs_address,
    is_here,
    read_checked_layout,
)
from actors.errors import PipelineError
from cluster.connect import stay_on_loopback
from cluster.errors import ClusterNotFound
from cluster.layout import list_shipped
from wan_tpu.commands.parser import Parser, as_words
from wan_tpu.errors import InvalidInput

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
POLL_S, LONGEST_PAUSE_S = 0.5, 15.0  # Seconds between two looks at a job, growing while there is no answer.
SILENCE_S = 60.0  # A log that is silent for this long is opened again; a driver writes far more often.
ANSWER_S = 30.0  # The job server has this long to answer one question.
GIVE_UP_S = 600.0  # Following a job ends after this long without an answer.
# Options that the driver doesn't get: those that choose the cluster, those of this command, and the layout, which it
# gets in another form.
_OWN_OPTIONS = ("address", "folder", "detach", "attach", "stop", "layout", "layout_text")

T = TypeVar("T")


class NoAnswer(ClusterNotFound):
    """The job server doesn't answer now."""


class FollowerLost(PipelineError):
    """The connection to a job was lost for long, so how the job ends isn't known here."""

    exit_code = 3


def submit(argv: Sequence[str]) -> int:
    """Have a cluster make every video of a manifest, as a job that outlives this command, and follow it."""
    parser = Parser(prog="wan-tpu submit", description=submit.__doc__)
    add_cluster_arguments(parser, 'of what takes jobs, "http://host:8265"')
    group = parser.add_argument_group("job")
    group.add_argument("--detach", action="store_true", help="return at once, with the job's id on stdout")
    group.add_argument("--attach", metavar="JOB_ID", help="follow a job that was submitted before, from its start")
    group.add_argument("--stop", metavar="JOB_ID", help="end a job; run again, it goes on where it was")
    add_drive_arguments(parser, required=False)
    args = parser.parse_args(argv)
    client = _connect(find_jobs_address(args))
    if args.stop is not None:
        return _stop(client, args.stop)
    if args.attach is not None:
        return _follow(client, args.attach)
    job = _submit(client, args, parser.non_defaults(args))
    if args.detach:
        print(job)
        return 0
    print(f"job {job}; Ctrl-C leaves it running", file=sys.stderr)
    return _follow(client, job)


def _submit(client: Any, args: argparse.Namespace, explicit: dict[str, Any]) -> str:
    for name in ("manifest", "output"):
        if getattr(args, name) is None:
            raise InvalidInput(f"--{name} is missing; see wan-tpu submit --help")
    job = f"wan-tpu-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    arguments = {name: value for name, value in explicit.items() if name not in _OWN_OPTIONS} | _describe_layout(args)
    # A cluster behind a forwarded port doesn't have this machine's paths.
    here = is_here(args, urlsplit(client.get_address()).netloc)
    if here and "://" not in args.manifest and not Path(args.manifest).is_file():
        raise InvalidInput(f"--manifest {args.manifest} isn't there; give a file, gs://bucket/name or s3://bucket/name")
    python = sys.executable if here else "python"
    command = ["exec", python, "-m", "actors.cli", "drive", *as_words(arguments)]
    metadata = {"manifest": args.manifest, "output": args.output}
    try:
        _ask(client, client.submit_job, entrypoint=shlex.join(command), submission_id=job, metadata=metadata)
    except NoAnswer as error:
        try:
            _read_details(client, job)  # The job was accepted, and only the answer was lost.
        except InvalidInput:
            raise error from None
        except NoAnswer:
            raise FollowerLost(f"{error}; whether job {job} was taken isn't known. {_explain_return(job)}") from None
    return job


def _describe_layout(args: argparse.Namespace) -> dict[str, str]:
    """Return the layout as the cluster can read it: a name, or the text of a file that it may not have."""
    layout = read_checked_layout(args)
    if layout is None:
        return {}
    if args.layout in list_shipped():
        return {"layout": args.layout}
    return {"layout_text": args.layout_text or Path(layout.source).read_text()}


def _connect(address: str) -> Any:
    """Return a client of the cluster's job server; raises `ClusterNotFound`."""
    stay_on_loopback(urlsplit(address).netloc)
    from ray.job_submission import JobSubmissionClient  # After the line above, because Ray reads settings at import.

    try:
        client = JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ClusterNotFound(
            f"nothing takes jobs at {address} ({reason}); give the dashboard's address, http://host:8265 where it is "
            "as usual (behind kubectl port-forward or ssh -L if need be)"
        ) from None
    logging.getLogger("ray.dashboard.modules.job.sdk").setLevel(logging.ERROR)  # The client has just set it.
    return client


def _follow(client: Any, job: str) -> int:
    """Print a job's log as it comes; return the exit code of its driver.

    A connection that breaks is opened again, because only the job's state says how it ended.

    Raises:
        InvalidInput: The job doesn't exist.
    """
    try:
        details = _watch(client, job)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # A second Ctrl-C would interrupt Ray's own shutdown.
        print(f"\ndetached; the job goes on. {_explain_return(job)}", file=sys.stderr)
        return 130
    return _find_exit_code(details, job)


def _watch(client: Any, job: str) -> Any:
    """Print a job's log until it has ended, and return its details; raises `FollowerLost`."""
    position, pause, silent_since = 0, POLL_S, None
    while True:
        before = position
        position, is_broken = asyncio.run(_print_log(client, job, position))
        try:
            details = _read_details(client, job)
        except NoAnswer as error:
            if silent_since is None:
                silent_since = time.monotonic()
                print(f"{error}; the job goes on, and this tries again", file=sys.stderr)
            elif time.monotonic() - silent_since > GIVE_UP_S:
                raise FollowerLost(f"{error}; given up after {GIVE_UP_S:g} s. {_explain_return(job)}") from None
        else:
            if silent_since is not None:
                silent_since = None
                print("connected again", file=sys.stderr)
            if details.status.value in ENDED:
                if is_broken:  # Before the end of the log.
                    asyncio.run(_print_log(client, job, position))
                return details
        is_stuck = position == before and (is_broken or silent_since is not None)
        pause = min(2 * pause, LONGEST_PAUSE_S) if is_stuck else POLL_S
        time.sleep(pause)


def _find_exit_code(details: Any, job: str) -> int:
    """Return the exit code of a job that has ended; raise `PipelineError` where its driver has none."""
    state, code = details.status.value, details.driver_exit_code
    if state == "SUCCEEDED":
        return 0
    if state == "STOPPED":
        print(f"job {job} was stopped", file=sys.stderr)
        return 130
    if code is None:
        raise PipelineError(f"job {job} failed: {(details.message or 'no reason given').strip().splitlines()[-1]}")
    if code < 0:
        name = signal.Signals(-code).name
        raise PipelineError(f"job {job}: its driver was killed ({name}); submitted again, it goes on")
    return int(code)


async def _print_log(client: Any, job: str, position: int) -> tuple[int, bool]:
    """Print the log after its first `position` characters; return its length, and whether it broke off."""
    import aiohttp

    at = 0
    pieces = client.tail_job_logs(job)
    try:
        while True:
            # A connection that has gone silently looks like a job that is silent, so it is opened again.
            async with asyncio.timeout(SILENCE_S):
                piece = await anext(pieces)
            new = piece[max(position - at, 0) :]
            at += len(piece)
            print(new, end="", flush=True)
    except StopAsyncIteration:
        return max(at, position), False
    except (aiohttp.ClientError, OSError, RuntimeError):  # `TimeoutError` is an `OSError`.
        return max(at, position), True


def _explain_return(job: str) -> str:
    return f"Again: wan-tpu submit --attach {job}; end it: --stop {job}"


def _stop(client: Any, job: str) -> int:
    details = _read_details(client, job)
    if details.status.value not in ENDED:
        _ask(client, client.stop_job, job)
        while (details := _read_details(client, job)).status.value not in ENDED:
            time.sleep(POLL_S)
    print(f"job {job}: {details.status.value.lower()}")
    return 0


def _read_details(client: Any, job: str) -> Any:
    """Return a job's details; raise `InvalidInput` where the cluster doesn't know it, or `NoAnswer`."""
    try:
        return _ask(client, client.get_job_info, job)
    except NoAnswer as error:
        known = sorted(str(each.submission_id) for each in _ask(client, client.list_jobs) if each.submission_id)
        if job not in known:
            raise InvalidInput(f"the cluster knows no job {job!r}; it knows {', '.join(known) or 'none'}") from None
        raise error


def _ask(client: Any, call: Callable[..., T], *args: Any, **keywords: Any) -> T:
    """Return the cluster's answer; raise `NoAnswer` when that fails, or takes too long."""
    import requests

    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call(*args, **keywords))
        except Exception as error:
            answer.set_exception(error)

    # Nobody waits for this thread, because Ray's client has no time-out of its own.
    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(ANSWER_S)
    except TimeoutError:
        reason = f"nothing within {ANSWER_S:g} s"
    except (requests.RequestException, OSError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    raise NoAnswer(f"no answer from {client.get_address()} ({reason})")
