"""Attack a service with ten clients, each in its own way, and report what forty ordinary clients notice of it.

python scripts/attack_service.py --url http://127.0.0.1:8000 --database service/jobs.sqlite --seconds 300

All clients' keys are created in the service's database, and revoked at the end. The same load is first measured without
an attack. With `--json` the figures are one line.
"""

import argparse
import asyncio
import contextlib
import io
import json
import multiprocessing
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlsplit

import aiohttp
from PIL import Image

from actors.jobs.keys import make_key, revoke_key
from actors.jobs.store import open_database

CLIENTS = 40
_local = False  # whether the service is on this machine
PAUSE_S = 1.5  # of a client between two requests
BODY = {"size": "256x256", "num_frames": 17, "num_inference_steps": 2}
KINDS = ("poll", "submit", "upload", "list")


# ---- the others


class Notes:
    """What the clients noticed: seconds by kind of request, unexpected answers, and their jobs."""

    def __init__(self) -> None:
        self.took: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.odd: Counter[str] = Counter()
        self.jobs: dict[str, list[str]] = {}  # by key

    def percentile_ms(self, percent: int = 99) -> dict[str, float]:
        """Return a percentile of each kind, and of polls and submissions together as "all"."""
        values = {"all": self.took["poll"] + self.took["submit"], **self.took}
        cuts = {name: statistics.quantiles(times, n=100) for name, times in values.items() if len(times) > 2}
        return {name: round(quantiles[percent - 1] * 1000, 1) for name, quantiles in cuts.items()}


async def client(url: str, key: str, notes: Notes, until: float) -> None:
    """Send requests now and then, as a program that has videos made would."""
    mine = notes.jobs.setdefault(key, [])
    image = picture(256, 256)
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(url, headers=headers, timeout=aiohttp.ClientTimeout(60)) as http:
        await asyncio.sleep(random.uniform(0, PAUSE_S))
        while time.monotonic() < until:
            kind = random.choices(KINDS, (85, 4, 3, 8))[0] if mine else "submit"
            start = time.monotonic()
            try:
                async with send_request(http, kind, mine, image) as answer:
                    body = await answer.read()
                    notes.took[kind].append(time.monotonic() - start)
                    again = answer.status == 503 and "Retry-After" in answer.headers
                    if answer.status == 200 and kind in ("submit", "upload"):
                        mine.append(json.loads(body)["id"])
                    elif answer.status != 200:
                        notes.odd[f"{kind} {answer.status}{' again' if again else ''} {body[:90]!r}"] += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                notes.odd[f"{kind} {type(error).__name__}"] += 1
            await asyncio.sleep(random.uniform(0.5, 1.5) * PAUSE_S)


def send_request(
    http: aiohttp.ClientSession, kind: str, mine: list[str], image: bytes
) -> "contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]":
    """Return a request of a kind."""
    if kind == "poll":
        return http.get(f"/v1/videos/{random.choice(mine)}")
    if kind == "list":
        return http.get("/v1/videos", params={"limit": "10"})
    body = BODY | {"prompt": f"a cat {random.random()}", "seed": random.randrange(99999)}
    if kind == "submit":
        return http.post("/v1/videos", json=body)
    form = aiohttp.FormData({name: str(value) for name, value in body.items()})
    form.add_field("input_reference", image, filename="a.png", content_type="image/png")
    return http.post("/v1/videos", data=form)


async def keep_busy(url: str, key: str, until: float) -> None:
    """Keep the slices busy, with and without an attack."""
    async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {key}"}) as http:
        while time.monotonic() < until:
            async with http.get("/v1/videos", params={"status": "queued", "limit": "8"}) as answer:
                waiting = len((await answer.json()).get("data", ())) if answer.status == 200 else 8
            for _ in range(8 - waiting):
                async with http.post("/v1/videos", json=BODY | {"prompt": "busy", "seed": 4}) as answer:
                    await answer.read()
            await asyncio.sleep(1)


async def go_on(url: str, keys: list[str], seconds: float) -> Notes:
    """Run all clients for that many seconds; only the last key's client keeps the slices busy."""
    *keys, busy = keys
    notes, until = Notes(), time.monotonic() + seconds
    await asyncio.gather(keep_busy(url, busy, until), *(client(url, key, notes, until) for key in keys))
    return notes


# ---- the attack


ADDRESSES = tuple(f"127.0.0.{i}" for i in range(2, 12))  # each attacker has its own; used where the service is here


def connector(key: str) -> aiohttp.TCPConnector:
    """Return connections from the address of the client with a key."""
    local_address = (ADDRESSES[sum(key.encode()) % len(ADDRESSES)], 0) if _local else None
    return aiohttp.TCPConnector(limit=0, local_addr=local_address)


