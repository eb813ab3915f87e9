"""The command line of `syshaxd bench`. Records go to standard output: a table for people, one JSON object a line for
programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from syshax.errors import SyshaxError
from syshaxd.bench import api, api_report, limits, moe, reports, ring, sessions, spinning, suite
from syshaxd.bench.timing import QUIET_CPUS
from syshaxd.core import compiled_core, core_errors

Operators = Annotated[list[str] | None, typer.Option(help="Path of an operator library; may be repeated.")]

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def bench() -> None:
    """Measure this machine without a running daemon."""


@contextmanager
def errors_for_people() -> Iterator[None]:
    """An error of the tree ends the command with its exit code, its message and hint on standard error."""
    try:
        yield
    except SyshaxError as error:
        print(f"syshaxd bench: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from error


@app.command("limits")
def limits_command(
    threads: Annotated[
        int, typer.Option(min=0, max=4096, help="Threads over all nodes; 0: as many as may be used.")
    ] = 0,
    isa: Annotated[str, typer.Option(envvar="SYSHAX_ISA", help="Cap on the instruction set.")] = "",
    seconds: Annotated[float, typer.Option(min=0.0, max=60.0, help="Time to spend on each limit.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """What this machine can do at most: bytes read a second, and operations a second by type of number."""
    with errors_for_people():
        core = compiled_core()
        with core_errors(core):
            record = limits.measured(limits.LimitMeter(core, moe.make_bench_plan(core, threads), isa), seconds)
    if as_json:
        print(json.dumps(record))
        return
    result = Table(title=f"{record['cpu']}, {record['isa']}, {record['threads']} threads on {record['nodes']} nodes")
    result.add_column("limit")
    result.add_column("G/s", justify="right")
    result.add_column("reached by")
    for limit, field in limits.FIELDS.items():
        result.add_row(field, f"{record[field]:.1f}", record["winners"][limit])  # type: ignore[literal-required]
    Console(width=None if sys.stdout.isatty() else 120).print(result)
    if record["others"] > QUIET_CPUS:
        print(busy_note(record["others"]), file=sys.stderr)


@app.command("moe")
def moe_command(
    shape: Annotated[
        str, typer.Option(help=f"{' | '.join(moe.SHAPES)} | HIDDENxINTERMEDIATExEXPERTSxTOPK.")
    ] = "qwen3-30b-a3b",
    format: Annotated[
        str, typer.Option(help="Format of the weights: bf16, fp16, q8_0, q4_0, or an operator library's.")
    ] = "q8_0",
    tokens: Annotated[str, typer.Option(help="Numbers of tokens to measure, separated by commas.")] = "1,16,256",
    threads: Annotated[
        int, typer.Option(min=0, max=4096, help="Threads over all nodes; 0: as many as may be used.")
    ] = 0,
    dtype: Annotated[str, typer.Option(help="Type of the activations: float32, float16, bfloat16.")] = "bfloat16",
    isa: Annotated[str, typer.Option(envvar="SYSHAX_ISA", help="Cap on the instruction set.")] = "",
    seconds: Annotated[float, typer.Option(min=0.0, help="Time to spend on each point.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of weights, activations and routing.")] = 0,
    with_limits: Annotated[
        bool, typer.Option("--limits/--no-limits", help="Measure the machine's limits beside each point.")
    ] = True,
    operators: Operators = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """The MoE layer: time, bytes of weights read and operations per second (medians), for each number of tokens."""
    with errors_for_people():
        options = moe.Options(
            shape, format, moe.parse_tokens(tokens), threads, dtype, isa, seconds, seed, with_limits, operators or ()
        )
        records = moe.run(options)
        if as_json:
            for record in records:
                print(json.dumps(record), flush=True)
        else:
            done = list(records)
            Console(width=None if sys.stdout.isatty() else 120).print(table(options, done))
            for note in notes(done):
                print(note, file=sys.stderr)


@app.command("all")
def all_command(
    output: Annotated[Path, typer.Option(help="Folder for the record (JSON) and the plot (PNG).")] = Path(
        "bench-results"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points and less time for each: minutes.")] = False,
    shapes: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(moe.SHAPES),
    formats: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(suite.FORMATS),
    tokens: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(map(str, suite.TOKENS)),
    threads: Annotated[str, typer.Option(help="Numbers of threads, separated by commas.")] = "1,2",
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Time to spend on each point; 0: 1 second, quick 0.35.")
    ] = 0.0,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Measure the peers that are installed.")] = True,
    operators: Operators = None,
) -> None:
    """Everything in one run, held against what it must reach: exit status 1 when a figure falls short."""
    with errors_for_people():
        reports.prepare(output)
        for shape in shapes.split(","):
            moe.parse_shape(shape)
        options = suite.Options(
            shapes.split(","),
            formats.split(","),
            moe.parse_tokens(tokens),
            moe.parse_tokens(threads),
            seconds or (0.35 if quick else 1.0),
            quick,
            peers,
            operators or (),
        )
        document = suite.run(options, lambda line: print(line, flush=True))
        for path in reports.write(document, output):
            print(f"wrote {path}")
    for name, reason in document["peers_absent"].items():
        print(f"no comparison with {name}: {reason}")
    if not document["quiet"]:
        print(f"note: only {document['quiet_part']:.0%} of the figures are from quiet moments of this machine")
    print(document["line"], flush=True)
    if document["falls_short"]:
        raise typer.Exit(1)


@app.command("ring")
def ring_command(
    seconds: Annotated[float, typer.Option(min=0.1, max=60.0, help="Time to spend on each figure.")] = 1.0,
    payload: Annotated[int, typer.Option(min=4, help="Bytes of hidden states each way.")] = 4096,
    client_cpu: Annotated[int, typer.Option(min=-1, help="-1: the first that may be used.")] = -1,
    daemon_cpu: Annotated[int, typer.Option(min=-1, help="-1: the last that may be used.")] = -1,
    parts: Annotated[str, typer.Option(help="What to measure, separated by commas.")] = ",".join(ring.PARTS),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """The ring, held against what it must reach: exit status 1 when something falls short. latency: microseconds from
    a client to the data plane and back, beside the least that the machine allows. idle: what a daemon and a client cost
    that have nothing to do. spinning: whether it gives way where others want the CPUs."""
    with errors_for_people():
        say = (lambda line: None) if as_json else (lambda line: print(line, flush=True))
        record = ring.whole(parts.split(","), seconds, payload, (client_cpu, daemon_cpu), say)
    if as_json:
        print(json.dumps(record))
    else:
        for result in ring_tables(record, payload):
            Console(width=None if sys.stdout.isatty() else 120).print(result)
        print(record["line"], flush=True)
    if record["falls_short"]:
        raise typer.Exit(1)


def ring_tables(record: dict[str, Any], payload: int) -> Iterator[Table]:
    if "floor_spin_us" in record:
        result = Table("figure", title=f"{payload} bytes each way")
        result.add_column("µs", justify="right")
        result.add_column("what")
        for name, meaning in ring.MEANINGS.items():
            result.add_row(name, f"{record[name]:.2f}", meaning)
        yield result
    if "spinning" in record:
        result = Table("a small layer, µs", title="spinning")
        for heading in ("by the rule", *(f"{us} µs fixed" for us in spinning.FIXED_SETTINGS), "best fixed / rule"):
            result.add_column(heading, justify="right")
        for row in record["spinning"]:
            times = [f"{time:.1f}" for time in (row["ours_us"], *row["fixed_us"].values())]
            result.add_row(row["scenario"], *times, f"{row['ratio']:.2f}")
        yield result
    result = Table("target", title="targets")
    for heading in ("at most", "found"):
        result.add_column(heading, justify="right")
    for verdict in record["verdicts"]:
        result.add_row(verdict["target"], f"{verdict['at_most']:g}", f"{verdict['value']:.3g}")
    yield result


@app.command("api")
def api_command(
    output: Annotated[Path, typer.Option(help="Folder for the record (JSON) and the plot (PNG).")] = Path(
        "bench-results"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter rounds: a minute.")] = False,
    parts: Annotated[str, typer.Option(help="What to measure, separated by commas.")] = ",".join(api.PARTS),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """syshax-api before a worker that answers at once, beside a bare pass-through on the same CPU in the same rounds:
    exit status 1 when something falls short. latency: what it adds at 200 requests a second. closed, full: requests and
    events a second at most. paced: CPU time of an event. many: 2,000 streams. processes: two against one."""
    with errors_for_people():
        reports.prepare(output)
        say = (lambda line: None) if as_json else (lambda line: print(line, flush=True))
        document = api.run(parts.split(","), api.QUICK if quick else api.FULL, say)
        paths = api_report.write(document, output)
    if as_json:
        print(json.dumps(document))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(api_report.table(document))
        for path in paths:
            print(f"wrote {path}")
        if not document["quiet"]:
            print(busy_note(document["others"]), file=sys.stderr)
        print(document["line"], flush=True)
    if document["falls_short"]:
        raise typer.Exit(1)


@app.command("sessions")
def sessions_command(
    formats: Annotated[str, typer.Option(help="Separated by commas.")] = "bf16,q8_0,q4_0",
    shape: Annotated[
        str, typer.Option(help=f"{' | '.join(moe.SHAPES)} | HIDDENxINTERMEDIATExEXPERTSxTOPK.")
    ] = "qwen3-30b-a3b",
    seconds: Annotated[float, typer.Option(min=0.1, max=600.0, help="Time to spend on each figure.")] = 8.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Several clients at once: one-token requests beside long ones, and replicas that decode the same layers. Exit
    status 1 when a figure falls short."""
    with errors_for_people():
        core = compiled_core()
        with core_errors(core):
            records = sessions.run(core, formats.split(","), shape, seconds)
    if as_json:
        for record in (part for pair in records for part in pair):
            print(json.dumps(record))
    else:
        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(fairness_table([fairness for fairness, _ in records]))
        console.print(sharing_table([sharing for _, sharing in records]))
    short = [text for pair in records for part in pair for text in part["falls_short"]]
    print(f"falls short: {'; '.join(short)}" if short else "sessions: nothing falls short")
    if short:
        raise typer.Exit(1)


