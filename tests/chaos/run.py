"""`make chaos`: does harm to a real daemon and its clients, round after round, and says what did not hold.

    python tests/chaos/run.py [--short] [--rounds N] [--requests N] [--seed N] [--round K] [--fault WORDS] [--json FILE]

Every round picks the next fault of a shuffled table; after it, within 5 s, every outstanding request has ended in the
right answer or an error with a name, everybody else's answers are right and as quick as before, and the daemon holds no
more than before. At the end 8 sessions send mixed requests, each of which must be answered right. What a round does
depends on seed and round alone: `--seed N --round K` does that round again. The last line says what falls short; then
the exit status is 1.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import statistics
import sys
import time
import traceback
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "daemon"), str(HERE.parent / "core")]

SHORT, FULL = (50, 5_000), (1_000, 100_000)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="faults against a running syshaxd")
    parser.add_argument("--short", action="store_true", help=f"{SHORT[0]} rounds and {SHORT[1]} requests, as CI")
    parser.add_argument("--rounds", type=int, help="rounds of faults")
    parser.add_argument("--requests", type=int, help="mixed requests at the end")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--round", type=int, help="this round alone, and no mixed requests")
    parser.add_argument("--fault", default="", help="only faults whose name has these words")
    parser.add_argument("--json", type=Path, help="write the figures there")
    chosen = parser.parse_args()
    rounds, requests = SHORT if chosen.short else FULL
    chosen.rounds = rounds if chosen.rounds is None else chosen.rounds
    chosen.requests = requests if chosen.requests is None else chosen.requests
    return chosen


def main() -> int:
    from faults import FAULTS, Fault
    from mixed import mixed_requests
    from stand import Failed, Stand

    chosen = options()
    table = [fault for fault in FAULTS if chosen.fault in f"{fault.group}: {fault.name}"]
    if not table:
        print(f"no fault is called {chosen.fault!r}; there are:")
        print(*(f"  {fault.group}: {fault.name}" for fault in FAULTS), sep="\n")
        return 2

    def fault_of(number: int) -> Fault:
        """Every fault comes once before any comes again."""
        cycle, place = divmod(number, len(table))
        order = random.Random(f"{chosen.seed} {cycle}").sample(table, len(table))
        return order[place]

    begun, recoveries = time.monotonic(), collections.defaultdict(list)
    print(f"chaos: seed {chosen.seed}", flush=True)
    numbers = range(chosen.rounds) if chosen.round is None else [chosen.round]
    shortfalls: list[str] = []
    given_up = False
    figures: dict[str, object] = {"seed": chosen.seed}
    with Stand() as stand:
        stand.begin_bystanders()
        print(f"bystanders: decode {stand.latency * 1e3:.2f} ms; {stand.before}", flush=True)
        for number in numbers:
            what = fault_of(number)
            stand.begin_round(random.Random(f"{chosen.seed} {number} fault"))
            started = time.monotonic()
            try:
                what.do(stand)
                seconds = stand.settle()
                recoveries[what.group].append(seconds)
            except Failed as error:
                stand.shortfalls.append(str(error))
            except Exception:  # noqa: BLE001  (whatever it is, the round did not go as it must)
                stand.shortfalls.append(traceback.format_exc(limit=-3)[-1500:])
            found, stand.shortfalls = stand.shortfalls, []
            took = time.monotonic() - started
            well = f"well after {took:.1f} s{stand.noise}"
            print(
                f"round {number}: {what.group}: {what.name}: {'; '.join(found) or well}",
                flush=True,
            )
            if found:
                again = f"--seed {chosen.seed} --round {number}"
                shortfalls.append(f"{what.group}: {what.name} ({again}): {found[0][-300:]}")
            given_up = bool(found) and not stand.can_go_on()
            if given_up:
                shortfalls.append(f"gave up after round {number}")
                break
        stand.end_bystanders()
        if chosen.round is None and chosen.requests and not given_up:
            figures["mixed"] = mixed_requests(stand, chosen.requests, chosen.seed)
        if any(group.startswith("one of several") for group in recoveries) and not stand.together:
            shortfalls.append("no request was ever computed together with another session's")
        shortfalls += stand.shortfalls + stand.last_look()
        figures |= {
            "outcomes": dict(stand.outcomes),
            "growth_bytes": stand.growth,
            "noisy": stand.noisy,
            "together": stand.together,
        }
    figures["recovery"] = {
        group: {"rounds": len(times), "median_s": statistics.median(times), "longest_s": max(times)}
        for group, times in sorted(recoveries.items())
    }
    figures["seconds"] = time.monotonic() - begun
    report(figures)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1))
    rounds = sum(len(times) for times in recoveries.values())
    if shortfalls:
        print("chaos: falls short: " + "; ".join(shortfalls))
        return 1
    print(
        f"chaos: nothing falls short: {rounds} rounds, {stand.outcomes['right']} right answers, none wrong, none lost"
    )
    return 0


def report(figures: dict) -> None:
    print(f"{'':58}  rounds  recovery s: median  longest")
    for group, row in figures["recovery"].items():
        print(f"{group:58}  {row['rounds']:6}  {row['median_s']:18.2f}  {row['longest_s']:7.2f}")
    print("how requests ended:", ", ".join(f"{count} {code}" for code, count in figures["outcomes"].items()))
    print(f"computed together with another session's, where that was tried: {figures['together']}")
    if mixed := figures.get("mixed"):
        print(f"mixed: {mixed['right']} of {mixed['requests']} right from 8 sessions, {mixed['per_second']:.0f}/s")
    print(f"{figures['seconds']:.0f} s; the daemon's own memory grew by at most {figures['growth_bytes'] >> 10} KiB")


def told_to_stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # cleaning up is not interrupted
    sys.exit("chaos: falls short: told to stop")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, told_to_stop)
    sys.exit(main())
