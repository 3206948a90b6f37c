"""Ten clients attack the service in every way that was found, all at once; forty others go on.

How long these wait is no matter of a test, since attackers have the same processors here: docs/benchmarks.md says it.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from actors.api.settings import ServiceSettings
from scripts.simulation import soak
from tests.actors.on_service.conftest import deploy_emulated
from tests.conftest import ROOT, STAGES

pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("WAN_TPU_ATTACK_S", "10"))
MIB = 2**20


@pytest.fixture
def online(tmp_path, forks):
    spec = soak.soak_spec(tmp_path, step_s=0.2)
    settings = ServiceSettings(
        database=str(tmp_path / "jobs.sqlite"),
        storage=str(tmp_path / "results"),
        model="simulated",
        concurrency=6,
        queue_limit=400,
        chips=dict.fromkeys(STAGES, 1),
    )
    with deploy_emulated(settings, spec, tmp_path, forks, drain_s=5) as service:
        yield service


class Watcher(threading.Thread):
    """Notes how much memory processes take at most, by a part of their title.

    Workers of an emulated cluster are forks of a process that has imported JAX, torch and diffusers: 300 MiB of pages
    that they share with it, that an ingress never uses, and that no real one has. These aren't counted.
    """

    def __init__(self, online, *names):
        super().__init__(daemon=True)
        self._online, self._ended = online, threading.Event()
        self.most = dict.fromkeys(names, 0.0)
        self.parts = dict.fromkeys(names, "")  # Of which kinds these pages are: shown when a limit is passed.

    def run(self):
        while not self._ended.wait(0.5):
            for name in self.most:
                for process in self._online.processes(name):
                    try:
                        memory = process.memory_full_info()
                        parts = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                        if (own := (memory.uss + memory.shared) / MIB) > self.most[name]:
                            self.most[name], self.parts[name] = own, parts
                    except (psutil.NoSuchProcess, OSError):
                        continue

    def end(self):
        self._ended.set()
        self.join()


@pytest.mark.parametrize("attack", [[], ["--one_key"]], ids=["ten clients", "one key"])
def test_a_hostile_client_harms_only_itself(online, attack):
    watcher = Watcher(online, "Ingress", "ServiceWorker")
    watcher.start()
    command = [sys.executable, ROOT / "scripts" / "attack_service.py", "--url", online.address, "--json", *attack]
    command += [
        "--database",
        online.settings.database,
        "--seconds",
        str(SECONDS),
        "--quiet_s",
        str(max(8, SECONDS / 5)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS * 3 + 700, env=os.environ)
    watcher.end()
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    stored = sum(file.stat().st_size for file in Path(online.settings.storage).rglob("input-*"))
    print(json.dumps(report, indent=1), watcher.most, f"{stored / MIB:.1f} MiB of images stored")
    print(*(f"{name}:\n{parts}" for name, parts in watcher.parts.items()))
    assert not report["odd"]["before"]
    # Others are never refused but for a moment, and then told when to come back.
    assert not [oddity for oddity in report["odd"]["during"] if " 503 again" not in oddity], report["odd"]
    assert set(report["ends"]) == {"completed"}, report["ends"]  # nothing accepted is lost
    assert watcher.most["Ingress"] < 400 and watcher.most["ServiceWorker"] < 600
    assert stored < 500 * 0.3 * MIB  # what may wait, each with an image of its video's size, and what was just made
