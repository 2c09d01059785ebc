#!/usr/bin/env python3
"""Runs the kernels of the CUDA backend under compute-sanitizer, on cases of the conformance suite.

    python3 tools/sanitize/sanitize.py target/release/libdsrun_backend_cuda.so --tool memcheck racecheck

Needs a CUDA device, compute-sanitizer and `dsrun-conformance`. `cases.txt` in the folder of this file has at least one case for
every kernel and element type that the suite reaches. Cases run once without a tool, which builds the kernels, and then under each
tool, with a process tree for each element type, all types in parallel. Prints the number of kernels launched under each tool and
every distinct report, and writes the logs to `--logs`. The exit status is 1 if a case failed or a tool reported something.
"""

import argparse
import collections
import os
import pathlib
import re
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
TOOLS = ["memcheck", "racecheck", "initcheck", "synccheck"]


def read_cases(path):
    """Reads the kernels of each case, by element type."""
    cases = collections.defaultdict(dict)
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            case, kernels = line.split()
            kind = case.split("/")[1] if not case.startswith("check/") else "checks"
            cases[kind][case] = kernels.split(",")
    return cases


def command(options, cases, tool=None):
    """The command line that runs these cases."""
    prefix = []
    if tool:
        prefix = [options.sanitizer, "--tool", tool, "--target-processes", "all", "--num-callers-host", "1"]
        prefix += ["--print-limit", "1000000", "--print-level", "info"]
        if options.lists_launches:
            prefix += ["--dump-kernel-launches"]
    run = [options.conformance, "run", options.plugin, "--jobs", str(options.jobs), "--timeout", str(options.timeout)]
    return prefix + run + [part for case in cases for part in ("--case", case)]


def lists_launches(sanitizer):
    """Whether this compute-sanitizer can list launches, which versions of 2026 can."""
    try:
        text = subprocess.run([sanitizer, "--help"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(f"{sanitizer} cannot be started: {error}; install the CUDA toolkit, or give its path with --sanitizer")
    return "--dump-kernel-launches" in text


def reports_of(text):
    """The reports of a tool, without addresses, threads and counts."""
    lines = [line.lstrip("= ") for line in text.splitlines() if line.startswith("=========")]
    for line, following in zip(lines, lines[1:] + [""]):
        if re.match(r"(Error|Warning|Invalid|Uninitialized|Potential|Barrier|Divergent|Race|Program hit)", line):
            whole = f"{line} {following}" if re.match(r"(at|and) ", following) else line
            yield re.sub(r"\+?0x[0-9a-f]+|\[\d+ hazards\]", "", whole)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plugin", help="path of the plugin's library")
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=TOOLS, help="tools to run; all by default")
    parser.add_argument("--cases", type=pathlib.Path, default=HERE / "cases.txt", help="file of cases and their kernels")
    parser.add_argument("--only", default="", help="run only cases with this in their name, or with a kernel of this name")
    parser.add_argument("--conformance", default="dsrun-conformance")
    parser.add_argument("--sanitizer", default="compute-sanitizer")
    parser.add_argument("--jobs", type=int, default=4, help="number of processes for each element type")
    parser.add_argument("--timeout", type=int, default=120, help="time limit of a case in seconds")
    parser.add_argument("--logs", type=pathlib.Path, default=pathlib.Path("sanitizer"))
    options = parser.parse_args()
    options.lists_launches = lists_launches(options.sanitizer)
    if not options.lists_launches:
        print(f"{options.sanitizer} cannot list launches, so it is not checked that every kernel ran", flush=True)
    options.logs.mkdir(parents=True, exist_ok=True)
    # Makes reports name the line of the source.
    environment = {**os.environ, "DSRUN_CUDA_LINE_INFO": "1"}
    kinds = {}
    for kind, cases in read_cases(options.cases).items():
        selected = {case: kernels for case, kernels in cases.items() if options.only in case or options.only in kernels}
        if selected:
            kinds[kind] = selected

    def start(kind, tool=None):
        log = (options.logs / f"{tool or 'plain'}-{kind}.txt").open("w")
        return subprocess.Popen(command(options, kinds[kind], tool), stdout=log, stderr=log, env=environment)

    clean = True
    for tool in [None, *options.tool]:
        begin = time.monotonic()
        running = {kind: start(kind, tool) for kind in kinds}
        for kind, process in running.items():
            status = process.wait()
            text = (options.logs / f"{tool or 'plain'}-{kind}.txt").read_text(errors="replace")
            passed = re.findall(r"^(\d+ cases? in .*)$", text, re.M)
            reports = collections.Counter(reports_of(text))
            summaries = [line[10:] for line in text.splitlines() if "SUMMARY" in line]
            expected = {kernel for kernels in kinds[kind].values() for kernel in kernels}
            print(f"{tool or 'no tool'}, {kind}: status {status}; {'; '.join(passed)}; {'; '.join(summaries)}", flush=True)
            if tool and options.lists_launches:
                missing = sorted(kernel for kernel in expected if not re.search(rf"\b{kernel}\b", text))
                print(f"  {len(expected) - len(missing)} kernels launched" + (f", not launched: {', '.join(missing)}" if missing else ""))
            for report, count in reports.most_common():
                print(f"  {count} x {report}")
            # Some versions count the list of launches among the errors.
            launches = len(re.findall(r"^=+ Launch #", text, re.M))
            found = sum(int(count) for summary in summaries for count in re.findall(r"(\d+) (?:errors?|hazards?)\b", summary))
            clean &= status == 0 and not reports and found in (0, launches)
        print(f"  {time.monotonic() - begin:.0f} s", flush=True)
    sys.exit(not clean)


if __name__ == "__main__":
    main()
