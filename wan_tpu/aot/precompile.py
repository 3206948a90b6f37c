"""Compile a model's programs ahead of time and keep them."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from wan_tpu.aot import key
from wan_tpu.aot.executables import Executables
from wan_tpu.aot.programs import AbstractRuntime, programs_by_images
from wan_tpu.errors import DoesNotFit
from wan_tpu.families.model import Model
from wan_tpu.request import ResolvedRequest
from wan_tpu.runtime.runtime import Runtime


@dataclass(frozen=True)
class Precompiled:
    """A program that is now in the folder."""

    name: str
    compile_s: float  # Seconds spent compiling it; 0 if it was already there.
    seconds: float
    refusal: str | None = None  # Why the program isn't stored: with this number of images it doesn't fit into memory.


def compile_all(
    runtime: Runtime, request: ResolvedRequest, stages: Sequence[str], on_program: Callable[[str, int, int], None]
) -> tuple[str, ...]:
    """Compile every program of a resolved request with any number of images.

    Args:
        on_program: Called before each program is compiled, with its name, its number and the number of programs.

    Returns:
        Descriptions of the programs that don't fit into memory with an unusual number of images.

    Raises:
        DoesNotFit: A program doesn't fit with the usual number.
    """
    programs = [
        (images, item)
        for stage in stages
        for images, group in programs_by_images(runtime, request, (stage,)).items()
        for item in group
    ]
    refusals = []
    for number, (images, (name, program, args)) in enumerate(programs, 1):
        on_program(name, number, len(programs))
        try:
            program.compile(*args)
        except DoesNotFit as error:
            if images == runtime.model.spec.images_of(request)[0]:
                raise
            refusals.append(f"{name}: {error}")
    return tuple(refusals)


def precompile(
    model: Model, request: ResolvedRequest, mesh: Mesh, dtype: str, folder: str, *, stages: Sequence[str] | None = None
) -> Iterator[Precompiled]:
    """Compile every program of a resolved request for a mesh, real or described, and store each in a folder.

    This includes the programs for every number of images that the model accepts.

    Args:
        folder: Where to store them. Programs that are already there are left alone.
        stages: As in `stage_programs`.

    Yields:
        Each program as soon as it is in the folder.

    Raises:
        DoesNotFit: A program doesn't fit the memory with the usual number of images.
    """
    runtime = AbstractRuntime(
        model, mesh, dtype, executables=Executables(folder, key.settings(model.config, dtype), save=True)
    )
    for images, programs in programs_by_images(runtime, request, stages).items():
        for name, program, args in programs:
            start, before, refusal = time.perf_counter(), program.compile_s, None
            try:
                program.compile(*args)
            except DoesNotFit as error:
                if images == model.spec.images_of(request)[0]:
                    raise
                refusal = str(error)
            yield Precompiled(name, program.compile_s - before, time.perf_counter() - start, refusal)
