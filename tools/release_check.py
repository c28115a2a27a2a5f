"""Build the wheel and the source archive, install each in an environment of its own, and use it as a new user does.

    python tools/release_check.py                 # files in dist/
    python tools/release_check.py --tag v0.1.0    # also compare the tag with the version

The commands run outside the repository, so a file that the package forgot is noticed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_WHEEL_BYTES = 3_000_000
#: What a new user runs.
COMMANDS = (
    ("version",),
    ("doctor",),
    ("plan", "llama3-8b", "8xh100"),
    ("train", "train.steps=20", "launch.ranks=2", "run.name=release"),
    ("runs", "show", "runs/release"),
    ("verify", "--model", "tiny", "--plan", "dp_shard=2 zero=3"),
)


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def declared_version(tag: str) -> str:
    """Return the package's version, after comparing it with CITATION.cff, CHANGELOG.md and the tag."""
    version = re.search(r'^__version__ = "(.+)"', (ROOT / "src/weft/__init__.py").read_text(), re.M)[1]  # type: ignore[index]
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)[1]  # type: ignore[index]
    newest = re.search(r"^## (\S+) \((.+)\)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    if not version == cited == newest[1]:
        raise SystemExit(f"error: version {version}, but CITATION.cff has {cited} and CHANGELOG.md {newest[1]}.")
    if tag and (tag != f"v{version}" or newest[2] == "unreleased"):
        raise SystemExit(f"error: tag {tag}, but the version is {version} and CHANGELOG.md says {newest[2]}.")
    return version


def new_environment(folder: Path, *packages: str) -> Path:
    """Return the folder of programs of a new environment with `packages`, in the versions of constraints.txt."""
    venv.create(folder, with_pip=True)
    programs = folder / ("Scripts" if sys.platform == "win32" else "bin")
    pip = (str(programs / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check")
    run(*pip, "--constraint", str(ROOT / "constraints.txt"), *packages, cwd=folder)
    return programs


def build(folder: Path) -> list[Path]:
    """Build into dist/ and return the wheel and the source archive."""
    dist = ROOT / "dist"
    for old in dist.glob("weft_train-*"):
        old.unlink()
    python = new_environment(folder / "build", "build") / "python"
    run(str(python), "-m", "build", "--outdir", str(dist), str(ROOT), cwd=folder)
    return [*dist.glob("*.whl"), *dist.glob("*.tar.gz")]


def check_wheel(wheel: Path) -> None:
    size = wheel.stat().st_size
    with zipfile.ZipFile(wheel) as archive:
        foreign = [name for name in archive.namelist() if not name.startswith(("weft/", "weft_train-"))]
    if size > MAX_WHEEL_BYTES or foreign:
        raise SystemExit(f"error: {wheel.name} has {size} bytes, at most {MAX_WHEEL_BYTES}; foreign files: {foreign}.")
    print(f"{wheel.name}: {size / 1e6:.2f} MB", flush=True)


def use(artifact: Path, version: str, folder: Path) -> None:
    """Install an artifact in a new environment and run `COMMANDS` in an empty folder."""
    started = time.monotonic()
    programs = new_environment(folder / "env", str(artifact))
    print(f"{artifact.name}: installed in {time.monotonic() - started:.0f} s", flush=True)
    work = folder / "work"
    work.mkdir()
    for words in COMMANDS:
        started = time.monotonic()
        output = run(str(programs / "weft"), *words, cwd=work)
        if words == ("version",) and version not in output:
            raise SystemExit(f"error: weft version prints {output!r}, not {version}.")
        print(f"  weft {' '.join(words)}: {time.monotonic() - started:.1f} s", flush=True)
    visit_dashboard(programs, work)


def visit_dashboard(programs: Path, work: Path) -> None:
    """Start `weft watch`, read its page and its list of runs, and stop it."""
    command = [str(programs / "weft"), "watch", "runs", "--port", "0"]
    with subprocess.Popen(command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            address = re.search(r"http://\S+", line)
            if address is None:
                raise SystemExit(f"error: weft watch prints {line!r}, without an address.")
            with urllib.request.urlopen(address[0], timeout=30) as page:
                if b"<html" not in page.read():
                    raise SystemExit(f"error: {address[0]} is not a page.")
        finally:
            server.terminate()
    print("  weft watch runs: its page opens", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", default="", help="the tag of the release, such as v0.1.0")
    version = declared_version(parser.parse_args().tag)
    with tempfile.TemporaryDirectory() as folder:
        artifacts = build(Path(folder))
        check_wheel(artifacts[0])
        for artifact in artifacts:
            use(artifact, version, Path(tempfile.mkdtemp(dir=folder)))


if __name__ == "__main__":
    main()
