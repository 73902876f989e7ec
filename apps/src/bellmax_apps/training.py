"""Training in one or several processes, with checkpoints to resume from after an interrupt.

A run is a folder with these files:

- ``config.json``: the configuration.
- ``last.pt``: the checkpoint to resume from.
- ``best.pt``: the weights with the best score on the development data.
- ``history.json``: the metrics, one entry per epoch.
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

LINE_SECONDS = 30.0
"""Seconds between two lines about an epoch if the output is not a terminal."""
EPOCH_FILES = "last.pt", "best.pt", "history.json"
"""Files that each epoch replaces."""
CHANGEABLE = "epochs", "minutes"
"""Settings that may change when a run is resumed."""


@dataclass(frozen=True)
class Settings:
    """Settings of the training loop.

    Args:
        epochs: Maximum number of epochs.
        minutes: Training time after which no new epoch starts, default unlimited.
        optimizer: "sgd" or "adamw".
        step_size: Learning rate.
        decay: Factor for the learning rate after an epoch without a new best score.
        cool_down: Number of last epochs over which the learning rate decays linearly, nearly to 0.
        clip: Maximum norm of the gradient.
        seed: Random seed.

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
        """Learning rate of an epoch, counted from 0. ``step_size`` is the learning rate before the cool-down.

        >>> settings = Settings(epochs=4, cool_down=2)
        >>> [settings.step_at(epoch, 3.0) for epoch in range(4)]
        [3.0, 3.0, 2.0, 1.0]
        """
        return step_size * min(1.0, (self.epochs - epoch) / (self.cool_down + 1))


@dataclass(frozen=True)
class Config:
    """The configuration of a run. Each application adds fields."""

    command: ClassVar[str] = "bellmax train"
    """The command that trains such a run."""

    settings: Settings = field(default_factory=Settings)
    fingerprint: str | None = None
    """Fingerprint of the training and development data, set by training. Old runs have None."""

    @classmethod
    def load(cls, run: Path) -> Self:
        """Read the configuration of a run."""
        values: dict[str, Any] = read_json(run / "config.json")
        with reading(run / "config.json", "the configuration of a run"):
            values = cls.upgraded(values)
            for name in sorted(values.keys() - {known.name for known in fields(cls)}):
                raise ValueError(f"{name!r} is not a setting of '{cls.command}'; is this a run of another application?")
            _check_types(Settings, values["settings"])
            values["settings"] = Settings(**values["settings"])
            _check_types(cls, values)
            return cls(**values)

    @classmethod
    def upgraded(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the saved values of a run of any version, as this version names them."""
        return values

    def save(self, run: Path) -> None:
        """Write the configuration of a run."""
        write_json(run / "config.json", asdict(self))

    def completed_from(self, run: Path, explicit: Collection[str]) -> Self:
        """Return the configuration of a run, in which ``self`` replaces the fields that ``explicit`` names."""
        saved = self.load(run)
        settings = {name: value for name, value in vars(self.settings).items() if name in explicit}
        others = {name: value for name, value in vars(self).items() if name in explicit}
        return replace(saved, settings=replace(saved.settings, **settings), **others)

    def resumed(self, run: Path) -> Self:
        """Return the configuration of a run, with the epochs and minutes of ``self``.

        Raises ``ValueError`` if anything else differs, or if the data have changed.
        """
        saved = self.load(run)
        is_old = saved.fingerprint is None
        pairs = [(vars(saved), vars(self)), (vars(saved.settings), vars(self.settings))]
        differ = [
            f"{name} {old[name]}, got {new[name]}"
            for old, new in pairs
            for name in old
            if name not in ("settings", "fingerprint", *CHANGEABLE)
            and old[name] != new[name]
            and not (is_old and old[name] is None)
        ]
        if differ:
            raise ValueError(
                f"{run} was started with {'; '.join(differ)}: omit these options, or choose another folder "
                f"(only {' and '.join(CHANGEABLE)} may change)"
            )
        if not is_old and saved.fingerprint != self.fingerprint:
            raise ValueError(
                f"{run} was started with other data: to continue, the files of train and dev must be the same"
            )
        changed = {name: getattr(self.settings, name) for name in CHANGEABLE}
        return replace(saved, settings=replace(saved.settings, **changed), fingerprint=self.fingerprint)


def check_share(name: str, value: float) -> None:
    """Raise ``ValueError`` unless ``value`` is at least 0 and below 1."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value}")


def _check_types(kind: type, values: dict[str, Any]) -> None:
    """Raise ``ValueError`` unless the values have the types of the fields of a dataclass, and are finite."""
    types = get_type_hints(kind)
    for name, value in values.items():
        expected, is_number = types.get(name, object), isinstance(value, int | float)
        if not isinstance(value, expected) and not (is_number and isinstance(0.0, expected)):
            raise ValueError(f"{name} must be {getattr(expected, '__name__', expected)}, got {value!r}")
        if is_number and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")


