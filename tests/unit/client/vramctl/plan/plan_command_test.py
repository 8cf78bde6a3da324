#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the command `vramctl plan`: its output, its files, and its refusals of bad input.

  plan_command_test.py VRAMCTL VRAMBROKERD
"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile

LLAMA_7B = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 2048,
            "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
# Each block fits into the segment of the block before. After a reclaim, the second block needs a segment of 20 MiB.
MOVED = "a 0 14680064 0\nf 0\na 1 7340032 0\nf 1\na 2 3145728 0\n"
GPT = ["--layers=12", "--hidden=768", "--heads=12", "--vocab=50257", "--seq=1024"]


class Command:
    def __init__(self, vramctl):
        self.vramctl = vramctl

    def run(self, *args):
        return subprocess.run([self.vramctl, *map(str, args)], capture_output=True, text=True, timeout=300, check=False)

    def json(self, *args):
        done = self.run(*args, "--format=json")
        return json.loads(done.stdout) if done.returncode == 0 else {"failed": done.stderr}


def train_faults(command, folder):
    config = folder / "config.json"
    config.write_text(json.dumps(LLAMA_7B), encoding="utf-8")
    done = command.run("plan", "train", "--config", config, "--batch", 8, "--device-bytes", "192GiB")
    for part in ("6738415616 parameters", "weights", "gradients", "optimizer (adamw)", "activations: attention", "logits",
                 "workspace", "sum", "expected peak", "16 B a parameter", "Korthikanti", "BATCH ON 192.00 GiB"):
        if part not in done.stdout:
            yield f"plan train does not print {part!r}: {done}"
    trace = folder / "step.trace"
    plan = command.json("plan", "train", "--config", config, "--batch", 8, "--device-bytes", "192GiB", "-o", trace)
    step = plan["steps"][0]
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "workspace")
    if sum(plan[f"{part}_bytes"] for part in parts) != plan["sum_bytes"]:
        yield f"the parts are not the sum: {plan}"
    if plan["weights_bytes"] != 2 * 6738415616 or plan["optimizer_bytes"] != 12 * 6738415616:
        yield f"weights and optimizer: {plan}"
    if [s["checkpoint"] for s in plan["steps"]] != ["none", "selective", "full"]:
        yield f"three ways to checkpoint: {plan['steps']}"
    batches = [s["largest_batch"] for s in plan["steps"]]
    if not 0 < batches[0] < batches[1] < batches[2]:
        yield f"checkpointing does not allow larger batches: {batches}"
    # The trace matches the plan, and replay agrees.
    replayed = command.json("replay", trace)
    for key in ("operations", "peak_allocated_bytes", "peak_reserved_bytes"):
        if replayed.get(key) != step[key]:
            yield f"{key}: plan {step[key]}, replay {replayed.get(key)}"
    if command.json("replay", trace, f"--device-bytes={step['smallest_device_bytes']}")["ooms"] != 0:
        yield "the step runs out of memory on what is said to be the smallest device"
    if command.json("replay", trace, f"--device-bytes={step['smallest_device_bytes'] - (2 << 20)}")["ooms"] == 0:
        yield "the step runs on less than what is said to be the smallest device"
    yield from batch_faults(command, folder)
    # Other settings change the reserved peak alone.
    split = command.json("plan", "train", "--config", config, "--batch", 8, "--alloc-conf=large_segment_size_mb:512")
    if split["steps"][0]["peak_reserved_bytes"] == step["peak_reserved_bytes"]:
        yield "--alloc-conf changes nothing"
    for text, count in (("1B", 10**9), ("1.3b", 13 * 10**8), ("350M", 35 * 10**7), ("1000000000", 10**9)):
        model = command.json("plan", "train", *GPT, f"--params={text}").get("model", {})
        if model.get("parameters") != count:
            yield f"--params={text} is taken as {model}"
    long = command.run("plan", "train", "--config", config, "--seq=4096")
    if long.returncode != 0 or "--seq 4096 is longer than the 2048 tokens" not in long.stderr:
        yield f"no warning of a long sequence: {long.stderr}"


