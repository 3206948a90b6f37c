"""A batch on a pipeline that runs already, in a process of its own, to be killed.

usage: batch_driver.py ADDRESS SETTINGS.pickle MANIFEST OUTPUT
"""

import pickle
import sys
from pathlib import Path

from actors.batch import BatchSettings, drive, run_batch
from actors.manifest import read_manifest
from actors.pipeline import Pipeline
from actors.storage import open_storage
from cluster.connect import connect


async def batch(layout, settings, manifest, output, spans):
    engine = Pipeline(layout, settings)
    return await run_batch(
        read_manifest(manifest), open_storage(output), engine, BatchSettings(model="test"), on_event=spans.append
    )


def main(address, settings, manifest, output):
    connect(address)
    spans = []
    report = drive(batch(*pickle.loads(Path(settings).read_bytes()), manifest, output, spans))
    print(report.text())
    steps = {name: [s.step for s in spans if s.step and s.request == name] for name in {s.request for s in spans}}
    print("first steps", *sorted(map(min, steps.values())))
    report.check()


if __name__ == "__main__":
    main(*sys.argv[1:])