class Task(Protocol, Generic[B]):
    """Training data, and a model that returns the sum of the losses over the items of a batch."""

    model: nn.Module
    metric: str
    """Entry of ``evaluate`` to maximize."""

    def batches(self, epoch: int) -> Sequence[B]:
        """Batches of an epoch. A repeated epoch has the same batches."""
        ...

    def shard(self, batch: B, rank: int, world: int) -> tuple[Any, int]:
        """Input of the model in one of ``world`` processes, and its number of items.

        If the number of items is 0, the input is a placeholder, whose loss does not count.
        """
        ...

    def items(self, batch: B) -> int:
        """Number of items in a batch. The loss that is minimized is the mean over items."""
        ...

    def tokens(self, batch: B) -> int:
        """Number of tokens in a batch, for the speed in tokens per second."""
        ...

    def evaluate(self) -> Record:
        """Metrics on the development data."""
        ...


# --- processes


def rank() -> int:
    """Number of this process, from 0."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def world() -> int:
    """Number of processes."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


@contextmanager
def processes(device: torch.device) -> Iterator[None]:
    """Join the process group for the duration of the block, if torchrun started this process."""
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
    """Progress of a run.

    Args:
        history: Metrics of each epoch.
        step_size: Learning rate before the cool-down.
        best: Best score so far.

    """

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
        """Training time of all epochs."""
        return sum(record["seconds"] for record in self.history)


def is_begun(run: Path) -> bool:
    """True if the run has a configuration or an epoch to resume from."""
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
    """True if the folder has no file of a run."""
    return not any((run / name).exists() for name in ("config.json", *EPOCH_FILES))


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Load tensors and numbers by name, without running code from the file."""
    with reading(path, "a checkpoint", "it is damaged, or another program wrote it"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of old pickle protocols, which it reads correctly
        checkpoint = torch.load(path, weights_only=True, map_location=device)
        if not isinstance(checkpoint, dict):
            raise ValueError
        return checkpoint


def load_best(make: Callable[[], M], run: Path) -> M:
    """Return the model that ``make`` creates, with the best weights of a run."""
    weights = load_checkpoint(run / "best.pt")
    with reading(run / "config.json", "the configuration of a run"), torch.device("meta"):
        without_memory = make()
    with reading(run / "best.pt", "the weights of this model"):
        # A damaged configuration may describe a model of any size. Compare shapes before allocating memory.
        _load_weights(without_memory, weights, assign=True)
        model = make()
        _load_weights(model, weights)
    return model


def _load_weights(model: nn.Module, weights: dict[str, Tensor], *, assign: bool = False) -> None:
    """Set the weights of a model. Raises ``ValueError`` if a weight is complex or not finite."""
    wrong = [name for name, weight in weights.items() if weight.is_complex() or not weight.isfinite().all()]
    if wrong:
        raise ValueError(f"{wrong[0]} must hold finite numbers")
    model.load_state_dict(weights, assign=assign)


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Take a step with zero gradients on a copy, so that a damaged optimizer state raises before training."""
    copy = deepcopy(optimizer)
    weights = [weight for group in copy.param_groups for weight in group["params"]]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    copy.step()
    if not all(weight.isfinite().all() for weight in weights):
        raise ValueError("its optimizer must hold finite numbers")


def begin(run: Path, config: Config, *, resume: bool) -> None:
    """Create the folder of a run and save its configuration. Unless ``resume``, delete the epochs of an earlier run."""
    run.mkdir(parents=True, exist_ok=True)
    if not resume:
        for name in EPOCH_FILES:
            (run / name).unlink(missing_ok=True)
    config.save(run)


def fit(task: Task[B], settings: Settings, run: Path, *, resume: bool = False, console: Console | None = None) -> State:
    """Train from the start, or from the last epoch of the run, and show the progress on ``console``.

    Ctrl-C raises ``KeyboardInterrupt``. Finished epochs stay in the run.
    """
    model = task.model
    device = next(model.parameters()).device
    kind = torch.optim.SGD if settings.optimizer == "sgd" else torch.optim.AdamW
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=settings.step_size)
    state = State([], settings.step_size)
    if resume and has_epoch(run):
        saved = load_checkpoint(run / "last.pt", device)
        with reading(run / "last.pt", "a checkpoint of this model"):
            _load_weights(model, saved["model"])
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
        record |= _train_epoch(task, parallel, optimizer, settings, epoch, console)
        _evaluate_and_save(task, record, optimizer, settings, state, run, console)
    return state


