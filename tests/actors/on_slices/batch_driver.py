"""A batch on a pipeline that runs already, in a process of its own, to be killed.

usage: batch_driver.py ADDRESS SPEC.pickle MANIFEST OUTPUT
"""

import pickle
import sys
from pathlib import Path

from actors.batch.manifest import read_manifest
from actors.batch.run import open_batch
from actors.pipeline.driver import PipelineDriver
from cluster.connect import connect
from wan_tpu.storage.opening import open_storage


def main(address, spec, manifest, output):
    connect(address)
    pipeline = PipelineDriver(pickle.loads(Path(spec).read_bytes()))
    lines = read_manifest(manifest, pipeline.model)
    with open_batch(lines, open_storage(output), model="test") as batch:
        batch.run(pipeline).check()


if __name__ == "__main__":
    main(*sys.argv[1:])
