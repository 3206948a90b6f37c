"""`ray start` of a host of an emulated cluster, with the arguments of `ray start`; see spot_machines.py.

Ray's own command can't start one: either it refuses a cluster of several nodes, or it takes the machine's own address
for the loopback interface's, where an emulated cluster doesn't listen (see cluster/connect.py).
"""

import sys
from pathlib import Path

from ray._private import ray_constants, services
from ray.scripts.scripts import main

from cluster.emulation import ray_nodes

ray_constants.ENABLE_RAY_CLUSTER = True  # of this process alone: its children read the environment
services.resolve_ip_for_localhost = lambda address: address
ray_nodes.fork_workers(Path(sys.argv[sys.argv.index("--temp-dir") + 1]).parent)

main()