def batch_faults(command, folder):
    """Checks the largest batch, whether or not smaller batches fit. Replays the trace of each batch."""
    (folder / "gpt2.json").write_text(json.dumps(GPT2), encoding="utf-8")
    for options, device, refused in ((["--checkpoint=selective"], "8GiB", "selective 15-16"),
                                     (["--checkpoint=full", "--flash"], "6GiB", "full 15-17"),
                                     (["--checkpoint=full"], "5000MiB", "full 12-13"),
                                     (["--checkpoint=full", "--optimizer=sgd"], "3GiB", "full 7")):
        train = ["plan", "train", "--config", folder / "gpt2.json", "--seq=512", *options]
        step = command.json(*train, f"--device-bytes={device}")["steps"][0]
        largest, trace, found = step["largest_batch"], folder / "batch.trace", []
        for batch in range(1, largest + 6):
            command.run(*train, f"--batch={batch}", "-o", trace)
            if command.json("replay", trace, f"--device-bytes={device}")["ooms"] != 0:
                found.append(batch)
        if found != [*step["smaller_batches_refused"], *range(largest + 1, largest + 6)]:
            yield f"{options} on {device}: refused are {found}, the plan says {step}"
        if step["largest_batch_is_exact"] is not True:
            yield f"{options} on {device} is not exact: {step}"
        text = command.run(*train, f"--device-bytes={device}").stdout
        if f"(fragmentation): {refused}.\n" not in text:
            yield f"{options} on {device} does not name {refused}: {text}"
    tiny = ["plan", "train", "--layers=1", "--hidden=32", "--heads=1", "--vocab=100", "--seq=4", "--device-bytes=80GiB"]
    if "at least 65536\n" not in command.run(*tiny).stdout:
        yield f"65536 is where the search ends: {command.run(*tiny).stdout}"
    step = command.json(*tiny)["steps"][0]
    if step["largest_batch"] != 65536 or step["largest_batch_is_exact"] is not False:
        yield f"65536 is where the search ends: {step}"
    unlimited = command.json(*tiny[:-1])["steps"][0]
    if unlimited["largest_batch"] is not None or unlimited["largest_batch_is_exact"] is not None:
        yield f"no device, and yet a largest batch: {unlimited}"


def serve_faults(command, folder):
    config = folder / "config.json"
    plan = command.json("plan", "serve", "--config", config, "--sequences=4", "--device-bytes=80GiB")
    if plan["kv_bytes_per_token"] != 512 << 10 or plan["kv_cache_bytes"] != 4 * 2048 * (512 << 10):
        yield f"KV cache: {plan}"
    if not plan["most_sequences"] > 4:
        yield f"sequences on 80 GiB: {plan}"
    half = command.json("plan", "serve", "--config", config, "--sequences=4", "--kv=fp8")
    if 2 * half["kv_cache_bytes"] != plan["kv_cache_bytes"] or half["most_sequences"] is not None:
        yield f"fp8 keys and values, no device: {half}"
    trace = folder / "server.trace"
    command.run("plan", "serve", "--config", config, "--sequences=4", "-o", trace)
    peak = command.json("replay", trace).get("peak_allocated_bytes", 0)
    if not 0.95 < peak / plan["sum_bytes"] < 1.05:
        yield f"the server's trace needs {peak}, not {plan['sum_bytes']}"
    both = command.json("plan", "share", folder / "step.trace", trace, "--device-bytes=400GiB")
    if [job["name"] for job in both["jobs"]] != ["step", "server"]:
        yield f"training and serving: {both}"
    if not half["weights_bytes"] > 3 * command.json("plan", "serve", "--config", config,
                                                    "--quantization=int4")["weights_bytes"]:
        yield "int4 is not a third"


