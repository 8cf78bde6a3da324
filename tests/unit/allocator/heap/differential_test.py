#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Random traces with random settings through `vramctl replay` and through tests/golden/model.py: every row must agree.

  differential_test.py VRAMCTL [--traces N] [--seed S] [--only INDEX]

The test shrinks a differing trace, and prints the trace with the command that repeats the difference. Devices are small
and streams finish late, so refusals, retries, collections and pending frees are common. The end of the test checks the
shares of such traces.
"""
import argparse
import collections
import concurrent.futures
import pathlib
import random
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "golden"))
import model  # noqa: E402  (model.py lies beside the recorded traces)

MIB = model.MIB
DEEP = 2**64 - 1  # the highest stream number

# The minimum shares of traces with each event: about half of the share seen with any seed.
LEAST = {"retries": 0.35, "ooms": 0.30, "pending": 0.25, "collected": 0.15, "oversize released": 0.07,
         "rejections": 0.05, "rescued by the search after the flush": 0.005}

Case = collections.namedtuple("Case", "settings device_bytes fraction lines")


def random_settings(r):
    items = {}
    large = 20
    if r.random() < 0.25:
        large = items["large_segment_size_mb"] = 2 * r.randint(6, 32)
    if r.random() < 0.5:
        items["max_split_size_mb"] = large + r.choice([0, 0, 1, 2, 3, 10, 44, 108])
    if r.random() < 0.4:
        items["max_non_split_rounding_mb"] = large + r.choice([0, 1, 2, 16, 100])
    if r.random() < 0.5:
        items["garbage_collection_threshold"] = r.choice([0.05, 0.3, 0.5, 0.8, round(r.uniform(0.01, 0.99), 3)])
    if r.random() < 0.35:
        count = lambda: r.choice([0, 1, 2, 4, 8, 16, 64])  # noqa: E731
        if r.random() < 0.5:
            items["roundup_power2_divisions"] = r.choice([1, 2, 4, 8, 16, 32])
        else:
            keys = sorted(r.sample([1 << i for i in range(9)], r.randint(1, 4)))
            parts = [f"{key}:{count()}" for key in keys] + ([f">:{count()}"] if r.random() < 0.6 else [])
            items["roundup_power2_divisions"] = "[" + ",".join(parts) + "]"
    if r.random() < 0.4:
        items["per_process_memory_fraction"] = r.choice([0.25, 0.5, 0.75, 1.0, round(r.uniform(0.1, 1), 3)])
    if r.random() < 0.25:
        items["throw_on_cudamalloc_oom"] = r.choice(["True", "True", "False"])
    pairs = [f"{key}:{value}" for key, value in items.items()]
    r.shuffle(pairs)
    return ",".join(pairs)


def sizes(r):
    """Returns a function that draws requests. Few different sizes make hits and ties; edges test the size classes."""
    edges = [0, 1, 512, MIB, 10 * MIB, 11 * MIB, 12 * MIB, 20 * MIB, 21 * MIB, 22 * MIB, 32 * MIB]
    draws = [lambda: r.randint(1, 4096), lambda: r.randint(1, MIB), lambda: r.randint(MIB, 10 * MIB),
             lambda: r.randint(10 * MIB, 64 * MIB), lambda: r.randint(18 * MIB, 26 * MIB),
             lambda: max(0, r.choice(edges) + r.choice([-512, -1, 0, 1, 512])), lambda: 1 << r.randint(8, 26)]
    draws = r.sample(draws, r.randint(1, 4))
    if r.random() < 0.5:
        few = [r.choice(draws)() for _ in range(r.randint(2, 8))]
        draws.append(lambda: r.choice(few))
        draws.append(lambda: r.choice(few))
    return lambda: r.choice(draws)()


def random_case(r):
    settings = random_settings(r)
    device_bytes = r.choice([64, 100, 160, 256, 400, 1024]) * MIB + r.choice([0, 0, 0, 123457])
    fraction = r.choice([None, None, None, 1.0, 0.5, 0.9, round(r.random(), 3)])
    draw_size = sizes(r)
    streams = r.choice([[0], [0, 1], [0, 1, 2, 7], [3, 1, DEEP]])
    records = r.choice([0, 0.05, 0.15, 0.25]) if len(streams) > 1 else 0.02
    finishes = r.choice([0, 0.01, 0.04, 0.1])
    lines, live, gone, next_id = [], [], [], 0
    if "throw" in settings and r.random() < 0.7:
        lines.append("frac 1")  # the rule matters only above the limit of the settings
    grows = True
    for _ in range(r.randint(30, 320)):
        if r.random() < 0.03:
            grows = not grows
        dice = r.random()
        if dice < records:
            if live or gone:
                name = r.choice(live) if live and r.random() < 0.95 else r.choice(gone or live)
                lines.append(f"r {name} {r.choice(streams)}")
        elif dice < records + finishes:
            lines.append(r.choice(["s", f"s {r.choice(streams)}", f"s {r.choice(streams)}"]))
        elif r.random() < 0.03:
            lines.append(r.choice(["e", "e", "p", f"frac {r.choice([0, 0.2, 0.5, 0.8, 1, round(r.random(), 3)])}"]))
        elif not live or r.random() < (0.62 if grows else 0.35):
            if gone and r.random() < 0.1:
                name = gone.pop(r.randrange(len(gone)))  # a trace may use an id again
            elif live and r.random() < 0.02:
                name = live.pop(r.randrange(len(live)))  # the trace may use an id again before its free
            else:
                name, next_id = next_id, next_id + 1
            live.append(name)
            lines.append(f"a {name} {draw_size()} {r.choice(streams)}")
        else:
            name = live.pop(r.choice([0, -1, r.randrange(len(live))]))
            gone.append(name)
            lines.append(f"f {name}")
            if r.random() < 0.02:
                lines.append(f"f {name}")  # the second free has no effect
    return Case(settings, device_bytes, fraction, lines)


def model_rows(case):
    replay = model.Replay(case.settings, case.device_bytes, case.fraction, search_after_flush=True)
    rows = [model.HEADING] + [replay.do(line) for line in case.lines] + [replay.final_line()]
    a = replay.allocator
    waits = any(replay.device.recorded.values())
    return rows, {"retries": a.retries, "ooms": a.ooms, "pending": waits, "collected": a.collected,
                  "oversize released": a.oversize_released, "rejections": a.rejections,
                  "rescued by the search after the flush": a.rescued}


def vramctl_flags(case):
    flags = ["--per-op", f"--device-bytes={case.device_bytes}"]
    if case.settings:
        flags.append(f"--alloc-conf={case.settings}")
    if case.fraction is not None:
        flags.append(f"--fraction={case.fraction}")
    return flags


class Vramctl:
    def __init__(self, program, folder):
        self.program, self.folder = program, folder

    def rows(self, case, name="trace"):
        path = pathlib.Path(self.folder, name)
        path.write_text("\n".join(case.lines) + "\n", encoding="ascii")
        done = subprocess.run([self.program, "replay", str(path), *vramctl_flags(case)], capture_output=True, text=True,
                              timeout=600, check=False)
        path.unlink()
        if done.returncode != 0 or done.stderr:
            return [f"vramctl: exit code {done.returncode}: {done.stderr.strip()}"]
        return done.stdout.splitlines()


def legal(lines):
    """Returns the lines without frees and uses whose allocation was taken out."""
    kept, seen = [], set()
    for line in lines:
        words = line.split()
        if words[0] == "a":
            seen.add(words[1])
        elif words[0] in "fr" and words[1] not in seen:
            continue
        kept.append(line)
    return kept


def shrink(case, fails):
    """Returns a smaller failing case: removes lines in ever smaller chunks, then removes settings."""
    chunk = max(1, len(case.lines) // 2)
    while True:
        i, shrunk = 0, False
        while i < len(case.lines):
            smaller = case._replace(lines=legal(case.lines[:i] + case.lines[i + chunk:]))
            if len(smaller.lines) < len(case.lines) and fails(smaller):
                case, shrunk = smaller, True
            else:
                i += chunk
        if chunk > 1:
            chunk //= 2
        elif not shrunk:
            break
    pairs = [":".join(pair) for pair in model.Settings.split(case.settings)]
    for pair in list(pairs):
        fewer = case._replace(settings=",".join(p for p in pairs if p != pair))
        if fails(fewer):
            case = fewer
            pairs.remove(pair)
    if case.fraction is not None and fails(case._replace(fraction=None)):
        case = case._replace(fraction=None)
    return case


def report(case, vramctl, seed, index):
    smallest = shrink(case, lambda c: model_rows(c)[0] != vramctl.rows(c))
    expected, got = model_rows(smallest)[0], vramctl.rows(smallest)
    print(f"trace {index} of seed {seed} differs; again with: --seed {seed} --only {index}")
    print(f"shrunk from {len(case.lines)} to {len(smallest.lines)} operations; vramctl replay TRACE",
          " ".join(f"'{flag}'" for flag in vramctl_flags(smallest)))
    print("\n".join(smallest.lines))
    for i in range(max(len(expected), len(got))):
        pair = [rows[i] if i < len(rows) else "(no row)" for rows in (expected, got)]
        if pair[0] != pair[1]:
            print(f"columns {model.HEADING}\nmodel   {pair[0]}\nvramctl {pair[1]}")
            break


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("vramctl")
    parser.add_argument("--traces", type=int, default=500)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--only", type=int)
    args = parser.parse_args()
    indices = range(args.traces) if args.only is None else [args.only]
    happened, operations = collections.Counter(), 0
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(2) as pool:
        vramctl = Vramctl(args.vramctl, folder)
        cases = {i: random_case(random.Random(f"{args.seed}/{i}")) for i in indices}
        runs = {i: pool.submit(vramctl.rows, case, f"trace{i}") for i, case in cases.items()}
        for i, case in cases.items():
            rows, counts = model_rows(case)
            if rows != runs[i].result():
                pool.shutdown(cancel_futures=True)
                report(case, vramctl, args.seed, i)
                return 1
            operations += len(case.lines)
            happened.update(name for name, count in counts.items() if count)
    print(f"{len(cases)} traces, {operations} operations, no difference; traces with",
          ", ".join(f"{name}: {happened[name]}" for name in LEAST))
    rare = [name for name, share in LEAST.items() if happened[name] < int(share * len(cases))]
    if rare and args.only is None:
        print("too few to mean anything:", ", ".join(rare))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
