#!/usr/bin/env python3
"""Tests or checks this project for platforms other than the one it runs on, on Debian 12 or newer.

    python3 tools/platforms/check.py aarch64           # unit tests of the CPU backend, under an emulator
    python3 tools/platforms/check.py windows macos     # `cargo check` of the workspace

A platform uses the default Rust toolchain if that has its standard library (`rustup target add`). Otherwise the compiler and the
library come from Debian's suite sid, by the mirror that apt uses here: packages are unpacked into `target/platforms/debian`, about
1 GB, and nothing is installed. Remove that folder to fetch newer ones.

`aarch64` needs a cross linker and the emulator (`apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user`). It runs
all tests once for each processor of `--cpu`, after a check that the emulated processor has the instructions it stands for. `windows`
and `macos` link nothing, so C code of dependencies is not compiled. The exit status is 1 if something failed.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

TARGETS = {
    "aarch64": "aarch64-unknown-linux-gnu",
    "windows": "x86_64-pc-windows-gnu",
    "macos": "aarch64-apple-darwin",
}

# Emulated processors, and the extensions of theirs that kernels ask for.
CPUS = {
    "max": {"dotprod", "i8mm"},
    "neoverse-n1": {"dotprod"},
    "cortex-a72": set(),
}

# The extensions' bits in the auxiliary vector: the entry and the position.
HWCAPS = {"dotprod": ("AT_HWCAP", 20), "i8mm": ("AT_HWCAP2", 13)}

SYSROOT = "/usr/aarch64-linux-gnu"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

# What `rustc` of Debian is started by: its own loader, because it needs a newer C library than the system may have.
WRAPPER = """#!/bin/sh
exec {loader} --argv0 "$0" --library-path {libraries} {root}/usr/bin/rustc --sysroot {root}/usr "$@"
"""


def output(*command, **options):
    """What a command writes to standard output."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **options).stdout


def needed(commands):
    """Ends the program if one of these commands, given with their packages, is missing."""
    missing = [package for command, package in commands.items() if not shutil.which(command)]
    if missing:
        sys.exit(f"missing: apt-get install {' '.join(missing)}")


def mirror():
    """The address of the Debian mirror that apt uses."""
    lines = output("apt-get", "indextargets", "--format", "$(REPO_URI) $(ORIGIN) $(LABEL)", "Created-By: Packages").splitlines()
    found = [line.split()[0] for line in lines if line.endswith(" Debian Debian")]
    if not found:
        sys.exit("apt has no Debian mirror here; run `apt-get update`, or install a toolchain with `rustup target add`")
    return found[0]


