"""Builds the wheel and compares what it would install with tests/expected_wheel.txt; `--write` renews that list."""

import pathlib
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXPECTED = ROOT / "tests" / "expected_wheel.txt"


def wheel_contents() -> list[str]:
    """Paths in the freshly built wheel, the versioned metadata folder named `*.dist-info`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(ROOT)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        (wheel,) = pathlib.Path(folder).glob("*.whl")
        names = zipfile.ZipFile(wheel).namelist()
    parts = [name.split("/") for name in names]
    return sorted("/".join(["*.dist-info", *p[1:]] if p[0].endswith(".dist-info") else p) for p in parts)


def main() -> int:
    """Prints the difference; 0 when there is none."""
    found = wheel_contents()
    if "--write" in sys.argv[1:]:
        EXPECTED.write_text("\n".join(found) + "\n")
        return 0
    expected = EXPECTED.read_text().split("\n")[:-1]
    for name in sorted(set(found) - set(expected)):
        print(f"the wheel installs {name}, which tests/expected_wheel.txt does not list")
    for name in sorted(set(expected) - set(found)):
        print(f"the wheel lacks {name}, which tests/expected_wheel.txt lists")
    if found == expected:
        print(f"the wheel holds the {len(found)} expected files")
    else:
        print("if that is meant, write: python .ci/check_wheel.py --write")
    return int(found != expected)


if __name__ == "__main__":
    sys.exit(main())
