"""A recipe, run: transformers' Trainer with another attention, and a result that a kill does not lose."""

from __future__ import annotations

import hashlib
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from smyrf.experiments.launch_env import is_first_process, n_processes
from smyrf.experiments.nlp.data import load_splits
from smyrf.experiments.nlp.encoder import hash_model, load_classifier, load_config, load_tokenizer, quiet
from smyrf.experiments.nlp.metrics import compute_metrics
from smyrf.experiments.nlp.recipe import Inputs, Recipe
from smyrf.experiments.nlp.results import SUFFIX, Evaluation, Result, load_result
from smyrf.experiments.nlp.tasks import TASKS
from smyrf.experiments.nlp.tokens import hash_rows, largest_token, tokenise
from smyrf.methods import Dense, Method
from smyrf.models.replace import replace_attention, restore_attention

# Checkpoints that are written in a run, and kept at a time: the one before stays until the next is whole.
N_CHECKPOINTS, N_KEPT = 10, 2
# Between two of them: a checkpoint is three times as large as the model.
LEAST_STEPS = 10
# Rows of the training loss in a result.
N_LOSSES = 20


class Prepared(NamedTuple):
    """What a run needs, all of it known to fit together; nothing has been trained.

    Args:
        splits: token ids, by name.
        inputs: hashes of what they and the model were made of.
    """

    recipe: Recipe
    tokenizer: Any
    config: Any
    splits: dict[str, Any]
    inputs: Inputs

    @property
    def name(self) -> str:
        """Of the run's files."""
        return self.recipe.name(self.inputs)


def n_devices() -> int:
    """Into how many parts a batch is cut: processes, or all devices of a single process, as transformers does it.

    Example:
        >>> n_devices() >= 1
        True
    """
    return n_processes() if n_processes() > 1 else max(1, torch.cuda.device_count())


def result_file(folder: Path, prepared: Prepared) -> Path:
    """Where the result of a run is, or will be."""
    return folder / f"{prepared.name}{SUFFIX}"


def model_folder(folder: Path, result: Result) -> Path:
    """Where the trained model of a run is, for ``from_pretrained``."""
    return folder / result.recipe.name(result.inputs) / "model"