async def post(url: str, key: str, body: bytes, kind: str = "application/json") -> None:
    """Send a body, and ignore the answer."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": kind}
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60), connector=connector(key)) as http:
            async with http.post(f"{url}/v1/videos", data=body, headers=headers) as answer:
                await answer.read()


async def again(send: Callable[[], Awaitable[object]], pause_s: float = 0.2) -> None:
    """Repeat a call for ever."""
    while True:
        await send()
        await asyncio.sleep(pause_s)


async def hold(url: str, count: int, sent: bytes) -> None:
    """Open connections that send `sent` and then nothing; reopen them when they are closed."""
    parts = urlsplit(url)

    async def hold_once() -> None:
        with contextlib.suppress(OSError):
            local_address = (ADDRESSES[sum(sent[:300]) % len(ADDRESSES)], 0) if _local else None
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, local_addr=local_address)
            writer.write(sent)
            await reader.read(200)
            writer.close()
        await asyncio.sleep(0.5)

    await asyncio.gather(*(again(hold_once) for _ in range(count)))


def half_body(url: str, key: str, sent: int) -> bytes:
    """Return a request whose body is incomplete."""
    lines = ["POST /v1/videos HTTP/1.1", f"Host: {urlsplit(url).netloc}", f"Authorization: Bearer {key}"]
    lines += ["Content-Type: application/json", "Content-Length: 26000000", "", ""]
    return "\r\n".join(lines).encode() + b"x" * sent


def form(image: bytes) -> bytes:
    """Return a form with a boundary of x."""
    body = b""
    for name, value in (BODY | {"prompt": "x", "size": "64x64"}).items():
        body += f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
    head = b'--x\r\nContent-Disposition: form-data; name="input_reference"; filename="a.jpg"\r\n\r\n'
    return body + head + image + b"\r\n--x--\r\n"


def picture(width: int, height: int, kind: str = "PNG") -> bytes:
    """Return an image's file."""
    file = io.BytesIO()
    Image.effect_noise((width, height), 60).convert("RGB").save(file, kind, quality=90)
    return file.getvalue()


async def follow(url: str, key: str, count: int) -> None:
    """Open `many` event streams of one job."""
    headers = {"Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(None)
    async with aiohttp.ClientSession(url, headers=headers, connector=connector(key), timeout=timeout) as http:
        async with http.post("/v1/videos", json=BODY | {"prompt": "x", "seed": 3}) as answer:
            job = (await answer.json()).get("id")

        async def follow_once() -> None:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"/v1/videos/{job}/events") as stream:
                    await stream.read()

        await asyncio.gather(*(again(follow_once, 1.0) for _ in range(count)))


def attacks(url: str, keys: list[str]) -> list[Awaitable[object]]:
    """Return what each of ten clients does."""
    large = form(picture(5000, 5000, "JPEG"))
    options = b'{"prompt": "x", "input_reference": {"image_url": "data:' + b";" * 26_000_000 + b'"}}'
    fields = b"{" + b",".join(b'"k%d":0' % i for i in range(1_500_000)) + b"}"
    lists = b"[" + b"[]," * 8_000_000 + b"0]"
    flood = json.dumps(BODY | {"prompt": "flood", "priority": 100, "seed": 1}).encode()
    plain = json.dumps(BODY | {"prompt": "flood", "seed": 2}).encode()
    of_form = "multipart/form-data; boundary=x"
    host = f"Host: {urlsplit(url).netloc}"
    return [
        again(lambda: post(url, keys[0], options)),
        again(lambda: post(url, keys[1], large, of_form)),
        hold(url, 300, half_body(url, keys[2], 1000)),
        hold(url, 500, f"GET /v1/videos HTTP/1.1\r\n{host}\r\nX-A".encode()),  # without a key
        again(lambda: post(url, keys[4], fields)),
        again(lambda: asyncio.gather(*(post(url, keys[5], flood) for _ in range(5)))),
        hold(url, 40, half_body(url, keys[6], 20_000_000)),
        again(lambda: asyncio.gather(*(post(url, keys[7], large, of_form) for _ in range(8)))),
        asyncio.gather(*(again(lambda: post(url, keys[8], plain), 0.05) for _ in range(4))),
        asyncio.gather(follow(url, keys[9], 300), again(lambda: post(url, keys[9], lists))),
    ]


