"""`wan-tpu submit`: a batch as a job of the cluster. It goes on when this command, or this machine, goes away."""

import argparse
import asyncio
import logging
import shlex
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from actors.commands.arguments import add_cluster_arguments, add_drive_arguments, checked_layout, is_here, jobs_address
from actors.errors import PipelineError
from cluster.connect import stay_on_loopback
from cluster.errors import ClusterNotFound
from cluster.layout import shipped
from wan_tpu.commands.parser import Parser, words
from wan_tpu.errors import InvalidInput

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
POLL_S = 0.5
# What isn't the driver's: which cluster it is, what this command does with the job, and the layout, which is looked at.
_OWN = ("address", "folder", "detach", "attach", "stop", "layout", "layout_text")


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
    client = _client(jobs_address(args))
    if args.stop is not None:
        return _stop(client, args.stop)
    if args.attach is not None:
        return _follow(client, args.attach)
    job = _submit(client, args, parser.given(args))
    if args.detach:
        print(job)
        return 0
    print(f"job {job}; Ctrl-C leaves it running", file=sys.stderr)
    return _follow(client, job)


def _submit(client: Any, args: argparse.Namespace, given: dict[str, Any]) -> str:
    for name in ("manifest", "output"):
        if getattr(args, name) is None:
            raise InvalidInput(f"--{name} is missing; see wan-tpu submit --help")
    job = f"wan-tpu-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    given = {name: value for name, value in given.items() if name not in _OWN} | _layout(args)
    # A cluster behind a port that is forwarded to here has no such path.
    python = sys.executable if is_here(args, urlsplit(client.get_address()).netloc) else "python"
    command = ["exec", python, "-m", "actors.cli", "drive", *words(given)]
    client.submit_job(
        entrypoint=shlex.join(command), submission_id=job, metadata={"manifest": args.manifest, "output": args.output}
    )
    return job


def _layout(args: argparse.Namespace) -> dict[str, str]:
    """Return the layout as the cluster can read it: by name, or the text of a file, which it may not have."""
    layout = checked_layout(args)
    if layout is None:
        return {}
    if args.layout in shipped():
        return {"layout": args.layout}
    return {"layout_text": args.layout_text or Path(layout.source).read_text()}


def _client(address: str) -> Any:
    """Return what talks to the cluster's job server; raises `ClusterNotFound`."""
    stay_on_loopback(urlsplit(address).netloc)
    from ray.job_submission import JobSubmissionClient  # after the line above: Ray reads its settings at import

    try:
        client = JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ClusterNotFound(
            f"nothing takes jobs at {address} ({reason}); give the dashboard's address, http://host:8265 where it is "
            "as usual (behind kubectl port-forward or ssh -L if need be)"
        ) from None
    logging.getLogger("ray.dashboard.modules.job.sdk").setLevel(logging.ERROR)  # which the line above has set
    return client


def _follow(client: Any, job: str) -> int:
    """Print a job's log as it comes; return the exit code of what it ran."""
    _status(client, job)
    try:
        shown = 0
        while True:
            shown = asyncio.run(_print_log(client, job, shown))
            if (state := _status(client, job)) in ENDED:
                break
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would interrupt Ray's own end
        print(
            f"\ndetached; the job goes on. Again: wan-tpu submit --attach {job}; end it: --stop {job}", file=sys.stderr
        )
        return 130
    details = client.get_job_info(job)
    if state == "SUCCEEDED":
        return 0
    code = details.driver_exit_code
    if state == "STOPPED":
        print(f"job {job} was stopped", file=sys.stderr)
        return 130
    if code is None:
        raise PipelineError(f"job {job} failed: {(details.message or 'no reason given').strip().splitlines()[-1]}")
    if code < 0:
        name = signal.Signals(-code).name
        raise PipelineError(f"job {job}: its driver was killed ({name}); submitted again, it goes on")
    return code


async def _print_log(client: Any, job: str, shown: int) -> int:
    """Print the log but for the first `shown` characters, to its end or the end of the connection."""
    at = 0
    try:
        async for piece in client.tail_job_logs(job):
            new = piece[max(shown - at, 0) :]
            at += len(piece)
            print(new, end="", flush=True)
    except RuntimeError:  # the connection broke: the job is asked after again
        pass
    return max(at, shown)


def _stop(client: Any, job: str) -> int:
    if _status(client, job) not in ENDED:
        client.stop_job(job)
        while _status(client, job) not in ENDED:
            time.sleep(POLL_S)
    print(f"job {job}: {_status(client, job).lower()}")
    return 0


def _status(client: Any, job: str) -> str:
    try:
        return client.get_job_status(job).value
    except RuntimeError as error:
        known = sorted(str(found.submission_id) for found in client.list_jobs() if found.submission_id)
        if job not in known:
            raise InvalidInput(f"the cluster knows no job {job!r}; it knows {', '.join(known) or 'none'}") from None
        raise ClusterNotFound(f"the cluster doesn't say how job {job} is ({str(error).splitlines()[0]})") from None