class Debian:
    """A Rust toolchain made of packages of Debian's suite sid."""

    def __init__(self, folder):
        self.folder, self.root = folder, folder / "root"
        self.packages = folder / "packages"
        self.architecture = output("dpkg", "--print-architecture").strip()

    def apt(self, command, *arguments):
        """Runs a command of apt with a state of its own, which needs no privileges."""
        options = {
            "APT::Architecture": self.architecture,
            "APT::Architectures": f"{self.architecture},arm64",
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false",
            "Dir::Cache": self.folder / "cache",
            "Dir::Etc::SourceList": self.folder / "sources.list",
            "Dir::Etc::SourceParts": "-",
            "Dir::State::Lists": self.folder / "lists",
        }
        flags = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
        return output(command, "--quiet", *flags, *arguments, cwd=self.packages)

    def update(self):
        """Fetches the list of packages, once."""
        sources = self.folder / "sources.list"
        if sources.exists():
            return
        for folder in (self.packages, self.folder / "lists" / "partial", self.folder / "cache" / "archives" / "partial"):
            folder.mkdir(parents=True, exist_ok=True)
        text = f"deb [arch={self.architecture},arm64 signed-by={KEYRING}] {mirror()} sid main\n"
        sources.write_text(text)
        try:
            self.apt("apt-get", "update")
        except subprocess.CalledProcessError:
            sources.unlink()
            raise

    def unpack(self, *names):
        """Unpacks the newest version of packages that are not there yet."""
        marks = {name: self.packages / f"{name}.unpacked" for name in names}
        missing = [name for name, mark in marks.items() if not mark.exists()]
        if not missing:
            return
        print(f"fetching {', '.join(missing)}", flush=True)
        for old in self.packages.glob("*.deb"):
            old.unlink()
        self.apt("apt-get", "download", *missing)
        for package in self.packages.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, self.root], check=True)
            package.unlink()
        for name in missing:
            marks[name].touch()

    def rustc(self, target):
        """The path of a compiler that can compile for a target, if need be with the source of its standard library."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.update()
        kinds = ["recommends", "suggests", "conflicts", "breaks", "replaces", "enhances"]
        flags = ["--recurse", *(f"--no-{kind}" for kind in kinds)]
        lines = self.apt("apt-cache", "depends", *flags, "libstd-rust-dev").splitlines()
        libraries = {line for line in lines if re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", line)}
        std = "libstd-rust-dev:arm64" if target == TARGETS["aarch64"] else "rust-src"
        self.unpack("rustc", *sorted(libraries), std)
        loader = next(self.root.glob("usr/lib/*/ld-linux-*.so.*"))
        wrapper = self.folder / "rustc"
        wrapper.write_text(WRAPPER.format(loader=loader, libraries=loader.parent, root=self.root))
        wrapper.chmod(0o755)
        return wrapper


class Platform:
    """A platform, and how cargo builds for it."""

    def __init__(self, name, folder):
        self.target = TARGETS[name]
        variable = self.target.replace("-", "_")
        self.environment = {**os.environ, "CARGO_TARGET_DIR": str(folder / "build")}
        self.flags = ["--target", self.target]
        library = output("rustc", "--print", "target-libdir", "--target", self.target).strip()
        if not list(pathlib.Path(library).glob("libstd-*")):
            if not (shutil.which("apt-get") and os.path.exists(KEYRING)):
                sys.exit(f"the standard library of {self.target} is missing, and only on Debian this program fetches it; "
                         f"run `rustup target add {self.target}`")
            self.environment["RUSTC"] = str(Debian(folder / "debian").rustc(self.target))
            if name != "aarch64":
                # Debian has no library for this target, so it is compiled too, for which cargo wants a nightly compiler.
                self.flags += ["-Z", "build-std"]
                self.environment["RUSTC_BOOTSTRAP"] = "1"
        if name == "aarch64":
            self.environment[f"CARGO_TARGET_{variable.upper()}_LINKER"] = "aarch64-linux-gnu-gcc"
        else:
            for tool in ("CC", "CXX", "AR"):
                self.environment[f"{tool}_{variable}"] = shutil.which("true")

    def cargo(self, *arguments, **options):
        """Runs a command of cargo."""
        return subprocess.run(["cargo", *arguments, *self.flags], env=self.environment, **options)


def extensions_of(emulator, program):
    """The extensions of an emulated processor that kernels ask for, as the C library of a program sees them."""
    shown = output(emulator[0], "-E", "LD_SHOW_AUXV=1", *emulator[1:], program, "--list")
    words = {name: int(value, 16) for name, value in re.findall(r"^(AT_HWCAP2?):\s+(?:0x)?([0-9a-f]+)$", shown, re.M)}
    return {name for name, (word, bit) in HWCAPS.items() if words.get(word, 0) >> bit & 1}


def test(platform, cpus):
    """Runs the unit tests of the CPU backend under the emulator."""
    built = platform.cargo("test", "--no-run", "--message-format", "json-render-diagnostics", "-p", "dsrun-cpu", "--lib",
                           stdout=subprocess.PIPE, text=True)
    if built.returncode != 0:
        return False
    messages = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    program = next(message["executable"] for message in messages if message.get("executable"))
    passed = True
    for cpu in cpus:
        emulator = ["qemu-aarch64", "-L", SYSROOT, "-cpu", cpu]
        begin, found = time.monotonic(), extensions_of(emulator, program)
        expected = CPUS.get(cpu, found)
        if found != expected:
            print(f"{cpu}: the emulator has {sorted(found)}, not {sorted(expected)}", flush=True)
            passed = False
            continue
        run = subprocess.run([*emulator, program, "--quiet"], cwd="backends/cpu")
        verdict = "passed" if run.returncode == 0 else f"status {run.returncode}"
        print(f"{cpu} ({', '.join(sorted(found)) or 'no extensions'}): {verdict}, {time.monotonic() - begin:.0f} s", flush=True)
        passed &= run.returncode == 0
    return passed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platform", nargs="+", choices=TARGETS)
    parser.add_argument("--cpu", nargs="+", default=list(CPUS), help="emulated processors (`qemu-aarch64 -cpu help`)")
    options = parser.parse_args()
    os.chdir(pathlib.Path(__file__).parent.parent.parent)
    needed({"cargo": "cargo", "rustc": "rustc"})
    if "aarch64" in options.platform:
        needed({
            "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
            "qemu-aarch64": "qemu-user",
        })
    metadata = json.loads(output("cargo", "metadata", "--no-deps", "--format-version", "1"))
    folder = pathlib.Path(metadata["target_directory"]) / "platforms"
    passed = {}
    for name in dict.fromkeys(options.platform):
        begin, platform = time.monotonic(), Platform(name, folder)
        if name == "aarch64":
            passed[name] = test(platform, options.cpu)
        else:
            passed[name] = platform.cargo("check", "--workspace").returncode == 0
        print(f"{name}: {'passed' if passed[name] else 'FAILED'}, {time.monotonic() - begin:.0f} s in all", flush=True)
    sys.exit(not all(passed.values()))


if __name__ == "__main__":
    main()
