"""The driver in a process of its own, to be killed, or given a disk of 1 MB.

usage: batch_worker.py MANIFEST OUTPUT SECONDS [small-disk]
"""

import os
import sys
from pathlib import Path

from actors.batch.manifest import read_manifest
from actors.batch.run import open_batch
from tests.actors.engines import Engine, mp4
from tests.actors.small_spec import SPEC
from tests.actors.storage_worker import MountsRefused, mount
from wan_tpu.cli import run
from wan_tpu.storage.opening import open_storage


def main(argv):
    manifest, output, seconds, *small_disk = argv
    mp4()  # made before the disk is full and before anybody kills this
    if small_disk:
        if child := os.fork():  # numpy has threads, and only a process without can have mounts of its own
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        try:
            mount(Path(output), "size=1m")
        except MountsRefused as error:
            print(f"refused: {error}", file=sys.stderr)
            sys.exit(77)
    with open_batch(read_manifest(manifest, SPEC), open_storage(output), in_flight=2, model="test") as batch:
        report = batch.run(Engine(float(seconds)))
    print(report.summarize())
    for result in report.results:
        print(result.id, result.status, result.error or "")
    if small_disk:  # nobody else sees it
        print(sorted(path.name for path in Path(output).iterdir()))
    report.check()


if __name__ == "__main__":
    sys.exit(run(main))
