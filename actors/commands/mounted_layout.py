"""A layout in a file that Kubernetes mounts into the cluster's pods from a ConfigMap."""

import hashlib
import time
from pathlib import Path
from typing import NamedTuple

from wan_tpu.errors import Unavailable

# With its default periods, a kubelet updates a mounted ConfigMap within two minutes. Wait twice as long.
_WAIT_S = 240.0


class MountedLayout(NamedTuple):
    """A layout file on the cluster's machines.

    Attributes:
        path: The path of the file.
        text: Its content, in YAML.
    """

    path: str
    text: str

    @property
    def sha256(self) -> str:
        """The SHA-256 hash of the content, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def wait_for_layout(path: str, sha256: str, wait_s: float = _WAIT_S) -> str:
    """Wait until a file has the layout that a service's configuration was written for, and return its text.

    A new configuration reaches Ray Serve before a changed ConfigMap reaches the machines.

    Args:
        path: The path of the file.
        sha256: The hash of the layout, in hexadecimal.
        wait_s: How long to wait, in seconds.

    Raises:
        Unavailable: After that time, the file can't be read or still has other content.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            layout = MountedLayout(path, Path(path).read_text())
        except OSError as error:
            problem = f"can't be read ({error.strerror})"
        else:
            if layout.sha256 == sha256:
                return layout.text
            problem = (
                f"has the hash {layout.sha256[:12]}, but the service's configuration was written for {sha256[:12]}"
            )
        if time.monotonic() > deadline:
            raise Unavailable(
                f"the layout {path} {problem}; run wan-tpu manifests once, and apply both the ConfigMap (the layout) "
                "and the RayService (the configuration) that it prints"
            )
        time.sleep(1)
