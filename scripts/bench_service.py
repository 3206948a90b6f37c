"""Send requests to a running service at a steady rate, and report response times; then list its jobs page by page.

python scripts/bench_service.py --url http://127.0.0.1:8000 --rate 300 --seconds 20
python scripts/bench_service.py --simulated --rate 300 --seconds 30 --ingresses 2
python scripts/bench_service.py --simulated --seconds 0 --list 10000

One request in `--submit_every` submits a job, the others ask for a submitted one. Requests are sent when they are due,
whether or not earlier ones have been answered, so that a service that falls behind shows it. `--simulated` starts a
service on an emulated cluster of this machine, whose slices only wait, and stops it again.
"""

import argparse
import asyncio
import contextlib
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp

MIB = 2**20
BODY = {"size": "256x256", "num_frames": 17, "num_inference_steps": 4}


async def main(args: argparse.Namespace, url: str, memory_mib: Callable[[], float] | None) -> None:
    """Send and measure."""
    headers = {"Authorization": f"Bearer {args.key}"} if args.key else {}
    async with aiohttp.ClientSession(url, headers=headers, connector=aiohttp.TCPConnector(limit=200)) as http:
        if args.seconds:
            jobs: list[str] = []
            await send(http, args, args.warm_up, jobs)
            start = time.perf_counter()
            took, wrong = await send(http, args, args.seconds, jobs)
            tell(took, wrong, time.perf_counter() - start)
        if args.list:
            await fill(http, args.list)
            for _ in range(3):
                await pages(http, memory_mib)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


async def send(
    http: aiohttp.ClientSession, args: argparse.Namespace, seconds: float, jobs: list[str]
) -> tuple[dict[str, list[float]], list[str]]:
    """Send requests at the rate for some seconds; return how long answers took by kind, and what went wrong."""
    took: dict[str, list[float]] = {"submit": [], "poll": []}
    wrong: list[str] = []

    async def submit(i: int) -> None:
        async with http.post("/v1/videos", json=BODY | {"prompt": f"load {i}", "seed": i}) as answer:
            content = await answer.json()
            if answer.status != 200:
                raise ValueError(f"{answer.status} {content}")
            jobs.append(content["id"])

    async def poll() -> None:
        async with http.get(f"/v1/videos/{random.choice(jobs)}") as answer:
            await answer.read()
            if answer.status != 200:
                raise ValueError(str(answer.status))

    async def send(i: int, due: float) -> None:
        kind = "submit" if i % args.submit_every == 0 else "poll"
        try:
            await (submit(i) if kind == "submit" else poll())
            took[kind].append(time.perf_counter() - due)
        except (aiohttp.ClientError, ValueError, TimeoutError) as error:
            wrong.append(f"{kind}: {error}"[:200])

    if not jobs:
        await submit(0)
    start, sent = time.perf_counter(), []
    for i in range(int(args.rate * seconds)):
        due = start + i / args.rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        sent.append(asyncio.create_task(send(i, due)))
    await asyncio.gather(*sent)
    return took, wrong


def tell(took: dict[str, list[float]], wrong: list[str], seconds: float) -> None:
    """Print how long answers took."""
    total = sum(map(len, took.values()))
    print(f"{total} answers in {seconds:.1f} s, {total / seconds:.0f} a second, {len(wrong)} failed {wrong[:3]}")
    for kind, times in took.items():
        if len(times) > 2:
            print(f"{kind:7} {len(times):6}: {shares(times)}")


def shares(times: list[float]) -> str:
    """Return the median, the 95th and 99th percentiles and the maximum of some seconds, in milliseconds."""
    cuts = statistics.quantiles([1000 * value for value in times], n=100)
    percentiles = ", ".join(f"{name} {cuts[at]:.1f} ms" for name, at in (("half", 49), ("95 %", 94), ("99 %", 98)))
    return f"{percentiles}, longest {1000 * max(times):.1f} ms"


