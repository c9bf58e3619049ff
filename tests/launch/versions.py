"""Where the other versions of Triton lie: `make` installs them into `.triton-versions`."""

from pathlib import Path

_FOLDER = Path(__file__).parents[2] / ".triton-versions"
OTHERS = ("3.6.0", "3.9.0")


def triton_folder(version):
    """The import folder of another Triton, or None where it is not installed."""
    path = _FOLDER / version
    return path if (path / "triton").is_dir() else None
