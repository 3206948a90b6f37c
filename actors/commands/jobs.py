"""`wan-tpu jobs list | show | cancel`: the jobs of an online service, through its HTTP API."""

import argparse
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any

from actors.commands.arguments import add_actions, check_range
from wan_tpu.commands.parser import Parser
from wan_tpu.commands.tables import as_table
from wan_tpu.errors import InvalidInput, Unavailable

URL, KEY = "WAN_TPU_URL", "WAN_TPU_API_KEY"  # Environment variables.
STATUSES = ("queued", "in_progress", "completed", "failed")
MOST = 100  # Jobs that one request lists.
_EXAMPLES = """
wan-tpu jobs list --status in_progress
wan-tpu jobs show video_... --url https://videos.example.com --key wan_...
"""
_ANSWER_S = 30.0
_PROMPT = 40  # Characters of a prompt in the list.


def jobs(argv: Sequence[str]) -> None:
    """List the jobs of a running service, show one, or cancel it. With an operator's key these are everybody's."""
    parser = Parser(prog="wan-tpu jobs", description=jobs.__doc__, examples=_EXAMPLES)
    actions = add_actions(parser)
    list_ = actions.add_parser("list", help="list jobs, the newest first")
    list_.add_argument("--status", choices=STATUSES, help=f"only these: {', '.join(STATUSES)}")
    list_.add_argument("--limit", type=int, default=20, help=f"how many to list, up to {MOST}; default %(default)s")
    show = actions.add_parser("show", help="show everything about a job")
    cancel = actions.add_parser("cancel", help="stop a job; the step that computes is finished first")
    for action in (show, cancel):
        action.add_argument("job", metavar="JOB", help="id of the job, such as video_...")
    for action in (list_, show, cancel):
        action.add_argument(
            "--url",
            default=os.environ.get(URL, "http://127.0.0.1:8000"),
            help=f"address of the service; default: the environment's {URL}, or else http://127.0.0.1:8000",
        )
        action.add_argument("--key", default=os.environ.get(KEY), help=f"API key; default: the environment's {KEY}")
    for action in (list_, show):
        action.add_argument("--json", action="store_true", help="print the API's JSON, for programs")
    args = parser.parse_args(argv)
    if args.action == "list":
        check_range(args, "limit", 1, MOST)
        query = {"limit": args.limit} | ({} if args.status is None else {"status": args.status})
        page = _ask(args, f"?{urllib.parse.urlencode(query)}")
        print(json.dumps(page["data"]) if args.json else _format_list(page))
        return
    path = f"/{urllib.parse.quote(args.job, safe='')}"
    if args.action == "cancel":
        video = _ask(args, f"{path}/cancel", method="POST")
        print(f"{video['id']}: {_describe_status(video)}")
        return
    video = _ask(args, path)
    print(json.dumps(video) if args.json else _format_video(video))


def _ask(args: argparse.Namespace, path: str, method: str = "GET") -> Any:
    """Return the API's answer.

    Raises:
        InvalidInput: The service refuses the request, or the address isn't that of such a service.
        Unavailable: No service answers.
    """
    base = args.url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise InvalidInput(f"--url is {args.url!r}; give the address of a service, such as http://127.0.0.1:8000")
    headers = {} if args.key is None else {"Authorization": f"Bearer {args.key}"}
    try:
        request = urllib.request.Request(f"{base}/v1/videos{path}", method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        message = _read_message(error)
        if error.code >= 500:
            raise Unavailable(f"{base} answers {error.code}: {message}") from None
        hint = f"; give an API key: --key, or {KEY}" if error.code == 401 and args.key is None else ""
        raise InvalidInput(f"{message}{hint}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Unavailable(
            f"no service answers at {base} ({reason}); give the --url that wan-tpu serve printed"
        ) from None


def _read_message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return error.reason


def _format_list(page: dict[str, Any]) -> str:
    videos = page["data"]
    if not videos:
        return "no jobs"
    rows = [
        (
            video["id"],
            _describe_status(video),
            _format_age(video["created_at"]),
            video["size"],
            _shorten(video["prompt"]),
        )
        for video in videos
    ]
    more = "\nand older ones: give a higher --limit" if page["has_more"] else ""
    return as_table(("job", "status", "age", "size", "prompt"), rows) + more


def _describe_status(video: dict[str, Any]) -> str:
    """Return a job's status, with how far it is and in how many seconds it will be finished."""
    status = video["status"].replace("_", " ")
    if video["status"] == "in_progress":
        status = f"{video['progress']} %{', compiling' if video.get('compiling') else ''}"
    if video["status"] == "failed" and video["error"]:
        status = video["error"]["code"]
    place, eta_s = video.get("queue_position"), video.get("eta_seconds")
    parts = [status] + ([] if place is None else [f"{place} before it"]) + ([] if eta_s is None else [f"{eta_s:.0f} s"])
    return ", ".join(parts)


def _format_age(created_at: float) -> str:
    age_s = max(0, round(time.time() - created_at))
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if age_s >= unit_s:
            return f"{age_s // unit_s} {unit}"
    return f"{age_s} s"


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _PROMPT else f"{line[: _PROMPT - 1]}…"


def _format_video(video: dict[str, Any]) -> str:
    """Return a job's fields, one a line, without those that are empty."""
    width = max(map(len, video))
    return "\n".join(
        f"{name:<{width}}  {value if isinstance(value, str | int | float) else json.dumps(value, ensure_ascii=False)}"
        for name, value in video.items()
        if value not in (None, [], {}, "") and name != "object"
    )
