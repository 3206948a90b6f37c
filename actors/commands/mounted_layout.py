"""A layout that the cluster's machines have as a file, which Kubernetes mounts from a ConfigMap."""

import hashlib
import time
from pathlib import Path
from typing import NamedTuple

from wan_tpu.errors import Unavailable

# A kubelet brings a changed ConfigMap to its pods within two periods of a minute each, the defaults.
_WAIT_S = 240.0


class MountedLayout(NamedTuple):
    """A layout in a file of the cluster's machines.

    Attributes:
        path: The file.
        text: Its content, YAML.
    """

    path: str
    text: str

    @property
    def sha256(self) -> str:
        """The hash of the content, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def wait_for_layout(path: str, sha256: str, wait_s: float = _WAIT_S) -> str:
    """Return the text of a file once it is the layout that a service's configuration means.

    A new configuration reaches Ray Serve before a changed ConfigMap reaches the machines.

    Raises:
        Unavailable: The file isn't there, or still has another content.
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
                f"has another content ({layout.sha256[:12]}) than the service's configuration says ({sha256[:12]})"
            )
        if time.monotonic() > deadline:
            raise Unavailable(
                f"the layout {path} {problem}; apply the ConfigMap, which has the file, and the RayService, which has "
                "the configuration, again, both as one run of wan-tpu manifests writes them"
            )
        time.sleep(1)