def share_faults(command, folder, daemon):
    trace, other, rules = folder / "gpt.trace", folder / "gpt.checkpointed.trace", folder / "rules.textproto"
    command.run("plan", "train", *GPT, "--batch=16", "-o", trace)
    command.run("plan", "train", *GPT, "--batch=16", "--checkpoint=full", "-o", other)
    snapshot = folder / "snapshot.pickle"
    command.run("replay", other, "-o", snapshot)
    roomy = command.json("plan", "share", trace, other, snapshot, "--device-bytes=200GiB")
    if roomy["fit"] != "privately" or [job["name"] for job in roomy["jobs"]] != ["gpt", "gpt-2", "snapshot"]:
        yield f"three jobs on a large device: {roomy}"
    if roomy["private_bytes"] != sum(job["peak_reserved_bytes"] for job in roomy["jobs"]):
        yield f"private caches: {roomy}"
    for key, fit in (("private_bytes", "privately"), ("worst_bytes", "reclaiming"), ("turns_bytes", "in_turns")):
        plan = command.json("plan", "share", trace, other, f"--device-bytes={command_bytes(command, trace, other, key)}",
                            "-o", rules)
        if plan.get("fit") != fit:
            yield f"on {key}: {plan}"
            continue
        done = subprocess.run([daemon, "--config", rules, "--check-config"], capture_output=True, text=True, check=False)
        if done.returncode != 0 or rules.read_text(encoding="utf-8") != plan["policy"]:
            yield f"the daemon refuses the rules for {key}: {done}"
        # The daemon warns if guarantees of one user's sessions could add up to more than the device.
        rules.write_text(f'capacity: "{plan["device_bytes"] >> 20}MiB"\n{plan["policy"]}', encoding="utf-8")
        done = subprocess.run([daemon, "--config", rules, "--check-config"], capture_output=True, text=True, check=False)
        if done.returncode != 0 or "max_sessions" in done.stderr + done.stdout:
            yield f"the daemon warns of the rules for {key}: {done}"
    floors = sum(job["floor_needed_bytes"] for job in roomy["jobs"])
    peak = max(job["peak_needed_bytes"] for job in roomy["jobs"])
    for jobs, device, verdict in (([trace], "1MiB", r"It does not fit: gpt needs [\d.]+ GiB even alone\."),
                                  ([trace, other], "1MiB", r"gpt needs [\d.]+ GiB even alone, and 1 other does not fit"),
                                  ([trace, other, other], "1MiB", r"even alone, and 2 others do not fit alone either\."),
                                  ([trace, other], str(peak - (64 << 20)), r"They do not fit: gpt needs .* even alone\."),
                                  ([trace, other, snapshot], str(max(peak, floors)), r"what they have at all times leaves")):
        text = command.run("plan", "share", *jobs, f"--device-bytes={device}").stdout
        if not re.search(verdict, text):
            yield f"why {jobs} do not fit on {device}: {text}"
    small = command.run("plan", "share", trace, other, "--device-bytes=1GiB", "-o", rules)
    if small.returncode != 1 or "do not fit" not in small.stderr or "PEAK NEEDED" not in small.stdout:
        yield f"a device that is too small: {small}"
    if any(job["limit_bytes"] is not None or job["guarantee_bytes"] is not None
           for job in command.json("plan", "share", trace, other, "--device-bytes=1GiB")["jobs"]):
        yield "limits for jobs that do not fit"
    before = trace.read_bytes()
    over = command.run("plan", "share", trace, other, "--device-bytes=200GiB", "-o", trace)
    if over.returncode != 2 or "that is what is read" not in over.stderr or trace.read_bytes() != before:
        yield f"an input was written over: {over}"
    printed = command.run("plan", "train", *GPT, "--batch=16", "-o", "-")
    if printed.stdout.encode() != before:
        yield "-o - does not print the trace, and nothing else"
    nowhere = command.run("plan", "train", *GPT, "-o", folder / "no" / "such.trace")
    if nowhere.returncode != 1 or "cannot write into its folder: No such file" not in nowhere.stderr or nowhere.stdout:
        yield f"a folder that is not there: {nowhere}"
    # The limit of a file's size stands for a full disk.
    kept = folder / "kept"
    kept.write_text("old", encoding="utf-8")
    limited = subprocess.run(["/bin/sh", "-c", 'ulimit -f 8; trap "" XFSZ; exec "$0" "$@"', command.vramctl, "plan",
                              "train", *GPT, "-o", kept], capture_output=True, text=True, check=False)
    if limited.returncode != 1 or kept.read_text(encoding="utf-8") != "old" or list(folder.glob("kept.*")):
        yield f"a file that cannot be written whole: {limited}"
    text = command.run("plan", "share", trace, other, "--device-bytes=200GiB")
    for part in ("Nobody waits", "private caches", "Saved against private caches", "rules {", "session_name: \"gpt-2\""):
        if part not in text.stdout:
            yield f"plan share does not print {part!r}: {text}"


