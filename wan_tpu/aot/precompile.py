"""Compile a model's programs ahead of time and keep them."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from wan_tpu.aot import key
from wan_tpu.aot.executables import Executables
from wan_tpu.aot.programs import AbstractRuntime, all_programs
from wan_tpu.families.model import Model
from wan_tpu.request import ResolvedRequest


@dataclass(frozen=True)
class Precompiled:
    """A program that is now in the folder; compile_s is 0 when it was there before."""

    name: str
    compile_s: float
    seconds: float


def precompile(
    model: Model, request: ResolvedRequest, mesh: Mesh, dtype: str, folder: str, *, stages: Sequence[str] | None = None
) -> Iterator[Precompiled]:
    """Compile every program of a resolved request for a mesh, described or real, and store each in a folder.

    This includes the programs for every number of images that the model accepts.

    Args:
        model: The model.
        request: The request whose programs are compiled.
        mesh: The devices that they will run on.
        dtype: The precision.
        folder: Where they are stored. Programs that it already has are left alone.
        stages: As in `stage_programs`.

    Yields:
        Each program as soon as it is in the folder.
    """
    runtime = AbstractRuntime(
        model, mesh, dtype, executables=Executables(folder, key.settings(model.config, dtype), save=True)
    )
    for name, program, args in all_programs(runtime, request, stages):
        start, before = time.perf_counter(), program.compile_s
        program.compile(*args)
        yield Precompiled(name, program.compile_s - before, time.perf_counter() - start)
