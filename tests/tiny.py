"""Small encoders with random weights, and small files of every task in their official formats."""

import json
import random
from pathlib import Path

from smyrf.experiments.nlp.tasks import TASKS

GOOD = ["fine", "great", "lovely", "bright", "warm"]
BAD = ["poor", "awful", "dull", "grim", "cold"]
OTHER = ["the", "film", "story", "actor", "was", "and", "a", "very", "this", "scene", "plot", "music"]
WORDS = [*GOOD, *BAD, *OTHER, ".", ","]


def save_encoder(folder, kind="bert", n_layers=2, **config):
    """A BERT or RoBERTa of a few thousand weights with its tokenizer, as `from_pretrained` reads them."""
    import torch
    import transformers

    folder = Path(folder)
    if kind == "bert":
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
        tokenizer = transformers.BertTokenizer(vocab=vocabulary)
    else:
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        letters = [*sorted(set("".join(WORDS))), "Ġ"]
        vocabulary = {word: number for number, word in enumerate([*special, *letters])}
        tokenizer = transformers.RobertaTokenizer(vocab=vocabulary, merges=[])
    settings = {
        "vocab_size": len(vocabulary),
        "hidden_size": 16,
        "num_hidden_layers": n_layers,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 512 if kind == "bert" else 514,
        "pad_token_id": tokenizer.pad_token_id,
        **({} if kind == "bert" else {"type_vocab_size": 1}),
        **config,
    }
    torch.manual_seed(0)
    classes = {"bert": ("BertConfig", "BertModel"), "roberta": ("RobertaConfig", "RobertaModel")}
    config_class, model_class = (getattr(transformers, name) for name in classes[kind])
    model_class(config_class(**settings)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def rows(task, n, seed=0):
    """Rows that can be learnt: good words or bad ones, by the label. They have different lengths."""
    chance = random.Random(f"{task.name} {seed}")
    found = []
    for number in range(n):
        label = number % max(2, len(task.labels))
        words = [*chance.sample([BAD, GOOD, OTHER][label], 3), *chance.sample(OTHER, chance.randint(0, 5))]
        chance.shuffle(words)
        row = {name: " ".join(chance.sample(words, len(words))) + " ." for name in task.texts}
        row["label"] = task.labels[label] if task.labels else f"{5.0 * label - 0.5 * label * chance.random():.3f}"
        found.append(row)
    return found


def write_task(folder, name, n_train=32, n_eval=16):
    """The files of a task as they are published: below `folder`, in a folder of the task's own."""
    task, place = TASKS[name], Path(folder) / TASKS[name].title
    place.mkdir(parents=True, exist_ok=True)
    splits = {"train": n_train, **dict.fromkeys(task.splits, n_eval)}
    if name == "hyperpartisan":
        del splits["validation"]
    for seed, (split, n) in enumerate(splits.items()):
        _write(place / task.files[split][0], task, rows(task, n, seed))
    return Path(folder)


def _write(stem, task, some):
    official = {ours: theirs for theirs, ours in task.columns.items()}
    if task.name in ("imdb", "hyperpartisan"):
        for row in some:
            row["label"] = task.labels.index(row["label"])
        stem.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        return
    numbers = task.name in ("cola", "sst2", "mrpc", "qqp", "wnli")
    names = list(task.header) or ["index", *(official.get(one, one) for one in (*task.texts, "label"))]
    lines = [] if task.header else ["\t".join(names)]
    for number, row in enumerate(some):
        label = str(task.labels.index(row["label"])) if numbers else row["label"]
        values = {"index": str(number), "source": "x", "star": "", **row, "label": label}
        lines.append("\t".join(values[task.columns.get(name, name)] for name in names))
    stem.with_suffix(".tsv").write_text(
        "\n".join(lines) + "\n", encoding="utf-8-sig" if task.name == "mrpc" else "utf-8"
    )
