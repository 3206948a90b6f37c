"""Pictures of a batch's unfinished videos, beside where the videos will be."""

import contextlib
import logging
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from actors.engine import PreviewPicture
from wan_tpu.storage.base import Storage, StorageError

log = logging.getLogger(__name__)


class LinePreviews:
    """The newest picture of one unfinished video. Nothing waits for it, and a batch is as good without."""

    def __init__(self, storage: Storage, name: str) -> None:
        """Write nothing yet; `name` is the picture's in the batch's output."""
        self._storage, self._name = storage, name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="previews")
        self._newest: deque[PreviewPicture] = deque(maxlen=1)  # One that comes meanwhile takes its place.
        self._writing, self._is_over, self._is_there = threading.Lock(), False, False

    def add(self, picture: PreviewPicture) -> None:
        """Write a picture in place of the one before, in the background. This may be called in any thread."""
        self._newest.append(picture)
        with contextlib.suppress(RuntimeError):  # The video is there already.
            self._thread.submit(self._write)

    def close(self) -> None:
        """Write no further picture, and remove the last one."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._writing:
            self._is_over = True
            if self._is_there:
                with contextlib.suppress(StorageError):
                    self._storage.delete(self._name)

    def _write(self) -> None:
        try:
            with self._writing:
                if self._newest and not self._is_over:
                    self._is_there = True
                    self._storage.write(self._name, self._newest.pop().jpeg)
        except StorageError as error:
            log.warning("no preview %s: %s", self._name, error)
