"""Compiled programs in a folder, here or in a bucket: made ahead of time, loaded in place of compiling.

One file holds one program: a line of JSON with what it was made from, then the serialised executable. A file is used
only where all of that is the same; otherwise the program is compiled, and the log says why.

Beside them, in `COMPILED`, JAX keeps what had to be compiled all the same, under its own key: the next process that is
given the folder loads that.

Loading runs code from the files: only folders that you trust.
"""

import contextlib
import hashlib
import json
import logging
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from wan_tpu.aot import key
from wan_tpu.errors import InvalidInput, OutputError
from wan_tpu.storage.addresses import is_bucket
from wan_tpu.storage.base import Missing
from wan_tpu.storage.opening import open_storage

SUFFIX, COMPILED = ".executable", "compiled"
_log = logging.getLogger(__name__)


class Executables:
    """The executables of one model's programs in a folder."""

    def __init__(self, folder: str | Path, settings: str, *, save: bool = False) -> None:
        """settings: as in `key.what`; save: store what has to be compiled.

        Raises `InvalidInput` when the folder to load from doesn't exist, `OutputError` when it can't be made.
        """
        self._folder = open_storage(folder, private=False)
        self._settings = settings
        self._save = save
        if is_bucket(str(folder)):
            return
        here = Path(folder)
        if not save and not here.is_dir():
            raise InvalidInput(f"{folder} is no folder of executables; make one with scripts/precompile.py")
        try:
            here.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"can't make the folder {folder} ({error.strerror})") from None

    def keep_compiled(self) -> None:
        """Have JAX keep what it compiles, unless it was told another place: a start after this one compiles nothing."""
        if not self._folder.jax_can_write:
            _log.warning("what has to be compiled is not kept: JAX can't write to %s", self._folder.location())
        elif jax.config.values["jax_compilation_cache_dir"] is None:
            jax.config.update("jax_compilation_cache_dir", self._folder.location(COMPILED))

    def get(self, name: str, args: Any, mesh: Mesh, build: Callable[[], Any]) -> Any:
        """Return the executable of a program for arguments like these; `build` is called when none is stored.

        args  the positional arguments: arrays, or shapes with shardings
        """
        asked = key.what(name, args, mesh, self._settings)
        file = self.file(asked)
        loaded = self._load(file, asked, mesh)
        if loaded is not None:
            return loaded
        if not self._save:
            return build()
        with _compiled_anew():
            built = build()
            self._folder.write(file, _packed({"what": asked, "made_by": key.made_by()}, built))
        return built

    def file(self, asked: key.Ingredients) -> str:
        """Return the name of the file that the program which `key.what` describes is kept in."""
        plain = re.sub(r"\W+", "-", asked["program"].split(",")[0])
        return f"{plain}-{key.digest(json.dumps(asked, sort_keys=True))}{SUFFIX}"

    def _load(self, file: str, asked: key.Ingredients, mesh: Mesh) -> Any | None:
        level = logging.WARNING
        try:
            header, payload = _unpacked(self._folder.read(file))
            reason = "; ".join(key.differences(header["made_by"], key.made_by()))
            if not reason:
                executable, in_tree, out_tree = pickle.loads(payload)
                return serialize_executable.deserialize_and_load(
                    executable, in_tree, out_tree, mesh.devices.flat[0].client, list(mesh.devices.flat)
                )
        except Missing:
            reason = "there is none for these shapes, this mesh and this model"
            level = logging.INFO if self._save else logging.WARNING
        except Exception as error:  # a damaged file, or whatever a runtime makes of one from another version
            reason = f"{file} can't be loaded ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
        _log.log(level, "compiling %s, no stored executable is used: %s", asked["program"], reason)
        return None


@contextlib.contextmanager
def _compiled_anew() -> Iterator[None]:
    """Keep JAX's own cache of compiled programs away: what comes from there can't be stored again whole (CPU, 0.10)."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # or it goes on as it was
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _unpacked(content: bytes) -> tuple[dict[str, Any], bytes]:
    head, _, payload = content.partition(b"\n")
    header = json.loads(head)
    if hashlib.sha256(payload).hexdigest() != header["sha256"]:
        raise ValueError("its checksum is wrong")
    return header, payload


def _packed(header: dict[str, Any], compiled: Any) -> bytes:
    payload = pickle.dumps(serialize_executable.serialize(compiled))
    head = json.dumps(header | {"sha256": hashlib.sha256(payload).hexdigest()})
    return head.encode() + b"\n" + payload
