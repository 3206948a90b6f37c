"""Ask a running service at a steady rate, and say how long answers took.

python scripts/bench_service.py --url http://127.0.0.1:8000 --rate 300 --seconds 20

One request in `--submit_every` submits a job, the others ask for one that was submitted. Requests are sent when they
are due, whether or not earlier ones were answered: a service that falls behind shows it.
"""

import argparse
import asyncio
import os
import random
import statistics
import time

import aiohttp


async def main(args: argparse.Namespace) -> None:
    """Send and measure."""
    headers = {"Authorization": f"Bearer {args.key}"} if args.key else {}
    took: dict[str, list[float]] = {"submit": [], "poll": []}
    wrong: list[str] = []
    jobs: list[str] = []
    connector = aiohttp.TCPConnector(limit=200)
    async with aiohttp.ClientSession(args.url, headers=headers, connector=connector) as http:

        async def submit(i: int) -> None:
            body = {"prompt": f"load {i}", "size": "256x256", "num_frames": 17, "num_inference_steps": 4, "seed": i}
            async with http.post("/v1/videos", json=body) as answer:
                found = await answer.json()
                if answer.status != 200:
                    raise ValueError(f"{answer.status} {found}")
                jobs.append(found["id"])

        async def poll() -> None:
            async with http.get(f"/v1/videos/{random.choice(jobs)}") as answer:
                await answer.read()
                if answer.status != 200:
                    raise ValueError(str(answer.status))

        async def one(i: int, due: float) -> None:
            kind = "submit" if i % args.submit_every == 0 else "poll"
            try:
                await (submit(i) if kind == "submit" else poll())
                took[kind].append(time.perf_counter() - due)
            except (aiohttp.ClientError, ValueError, TimeoutError) as error:
                wrong.append(f"{kind}: {error}"[:200])

        await submit(0)
        start, sent = time.perf_counter(), []
        for i in range(int(args.rate * args.seconds)):
            due = start + i / args.rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            sent.append(asyncio.create_task(one(i, due)))
        await asyncio.gather(*sent)
        seconds = time.perf_counter() - start
    total = sum(map(len, took.values()))
    print(f"{total} answers in {seconds:.1f} s, {total / seconds:.0f} a second, {len(wrong)} failed {wrong[:3]}")
    for kind, times in took.items():
        ms = [1000 * value for value in times]
        if len(ms) > 2:
            cuts = statistics.quantiles(ms, n=100)
            shares = ", ".join(f"{name} {cuts[at]:.1f} ms" for name, at in (("half", 49), ("95 %", 94), ("99 %", 98)))
            print(f"{kind:7} {len(ms):6}: {shares}, longest {max(ms):.1f} ms")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key")
    parser.add_argument("--rate", type=float, default=300, help="requests a second; default %(default)s")
    parser.add_argument("--seconds", type=float, default=20, help="default %(default)s")
    parser.add_argument("--submit_every", type=int, default=30, help="a job for so many requests; default %(default)s")
    asyncio.run(main(parser.parse_args()))
