"""Run one seed of the simulation, and tell its story: python -m tests.actors.simulation SEED."""

import sys

from tests.actors.simulation.scenario import simulate

if __name__ == "__main__":
    result = simulate(int(sys.argv[1]))
    print(result.tell())
    sys.exit(bool(result.problems))
