"""`smyrf bench` and `smyrf bench quality`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from smyrf.tools.cli.options import Json, Plot, Seed, Threads
from smyrf.tools.cli.validation import (
    naming,
    need,
    need_at_least,
    need_model,
    need_outputs,
    need_seed,
    read_memory,
    read_threads,
    refuse,
)

app = typer.Typer(invoke_without_command=True)


@app.callback()
def bench(
    context: typer.Context,
    preset: Annotated[
        str | None, typer.Option(help="batch1, fixed-tokens (the paper's two experiments), native or quick.")
    ] = None,
    length: Annotated[list[int] | None, typer.Option(help="Sequence length; may be given several times.")] = None,
    batch: Annotated[int, typer.Option(help="Batch size, with --length.")] = 1,
    n_hashes: Annotated[list[int] | None, typer.Option(help="Rounds of Smyrf, paired with --cluster-size.")] = None,
    cluster_size: Annotated[list[int] | None, typer.Option(help="Queries per cluster of Smyrf.")] = None,
    budget: Annotated[list[int] | None, typer.Option(help="Key visits of Tangent; may be given several times.")] = None,
    levels: Annotated[int | None, typer.Option(help="Levels of Tangent; by default from length and budget.")] = None,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    width: Annotated[int, typer.Option(help="Width of a head.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    threads: Threads = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="Backend: reference, torch or native; several are compared if given several times or separated by "
            "commas; by default the best for the device."
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(help="Baseline to leave out: eager smyrf, sdpa, eager dense; may be given several times."),
    ] = None,
    backward: Annotated[bool, typer.Option(help="Also measure forward + backward.")] = True,
    memory: Annotated[bool, typer.Option(help="Also measure peak memory, each in a fresh process.")] = True,
    json: Json = None,
    plot: Plot = None,
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

    from smyrf.backends.registry import BACKENDS, backends
    from smyrf.methods import Method, Smyrf, Tangent
    from smyrf.tools.bench.baselines import BASELINES
    from smyrf.tools.bench.command import run_suite
    from smyrf.tools.bench.problems import DTYPES, PRESETS, make_suite

    names = [name for several in backend or [] for name in several.split(",")]
    for option, choices, known in (
        ("preset", [] if preset is None else [preset], PRESETS),
        ("dtype", [dtype], DTYPES),
        ("backend", names, BACKENDS),
        ("without", without or [], BASELINES),
    ):
        for choice in choices:
            if option == "backend" and choice not in known and choice in backends():
                refuse(f"--backend {choice} is {backends()[choice]}")
            if choice not in known:
                refuse(f"--{option} {choice} must be one of {', '.join(known)}")
    threads = read_threads(threads)
    need_at_least(1, batch=batch, heads=heads, width=width, levels=levels)
    for option, values in (
        ("length", length),
        ("n_hashes", n_hashes),
        ("cluster_size", cluster_size),
        ("budget", budget),
    ):
        for value in values or []:
            need_at_least(1, **{option: value})
    if preset is not None and (length or n_hashes or cluster_size or budget or batch != 1):
        refuse(
            f"--preset {preset} fixes shapes and methods: leave out --length, --batch, --n-hashes, --cluster-size and "
            "--budget"
        )
    if levels is not None and not budget:
        refuse(f"--levels {levels} is for Tangent: give --budget too")
    if len(n_hashes or []) != len(cluster_size or []):
        refuse("--n-hashes and --cluster-size go in pairs: give them equally often")
    memory = memory and read_memory(memory)
    need_outputs(json, plot)

    pairs = zip(n_hashes or [], cluster_size or [], strict=True)
    try:
        methods: list[Method] = [*(Smyrf(h, c) for h, c in pairs), *(Tangent(u, levels=levels) for u in budget or [])]
    except ValueError as error:
        refuse(str(error))
    if preset is None and not length and not methods:
        preset = "quick"
    suite = make_suite(
        PRESETS[preset].shapes if preset else [(batch, n) for n in length or []] or PRESETS["quick"].shapes,
        PRESETS[preset].methods if preset else methods or [Smyrf(4, 64)],
        heads=heads,
        width=width,
        dtype=dtype,
        backward=backward,
        backends=tuple(dict.fromkeys(names)) or (None,),
        without=tuple(dict.fromkeys(without or [])),
    )
    console = Console()
    if preset:
        console.print(PRESETS[preset].says)
    title = f"smyrf bench --preset {preset}" if preset else "smyrf bench"
    run_suite(suite, title, threads=threads, memory=memory, json=json, plot=plot, console=console)


@app.command()
def quality(
    model: Annotated[str | None, typer.Option(help="minilm (default), or a path or hub name of an encoder.")] = None,
    qkv: Annotated[Path | None, typer.Option(help="Read q, k, v from a .safetensors or .npz file instead.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per document, for a model; 512 by default.")] = None,
    documents: Annotated[int | None, typer.Option(help="Documents, for a model; 2 by default.")] = None,
    budget: Annotated[
        list[int] | None,
        typer.Option(help="Key visits per query; may be given several times; default 64, 128, 256."),
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(help="Python file or folder with other methods, such as benchmarks/peers; it is executed."),
    ] = None,
    gradients: Annotated[bool, typer.Option(help="Also errors of gradients and of the attention map.")] = True,
    time: Annotated[bool, typer.Option(help="Also measure the time.")] = True,
    threads: Threads = None,
    seed: Seed = 0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Error of attention against key visits and time: our methods, their ablations, and peers."""
    from smyrf.tools.encoders import encoder_attention, model_title
    from smyrf.tools.quality.command import bench_quality
    from smyrf.tools.quality.entrants import LEAST_BUDGET, all_entrants
    from smyrf.tools.quality.inputs import load_qkv, uniform
    from smyrf.tools.quality.peers import PeerError, load_peers

    threads = read_threads(threads)
    need_at_least(1, length=length, documents=documents)
    for one in budget or []:
        need_at_least(LEAST_BUDGET, budget=one)
    need_seed(seed)
    if qkv is not None and not (model is None and length is None and documents is None):
        refuse(f"--qkv {qkv} has its own lengths: leave out --model, --length and --documents")
    need_outputs(json, plot)
    console = Console()
    try:
        peers_of = None if peers is None else load_peers(peers)
    except PeerError as error:
        refuse(f"--peers {peers}: {error}")
    console.print(
        "no peers: --peers names a file with them" if peers is None else f"peers: {escape(str(peers))}", highlight=False
    )

    model = model or "minilm"
    if qkv is None:
        need_model(model)
    elif qkv.suffix == ".safetensors":
        need("safetensors", "demo")
    option, source = (f"--model {model}", model_title(model)) if qkv is None else (f"--qkv {qkv}", qkv.name)
    with naming(option), console.status(f"loading {source}"):
        calls = uniform(encoder_attention(model, documents or 2, length or 512) if qkv is None else load_qkv(qkv))
    n_queries, n_keys = calls[0].q.shape[2], calls[0].k.shape[2]
    budgets = sorted(set(budget or [some for some in (64, 128, 256) if some <= n_keys]))
    if not budgets or budgets[-1] > n_keys:
        refuse(f"--budget {budgets[-1] if budgets else 64} is more than the {n_keys} keys of {source}")
    try:
        bench_quality(
            calls,
            all_entrants(budgets, n_keys, n_queries, peers_of),
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
