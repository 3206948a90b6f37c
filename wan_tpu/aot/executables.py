"""Compiled programs in a folder, here or in a bucket: built ahead of time, and loaded instead of compiling.

One file holds one program: a line of JSON with everything that it was compiled from, then the serialised executable. A
file is used only if all of that is the same; otherwise the program is compiled, and the log says why.

Beside them, in `COMPILED`, JAX keeps the programs that had to be compiled anyway (`wan_tpu.aot.kept`).

Loading runs code from the files: use only folders that you trust.
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

from wan_tpu.aot import kept, key
from wan_tpu.errors import InvalidInput, OutputError
from wan_tpu.storage.addresses import is_bucket
from wan_tpu.storage.base import Missing
from wan_tpu.storage.opening import open_storage

SUFFIX, COMPILED = ".executable", "compiled"
_log = logging.getLogger(__name__)


class Executables:
    def __init__(self, folder: str | Path, settings: str, *, save: bool = False) -> None:
        """Open the folder.

        Args:
            folder: Where the executables are.
            settings: As in `key.describe_program`.
            save: Store the programs that have to be compiled.

        Raises:
            InvalidInput: The folder to load from doesn't exist.
            OutputError: The folder to store into can't be created.
        """
        self._folder = open_storage(folder, private=False)
        self._settings = settings
        self._save = save
        if is_bucket(str(folder)):
            return
        here = Path(folder)
        if not save and not here.is_dir():
            raise InvalidInput(f"{folder} isn't a folder of executables; create one with scripts/precompile.py")
        try:
            here.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"can't create the folder {folder} ({error.strerror})") from None

    def keep_compiled(self) -> None:
        """Have JAX keep what it compiles, so that the next start compiles nothing."""
        if not self._folder.jax_can_write:
            _log.warning("compiled programs aren't kept, because JAX can't write to %s", self._folder.location())
        else:
            kept.keep_compiled(self._folder.location(COMPILED))

    def get(self, name: str, args: Any, mesh: Mesh, build: Callable[[], Any]) -> Any:
        """Return the executable of a program for arguments like these.

        Args:
            args: The positional arguments: arrays, or shapes with shardings.
            build: Compiles the program. Called when none is stored.
        """
        description = key.describe_program(name, args, mesh, self._settings)
        file = self.file(description)
        loaded = self._load(file, description, mesh)
        if loaded is not None:
            return loaded
        if not self._save:
            return build()
        with _without_jax_cache():
            compiled = build()
            self._folder.write(file, _pack({"what": description, "made_by": key.describe_build()}, compiled))
        return compiled

    def file(self, description: key.Ingredients) -> str:
        """Return the name of the file for the program that `key.describe_program` describes."""
        plain = re.sub(r"\W+", "-", description["program"].split(",")[0])
        return f"{plain}-{key.digest(json.dumps(description, sort_keys=True))}{SUFFIX}"

    def _load(self, file: str, description: key.Ingredients, mesh: Mesh) -> Any | None:
        level = logging.WARNING
        try:
            header, payload = _unpack(self._folder.read(file))
            reason = "; ".join(key.list_differences(header["made_by"], key.describe_build()))
            if not reason:
                executable, in_tree, out_tree = pickle.loads(payload)
                loaded = serialize_executable.deserialize_and_load(
                    executable, in_tree, out_tree, mesh.devices.flat[0].client, list(mesh.devices.flat)
                )
                kept.note_loaded()
                return loaded
        except Missing:
            reason = "there is none for these shapes, this mesh and this model"
            level = logging.INFO  # What is compiled now is kept.
        except Exception as error:  # Damaged files and those of other versions fail in many ways.
            reason = f"{file} can't be loaded ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
        _log.log(
            level,
            "compiling %s instead of loading a stored executable: %s",
            description["program"],
            reason,
            extra={"reason": reason},
        )
        return None


@contextlib.contextmanager
def _without_jax_cache() -> Iterator[None]:
    """Disable JAX's own cache of compiled programs: its programs can't be stored again completely (CPU, JAX 0.10)."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # Without this, the new setting has no effect.
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _unpack(content: bytes) -> tuple[dict[str, Any], bytes]:
    head, _, payload = content.partition(b"\n")
    header = json.loads(head)
    if hashlib.sha256(payload).hexdigest() != header["sha256"]:
        raise ValueError("its checksum is wrong")
    return header, payload


def _pack(header: dict[str, Any], compiled: Any) -> bytes:
    payload = pickle.dumps(serialize_executable.serialize(compiled))
    head = json.dumps(header | {"sha256": hashlib.sha256(payload).hexdigest()})
    return head.encode() + b"\n" + payload