def prepare(recipe: Recipe, data: Path | None = None, *, cache: Path | None = None) -> Prepared:
    """Reads model, data and tokens of a run, and checks that they fit: the step at which bad input is refused.

    Args:
        data: folder with the task's files; None for the hub.
        cache: folder for token ids; `smyrf.experiments.nlp.tokens.tokens_folder()` by default.

    Raises:
        ValueError: says what is wrong with the recipe, the model or the data.
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
                f"model={recipe.model!r} knows {config.vocab_size} tokens, and its tokenizer has made number {largest}"
            )
    texts = hashlib.sha256("".join(hash_rows(rows, task) for rows in splits.values()).encode()).hexdigest()[:16]
    return Prepared(recipe, tokenizer, config, tokens, Inputs(texts, hash_model(recipe.model, config)))


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
    """Fine-tunes and evaluates; what is finished is read, what was interrupted goes on from its last checkpoint.

    Args:
        recipe: what to do.
        folder: for the result, ``<name>.run.json``, and for a folder ``<name>`` with checkpoints and the model.
        data: folder with the task's files; None for the hub.
        preset: the paper's row that this is, for the report.
        keep_model: keep the trained model, with its tokenizer, in ``<name>/model``.
        cache: folder for token ids.
        command: what was typed, for the result.
        console: for progress; None for silence.

    Returns:
        the result, which has been written.

    Raises:
        ValueError: says what is wrong with the recipe, the model or the data, before anything is trained.
    """
    prepared = prepare(recipe, data, cache=cache)
    if (found := finished(prepared, folder)) is not None:
        return found
    return train(prepared, folder, preset=preset, keep_model=keep_model, command=command, console=console)


def finished(prepared: Prepared, folder: Path) -> Result | None:
    """The result of a run that is there already, or None. What a kill has left of its checkpoints is removed."""
    from smyrf.experiments.nlp.checkpoints import remove_all

    file = result_file(folder, prepared)
    if not file.exists():
        return None
    found = load_result(file)
    if is_first_process():
        remove_all(folder / prepared.name)
    return found


def train(
    prepared: Prepared,
    folder: Path,
    *,
    preset: str = "",
    keep_model: bool = True,
    command: str = "",
    console: Console | None = None,
) -> Result:
    """`finetune` of what has been prepared."""
    from transformers import DataCollatorWithPadding, set_seed
    from transformers.trainer_callback import PrinterCallback

    from smyrf.experiments.nlp.checkpoints import MarkWhole, last_checkpoint, n_marks, remove_all, remove_half_written
    from smyrf.experiments.nlp.length_sampler import GroupedByLength, SetEpoch, lengths, longest_first
    from smyrf.experiments.nlp.progress import ShowProgress

    recipe, task = prepared.recipe, TASKS[prepared.recipe.task]
    run_folder = folder / prepared.name
    if run_folder.exists() and not run_folder.is_dir():
        raise ValueError(f"{run_folder} must be a folder for checkpoints, and is a file")
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
    trainer = _trainer_class(order)(
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
            f"{run_folder} was begun with {n_marks(resumed)} processes and cannot go on with {n_processes()}: start it "
            "as before, or remove the folder"
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
                    set_seed(recipe.seed)  # hashes of one evaluation do not depend on those before it
                    rows = prepared.splits[split]
                    if recipe.pad == "grouped":
                        rows = longest_first(rows)
                    progress.begin(f"evaluate {method.label}", math.ceil(len(rows) / recipe.batch_size))
                    began = time.perf_counter()
                    found = trainer.predict(rows, metric_key_prefix="eval").metrics
                    metrics = {name: float(found[f"eval_{name}"]) for name in task.metrics}
                    evaluations.append(Evaluation(method, split, len(rows), metrics, time.perf_counter() - began))
    finally:
        progress.end()  # a bar that is left behind hides the cursor
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
            with quiet():
                model.save_pretrained(model_folder(folder, result))
                prepared.tokenizer.save_pretrained(model_folder(folder, result))
        result.save(result_file(folder, prepared), command)
        remove_all(run_folder)
    trainer.accelerator.wait_for_everyone()
    return result


def count_steps(recipe: Recipe, n_rows: int) -> int:
    """Optimisation steps of a run.

    Example:
        >>> count_steps(Recipe(task="rte", model="bert"), 2490)
        468
    """
    steps = math.ceil(math.ceil(n_rows / recipe.batch_size) * recipe.epochs)
    return steps if recipe.max_steps is None else min(steps, recipe.max_steps)


def set_attention(model: Any, method: Method) -> None:
    """Has a model attend by one method, whatever it did before; Dense is its own attention.

    Raises:
        ValueError: no layer of it can be replaced.
    """
    restore_dense(model)
    if not isinstance(method, Dense):
        replace_attention(model, method)


def restore_dense(model: Any) -> None:
    """Gives a model its own attention back, if it has been replaced."""
    from smyrf.models.transformers import ATTRIBUTE

    if any(hasattr(module, ATTRIBUTE) for module in model.modules()):
        restore_attention(model)


def _train(trainer: Any, resumed: Path | None) -> None:
    """Trains, from a checkpoint if there is one.

    Raises:
        ValueError: the checkpoint is damaged.
    """
    try:
        trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    except Exception as error:  # each of its files makes errors of its own
        if resumed is None or trainer.state.global_step > int(resumed.name.rsplit("-", 1)[-1]):
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{resumed} cannot be read: {first}; remove it, to go on from the one before") from error


def _trainer_class(order: Any) -> Any:
    """Trainer, or one that has an order of ours.

    Its own grouping by length draws the order of an epoch from the global generator, which a resumed run has in
    another state.
    """
    from transformers import Trainer

    if order is None:
        return Trainer

    class GroupedTrainer(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return order

    return GroupedTrainer


def _arguments(recipe: Recipe, run_folder: Path, n_steps: int) -> Any:
    from transformers import TrainingArguments

    on_cpu = not torch.accelerator.is_available()
    log_steps = max(1, math.ceil(n_steps / N_LOSSES))
    # Whole numbers of logged steps: the mean loss since the last is not part of a checkpoint.
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
        # A classifier's loss is a mean over rows already: without this transformers multiplies it by the processes.
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
