"""`smyrf bench` and `smyrf bench quality`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from smyrf.tools.cli.validation import need, need_at_least, need_model, need_outputs, need_seed, refuse

app = typer.Typer(invoke_without_command=True)
PEERS = Path("benchmarks/peers")


@app.callback()
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
                refuse(
                    f"{parameter.opts[0]} must not stand before {context.invoked_subcommand}, which is another command"
                )
        return
    import torch

    from smyrf.backends import BACKENDS, backends
    from smyrf.methods import Smyrf, Tangent
    from smyrf.tools.bench import command
    from smyrf.tools.bench import subprocess_memory as fresh
    from smyrf.tools.bench.cases import DTYPES, PRESETS
    from smyrf.tools.bench.contenders import BASELINES

    threads = torch.get_num_threads() if threads is None else threads
    for name, choices, known in (
        ("preset", [] if preset is None else [preset], PRESETS),
        ("dtype", [dtype], DTYPES),
        ("backend", backend or [], BACKENDS),
        ("without", without or [], BASELINES),
    ):
        for choice in choices:
            if name == "backend" and choice not in known and choice in backends():
                refuse(f"--backend {choice} is {backends()[choice]}")
            if choice not in known:
                refuse(f"--{name} {choice} must be one of {', '.join(known)}")
    need_at_least(1, threads=threads)
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
                refuse(f"--{name} {value} must be at least 1")
    if preset is not None and (length or n_hashes or cluster_size or budget or batch != 1):
        refuse(
            f"--preset {preset} says shapes and methods: leave out --length, --batch, --n-hashes, --cluster-size and "
            "--budget"
        )
    if levels is not None and not budget:
        refuse(f"--levels {levels} is for Tangent: give --budget too")
    if len(n_hashes or []) != len(cluster_size or []):
        refuse("--n-hashes and --cluster-size go in pairs: give them equally often")
    if memory and fresh.can_measure() is not None:
        refuse(f"--memory: {fresh.can_measure()}; use --no-memory")
    need_outputs(json, plot)

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


@app.command()
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

    from smyrf.tools.encoders import encoder_attention, minilm_attention
    from smyrf.tools.quality import cases, command
    from smyrf.tools.quality.inputs import load_qkv, uniform
    from smyrf.tools.quality.peers import PeerError, load_peers

    threads = torch.get_num_threads() if threads is None else threads
    need_at_least(1, length=length, documents=documents, threads=threads)
    for one in budget or []:
        need_at_least(cases.LEAST_BUDGET, budget=one)
    need_seed(seed)
    if qkv is not None and not (model is None and length is None and documents is None):
        refuse(f"--qkv {qkv} has its own lengths: leave out --model, --length and --documents")
    need_outputs(json, plot)
    console = Console()
    if peers is None and PEERS.exists():
        peers = PEERS
    try:
        peers_of = None if peers is None else load_peers(peers)
    except PeerError as error:
        refuse(f"--peers {peers}: {error}")
    console.print(
        "no peers: --peers names a file with them" if peers is None else f"peers: {escape(str(peers))}", highlight=False
    )

    model, length, documents = model or "minilm", length or 512, documents or 2
    if qkv is not None:
        if qkv.suffix == ".safetensors":
            need("safetensors", "demo")
        option, source = f"--qkv {qkv}", qkv.name
    else:
        need_model(model)
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
        refuse(f"{option}: {error}")
    n_queries, n_keys = calls[0].q.shape[2], calls[0].k.shape[2]
    budgets = sorted(set(budget or [some for some in (64, 128, 256) if some <= n_keys]))
    if not budgets or budgets[-1] > n_keys:
        refuse(f"--budget {budgets[-1] if budgets else 64} is more than the {n_keys} keys of {source}")
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
        refuse(f"--peers {peers}: {error}")