def costly(url: str, key: str) -> list[Awaitable[object]]:
    """Return the actions of a client that causes the most work per answer, at its limits."""
    headers = {"Authorization": f"Bearer {key}"}
    long = "a cat " * 5300  # 32,000 characters

    def write_plan() -> bytes:
        many = {"num_inference_steps": 1000, "shift": random.uniform(1, 9), "seed": 7, "deadline": time.time() + 2}
        return json.dumps(BODY | {"prompt": "x"} | many).encode()

    def write_address(host: str) -> bytes:
        return json.dumps(BODY | {"prompt": "x", "input_reference": {"image_url": f"https://{host}/a.png"}}).encode()

    async def pages() -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with aiohttp.ClientSession(url, headers=headers, connector=connector(key)) as http:
                async with http.get("/v1/videos", params={"limit": "100"}) as answer:
                    await answer.read()

    labels = ".".join(["bücher"] * 1200)
    return [
        *(again(lambda: post(url, key, write_plan()), 0.0) for _ in range(10)),
        *(again(lambda: post(url, key, write_address(f"host{random.random()}.invalid")), 0.0) for _ in range(4)),
        *(again(lambda: post(url, key, write_address(labels)), 0.0) for _ in range(4)),
        again(lambda: post(url, key, json.dumps(BODY | {"prompt": long, "seed": 8}).encode())),
        *(again(pages, 0.0) for _ in range(12)),
    ]


def attack(url: str, keys: list[str], one_key: bool) -> None:
    """Attack until this process is ended, at low priority, since real attackers have processors of their own."""
    global _local
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _local = urlsplit(url).hostname == "127.0.0.1"

    async def all_() -> None:
        await asyncio.gather(*(costly(url, keys[0]) if one_key else attacks(url, keys)))

    asyncio.run(all_())


# ---- both


@contextlib.asynccontextmanager
async def run_attack(url: str, keys: list[str], one_key: bool) -> AsyncIterator[None]:
    """Have the service attacked, by another process."""
    process = multiprocessing.get_context("spawn").Process(target=attack, args=(url, keys, one_key), daemon=True)
    process.start()
    try:
        await asyncio.sleep(5)  # until it is under way
        yield
    finally:
        process.kill()
        process.join()


async def all_ended(url: str, jobs: dict[str, list[str]], seconds: float) -> dict[str, int]:
    """Wait for the jobs' ends; return how many there are of each status, "missing" where one isn't known any more."""
    give_up, left = time.monotonic() + seconds, {job: key for key, ids in jobs.items() for job in ids}
    ends: Counter[str] = Counter()
    async with aiohttp.ClientSession(url) as http:
        while left and time.monotonic() < give_up:
            for job, key in list(left.items()):
                async with http.get(f"/v1/videos/{job}", headers={"Authorization": f"Bearer {key}"}) as answer:
                    status = (await answer.json())["status"] if answer.status == 200 else "missing"
                if status in ("completed", "failed", "missing"):
                    ends[status] += 1
                    del left[job]
            await asyncio.sleep(1)
    return dict(ends | Counter({"waiting": len(left)} if left else {}))


async def main(args: argparse.Namespace) -> None:
    """Measure the service first without the attack, then with it."""
    database = open_database(args.database)
    names = [f"{args.name} {i}" for i in range(CLIENTS + 11)]
    keys = [make_key(database, name) for name in names]
    try:
        await asyncio.sleep(2)  # The service knows the keys by then.
        before = await go_on(args.url, keys[: CLIENTS + 1], args.quiet_s)
        async with run_attack(args.url, keys[CLIENTS + 1 :], args.one_key):
            during = await go_on(args.url, keys[: CLIENTS + 1], args.seconds)
        jobs = {key: [*before.jobs.get(key, ()), *during.jobs.get(key, ())] for key in keys[:CLIENTS]}
        ends = await all_ended(args.url, jobs, args.end_s)
    finally:
        for name in names:
            revoke_key(database, name)
    if args.json:
        odd = {"before": dict(before.odd), "during": dict(during.odd)}
        figures = {"before": before.percentile_ms(), "during": during.percentile_ms(), "odd": odd, "ends": ends}
        print(json.dumps(figures | {"before_95": before.percentile_ms(95), "during_95": during.percentile_ms(95)}))
        return
    for name, notes in (("alone", before), ("attacked", during)):
        answers = sum(map(len, notes.took.values()))
        print(f"{name:9} {answers} answers; 95th percentile, ms: {notes.percentile_ms(95)}")
        print(f"{'':9} 99th percentile, ms: {notes.percentile_ms()}")
        for problem, count in notes.odd.most_common(10):
            print(f"          {count} x {problem}")
    print(f"jobs of the others: {ends}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--database", required=True, help="of the service's jobs, where the keys are made")
    parser.add_argument("--seconds", type=float, default=300, help="of the attack; default %(default)s")
    parser.add_argument("--quiet_s", type=float, default=60, help="before it; default %(default)s")
    parser.add_argument("--end_s", type=float, default=600, help="for all jobs to end then; default %(default)s")
    parser.add_argument("--name", default="attack", help="of the keys; default %(default)s")
    parser.add_argument(
        "--one_key", action="store_true", help="attack with one key only, whose requests are the costliest to answer"
    )
    parser.add_argument("--json", action="store_true", help="print the figures in one line")
    asyncio.run(main(parser.parse_args()))