def fairness_table(records: list[sessions.Fairness]) -> Table:
    result = Table(title=f"one token alone, and beside requests of {records[0]['long_tokens']} tokens back to back")
    for heading in ("format", "alone p50 ms", "p99", "beside p50 ms", "p99", "throughput of both"):
        result.add_column(heading, justify="left" if heading == "format" else "right")
    for record in records:
        times = (record["alone_p50_ms"], record["alone_p99_ms"], record["beside_p50_ms"], record["beside_p99_ms"])
        result.add_row(record["format"], *(f"{ms:.2f}" for ms in times), f"{record['throughput']:.0%}")
    return result


def sharing_table(records: list[sessions.Sharing]) -> Table:
    result = Table(title=f"two replicas of {records[0]['tokens']} tokens, tokens a second")
    for heading in ("format", "one after the other", "together", "gain", "possible", "computed together"):
        result.add_column(heading, justify="left" if heading == "format" else "right")
    for record in records:
        result.add_row(
            record["format"],
            f"{record['after_each_other']:.0f}",
            f"{record['together']:.0f}",
            f"{record['gain']:.2f}",
            f"{record['possible']:.2f}",
            f"{record['batched']:.0%}",
        )
    return result


def busy_note(cpus: float) -> str:
    return f"note: other processes kept {cpus:.1f} CPUs busy; figures of a busy machine say little"