def _train_epoch(
    task: Task[B],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    epoch: int,
    console: Console | None,
) -> Record:
    """Take a step for each batch of an epoch. Returns the mean loss, the seconds, and the tokens per second."""
    torch.manual_seed(1_000_003 * settings.seed + epoch)
    model.train()
    device = next(model.parameters()).device
    batches = task.batches(epoch)
    start = time.perf_counter()
    total = torch.zeros((), dtype=torch.float64)
    items = tokens = 0
    with _bar(console, f"epoch {epoch + 1}/{settings.epochs}", len(batches)) as advance:
        for batch in batches:
            shard, items_here = task.shard(batch, rank(), world())
            with _suggest_smaller_steps(epoch + 1, optimizer.param_groups[0]["lr"]):
                loss = _loss(model, shard) * bool(items_here)
            optimizer.zero_grad()
            (loss * (world() / task.items(batch))).backward()  # DistributedDataParallel averages over processes
            clip_gradients(model.parameters(), settings.clip)
            optimizer.step()
            total += loss.detach().double().cpu()
            items += task.items(batch)
            tokens += task.tokens(batch)
            advance(f"loss {total / items * world():.3f}, {tokens / (time.perf_counter() - start):.0f} tokens/s")
    seconds = time.perf_counter() - start
    if world() > 1:
        total = total.to(device)
        distributed.all_reduce(total)
        slowest = torch.tensor(seconds, device=device)  # then all processes stop after the same epoch
        distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
        seconds = slowest.item()
    return {"loss": total.item() / max(items, 1), "seconds": seconds, "tokens_per_second": tokens / seconds}


def _loss(model: nn.Module, inputs: Any) -> Tensor:
    """Sum of the losses of the inputs, in mixed precision on a GPU. Raises ``ValueError`` if it is not finite."""
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        loss: Tensor = model(inputs)
    if not loss.isfinite():
        raise ValueError(f"the loss became {loss.item()}")
    return loss


@contextmanager
def _suggest_smaller_steps(epoch: int, step_size: float) -> Iterator[None]:
    """Turn a ``ValueError`` into a ``FloatingPointError`` that suggests a smaller learning rate.

    If steps are too long, the weights diverge. Then the loss is not finite, or bellmax refuses the scores.
    """
    try:
        yield
    except ValueError as error:
        raise FloatingPointError(f"{error}, in epoch {epoch}: try a learning rate below {step_size:g}") from None


def _evaluate_and_save(
    task: Task[B],
    record: Record,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    state: State,
    run: Path,
    console: Console | None,
) -> None:
    """Finish an epoch: evaluate on the development data, adapt the learning rate, and write the files of the run."""
    task.model.eval()
    with _suggest_smaller_steps(int(record["epoch"]), record["step_size"]):
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
        checkpoint = {"model": task.model.state_dict(), "optimizer": optimizer.state_dict(), **vars(state)}
        save(checkpoint, run / "last.pt")
    if console is not None:
        console.print(
            f"epoch {record['epoch']:>3}: loss {record['loss']:.4f}, dev {task.metric} {record[task.metric]:.2f}"
            f"{' (best)' if is_best else ''}, {record['tokens_per_second']:.0f} tokens/s, {record['seconds']:.0f} s",
            highlight=False,
            soft_wrap=True,
        )


@contextmanager
def _bar(console: Console | None, title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call after each batch, which updates a progress bar and the text behind it."""
    if console is None or not console.is_terminal:
        yield (lambda text: None) if console is None else _line_printer(console, title, total)
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, TextColumn("{task.fields[text]}"), console=console, transient=True) as progress:
        bar = progress.add_task(title, total=total, text="")
        yield lambda text: progress.update(bar, advance=1, text=text)


def _line_printer(console: Console, title: str, total: int) -> Callable[[str], None]:
    """Replacement of a progress bar: a function to call after each batch, which prints a line every 30 seconds."""
    done, last = 0, time.monotonic()

    def advance(text: str) -> None:
        nonlocal done, last
        done += 1
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            console.print(f"{title}: {done} of {total} batches, {text}", highlight=False, soft_wrap=True)

    return advance


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Scale all gradients, dense and sparse, to a total norm of at most ``limit``. Returns the norm before.

    >>> weight = nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_gradients([weight], 1.0), weight.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    gradients = []
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
                gradients.append(parameter.grad.values())
            else:
                gradients.append(parameter.grad)
    norm: Tensor = torch.stack(torch._foreach_norm(gradients)).norm()
    torch._foreach_mul_(gradients, torch.where(norm > limit, limit / norm, 1.0))
    return norm


def save(checkpoint: Any, path: Path) -> None:
    """Write a checkpoint atomically."""
    with replacing(path) as temporary:
        torch.save(checkpoint, temporary)