def policy_faults(command, folder, daemon):
    """The daemon takes every configuration written by plan share."""
    rules, fits = folder / "rules.textproto", set()
    small = folder / "small.trace"  # one step: needs 2 MiB at most, and no memory permanently
    small.write_text("p\na 0 512 0\nf 0\np\na 1 512 0\nf 1\n", encoding="utf-8")
    moved = folder / "moved.trace"  # needs more memory with reclaims than with its own cache
    moved.write_text(MOVED, encoding="utf-8")
    profile = command.json("plan", "share", moved, "--device-bytes=1GiB")["jobs"][0]
    if not profile["peak_needed_bytes"] > profile["peak_reserved_bytes"]:
        yield f"a reclaim does not move the blocks of {moved.name}: {profile}"
    jobs = [[moved], [moved, moved], [small], [small, small, moved],
            [moved, folder / "gpt.trace", folder / "gpt.checkpointed.trace"]]
    for files in jobs:
        sums = command.json("plan", "share", *files, "--device-bytes=200GiB")
        for key in ("private_bytes", "worst_bytes", "turns_bytes", "staggered_bytes"):
            for extra in (-(2 << 20) - 1, -(2 << 20), -1, 0, 1, 2 << 20, (2 << 20) + 1):
                device = sums[key] + extra
                rules.unlink(missing_ok=True)
                if device <= 0:
                    continue
                plan = command.json("plan", "share", *files, f"--device-bytes={device}", "-o", rules)
                if "failed" in plan or plan["fit"] == "not":
                    if rules.exists():
                        yield f"{files} on {device} do not fit, and there are rules"
                    continue
                fits.add(plan["fit"])
                for capacity in ("", f'capacity: "{device}"\n'):
                    rules.write_text(capacity + plan["policy"], encoding="utf-8")
                    done = subprocess.run([daemon, "--config", rules, "--check-config"], capture_output=True, text=True,
                                          check=False)
                    if done.returncode != 0 or "max_sessions" in done.stderr + done.stdout:
                        yield f"{files} on {device}: the daemon refuses {rules.read_text(encoding='utf-8')}: {done}"
                if sum(job["guarantee_bytes"] for job in plan["jobs"]) > device:
                    yield f"{files} on {device}: more is guaranteed than there is: {plan}"
    if fits != {"privately", "reclaiming", "in_turns"}:
        yield f"only these were tried: {fits}"


def command_bytes(command, trace, other, key):
    return command.json("plan", "share", trace, other, "--device-bytes=200GiB")[key]


