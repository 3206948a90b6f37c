"""Measure a large manifest: seconds and memory to read it, to look at its records, and to write results.jsonl.

Usage: bench_manifest.py [LINES ...]. By default 10,000, 100,000 and 1,000,000 lines, each in a process of its own.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from actors.batch.manifest import read_manifest
from actors.batch.results import Provenance, Result, Results, settle
from wan_tpu.families import published_spec
from wan_tpu.storage.local import LocalStorage

MODEL = "wan2.2-t2v-a14b"
WORDS = ["cat", "dog", "looks", "runs", "along", "the", "beach", "camera", "slowly", "rain", "golden", "old", "town"]
SIZES = ((720, 1280), (1280, 720), (480, 832), (832, 480))


def write_manifest(path: Path, lines: int) -> None:
    """Write lines like those of real batches: 25 words, a seed, one of four sizes, and in every second one an id."""
    chosen = random.Random(0)
    with path.open("w") as file:
        for number in range(lines):
            height, width = SIZES[number % len(SIZES)]
            line = {"prompt": " ".join(chosen.choices(WORDS, k=25)), "seed": number, "height": height, "width": width}
            if number % 2:
                line["id"] = f"clips/{number // 1000:04}/video-{number:07}"
            file.write(json.dumps(line) + "\n")


def measure(lines: int, folder: Path) -> dict[str, float]:
    """Return seconds and memory of each part; memory is the highest so far of the whole process."""
    path, output, figures = folder / "requests.jsonl", LocalStorage(folder / "out"), {"lines": float(lines)}
    write_manifest(path, lines)
    figures["manifest_mb"] = path.stat().st_size / 1e6
    model = published_spec(MODEL)
    start, busy = time.perf_counter(), time.process_time()
    manifest = read_manifest(path, model)
    figures |= {"read_s": time.perf_counter() - start, "read_cpu_s": time.process_time() - busy}
    figures["read_gib"] = _highest_gib()
    assert len(manifest.entries) == lines, manifest.bad[:1]
    start, results = time.perf_counter(), Results(lines)
    for entry, result in settle(output, manifest.entries, provenance=Provenance(), remake_changed=False):
        assert result is None
        done = Result(line=entry.line, id=entry.id, status="done", output=output.location(entry.output))
        results.add(done)
    figures["settle_s"], figures["settle_gib"] = time.perf_counter() - start, _highest_gib()
    start = time.perf_counter()
    output.write("results.jsonl", results.to_bytes())
    figures["results_s"], figures["results_gib"] = time.perf_counter() - start, _highest_gib()
    return figures


def _highest_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """Measure each number of lines in a process of its own, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lines", nargs="*", type=int, default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--alone", action="store_true", help="in this process")
    args = parser.parse_args()
    if args.alone:
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(args.lines[0], Path(folder))
        print(" ".join(f"{name} {value:,.2f}".removesuffix(".00") for name, value in figures.items()), flush=True)
        return
    for lines in args.lines:
        subprocess.run([sys.executable, __file__, str(lines), "--alone"], check=True)


if __name__ == "__main__":
    main()