async def fill(http: aiohttp.ClientSession, jobs: int) -> None:
    """Submit that many jobs, eight at a time."""
    left = iter(range(jobs))

    async def one_by_one() -> None:
        for i in left:
            async with http.post("/v1/videos", json=BODY | {"prompt": f"fill {i}", "seed": i}) as answer:
                answer.raise_for_status()

    start = time.perf_counter()
    await asyncio.gather(*(one_by_one() for _ in range(8)))
    print(f"{jobs} jobs submitted in {time.perf_counter() - start:.1f} s")


async def pages(http: aiohttp.ClientSession, memory_mib: Callable[[], float] | None) -> None:
    """List all jobs in pages of 100, and print their number, the time per page, and the ingress's memory."""
    times: list[float] = []
    seen: set[str] = set()
    after = ""
    memory = [] if memory_mib is None else [memory_mib()]
    while True:
        start = time.perf_counter()
        async with http.get("/v1/videos", params={"limit": 100} | ({"after": after} if after else {})) as answer:
            page = await answer.json()
        times.append(time.perf_counter() - start)
        seen.update(video["id"] for video in page["data"])
        if memory_mib is not None:
            memory.append(memory_mib())
        if not page["has_more"]:
            break
        after = page["last_id"]
    print(f"{len(seen)} jobs in {len(times)} pages: {shares(times)}")
    if memory:
        print(f"the ingress holds {memory[0]:.1f} MiB before, {memory[-1]:.1f} after, at most {max(memory):.1f}")


@contextlib.contextmanager
def serve_simulated(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield the address of a service whose steps take `--step_s`, and a function that measures ingresses' memory."""
    from simulation.soak import soak_spec

    from actors.api.deploy import deploy_service, take_down
    from actors.api.settings import ServiceSettings
    from cluster.connect import connect, leave
    from cluster.emulation import ray_nodes
    from cluster.emulation.cluster import EmulatedCluster, list_emulated_slices

    with tempfile.TemporaryDirectory(prefix="wan-bench-") as temporary, socket.create_server(("127.0.0.1", 0)) as free:
        folder, port = Path(temporary), free.getsockname()[1]
        free.close()
        spec = soak_spec(folder, args.step_s)
        settings = ServiceSettings(
            database=str(folder / "jobs.sqlite"),
            storage=str(folder / "results"),
            model="simulated",
            concurrency=6,
            chips=dict.fromkeys(spec.model.stages, 1),
            queue_limit=100_000,
        )
        with EmulatedCluster.start(list_emulated_slices(spec.layout), folder=folder / "cluster") as cluster:
            connect(cluster.address)
            try:
                deploy_service(settings, spec, host="127.0.0.1", port=port, ingresses=args.ingresses)

                def memory_mib() -> float:
                    processes = ray_nodes.processes(cluster.temp)
                    return (
                        sum(
                            process.memory_info().rss
                            for process in processes
                            if "Ingress" in "".join(process.cmdline())
                        )
                        / MIB
                    )

                yield f"http://127.0.0.1:{port}", memory_mib
                take_down(spec.settings.name, drain_s=5)
            finally:
                leave()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key")
    parser.add_argument("--rate", type=float, default=300, help="requests a second; default %(default)s")
    parser.add_argument("--seconds", type=float, default=20, help="default %(default)s")
    parser.add_argument("--warm_up", type=float, default=3, help="seconds before, not counted; default %(default)s")
    parser.add_argument("--submit_every", type=int, default=30, help="a job for so many requests; default %(default)s")
    parser.add_argument("--list", type=int, default=0, metavar="JOBS", help="submit so many, and list all")
    parser.add_argument("--simulated", action="store_true", help="a service of its own, instead of --url")
    parser.add_argument("--step_s", type=float, default=0.5, help="a simulated step takes; default %(default)s")
    parser.add_argument("--ingresses", type=int, default=1, help="of the simulated service; default %(default)s")
    args = parser.parse_args()
    with serve_simulated(args) if args.simulated else contextlib.nullcontext((args.url, None)) as (address, measured):
        asyncio.run(main(args, address, measured))
