"""Training with progress, which can be interrupted and resumed, on one or several processes.

A run is a folder: ``last.pt`` is the checkpoint to resume from, ``best.pt`` the best weights on the development data,
``history.json`` the metrics, one entry per epoch.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, get_type_hints

import torch
import torch.distributed as distributed
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bellmax_apps.files import read_json, reading, replacing, write_json

if TYPE_CHECKING:
    from typing_extensions import Self

B = TypeVar("B")
M = TypeVar("M", bound=nn.Module)
Record = dict[str, float]

EVERY = 30.0
"""Seconds between two lines about an epoch, where there is no terminal to draw a bar on."""
LEARNT = "last.pt", "best.pt", "history.json"
FILES = "config.json", *LEARNT
MAY_CHANGE = "epochs", "minutes"  # when a run goes on


@dataclass(frozen=True)
class Settings:
    """How to train.

    Args:
        epochs: maximum number of epochs.
        minutes: no new epoch starts after this many.
        optimizer: "sgd" or "adamw".
        step_size: learning rate.
        decay: the learning rate is multiplied by this after an epoch without a new best score.
        cool_down: number of last epochs over which the learning rate decays linearly, nearly to 0.
        clip: maximum norm of a gradient.
        seed: random seed.

    """

    epochs: int = 30
    minutes: float | None = None
    optimizer: str = "sgd"
    step_size: float = 0.01
    decay: float = 1.0
    cool_down: int = 0
    clip: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.optimizer not in ("sgd", "adamw"):
            raise ValueError(f"optimizer must be 'sgd' or 'adamw', got {self.optimizer!r}")
        if self.epochs < 1:
            raise ValueError(f"epochs must be at least 1, got {self.epochs}")
        if not 0 <= self.cool_down <= self.epochs:
            raise ValueError(f"cool_down must be from 0 to the {self.epochs} epochs, got {self.cool_down}")
        for name in ("step_size", "decay", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")

    def step_at(self, epoch: int, step_size: float) -> float:
        """The learning rate of an epoch, counted from 0, where ``step_size`` is the rate without the cool-down.

        >>> settings = Settings(epochs=4, cool_down=2)
        >>> [settings.step_at(epoch, 3.0) for epoch in range(4)]
        [3.0, 3.0, 2.0, 1.0]
        """
        return step_size * min(1.0, (self.epochs - epoch) / (self.cool_down + 1))


@dataclass(frozen=True)
class Config:
    """The configuration of a run; each application adds fields."""

    command: ClassVar[str] = "bellmax train"
    """The command that writes such a run."""

    settings: Settings = field(default_factory=Settings)
    fingerprint: str | None = None
    """That of the files of train and dev; training sets it. Older runs have none."""

    @classmethod
    def load(cls, run: Path) -> Self:
        given: dict[str, Any] = read_json(run / "config.json")
        with reading(run / "config.json", "the configuration of a run"):
            for name in sorted(given.keys() - {known.name for known in fields(cls)}):
                raise ValueError(f"{name!r} is not a setting of '{cls.command}'; is this a run of another application?")
            settings = Settings(**_typed(Settings, given["settings"]))
            return cls(**_typed(cls, {**given, "settings": settings}))

    def save(self, run: Path) -> None:
        write_json(run / "config.json", asdict(self))

    def filled(self, run: Path, given: Collection[str]) -> Self:
        """The configuration saved in a run, with the fields of this one that are in ``given``."""
        before = self.load(run)
        own = {name: value for name, value in vars(self.settings).items() if name in given}
        others = {name: value for name, value in vars(self).items() if name in given}
        return replace(before, settings=replace(before.settings, **own), **others)

    def resumed(self, run: Path) -> Self:
        """The configuration saved in a run, with the epochs and minutes of this one. Nothing else may differ."""
        before = self.load(run)
        is_old = before.fingerprint is None
        pairs = [(vars(before), vars(self)), (vars(before.settings), vars(self.settings))]
        differ = [
            f"{name} {old[name]}, got {new[name]}"
            for old, new in pairs
            for name in old
            if name not in ("settings", "fingerprint", *MAY_CHANGE)
            and old[name] != new[name]
            and not (is_old and old[name] is None)
        ]
        if differ:
            raise ValueError(
                f"{run} was begun with {'; '.join(differ)}: leave this out, or name another folder "
                f"(only {' and '.join(MAY_CHANGE)} may change)"
            )
        if not is_old and before.fingerprint != self.fingerprint:
            raise ValueError(f"{run} was begun with other data: to go on, the files of train and dev must be the same")
        changed = {name: getattr(self.settings, name) for name in MAY_CHANGE}
        return replace(before, settings=replace(before.settings, **changed), fingerprint=self.fingerprint)


def check_share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value}")


def _typed(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    """What is given for a dataclass, if it has the types of its fields and is finite."""
    types = get_type_hints(kind)
    for name, value in given.items():
        wanted, is_number = types.get(name, object), isinstance(value, int | float)
        if not isinstance(value, wanted) and not (is_number and isinstance(0.0, wanted)):
            raise ValueError(f"{name} must be {getattr(wanted, '__name__', wanted)}, got {value!r}")
        if is_number and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")
    return given


class Task(Protocol, Generic[B]):
    """A training task: batches, and a model that returns the sum of the losses of a batch."""

    model: nn.Module
    metric: str
    """The entry of ``evaluate`` to maximise."""

    def batches(self, epoch: int) -> Sequence[B]:
        """The batches of an epoch; the same ones if the epoch is repeated."""
        ...

    def part(self, batch: B, rank: int, world: int) -> tuple[Any, int]:
        """The share of a batch for one of ``world`` processes, as model input, and its number of items, maybe 0."""
        ...

    def items(self, batch: B) -> int:
        """Number of items in a batch; the loss is the mean over items."""
        ...

    def tokens(self, batch: B) -> int:
        """Number of tokens in a batch; speed is in tokens per second."""
        ...

    def evaluate(self) -> Record:
        """Metrics on the development data."""
        ...


# --- processes


def rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def world() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


@contextmanager
def processes(device: torch.device) -> Iterator[None]:
    """Join the process group, if torchrun started this process."""
    if "WORLD_SIZE" not in os.environ or distributed.is_initialized():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()


# --- runs


@dataclass
class State:
    """The progress of a run."""

    history: list[Record]
    step_size: float
    best: float = -float("inf")

    def __post_init__(self) -> None:
        numbers = [self.step_size, self.best, *(number for record in self.history for number in record.values())]
        if not all(isinstance(number, int | float) for number in numbers) or math.isnan(self.best):
            raise ValueError("the progress of a run must be numbers")
        if not 0 < self.step_size < math.inf:
            raise ValueError(f"the step size of a run must be finite and above 0, got {self.step_size}")
        if not all(0 <= record.get("seconds", -1.0) < math.inf for record in self.history):
            raise ValueError("the progress of a run must have the seconds of each epoch")

    @property
    def seconds(self) -> float:
        return sum(record["seconds"] for record in self.history)


def is_begun(run: Path) -> bool:
    """True if the run has settings, or an epoch, to resume from."""
    return (run / "config.json").exists() or has_epoch(run)


def has_epoch(run: Path) -> bool:
    """True if the run has a finished epoch to resume from."""
    return (run / "last.pt").exists()


def is_usable(run: Path) -> bool:
    """True if the run has the weights of a finished epoch."""
    return (run / "best.pt").exists()


def check_usable(run: Path, command: str) -> None:
    """Raise ``ValueError`` if a run of ``command`` has no weights."""
    if is_usable(run):
        return
    if is_begun(run):
        raise ValueError(f"{run} has no weights, since no epoch was finished: continue with '{command} --resume'")
    raise ValueError(f"{run} is not a run of '{command}': it has no best.pt")


def is_empty(run: Path) -> bool:
    """Whether the folder has none of the files of a run."""
    return not any((run / name).exists() for name in FILES)


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """torch.load of tensors and numbers by name, which runs no code of the file."""
    with reading(path, "a checkpoint", "it is damaged, or another program wrote it"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, on files that it reads as meant
        found = torch.load(path, weights_only=True, map_location=device)
        if not isinstance(found, dict):
            raise ValueError
        return found


def load_best(make: Callable[[], M], run: Path) -> M:
    """The model of a configuration, with the best weights of a run."""
    state = load_checkpoint(run / "best.pt")
    with reading(run / "config.json", "the configuration of a run"), torch.device("meta"):
        empty = make()
    with reading(run / "best.pt", "the weights of this model"):
        _fill(empty, state, assign=True)  # before a model of any size takes memory
        model = make()
        _fill(model, state)
    return model


def _fill(model: nn.Module, state: dict[str, Tensor], *, assign: bool = False) -> None:
    wrong = [name for name, weight in state.items() if weight.is_complex() or not weight.isfinite().all()]
    if wrong:
        raise ValueError(f"{wrong[0]} must hold finite numbers")
    model.load_state_dict(state, assign=assign)


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Take a step with gradients of 0 on a copy, so that damage shows now."""
    copy = deepcopy(optimizer)
    weights = [weight for group in copy.param_groups for weight in group["params"]]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    copy.step()
    if not all(weight.isfinite().all() for weight in weights):
        raise ValueError("its optimizer must hold finite numbers")


