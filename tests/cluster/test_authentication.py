"""Who has no token, or another one, can't join an emulated cluster."""

import os
import subprocess
import sys

from tests.conftest import ROOT
from tests.waiting import SECONDS

# What joining begins with; `ray.init` itself tries for 20 s before it says that it was refused.
ASK = "from ray._raylet import GcsClient as Client; Client({address!r}).get_all_node_info(timeout=60); print('joined')"


def start(code, address, **environment):
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")} | environment
    env |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_gcs_rpc_server_reconnect_timeout_s": "1"}
    command = [sys.executable, "-c", code.format(address=address)]
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_token_opens_the_cluster_and_nothing_else_does(cluster, token, tmp_path):
    (tmp_path / "another").write_text("another" * 8)
    right = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    wrong = right | {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "another")}
    asks = start(ASK, cluster.address, **right)
    refused = [start(ASK, cluster.address, **wrong), start(ASK, cluster.address, RAY_AUTH_MODE="disabled")]
    out, err = asks.communicate(timeout=SECONDS)
    assert out == "joined\n", err
    for process in refused:
        out, err = process.communicate(timeout=SECONDS)
        assert (process.returncode, out) == (1, "")
        assert "uthentication" in err


def test_a_token_s_path_may_name_a_file_that_is_not_there(tmp_path):
    code = (
        "from cluster.authentication import use_token; use_token(); import os; print(os.environ.get('RAY_AUTH_MODE'))"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    env |= {"HOME": str(tmp_path), "RAY_AUTH_TOKEN_PATH": str(tmp_path / "nowhere")}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "None\n", done.stderr


def test_a_token_is_made_that_only_its_user_can_read(tmp_path):
    code = "from cluster.authentication import make_token; make_token(); import os; print(os.environ['RAY_AUTH_MODE'])"
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    token = tmp_path / ".ray" / "auth_token"
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], env=env | {"HOME": str(tmp_path)}, cwd=ROOT, capture_output=True, text=True
        )
        assert done.stdout == "token\n", done.stderr
        assert (token.stat().st_mode & 0o777, len(token.read_text())) == (0o600, 64)
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]
