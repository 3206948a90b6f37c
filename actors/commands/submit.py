"""`wan-tpu submit`: run a batch as a job of the cluster, which continues without this command and this machine."""

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
    JOBS_ADDRESS_HELP,
    MAX_IN_FLIGHT,
    add_cluster_arguments,
    add_drive_arguments,
    check_range,
)
from actors.commands.connection import find_jobs_address, is_emulated_here
from actors.commands.new_pipeline import read_checked_layout
from actors.errors import PipelineError
from cluster.connect import stay_on_loopback
from cluster.errors import ClusterNotFound
from cluster.layout import list_shipped
from wan_tpu.commands.importing import heavy_imports
from wan_tpu.commands.parser import Parser, as_words
from wan_tpu.errors import InvalidInput
from wan_tpu.progress import say
from wan_tpu.storage.addresses import FILE_FORMS
from wan_tpu.suggest import did_you_mean

FINAL_STATES = ("SUCCEEDED", "FAILED", "STOPPED")
# Seconds between two requests for a job's state. The pause doubles, up to the second value, while nothing changes.
POLL_S, LONGEST_PAUSE_S = 0.5, 15.0
SILENCE_S = 60.0  # After this time without output, the log is opened again; a driver writes far more often.
ANSWER_S = 30.0  # The time limit for an answer from the job server.
GIVE_UP_S = 600.0  # After this time without any answer, the command stops following the job.
# Options that aren't passed on to the driver: those that choose the cluster, those of this command, and the layout,
# which is passed on in another form.
_OWN_OPTIONS = ("address", "folder", "detach", "attach", "stop", "layout", "layout_text")

_EXAMPLES = """
wan-tpu submit --manifest requests.jsonl --output out --layout emulated-demo --model MODEL
wan-tpu submit --address http://HEAD:8265 --manifest gs://bucket/requests.jsonl --output gs://bucket/run-1
wan-tpu submit --attach JOB_ID
"""

T = TypeVar("T")


class NoAnswer(ClusterNotFound):
    """The job server doesn't answer, or answers with an error."""


class FollowerLost(PipelineError):
    """The job server didn't answer for so long that the job's outcome is unknown."""

    exit_code = 3


def submit(argv: Sequence[str]) -> int:
    """Submit a manifest to a cluster, as a job that outlives this command, and show the job's log until it ends."""
    parser = Parser(prog="wan-tpu submit", description=submit.__doc__, examples=_EXAMPLES)
    add_cluster_arguments(parser, JOBS_ADDRESS_HELP)
    group = parser.add_group("job").add_alternatives()
    group.add_argument("--detach", action="store_true", help="print the job's id and return at once")
    group.add_argument("--attach", metavar="JOB_ID", help="show the log of an earlier job, from its beginning")
    group.add_argument(
        "--stop", metavar="JOB_ID", help="stop a job; if you submit its manifest again, it continues where it stopped"
    )
    add_drive_arguments(parser, required=False)
    args = parser.parse_args(argv)
    if args.stop is None and args.attach is None:
        _check_batch(args)
        say("connecting to the cluster")  # Importing Ray takes seconds.
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


def _check_batch(args: argparse.Namespace) -> None:
    for name in ("manifest", "output"):
        if getattr(args, name) is None:
            raise InvalidInput(f"--{name} is missing; a new job needs --manifest and --output")
    check_range(args, "in_flight", 1, MAX_IN_FLIGHT)


def _submit(client: Any, args: argparse.Namespace, explicit: dict[str, Any]) -> str:
    job = f"wan-tpu-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    arguments = {name: value for name, value in explicit.items() if name not in _OWN_OPTIONS} | _describe_layout(args)
    # Only the emulated cluster sees this machine's files; a forwarded port may lead to another machine.
    is_local = is_emulated_here(args, urlsplit(client.get_address()).netloc)
    if is_local and "://" not in args.manifest and not Path(args.manifest).is_file():
        problem = "isn't a file" if Path(args.manifest).exists() else "doesn't exist"
        raise InvalidInput(f"--manifest {args.manifest} {problem}; give a file, {FILE_FORMS}")
    python = sys.executable if is_local else "python"
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
            raise FollowerLost(f"{error}; it is unknown whether job {job} was accepted. {_suggest_next(job)}") from None
    return job


def _describe_layout(args: argparse.Namespace) -> dict[str, str]:
    """Return the driver's argument for the layout: a shipped layout's name, or the text of a file of this machine."""
    layout = read_checked_layout(args)
    if layout is None:
        return {}
    if args.layout in list_shipped():
        return {"layout": args.layout}
    return {"layout_text": args.layout_text or Path(layout.source).read_text()}


