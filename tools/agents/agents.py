#!/usr/bin/env python3
"""Runs coding agents against `dsrun serve`, as their users would: each is asked for a file, and has to write it.

    tools/agents/agents.py [--dsrun PATH] [AGENT ...]

Installs the agents from npm, in the versions below, into a folder of the build. The model is a scripted one (`scripted_model.py`):
it calls the agent's own tool, and once the result is there, says that it is done. So what is tested is the whole way: the
request with all of its tools, the streamed call, the result, and the next request. Not part of the continuous integration, because it
installs several hundred megabytes.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripted_model import write

ROOT = Path(__file__).resolve().parents[2]
MODEL, CONTENT, DONE = "scripted", "written by an agent", "The file is there."


@dataclass
class Agent:
    name: str
    package: str
    # The tool that writes the file, and its arguments.
    tool: str
    arguments: Callable
    # The command line and the environment, given the server's address.
    command: Callable
    environment: Callable = lambda url: {}


PROMPT = "Write a file."
AGENTS = [
    Agent(
        "codex", "@openai/codex@0.171.0", "exec_command",
        lambda file: {"cmd": f"printf %s '{CONTENT}' > {file}"},
        lambda url: [
            "codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", MODEL,
            "-c", 'model_provider="local"',
            "-c", f'model_providers.local={{name="local",base_url="{url}/v1",wire_api="responses"}}', PROMPT,
        ],
    ),
    Agent(
        "claude", "@anthropic-ai/claude-code@2.1.332", "Write",
        lambda file: {"file_path": str(file), "content": CONTENT},
        lambda url: ["claude", "-p", PROMPT, "--model", MODEL, "--allowedTools", "Write"],
        lambda url: {
            "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    Agent(
        "opencode", "opencode-ai@1.18.33", "write",
        lambda file: {"filePath": str(file), "content": CONTENT},
        lambda url: ["opencode", "run", PROMPT],
        lambda url: {
            "OPENCODE_CONFIG_CONTENT": json.dumps({
                "model": f"local/{MODEL}",
                "provider": {
                    "local": {
                        "npm": "@ai-sdk/openai-compatible", "name": "local", "options": {"baseURL": f"{url}/v1"},
                        "models": {MODEL: {"name": MODEL}},
                    }
                },
            })
        },
    ),
    Agent(
        "qwen", "@qwen-code/qwen-code@0.24.4", "write_file",
        lambda file: {"file_path": str(file), "content": CONTENT},
        lambda url: ["qwen", "--auth-type", "openai", "--yolo", "-p", PROMPT],
        lambda url: {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": MODEL},
    ),
]


def serve(dsrun, model, log):
    """Starts a server, and returns its process and its address."""
    command = [dsrun, "--quiet", "serve", model, "--port", "0", "--served-model-name", MODEL, "--log", "info", "--access-log", "text"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    # Ends the wait for a server that never gets ready.
    limit = threading.Timer(120, process.kill)
    limit.start()
    ready = re.match(r"ready at (\S+)", process.stdout.readline())
    limit.cancel()
    if not ready:
        raise SystemExit(f"the server did not start: {Path(log.name).read_text()}")
    return process, ready[1]


def run(agent, dsrun, packages):
    """Lets an agent write its file. Returns what went wrong, if anything did."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        work, home = folder / "work", folder / "home"
        work.mkdir()
        home.mkdir()
        file = work / "asked.txt"
        call = {"name": agent.tool, "arguments": agent.arguments(file)}
        write(folder / "model", f"<tool_call>\n{json.dumps(call)}\n</tool_call>", DONE)
        with (folder / "server.log").open("w") as log:
            server, url = serve(dsrun, folder / "model", log)
        try:
            environment = os.environ | {"HOME": str(home), "PWD": str(work), "NO_COLOR": "1"} | agent.environment(url)
            environment["PATH"] = f"{packages / 'node_modules/.bin'}:{environment['PATH']}"
            ran = subprocess.run(
                agent.command(url), cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180
            )
        except subprocess.TimeoutExpired as late:
            ran = subprocess.CompletedProcess(late.cmd, "none after 180 s", late.stdout or "", late.stderr or "")
        finally:
            server.terminate()
            try:
                server.wait(timeout=60)
            except subprocess.TimeoutExpired:
                server.kill()
        wrong = []
        if ran.returncode != 0:
            wrong.append(f"its exit status is {ran.returncode}")
        if not file.exists() or file.read_text().strip() != CONTENT:
            wrong.append("it did not write the file")
        if DONE not in f"{ran.stdout}":
            wrong.append("it did not print the last answer")
        if wrong:
            wrong += [f"output: {ran.stdout[-1500:]}{ran.stderr[-1500:]}", f"server: {(folder / 'server.log').read_text()[-1500:]}"]
        return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [agent.name for agent in AGENTS]
    parser.add_argument("agents", nargs="*", metavar="AGENT", help=f"which, of {', '.join(names)}; all if none is named")
    parser.add_argument("--dsrun", default=str(ROOT / "target/release/dsrun"), help="the program; %(default)s")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.agents if name not in names]
    if unknown:
        parser.error(f"there is no agent {unknown[0]!r}; {', '.join(names)} are known")
    if not shutil.which(arguments.dsrun):
        parser.error(f"there is no program {arguments.dsrun}: build it with `cargo build --release -p dsrun`, or name it with --dsrun")
    if not shutil.which("npm"):
        parser.error("npm is missing: install Node.js")
    asked = [agent for agent in AGENTS if not arguments.agents or agent.name in arguments.agents]
    packages = ROOT / "target/agents"
    packages.mkdir(parents=True, exist_ok=True)
    install = ["npm", "install", "--no-fund", "--no-audit", "--silent", "--prefix", str(packages)]
    subprocess.run([*install, *(agent.package for agent in asked)], check=True, timeout=900)
    failed = 0
    for agent in asked:
        wrong = run(agent, arguments.dsrun, packages)
        failed += bool(wrong)
        print(f"{agent.package:36} {'failed' if wrong else 'passed'}", *wrong, sep="\n    " if wrong else "", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