def begin(run: Path, config: Config, *, resume: bool) -> None:
    """Make the folder of a run and save its settings; unless it resumes, remove what an earlier run has learnt."""
    run.mkdir(parents=True, exist_ok=True)
    if not resume:
        for name in LEARNT:
            (run / name).unlink(missing_ok=True)
    config.save(run)


def fit(task: Task[B], settings: Settings, run: Path, *, resume: bool = False, console: Console | None = None) -> State:
    """Train, from the start or from the last epoch of the run; show progress on ``console``.

    Ctrl-C raises KeyboardInterrupt. The files of the finished epochs stay.
    """
    model = task.model
    device = next(model.parameters()).device
    kind = torch.optim.SGD if settings.optimizer == "sgd" else torch.optim.AdamW
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=settings.step_size)
    state = State([], settings.step_size)
    if resume and has_epoch(run):
        saved = load_checkpoint(run / "last.pt", device)
        with reading(run / "last.pt", "a checkpoint of this model"):
            _fill(model, saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            _check_optimizer(optimizer)
            state = State(saved["history"], saved["step_size"], saved["best"])
    parallel = DistributedDataParallel(model) if world() > 1 else model
    for epoch in range(len(state.history), settings.epochs):
        if settings.minutes is not None and state.seconds >= 60 * settings.minutes:
            break
        step_size = settings.step_at(epoch, state.step_size)
        for group in optimizer.param_groups:
            group["lr"] = step_size
        record = {"epoch": epoch + 1, "step_size": step_size}
        record |= _epoch(task, parallel, optimizer, settings, epoch, console)
        _keep(task, record, optimizer, settings, state, run, console)
    return state


def _epoch(
    task: Task[B],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    epoch: int,
    console: Console | None,
) -> Record:
    torch.manual_seed(1_000_003 * settings.seed + epoch)
    model.train()
    device = next(model.parameters()).device
    batches = task.batches(epoch)
    begun = time.perf_counter()
    total = torch.zeros((), dtype=torch.float64)
    items = tokens = 0
    with _bar(console, f"epoch {epoch + 1}/{settings.epochs}", len(batches)) as advance:
        for batch in batches:
            part, own = task.part(batch, rank(), world())
            with _step_is_named(epoch + 1, optimizer.param_groups[0]["lr"]):
                loss = _loss(model, part) * bool(own)
            optimizer.zero_grad()
            (loss * (world() / task.items(batch))).backward()  # processes take the mean of their gradients
            clip_gradients(model.parameters(), settings.clip)
            optimizer.step()
            total += loss.detach().double().cpu()
            items += task.items(batch)
            tokens += task.tokens(batch)
            advance(f"loss {total / items * world():.3f}, {tokens / (time.perf_counter() - begun):.0f} tokens/s")
    seconds = time.perf_counter() - begun
    if world() > 1:
        total = total.to(device)
        distributed.all_reduce(total)
        slowest = torch.tensor(seconds, device=device)  # so that all processes stop after the same epoch
        distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
        seconds = slowest.item()
    return {"loss": total.item() / max(items, 1), "seconds": seconds, "tokens_per_second": tokens / seconds}


def _loss(model: nn.Module, part: Any) -> Tensor:
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        loss: Tensor = model(part)
    if not loss.isfinite():
        raise ValueError(f"the loss became {loss.item()}")
    return loss


@contextmanager
def _step_is_named(epoch: int, step_size: float) -> Iterator[None]:
    """After steps that are too long the loss, or the scores that a structure is given, are not finite."""
    try:
        yield
    except ValueError as error:
        raise FloatingPointError(f"{error}, in epoch {epoch}: try a learning rate below {step_size:g}") from None


def _keep(
    task: Task[B],
    record: Record,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    state: State,
    run: Path,
    console: Console | None,
) -> None:
    """Evaluate, and write the run's files."""
    task.model.eval()
    with _step_is_named(int(record["epoch"]), record["step_size"]):
        record |= task.evaluate()
    state.history.append(record)
    is_best = record[task.metric] > state.best
    if is_best:
        state.best = record[task.metric]
    else:
        state.step_size *= settings.decay
    if rank() == 0:
        if is_best:
            save(task.model.state_dict(), run / "best.pt")
        write_json(run / "history.json", state.history)
        whole = {"model": task.model.state_dict(), "optimizer": optimizer.state_dict(), **vars(state)}
        save(whole, run / "last.pt")
    if console is not None:
        console.print(
            f"epoch {record['epoch']:>3}: loss {record['loss']:.4f}, dev {task.metric} {record[task.metric]:.2f}"
            f"{' (best)' if is_best else ''}, {record['tokens_per_second']:.0f} tokens/s, {record['seconds']:.0f} s",
            highlight=False,
            soft_wrap=True,
        )


@contextmanager
def _bar(console: Console | None, title: str, total: int) -> Iterator[Callable[[str], None]]:
    if console is None or not console.is_terminal:
        yield (lambda text: None) if console is None else _lines(console, title, total)
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, TextColumn("{task.fields[text]}"), console=console, transient=True) as progress:
        bar = progress.add_task(title, total=total, text="")
        yield lambda text: progress.update(bar, advance=1, text=text)


def _lines(console: Console, title: str, total: int) -> Callable[[str], None]:
    """Prints a line every so often, in place of a bar."""
    done, last = 0, time.monotonic()

    def advance(text: str) -> None:
        nonlocal done, last
        done += 1
        if time.monotonic() - last >= EVERY:
            last = time.monotonic()
            console.print(f"{title}: {done} of {total} batches, {text}", highlight=False, soft_wrap=True)

    return advance


def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> Tensor:
    """Scale all gradients, dense and sparse, to a total norm of at most ``most``; returns the norm before.

    >>> weight = nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_gradients([weight], 1.0), weight.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    numbers = []
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
                numbers.append(parameter.grad.values())
            else:
                numbers.append(parameter.grad)
    norm: Tensor = torch.stack(torch._foreach_norm(numbers)).norm()
    torch._foreach_mul_(numbers, torch.where(norm > most, most / norm, 1.0))
    return norm


def save(what: Any, path: Path) -> None:
    """torch.save, atomically."""
    with replacing(path) as temporary:
        torch.save(what, temporary)
