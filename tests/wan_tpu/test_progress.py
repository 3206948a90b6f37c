"""Progress on the command line."""

import re
import time

from tests.waiting import wait_for
from wan_tpu import progress
from wan_tpu.progress import CompileNotice, Console


def test_first_step_which_waits_for_the_compiler_says_nothing_about_the_others(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    bar = Console().bar("denoise", 20)
    for step in range(20):
        now += 60.0 if step == 0 else 0.5
        bar.step()
    bar.close()
    left = [int(seconds) for seconds in re.findall(r"ETA (\d+) s", capsys.readouterr().err)]
    assert left == [9, 8, 7, 6, 5, 4, 3, 2, 1]  # Half a second for each step that is left, at every tenth of them.


def test_program_that_takes_long_to_compile_is_named(capsys, monkeypatch):
    notice, seen = CompileNotice(), []
    notice("text keys")
    notice(None)
    monkeypatch.setattr(progress, "QUIET_S", 0)
    notice("denoise step")
    wait_for(lambda: "denoise step" in (seen.append(capsys.readouterr().err) or "".join(seen)))
    notice(None)
    assert "text keys" not in "".join(seen)
