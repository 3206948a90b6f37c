"""What both training stages share: learning rate, averaged weights, log, and a state to resume from."""

import json
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .sizes import Schedule


@dataclass(frozen=True)
class Run:
    """Where and how long to train.

    Attributes:
        folder: Where states, logs and contact sheets are written.
        device: The device to train on.
        seed: The seed of all random numbers.
        seconds: How long a stage trains before it saves its state and stops; called again, it resumes.
        compiled: Whether inductor fuses the operations between matrix products, which halves an expert's step on a CPU.
            It needs g++.
    """

    folder: Path
    device: torch.device
    seed: int
    seconds: float
    compiled: bool = False


class Descent:
    """An optimiser: torch's Muon for the matrices and convolutions of `modules`, AdamW for all else.

    On the VAE, 500 steps of Muon reach a square error that AdamW doesn't reach in 2,000. Muon takes only matrices, so a
    convolution's kernel is passed to it with a row for each output channel.
    """

    def __init__(self, modules: torch.nn.ModuleDict):
        self._modules = modules
        # An embedding is a list of vectors and not a matrix, so AdamW trains it, as Muon's author advises.
        vectors = {id(m.weight) for m in modules.modules() if isinstance(m, torch.nn.Embedding)}
        kernels = [p for p in modules.parameters() if p.dim() > 1 and p.dim() != 3 and id(p) not in vectors]
        chosen = {id(p) for p in kernels}
        self._rows = [(p, torch.nn.Parameter(_as_rows(p.data))) for p in kernels]
        self._muon = torch.optim.Muon([row for _, row in self._rows], weight_decay=0.01)
        rest = [p for p in modules.parameters() if id(p) not in chosen]
        self._adam = torch.optim.AdamW(rest, betas=(0.9, 0.99), weight_decay=0.01)

    def step(self, loss: torch.Tensor, adam_rate: float, muon_rate: float) -> None:
        """Move all parameters down the gradient of `loss`, which is clipped to a norm of one."""
        self._modules.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._modules.parameters(), 1.0)
        for parameter, rows in self._rows:
            rows.grad = None if parameter.grad is None else _as_rows(parameter.grad)
        for optimiser, rate in ((self._muon, muon_rate), (self._adam, adam_rate)):
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        return {"muon": self._muon.state_dict(), "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self._muon.load_state_dict(state["muon"])
        self._adam.load_state_dict(state["adam"])


def train(
    name: str,
    run: Run,
    schedule: Schedule,
    modules: torch.nn.ModuleDict,
    loss_of: Callable[[int], dict[str, torch.Tensor]],
    sheet: Callable[[int], None],
) -> bool:
    """Train `modules` from where the last call stopped, and leave the averaged weights in them.

    Args:
        name: The stage.
        run: Where and how long to train.
        schedule: Steps, learning rates and averaging.
        modules: What is trained.
        loss_of: Returns the parts of a step's loss, of which "loss" is minimised. Its randomness must depend only on
            the step.
        sheet: Draws a contact sheet with the averaged weights at a step.

    Returns:
        Whether all steps are done.
    """
    modules.to(run.device).train()
    averaged = {key: value.detach().clone() for key, value in modules.state_dict().items()}
    descent = Descent(modules)
    first = _restore(run.folder / f"{name}.pt", modules, descent, averaged, run.device)
    began = time.monotonic()
    step, seen = first, []
    while step < schedule.steps and time.monotonic() - began < run.seconds:
        _seed(run.seed, step)
        parts = loss_of(step)
        part = learning_rate(schedule, step)
        descent.step(parts["loss"], part * schedule.adam_rate, part * schedule.muon_rate)
        step += 1
        seen.append({key: value.detach() for key, value in parts.items()})
        _average(averaged, modules, min(schedule.ema, step / (step + 10)))
        if step % 50 == 0 or step == schedule.steps:
            _log(run.folder / f"{name}.jsonl", step, seen, (time.monotonic() - began) / (step - first))
            seen = []
        if step % schedule.save_every == 0:
            _save(run.folder / f"{name}.pt", step, modules, descent, averaged)
        if schedule.sheet_every and (step % schedule.sheet_every == 0 or step == schedule.steps):
            _with_average(modules, averaged, lambda: sheet(step))  # noqa: B023  # It is called at once.
    _save(run.folder / f"{name}.pt", step, modules, descent, averaged)
    modules.load_state_dict(averaged)
    modules.eval()
    print(f"{name}: {step} of {schedule.steps} steps, {(time.monotonic() - began) / max(1, step - first):.2f} s a step")
    return step >= schedule.steps


def learning_rate(schedule: Schedule, step: int) -> float:
    """Return a step's learning rate as a share of its peak: a warm-up, then a cosine down to a fiftieth."""
    if step < schedule.warm_up:
        return (step + 1) / schedule.warm_up
    passed = (step - schedule.warm_up) / max(1, schedule.steps - schedule.warm_up)
    return 0.02 + 0.98 * (1 + math.cos(math.pi * min(1.0, passed))) / 2


def load_average(name: str, run: Run, modules: torch.nn.ModuleDict) -> None:
    """Fill `modules` with a stage's averaged weights."""
    state = torch.load(run.folder / f"{name}.pt", map_location="cpu", weights_only=True)
    modules.load_state_dict(state["averaged"])
    modules.to(run.device).eval()


def _seed(seed: int, step: int) -> None:
    # A step's random numbers don't depend on whether the run was stopped before it.
    mixed = int(np.random.SeedSequence([seed, step]).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def _average(averaged: dict[str, torch.Tensor], modules: torch.nn.Module, decay: float) -> None:
    for key, value in modules.state_dict().items():
        if value.is_floating_point():
            averaged[key].lerp_(value.detach(), 1 - decay)
        else:
            averaged[key].copy_(value)


def _with_average(modules: torch.nn.Module, averaged: dict[str, torch.Tensor], look: Callable[[], None]) -> None:
    trained = {key: value.detach().clone() for key, value in modules.state_dict().items()}
    modules.load_state_dict(averaged)
    modules.eval()
    with torch.no_grad():
        look()
    modules.load_state_dict(trained)
    modules.train()


def _restore(
    file: Path,
    modules: torch.nn.Module,
    descent: Descent,
    averaged: dict[str, torch.Tensor],
    device: torch.device,
) -> int:
    if not file.exists():
        return 0
    state = torch.load(file, map_location=device, weights_only=True)
    modules.load_state_dict(state["trained"])
    descent.load_state_dict(state["optimiser"])
    for key, value in state["averaged"].items():
        averaged[key].copy_(value)
    return int(state["step"])


def _save(
    file: Path,
    step: int,
    modules: torch.nn.Module,
    descent: Descent,
    averaged: dict[str, torch.Tensor],
) -> None:
    partial = file.with_suffix(".partial")
    state = {"step": step, "trained": modules.state_dict(), "averaged": averaged, "optimiser": descent.state_dict()}
    torch.save(state, partial)
    os.replace(partial, file)  # Atomically, because an interrupted save mustn't lose the run.


def _log(file: Path, step: int, seen: list[dict[str, torch.Tensor]], seconds: float) -> None:
    """Write the mean of each part of the losses since the last line; not every step has every part."""
    names = dict.fromkeys(name for parts in seen for name in parts)
    values = {name: round(float(np.mean([float(p[name]) for p in seen if name in p])), 5) for name in names}
    line = json.dumps({"step": step, **values, "seconds_a_step": round(seconds, 3)})
    with file.open("a") as log:
        log.write(line + "\n")
    print(line, flush=True)


def _as_rows(kernel: torch.Tensor) -> torch.Tensor:
    """Return a kernel [O, I, ...] as a matrix with O rows; a view if the channels come last in memory."""
    if kernel.dim() == 2:
        return kernel
    return kernel.movedim(1, -1).flatten(1)
