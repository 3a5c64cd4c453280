"""Run a recipe with transformers' Trainer and another attention method; interrupted runs resume."""

from __future__ import annotations

import hashlib
import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from smyrf.experiments.checkpoint_folders import checkpoint_step
from smyrf.experiments.launch_env import is_first_process, n_processes
from smyrf.experiments.nlp.data import load_splits
from smyrf.experiments.nlp.encoder import hash_model, load_classifier, load_config, load_tokenizer, quiet
from smyrf.experiments.nlp.metrics import compute_metrics
from smyrf.experiments.nlp.recipe import InputHashes, Recipe
from smyrf.experiments.nlp.results import SUFFIX, Evaluation, Result, load_result
from smyrf.experiments.nlp.tasks import TASKS
from smyrf.experiments.nlp.tokens import hash_rows, largest_token, save_tokenizer, tokenise
from smyrf.experiments.run_lock import run_lock
from smyrf.experiments.save_errors import SaveError, naming_folder
from smyrf.methods import Method
from smyrf.models.replace import replace_attention, restore_attention
from smyrf.tools.error_text import first_line

# Checkpoints per run, and kept at a time: the previous one stays until the next is complete.
N_CHECKPOINTS, N_KEPT = 10, 2
# Minimum number of steps between checkpoints, each of which is three times as large as the model.
LEAST_STEPS = 10
# Training losses in a result.
N_LOSSES = 20


class PreparedRun(NamedTuple):
    """All inputs of a run, loaded and checked against each other.

    Args:
        splits: token ids by split.
        inputs: hashes of data and model.
    """

    recipe: Recipe
    tokenizer: Any
    config: Any
    splits: dict[str, Any]
    inputs: InputHashes

    @property
    def name(self) -> str:
        """Name of the run's files."""
        return self.recipe.name(self.inputs)


def n_devices() -> int:
    """Number of parts of a batch: processes, or devices of a single process, as in transformers.

    Example:
        >>> n_devices() >= 1
        True
    """
    return n_processes() if n_processes() > 1 else max(1, torch.cuda.device_count())


def result_file(folder: Path, prepared: PreparedRun) -> Path:
    """Path of a run's result."""
    return folder / f"{prepared.name}{SUFFIX}"


def model_folder(folder: Path, result: Result) -> Path:
    """Folder of a run's trained model, for ``from_pretrained``."""
    return folder / result.recipe.name(result.inputs) / "model"


def prepare(recipe: Recipe, data: Path | None = None, *, cache: Path | None = None) -> PreparedRun:
    """Load the config, tokenizer and data of a run, and check that they fit together.

    Args:
        data: folder with the task's files; None for the hub.
        cache: folder for token ids; `smyrf.experiments.nlp.tokens.tokens_folder()` by default.

    Raises:
        ValueError: the recipe, the model or the data cannot be used.
    """
    task = TASKS[recipe.task]
    if recipe.batch_size % n_devices():
        raise ValueError(f"batch_size={recipe.batch_size} must be a multiple of the {n_devices()} processes or devices")
    config = load_config(recipe)
    tokenizer = load_tokenizer(recipe, config)
    splits = load_splits(task, data, n_train=recipe.n_train, n_eval=recipe.n_eval)
    tokens = {split: tokenise(rows, tokenizer, task, recipe.max_length, cache) for split, rows in splits.items()}
    for rows in tokens.values():
        if (largest := largest_token(rows)) >= config.vocab_size:
            raise ValueError(
                f"model={recipe.model!r} has {config.vocab_size} tokens, but its tokenizer gives the token id {largest}"
            )
    texts = hashlib.sha256("".join(hash_rows(rows, task) for rows in splits.values()).encode()).hexdigest()[:16]
    return PreparedRun(recipe, tokenizer, config, tokens, InputHashes(texts, hash_model(recipe.model, config)))


def finetune(
    recipe: Recipe,
    folder: Path,
    data: Path | None = None,
    *,
    preset: str = "",
    keep_model: bool = True,
    cache: Path | None = None,
    command: str = "",
    console: Console | None = None,
) -> Result:
    """Fine-tune and evaluate a model. A finished run is read; an interrupted one resumes from its last checkpoint.

    Args:
        recipe: what to run.
        folder: holds the result, ``<name>.run.json``, and a folder ``<name>`` with checkpoints and the model.
        data: folder with the task's files; None for the hub.
        preset: name of the paper's row, for the report.
        keep_model: keep the trained model, with its tokenizer, in ``<name>/model``.
        cache: folder for token ids.
        command: command line, for the result.
        console: shows progress; None for silence.

    Returns:
        the result, which has been written.

    Raises:
        LockedError: another process is training in the run's folder.
        SaveError: a file cannot be written; earlier checkpoints stay.
        ValueError: the recipe, the model or the data cannot be used; raised before training.
    """
    prepared = prepare(recipe, data, cache=cache)
    if (found := finished(prepared, folder)) is not None:
        return found
    return train(prepared, folder, preset=preset, keep_model=keep_model, command=command, console=console)