def notes(records: list[moe.Record]) -> list[str]:
    """What must be known to read the figures."""
    found = [
        f"note: {record['tokens']} tokens exceeded the {record['raised']} limit that was measured, and raised it"
        for record in records
        if record["raised"]
    ]
    busiest = max(record["others"] for record in records)
    return found + ([] if all(record["quiet"] for record in records) else [busy_note(busiest)])


def table(options: moe.Options, records: list[moe.Record]) -> Table:
    first = records[0]
    title = f"{options.shape}, {options.format}, {options.dtype}, {first['threads']} threads on {first['nodes']} nodes"
    result = Table(title=title)
    for heading in ("tokens", "ms", "weights GB/s", "GFLOP/s", "of limit", "of sustained", "busy", "calls", "kernel"):
        result.add_column(heading, justify="left" if heading == "kernel" else "right")
    for record in records:
        share = record["limit_share"]
        result.add_row(
            str(record["tokens"]),
            f"{record['ms']:.3f}",
            f"{record['weight_gb_s']:.1f}",
            f"{record['gflop_s']:.1f}",
            "" if share is None else f"{share:.0%} {record['limit']}",
            "" if share is None else f"{record['sustained_share']:.0%}",
            f"{record['busy']:.0%}",
            str(record["calls"]),
            record["kernel"],
        )
    return result
