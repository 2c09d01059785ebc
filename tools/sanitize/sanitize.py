#!/usr/bin/env python3
"""Holds the kernels of the CUDA backend to compute-sanitizer, on cases of the conformance suite.

    python3 tools/sanitize/sanitize.py target/release/libdsrun_backend_cuda.so --tool memcheck racecheck

Needs a CUDA device, compute-sanitizer and `dsrun-conformance`. `cases.txt` beside this file has at least one case for every kernel
and element type that the suite reaches. Cases run once without a tool, so that kernels are built; then under each tool, one process
tree for an element type, all types side by side. Prints what was launched under each tool and every distinct report, and leaves the
logs in `--logs`. The exit status is 1 if a case failed or anything was reported.
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
    """The kernels of each case, by element type."""
    cases = collections.defaultdict(dict)
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            case, kernels = line.split()
            kind = case.split("/")[1] if not case.startswith("check/") else "checks"
            cases[kind][case] = kernels.split(",")
    return cases


def command(options, cases, tool=None):
    """The run of these cases."""
    prefix = []
    if tool:
        prefix = [options.sanitizer, "--tool", tool, "--target-processes", "all", "--num-callers-host", "1"]
        prefix += ["--print-limit", "1000000", "--print-level", "info"]
        if options.tells_launches:
            prefix += ["--dump-kernel-launches"]
    run = [options.conformance, "run", options.plugin, "--jobs", str(options.jobs), "--timeout", str(options.timeout)]
    return prefix + run + [part for case in cases for part in ("--case", case)]


def tells_launches(sanitizer):
    """Whether this compute-sanitizer can say what was launched: versions of 2026 can."""
    try:
        text = subprocess.run([sanitizer, "--help"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(f"{sanitizer} does not run: {error}; it comes with the CUDA toolkit, --sanitizer names it")
    return "--dump-kernel-launches" in text


def reports_of(text):
    """What a tool complains of, without addresses, threads and counts."""
    lines = [line.lstrip("= ") for line in text.splitlines() if line.startswith("=========")]
    for line, behind in zip(lines, lines[1:] + [""]):
        if re.match(r"(Error|Warning|Invalid|Uninitialized|Potential|Barrier|Divergent|Race|Program hit)", line):
            whole = f"{line} {behind}" if re.match(r"(at|and) ", behind) else line
            yield re.sub(r"\+?0x[0-9a-f]+|\[\d+ hazards\]", "", whole)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plugin", help="the plugin's library")
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=TOOLS, help="all, if not given")
    parser.add_argument("--cases", type=pathlib.Path, default=HERE / "cases.txt")
    parser.add_argument("--only", default="", help="cases that have this in their name, or in those of their kernels")
    parser.add_argument("--conformance", default="dsrun-conformance")
    parser.add_argument("--sanitizer", default="compute-sanitizer")
    parser.add_argument("--jobs", type=int, default=4, help="processes for each element type")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for a case")
    parser.add_argument("--logs", type=pathlib.Path, default=pathlib.Path("sanitizer"))
    options = parser.parse_args()
    options.tells_launches = tells_launches(options.sanitizer)
    if not options.tells_launches:
        print(f"{options.sanitizer} does not tell what was launched; that every kernel ran is not checked", flush=True)
    options.logs.mkdir(parents=True, exist_ok=True)
    # So that reports say which line of which source.
    environment = {**os.environ, "DSRUN_CUDA_LINE_INFO": "1"}
    kinds = {}
    for kind, cases in read_cases(options.cases).items():
        kept = {case: kernels for case, kernels in cases.items() if options.only in case or options.only in kernels}
        if kept:
            kinds[kind] = kept

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
            wanted = {kernel for kernels in kinds[kind].values() for kernel in kernels}
            print(f"{tool or 'no tool'}, {kind}: status {status}; {'; '.join(passed)}; {'; '.join(summaries)}", flush=True)
            if tool and options.tells_launches:
                missing = sorted(kernel for kernel in wanted if not re.search(rf"\b{kernel}\b", text))
                print(f"  {len(wanted) - len(missing)} kernels launched" + (f", not seen: {', '.join(missing)}" if missing else ""))
            for report, count in reports.most_common():
                print(f"  {count} x {report}")
            # What is told of launches may be counted among the errors.
            launches = len(re.findall(r"^=+ Launch #", text, re.M))
            found = sum(int(count) for summary in summaries for count in re.findall(r"(\d+) (?:errors?|hazards?)\b", summary))
            clean &= status == 0 and not reports and found in (0, launches)
        print(f"  {time.monotonic() - begin:.0f} s", flush=True)
    sys.exit(not clean)


if __name__ == "__main__":
    main()