def finished(prepared: PreparedRun, folder: Path) -> Result | None:
    """Read the result of a finished run, and remove checkpoints that it left behind; None if it is not finished."""
    from smyrf.experiments.nlp.checkpoints import remove_all

    file = result_file(folder, prepared)
    if not file.exists():
        return None
    found = load_result(file)
    if is_first_process():
        remove_all(folder / prepared.name)
    return found


def train(
    prepared: PreparedRun,
    folder: Path,
    *,
    preset: str = "",
    keep_model: bool = True,
    command: str = "",
    console: Console | None = None,
) -> Result:
    """Fine-tune and evaluate a prepared run.

    Raises:
        LockedError: another process is training in its folder.
        SaveError: a file cannot be written; earlier checkpoints stay.
        ValueError: a checkpoint cannot be read, or the run cannot resume.
    """
    run_folder = folder / prepared.name
    if run_folder.exists() and not run_folder.is_dir():
        raise ValueError(f"{run_folder} must be a folder for checkpoints, but is a file")
    with run_lock(run_folder) if is_first_process() else nullcontext():
        return _train_and_evaluate(
            prepared, folder, preset=preset, keep_model=keep_model, command=command, console=console
        )


def _train_and_evaluate(
    prepared: PreparedRun, folder: Path, *, preset: str, keep_model: bool, command: str, console: Console | None
) -> Result:
    from transformers import DataCollatorWithPadding, set_seed
    from transformers.trainer_callback import PrinterCallback

    from smyrf.experiments.nlp.checkpoints import MarkWhole, last_checkpoint, n_marks, remove_all, remove_half_written
    from smyrf.experiments.nlp.length_sampler import GroupedByLength, SetEpoch, lengths, longest_first
    from smyrf.experiments.nlp.progress import ShowProgress

    recipe, task = prepared.recipe, TASKS[prepared.recipe.task]
    run_folder = folder / prepared.name
    n_steps = count_steps(recipe, len(prepared.splits["train"]))
    arguments = _arguments(recipe, run_folder, n_steps)
    set_seed(recipe.seed)
    model = load_classifier(recipe, prepared.config)
    set_attention(model, recipe.train_method)
    console = console or Console(quiet=True)
    progress = ShowProgress(console, f"{task.title} {recipe.label} seed {recipe.seed}")
    order = None
    if recipe.pad == "grouped":
        order = GroupedByLength(lengths(prepared.splits["train"]), recipe.batch_size, recipe.seed)
    trainer = _trainer_class(order, run_folder)(
        model=model,
        args=arguments,
        train_dataset=prepared.splits["train"],
        processing_class=prepared.tokenizer,
        data_collator=DataCollatorWithPadding(
            prepared.tokenizer,
            padding="longest" if recipe.pad == "grouped" else recipe.pad,
            max_length=recipe.max_length,
        ),
        compute_metrics=lambda found: compute_metrics(task.metrics, found.label_ids, found.predictions),
        callbacks=[
            MarkWhole(),
            *([] if order is None else [SetEpoch(order)]),
            *([progress] if is_first_process() else []),
        ],
    )
    trainer.remove_callback(PrinterCallback)

    resumed = last_checkpoint(run_folder)
    if resumed is not None and n_marks(resumed) != n_processes():
        raise ValueError(
            f"{run_folder} was started with {n_marks(resumed)} processes and cannot resume with {n_processes()}: start "
            "it as before, or remove the folder"
        )
    if is_first_process():
        remove_half_written(run_folder)
    evaluations = []
    try:
        with quiet():
            began = time.perf_counter()
            _train(trainer, resumed)
            seconds = time.perf_counter() - began
            for method in recipe.eval_methods:
                set_attention(model, method)
                for split in task.splits:
                    set_seed(recipe.seed)  # hashes must not depend on earlier evaluations
                    rows = prepared.splits[split]
                    if recipe.pad == "grouped":
                        rows = longest_first(rows)
                    progress.begin(f"evaluate {method.label}", math.ceil(len(rows) / recipe.batch_size))
                    began = time.perf_counter()
                    found = trainer.predict(rows, metric_key_prefix="eval").metrics
                    metrics = {name: float(found[f"eval_{name}"]) for name in task.metrics}
                    evaluations.append(Evaluation(method, split, len(rows), metrics, time.perf_counter() - began))
    finally:
        progress.end()  # a bar that is not removed hides the cursor
    losses = [(one["step"], one["loss"]) for one in trainer.state.log_history if "loss" in one]
    restore_dense(model)
    result = Result(
        recipe=recipe,
        evaluations=tuple(evaluations),
        inputs=prepared.inputs,
        preset=preset,
        n_steps=trainer.state.global_step,
        n_rows=len(prepared.splits["train"]),
        losses=tuple(losses),
        seconds=seconds if resumed is None else None,
        threads=torch.get_num_threads(),
        n_processes=n_processes(),
    )
    if is_first_process():
        if keep_model:
            with quiet(), naming_folder(run_folder, "the model"):
                model.save_pretrained(model_folder(folder, result))
                save_tokenizer(prepared.tokenizer, model_folder(folder, result))
        with naming_folder(run_folder, "the result"):
            result.save(result_file(folder, prepared), command)
        remove_all(run_folder)
    trainer.accelerator.wait_for_everyone()
    return result


