#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`vramctl replay`: the output for the recorded traces, and the refusals of bad input.

  replay_command_test.py VRAMCTL GOLDEN_DIR
"""
import gzip
import json
import pathlib
import re
import subprocess
import sys
import tempfile

TRACES = 44


def replay(vramctl, *args):
    return subprocess.run([vramctl, "replay", *map(str, args)], capture_output=True, timeout=600, check=False)


def contents(path):
    packed = path.with_name(path.name + ".gz")
    return gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()


def golden_faults(vramctl, folder):
    """Compares every recorded result byte for byte. A changed setting must change the result."""
    confs = sorted(folder.glob("*.conf"))
    if len(confs) != TRACES:
        yield f"{len(confs)} recorded traces instead of {TRACES}"
    for conf in confs:
        other = re.search(r"^trace=(.*)$", conf.read_text(encoding="utf-8"), re.M)
        trace = folder / f"{other.group(1) if other else conf.stem}.trace"
        if not trace.exists():
            trace = trace.with_name(trace.name + ".gz")
        done = replay(vramctl, trace, "--conf", conf, "--per-op")
        expected = contents(conf.with_suffix(".expected"))
        if done.returncode != 0 or done.stdout != expected:
            rows = zip(done.stdout.splitlines(), expected.splitlines())
            first = next(((a, b) for a, b in rows if a != b), "one is shorter")
            yield f"{conf.stem}: exit code {done.returncode}, {done.stderr!r}, first difference {first}"
    trace, conf = folder / "maxsplit_128.trace", folder / "maxsplit_128.conf"
    if replay(vramctl, trace, "--conf", conf, "--alloc-conf=max_split_size_mb:64", "--per-op").stdout == contents(
            folder / "maxsplit_128.expected"):
        yield "--alloc-conf does not override --conf"


def standard_input_faults(vramctl, folder):
    """`-` reads a trace from standard input, packed or not. Errors name standard input."""
    trace = b"a 0 512 0\na 1 4194304 0\nf 0\n"
    (folder / "same.trace").write_bytes(trace)
    expected = replay(vramctl, folder / "same.trace", "--per-op").stdout
    for content in (trace, gzip.compress(trace)):
        done = subprocess.run([vramctl, "replay", "-", "--per-op"], input=content, capture_output=True, timeout=600, check=False)
        if done.returncode != 0 or not expected or done.stdout != expected:
            yield f"replay -: exit code {done.returncode}, {done.stdout!r}, {done.stderr!r}"
    for content, why in ((b"a 0 512 0\nwhat\n", "line 2"), (b"", "has no operations")):
        done = subprocess.run([vramctl, "replay", "-"], input=content, capture_output=True, timeout=600, check=False)
        if done.returncode != 2 or "standard input: " not in (said := done.stderr.decode()) or why not in said:
            yield f"replay - with {content!r}: exit code {done.returncode}, {done.stderr!r}"


def refusal_faults(vramctl, folder):
    """Bad input gives exit code 2, an empty standard output, and a message that names the place."""
    good = folder / "good.trace"
    good.write_bytes(b"# comment\n\na 0 512 0\nf 0\n")
    packed = gzip.compress(b"a 0 512 0\nf 0\n" * 1000)

    def file(name, content):
        (folder / name).write_bytes(content)
        return folder / name

    def conf(name, content):
        return f"--conf={file(name + '.conf', content)}"

    cases = [
        ("an unknown operation", [file("op.trace", b"a 0 512 0\n\nx 0\n")], r"op\.trace: line 3: unknown operation"),
        ("a word too few", [file("few.trace", b"a 0 512\n")], r"few\.trace: line 1: "),
        ("no number", [file("number.trace", b"# c\na 0 -1 0\n")], r"number\.trace: line 2: BYTES is \"-1\""),
        ("an unknown id", [file("id.trace", b"f 7\n")], r'line 1: id "7" was never allocated'),
        ("rubbish", [file("rubbish.trace", bytes(range(128, 256)) * 20)], r"rubbish\.trace: (line|byte) \d+"),
        ("a line after gzip", [file("packed.trace.gz", gzip.compress(b"a 0 1 0\nq\n"))], r"line 2: unknown operation"),
        ("a truncated gzip", [file("cut.trace.gz", packed[:-12])], r"cut\.trace\.gz: byte \d+ unpacked: "),
        ("a gzip with a wrong check sum", [file("crc.gz", packed[:-8] + b"12345678")], r"crc\.gz: byte \d+ unpacked: "),
        ("a gzip header alone", [file("header.gz", packed[:10])], r"header\.gz: byte 0 unpacked: "),
        ("a pickle that ends early", [file("cut.pickle", b"\x80\x04}q\x00(X\x08")], r"cut\.pickle: byte \d+: "),
        ("a pickle that calls", [file("os.pickle", b"\x80\x02cos\nsystem\nU\x02ls\x85R.")], r"os\.pickle: byte \d+: "),
        ("a pickle of no snapshot", [file("list.pickle", b"\x80\x02].")], r"list\.pickle: "),
        ("a missing file", [folder / "missing"], r"missing: .*No such file"),
        ("a folder", [folder], r"(?i)is a directory"),
        ("an unknown setting", [good, "--alloc-conf=max_split_mb:1"], r"--alloc-conf: .*max_split_mb"),
        ("a setting out of range", [good, "--alloc-conf=max_split_size_mb:1"], r"--alloc-conf: .*max_split_size_mb"),
        ("a setting with rubbish", [good, "--alloc-conf=max_split_size_mb:128x"], r"--alloc-conf: .*128x"),
        ("a bad size", [good, "--device-bytes=12Gib3"], r"--device-bytes: "),
        ("a size beyond all devices", [good, "--device-bytes=8EiB"], r"--device-bytes: "),
        ("a bad fraction", [good, "--device-bytes=1GiB", "--fraction=1.5"], r"--fraction: '1\.5' is not a share"),
        ("a fraction of nothing", [good, "--fraction=0.5"], r"a memory fraction of what"),
        ("a missing conf", [good, f"--conf={folder}/missing"], r"--conf: .*missing"),
        ("a conf without =", [good, conf("a", b"# c\ndevice")], r"a\.conf: line 2: "),
        ("a conf with a bad setting", [good, conf("b", b"alloc_conf=nothing:1")], r"b\.conf: line 1: .*nothing"),
        ("a conf with a bad size", [good, conf("c", b"device_bytes=many")], r"c\.conf: line 1: device_bytes"),
        ("a conf with a bad fraction", [good, conf("d", b"fraction=nan")], r"d\.conf: line 1: fraction"),
        ("an unknown flag", [good, "--per-operation"], r"per.operation"),
        ("an empty trace", [file("empty.trace", b"# nothing\n")], r"empty\.trace: has no operations to replay"),
        ("a snapshot as JSON", [file("snapshot.json", b'{"segments": []}')],
         r"snapshot\.json: is JSON; .* is a pickle"),
        ("a start alone", [file("start.trace", b"seg 512 0 small\nb 512\n")], r"start\.trace: has no operations"),
        ("a bad start", [file("seg.trace", b"seg 512 0 small\ne\n")], r"seg\.trace: line 2: the start before it: "),
        ("no trace", [], r"FILE is required; see vramctl replay --help"),
        ("two traces", [good, good], r"unexpected argument .*; see vramctl replay --help"),
    ]
    for what, args, pattern in cases:
        for mode in ([], ["--per-op"]):
            done = replay(vramctl, *args, *mode)
            message = done.stderr.decode(errors="replace")
            if done.returncode != 2 or done.stdout or not re.search(pattern, message):
                yield f"{what} {mode}: exit code {done.returncode}, message {message!r}, wanted {pattern!r}"
    done = replay(vramctl, good, "--per-op")
    if done.returncode != 0 or done.stdout.count(b"\n") != 4:
        yield f"the good trace, on which the cases are built, is refused: {done}"


def snapshot_faults(vramctl, golden, folder):
    """A replay of a replay's snapshot is the same run again."""
    trace = golden / "two_stream_overlap.trace.gz"
    file = folder / "heap.pickle"
    peaks = []
    for args in ([trace, "-o", file], [file]):
        done = replay(vramctl, *args, "--format=json")
        if done.returncode != 0:
            yield f"{args}: {done}"
            return
        peaks.append({key: value for key, value in json.loads(done.stdout).items() if key.startswith("peak_")})
    if peaks[0] != peaks[1] or peaks[0]["peak_allocated_bytes"] == 0:
        yield f"the snapshot of a replay gives other peaks: {peaks}"
    done = replay(vramctl, trace, "-o", "-")
    if done.returncode != 0 or "segments" not in json.loads(done.stdout):
        yield f"no JSON on standard output: {done.stdout[:100]!r} {done.stderr!r}"
    done = replay(vramctl, trace, "-o", folder)
    if done.returncode != 2 or b"not a file" not in done.stderr:
        yield f"a folder as output: {done}"


def main():
    vramctl, golden = sys.argv[1], pathlib.Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        faults = [*golden_faults(vramctl, golden), *refusal_faults(vramctl, folder), *standard_input_faults(vramctl, folder),
                  *snapshot_faults(vramctl, golden, folder)]
    for fault in faults:
        print(fault)
    print(f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
