"""Where lies what is shipped beside the code: configurations, scripts, the list of known texts.

In a checkout that is the folder above the package; an installed package holds them itself (see ``pyproject.toml``).
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
INSTALLED = (_PACKAGE / "configs").is_dir()
HOME = _PACKAGE if INSTALLED else _PACKAGE.parent
CONFIGS, SCRIPTS = HOME / "configs", HOME / "scripts"


def command(script: str) -> str:
    """How a script is called here: ``python scripts/train.py``, or where minigpt was installed ``minigpt train``."""
    return f"minigpt {script}" if INSTALLED else f"python scripts/{script}.py"


def config_file(path: Path) -> Path:
    """The file of that path or, where there is none, the shipped one: ``configs/tiny.toml`` is found from anywhere."""
    shipped = HOME / path
    return shipped if not path.exists() and shipped.parent == CONFIGS and shipped.is_file() else path