def refusal_faults(command, folder):
    """Bad input gives exit code 2, an empty standard output, and a message with the place."""
    def config(name, text):
        (folder / name).write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
        return f"--config={folder / name}"

    train, serve, share = ["plan", "train"], ["plan", "serve"], ["plan", "share"]
    good = config("good.json", LLAMA_7B)
    trace = folder / "gpt.trace"
    empty = folder / "empty.trace"
    empty.write_text("", encoding="utf-8")
    idle = folder / "idle.trace"
    idle.write_text("p\n", encoding="utf-8")
    cases = [
        ([*train], r"which model\? give --config FILE"),
        ([*train, "--config", folder / "missing"], r"--config: .*missing: .*No such file"),
        ([*train, "--config", folder], r"(?i)--config: .*is a directory"),
        ([*train, good, "--layers=3"], r"--config goes with none of --params"),
        ([*train, config("list.json", "[1]")], r"list\.json: this is not a JSON object"),
        ([*train, config("cut.json", '{"model_type": ')], r"cut\.json: byte \d+: this is not JSON"),
        ([*train, config("deep.json", "[" * 100000 + "]" * 100000)], r"deep\.json: nested deeper than 64 levels"),
        ([*train, config("large.json", " " * (2 << 20))], r"large\.json: \d+ bytes; a config\.json has at most 1 MiB"),
        ([*train, config("other.json", {**LLAMA_7B, "model_type": "rwkv"})], r'"rwkv"; known are .*--params'),
        ([*train, config("number.json", {**LLAMA_7B, "model_type": 5})], r'"model_type" is 5; a name is needed, one of'),
        ([*train, config("less.json", {"model_type": "llama"})], r'less\.json: "num_hidden_layers" is missing'),
        ([*train, config("minus.json", {**LLAMA_7B, "hidden_size": -4096})], r'"hidden_size" is -4096; a whole number'),
        ([*train, config("huge.json", {**LLAMA_7B, "vocab_size": 10 ** 30})], r'"vocab_size" is .*; a whole number'),
        ([*train, config("odd.json", {**LLAMA_7B, "num_attention_heads": 31})], r"cannot be divided among 31 heads"),
        ([*train, *GPT, "--layers=100000"], r"--layers: 100000 is above 512"),
        ([*train, *GPT, "--hidden=-5"], r'--hidden: "-5"; a whole number'),
        ([*train, *GPT, "--hidden=99999999999999999999999"], r"--hidden: .*a whole number"),
        ([*train, *GPT, "--batch=0"], r"--batch: 0; accepted: 1 to 65536"),
        ([*train, *GPT[:-1], "--seq=0"], r"--seq: 0; at least 1 is needed"),
        ([*train, *GPT, "--lora=0"], r"--lora: 0; at least 1 is needed"),
        ([*train, *GPT, "--device-bytes=0"], r"--device-bytes: 0 B; a size above 0 is needed"),
        ([*train, *GPT, "--device-bytes=0GiB"], r"--device-bytes: 0 B; a size above 0 is needed"),
        ([*train, *GPT, "--params=0"], r"--params: 0; at least 1 is needed"),
        ([*train, *GPT, "--params=0B"], r"--params: 0B; at least 1 is needed"),
        ([*train, *GPT[:2], "--heads=0"], r"--heads: 0; at least 1 is needed"),
        ([*train, *GPT, "--kv-heads=0"], r"--kv-heads: 0; at least 1 is needed"),
        ([*train, *GPT, "--gpus=0"], r"--gpus: 0; accepted: 1 to 1048576"),
        ([*train, *GPT, "--batch=lots"], r'--batch: "lots"; a whole number'),
        ([*train, *GPT, "--seq=99999999999"], r"--seq: 99999999999; accepted"),
        ([*train, *GPT, "--params=7"], r"--params: 7 is less than"),
        ([*train, *GPT, "--params=7Q"], r'--params: "7Q"; a whole number'),
        ([*train, *GPT, "--params=B"], r'--params: "B"; accepted: a whole number, or one such as 124M'),
        ([*train, *GPT, "--params=-7B"], r'--params: "-7B"; accepted'),
        ([*train, *GPT, "--params=1.2.3B"], r'--params: "1.2.3B"; accepted'),
        ([*train, *GPT, "--precision=fp4"], r'--precision: "fp4"; accepted: bf16-mixed'),
        ([*train, *GPT, "--optimizer=lion"], r'--optimizer: "lion"; accepted: adamw'),
        ([*train, *GPT, "--checkpoint=some"], r'--checkpoint: "some"; accepted: none'),
        ([*train, *GPT, "--zero=3"], r"say how many with --gpus"),
        ([*train, *GPT, "--zero=4", "--gpus=2"], r"--zero: 4; accepted: 0 to 3"),
        ([*train, *GPT, "--gpus=2"], r"--gpus is for --zero"),
        ([*train, *GPT, "--flash", "--eager"], r"give one of the two"),
        ([*train, *GPT, "--device-bytes=80Pb"], r"--device-bytes: "),
        ([*train, *GPT, "--alloc-conf=nothing:1"], r"--alloc-conf: .*nothing"),
        ([*train, "--layers=512", "--hidden=32768", "--heads=32768", "--vocab=16777216", "--batch=65536",
          "--seq=16777216"], r"more than 64 PiB"),
        ([*serve, good, "--quantization=int3"], r'--quantization: "int3"; accepted'),
        ([*serve, good, "--kv=int4"], r'--kv: "int4"; accepted'),
        ([*serve, good, "--sequences=0"], r"--sequences: 0; accepted"),
        ([*serve, good, "--seq=0"], r"--seq: 0; at least 1 is needed"),
        ([*serve, good, "--prefill-tokens=0"], r"--prefill-tokens: 0; at least 1 is needed"),
        ([*serve, good, "--device-bytes=0"], r"--device-bytes: 0 B; a size above 0 is needed"),
        ([*serve, good, "--utilization=2"], r"--utilization: accepted"),
        ([*serve, good, "--utilization=nan"], r"--utilization: accepted"),
        ([*share], r"FILE is required; see vramctl plan share --help"),
        ([*share, trace], r"--device-bytes is required"),
        ([*share, trace, "--device-bytes=0"], r"--device-bytes: 0 B; a size above 0 is needed"),
        ([*share, folder / "missing", "--device-bytes=1GiB"], r"missing: .*No such file"),
        ([*share, empty, "--device-bytes=1GiB"], r"empty\.trace: has no operations to replay"),
        ([*share, idle, "--device-bytes=1GiB"], r"idle\.trace: allocates nothing"),
        ([*share, *[trace] * 17, "--device-bytes=80GiB"], r"17 jobs; at most 16"),
        (["plan"], r"plan: no command given; see vramctl plan --help"),
        (["plan", "dinner"], r"plan: no command 'dinner'"),
    ]
    for args, pattern in cases:
        done = command.run(*args)
        if done.returncode != 2 or done.stdout or not re.search(pattern, done.stderr):
            yield f"{args}: exit code {done.returncode}, message {done.stderr!r}, wanted {pattern!r}"
    error = command.run(*train, "--format=json")
    if json.loads(error.stderr)["error"]["code"] != "INVALID_ARGUMENT":
        yield f"no error as JSON: {error}"


def completion_faults(command):
    for words, wanted in ((["plan", ""], {"train", "serve", "share"}), (["plan", "train", "--prec"], {"--precision"}),
                          (["plan", "train", "--checkpoint", ""], {"none", "full", "selective"}),
                          (["plan", "train", "--config", ""], {":files"}), (["plan", "share", ""], {":files"}),
                          (["plan", "share", "a.trace", ""], {":files"}), (["replay", "a.trace", ""], set()),
                          (["plan", "serve", "--kv", "fp"], {"fp16", "fp32", "fp8"})):
        offered = set(command.run("__complete", *words).stdout.split())
        if offered != wanted:
            yield f"completion of {words}: {offered}"


def main():
    command = Command(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        faults = [*train_faults(command, folder), *serve_faults(command, folder),
                  *share_faults(command, folder, sys.argv[2]), *policy_faults(command, folder, sys.argv[2]),
                  *refusal_faults(command, folder),
                  *completion_faults(command)]
    for fault in faults:
        print(fault)
    print(f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