def count_steps(recipe: Recipe, n_rows: int) -> int:
    """Number of optimisation steps of a run.

    Example:
        >>> count_steps(Recipe(task="rte", model="bert"), 2490)
        468
    """
    steps = math.ceil(math.ceil(n_rows / recipe.batch_size) * recipe.epochs)
    return steps if recipe.max_steps is None else min(steps, recipe.max_steps)


def set_attention(model: Any, method: Method) -> None:
    """Set the attention method of a model; Dense restores its own attention.

    Raises:
        ValueError: no layer can be replaced.
    """
    restore_dense(model)
    if not method.is_dense:
        replace_attention(model, method)


def restore_dense(model: Any) -> None:
    """Restore the attention of a model if it was replaced."""
    from smyrf.models.transformers import ATTRIBUTE

    if any(hasattr(module, ATTRIBUTE) for module in model.modules()):
        restore_attention(model)


def _train(trainer: Any, resumed: Path | None) -> None:
    """Train, from a checkpoint if there is one.

    Raises:
        SaveError: a checkpoint cannot be written.
        ValueError: the checkpoint cannot be read.
    """
    from transformers import TrainerState

    from smyrf.experiments.nlp.checkpoints import remove_half_written

    if resumed is not None:
        process = f"_{trainer.args.process_index}" if trainer.args.world_size > 1 else ""
        # transformers would resume without them, and differ
        for name in ("optimizer.pt", "scheduler.pt", f"rng_state{process}.pth"):
            if not (resumed / name).is_file():
                raise ValueError(f"{resumed} has no {name}; remove it to resume from the previous checkpoint")
    try:
        if resumed is not None:
            state = TrainerState.load_from_json(str(resumed / "trainer_state.json"))
            if state.global_step != checkpoint_step(resumed):
                raise ValueError(f"its trainer_state.json is of step {state.global_step!r}")
            if state.global_step == trainer.args.max_steps:
                # Trainer would take one more step, unless the last one ends an epoch.
                trainer._load_from_checkpoint(str(resumed))
                trainer.state = state
                return
        trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    except SaveError:
        if is_first_process():
            remove_half_written(Path(trainer.args.output_dir))  # it may fill the disk
        raise
    except Exception as error:  # each file of a checkpoint has its own kinds of errors
        if resumed is None or trainer.state.global_step > checkpoint_step(resumed):
            raise
        raise ValueError(
            f"{resumed} cannot be read: {first_line(error)}; remove it to resume from the previous checkpoint"
        ) from error


def _trainer_class(order: Any, run_folder: Path) -> Any:
    """Trainer that names its folder in errors of writing, and takes the given sampler, if there is one.

    Trainer's own grouping by length draws from the global generator, whose state differs in a resumed run.
    """
    from transformers import Trainer

    class FolderTrainer(Trainer):  # type: ignore[misc]
        def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
            with naming_folder(run_folder, f"checkpoint-{self.state.global_step}"):
                super()._save_checkpoint(*arguments, **options)

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return super()._get_train_sampler(train_dataset) if order is None else order

    return FolderTrainer


def _arguments(recipe: Recipe, run_folder: Path, n_steps: int) -> Any:
    from transformers import TrainingArguments

    on_cpu = not torch.accelerator.is_available()
    log_steps = max(1, math.ceil(n_steps / N_LOSSES))
    # A multiple of the logged steps: a checkpoint does not hold the losses since the last logged step.
    save_steps = log_steps * math.ceil(max(LEAST_STEPS, n_steps / N_CHECKPOINTS) / log_steps)
    share = recipe.batch_size // n_devices()
    return TrainingArguments(
        output_dir=str(run_folder),
        per_device_train_batch_size=share,
        per_device_eval_batch_size=share,
        num_train_epochs=recipe.epochs,
        max_steps=n_steps,
        learning_rate=recipe.learning_rate,
        warmup_steps=int(recipe.warmup * n_steps),
        weight_decay=recipe.weight_decay,
        lr_scheduler_type="linear",
        seed=recipe.seed,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and n_processes() > 1 else None,
        # The loss is a mean over rows already: otherwise transformers multiplies it by the number of processes.
        average_tokens_across_devices=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        save_strategy="steps",
        save_steps=save_steps,
        save_total_limit=N_KEPT,
        logging_strategy="steps",
        logging_steps=log_steps,
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
