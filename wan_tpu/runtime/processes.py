"""Messages between the processes of one mesh, separate from their programs."""

import jax
import numpy as np
from jax.experimental import multihost_utils

MESSAGE_BYTES = 1024  # The longest message; longer ones are cut.


def share_first(message: str) -> str:
    """Return the first process's message on every process, at most `MESSAGE_BYTES` bytes of it.

    This is a collective: every process must call it, in the same order relative to its programs.
    """
    if jax.process_count() == 1:
        return message
    content = np.frombuffer(message.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0"), np.uint8)
    return bytes(multihost_utils.broadcast_one_to_all(content)).rstrip(b"\0").decode(errors="ignore")