def _connect(address: str) -> Any:
    """Return a client of the cluster's job server; raises `ClusterNotFound`."""
    stay_on_loopback(urlsplit(address).netloc)
    with heavy_imports():  # Ray reads settings at import, so the line above comes first.
        from ray.job_submission import JobSubmissionClient

    try:
        client = JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ClusterNotFound(
            f"no job server answers at {address} ({reason}); give the address of Ray's dashboard, usually "
            "http://host:8265 (or http://localhost:8265 through kubectl port-forward or ssh -L)"
        ) from None
    logging.getLogger("ray.dashboard.modules.job.sdk").setLevel(logging.ERROR)  # Creating the client sets it to INFO.
    return client


def _follow(client: Any, job: str) -> int:
    """Print a job's log as it grows; return the exit code of the job's driver.

    A broken connection is opened again, because only the job's state says how the job ended.

    Raises:
        InvalidInput: The job doesn't exist.
        FollowerLost: The job server hasn't answered for `GIVE_UP_S`.
        PipelineError: The driver was killed, or didn't start.
    """
    try:
        details = _watch(client, job)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # A second Ctrl-C would interrupt Ray's own shutdown.
        print(f"\ndetached; the job continues. {_suggest_next(job)}", file=sys.stderr)
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
                print(f"{error}; the job continues, and this command tries to reconnect", file=sys.stderr)
            elif time.monotonic() - silent_since > GIVE_UP_S:
                raise FollowerLost(f"{error}; gave up after {GIVE_UP_S:g} s. {_suggest_next(job)}") from None
        else:
            if silent_since is not None:
                silent_since = None
                print("reconnected", file=sys.stderr)
            if details.status.value in FINAL_STATES:
                if is_broken:  # Print the rest of the log.
                    asyncio.run(_print_log(client, job, position))
                return details
        is_stuck = position == before and (is_broken or silent_since is not None)
        pause = min(2 * pause, LONGEST_PAUSE_S) if is_stuck else POLL_S
        time.sleep(pause)


def _find_exit_code(details: Any, job: str) -> int:
    """Return the exit code of a job that has ended; raise `PipelineError` if its driver didn't exit with a code."""
    state, code = details.status.value, details.driver_exit_code
    if state == "SUCCEEDED":
        return 0
    if state == "STOPPED":
        print(f"job {job} was stopped", file=sys.stderr)
        return 130
    if code is None:
        raise PipelineError(f"job {job} failed: {(details.message or 'Ray gives no reason').strip().splitlines()[-1]}")
    if code < 0:
        name = signal.Signals(-code).name
        raise PipelineError(
            f"the driver of job {job} was killed ({name}); submit the manifest again to continue where it stopped"
        )
    return int(code)


async def _print_log(client: Any, job: str, position: int) -> tuple[int, bool]:
    """Print the log after its first `position` characters.

    Args:
        client: The client of the job server.
        job: The job's id.
        position: How many characters have already been printed.

    Returns:
        How many characters have been printed, and whether the connection broke before the end of the log.
    """
    import aiohttp

    length = 0
    pieces = client.tail_job_logs(job)
    try:
        while True:
            # A lost connection can't be told from a job that prints nothing, so after a while another one is opened.
            async with asyncio.timeout(SILENCE_S):
                piece = await anext(pieces)
            print(piece[max(position - length, 0) :], end="", flush=True)
            length += len(piece)
    except StopAsyncIteration:
        return max(length, position), False
    except (aiohttp.ClientError, OSError, RuntimeError):  # `TimeoutError` is an `OSError`.
        return max(length, position), True


def _suggest_next(job: str) -> str:
    return f"To follow it again: wan-tpu submit --attach {job}; to stop it: wan-tpu submit --stop {job}"


def _stop(client: Any, job: str) -> int:
    details = _read_details(client, job)
    if details.status.value not in FINAL_STATES:
        _ask(client, client.stop_job, job)
        while (details := _read_details(client, job)).status.value not in FINAL_STATES:
            time.sleep(POLL_S)
    print(f"job {job}: {details.status.value.lower()}")
    return 0


def _read_details(client: Any, job: str) -> Any:
    """Return a job's details.

    Raises:
        InvalidInput: The cluster has no such job.
        NoAnswer: The job server doesn't answer.
    """
    try:
        return _ask(client, client.get_job_info, job)
    except NoAnswer as error:
        known = sorted(str(each.submission_id) for each in _ask(client, client.list_jobs) if each.submission_id)
        if job not in known:
            raise InvalidInput(
                f"the cluster has no job {job!r}{did_you_mean(job, known)}; it has {', '.join(known) or 'no jobs'}"
            ) from None
        raise error


def _ask(client: Any, call: Callable[..., T], *args: Any, **keywords: Any) -> T:
    """Call a method of the client; raise `NoAnswer` if the call fails or takes longer than `ANSWER_S`."""
    import requests

    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call(*args, **keywords))
        except Exception as error:
            answer.set_exception(error)

    # Ray's client has no time-out of its own, so it runs in a thread that nothing waits for.
    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(ANSWER_S)
    except TimeoutError:
        reason = f"no response within {ANSWER_S:g} s"
    except (requests.RequestException, OSError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    raise NoAnswer(f"no answer from {client.get_address()} ({reason})")
