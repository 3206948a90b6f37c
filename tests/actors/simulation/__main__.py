"""Run one seed of a simulation and print what happened: python -m tests.actors.simulation SEED [--service]."""

import argparse
import sys
import tempfile
from pathlib import Path

from actors.jobs.store import open_database
from tests.actors.simulation.scenario import simulate
from tests.actors.simulation.service import simulate_service

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--service", action="store_true", help="of test_service.py, not of test_simulation.py")
    args = parser.parse_args()
    if args.service:
        with tempfile.TemporaryDirectory() as folder:
            empty = Path(folder, "empty.sqlite")
            open_database(empty).close()
            result = simulate_service(args.seed, Path(folder), empty)
    else:
        result = simulate(args.seed)
    print(result.tell())
    sys.exit(bool(result.problems))
